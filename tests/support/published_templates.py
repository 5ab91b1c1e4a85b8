"""The chat templates of Qwen3.5 to 3.8, Nemotron 3 and Gemma 4, written anew: they give the texts
of the published ones, with `{% generation %}` marks round what the assistant writes.

What a published template writes in words of its own (how to call a function, how long to think) is
quoted where the texts are, in `tests/encode/published_texts.json`, with its source and revision.
Left out: videos, sound, `add_vision_id`, and tools whose parameters name several types.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from support.conversations import Manner
from support.published_gemma_template import gemma
from support.shards import ROOT
from support.templates import Template

TEXTS = ROOT / "tests/encode/published_texts.json"


@cache
def published_texts() -> dict[str, Any]:
    """Conversations, what the published templates make of them, and where these come from."""
    return dict(json.loads(TEXTS.read_text(encoding="utf-8")))


_CALLS = """\
{%- for call in message.tool_calls or [] -%}
  {%- set call = call.function or call -%}
  {{- BREAK + '<tool_call>\\n<function=' + call.name + '>\\n' -}}
  {%- for name, value in (call.arguments or {}) | items -%}
    {{- '<parameter=' + name + '>\\n' -}}
    {{- VALUE -}}
    {{- '\\n</parameter>\\n' -}}
  {%- endfor -%}
  {{- '</function>\\n</tool_call>' -}}
{%- endfor -%}
"""
_AS_PYTHON = "(value | tojson) if value is mapping or (value is sequence and value is not string) "
_AS_PYTHON += "else value | string"
_AS_JSON = "value if value is string else value | tojson"

_QWEN = """\
{%- macro words(content) -%}
  {%- for part in ([content] if content is string else content or []) -%}
    {%- if part is string -%}{{- part -}}
    {%- elif part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
    {%- else -%}{{- part.text -}}
    {%- endif -%}
  {%- endfor -%}
{%- endmacro -%}
{%- set last = namespace(query=-1) -%}
{%- for message in messages -%}
  {%- set said = words(message.content) | trim -%}
  {%- set result = said.startswith('<tool_response>') and said.endswith('</tool_response>') -%}
  {%- if message.role == 'user' and not result -%}{%- set last.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if last.query < 0 -%}{{- raise_exception('No user query found in messages.') -}}{%- endif -%}
{%- set bare = BARE -%}
{%- set system = words(messages[0].content) | trim if messages[0].role == 'system' else '' -%}
{%- set effort = EFFORT -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' + (effort + '\\n\\n' if effort else '') + 'TOOLS<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
  {{- '\\n</tools>RULES' + ('\\n\\n' + system if system else '') + '<|im_end|>\\n' -}}
{%- elif effort or HAS_SYSTEM -%}
  {{- '<|im_start|>system\\n' + effort + ('\\n\\n' if effort and system else '') + system -}}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set content = words(message.content) | trim -%}
  {%- if message.role == 'user' -%}
    {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' -}}
  {%- elif message.role == 'system' and not loop.first -%}
    {{- raise_exception('System message must be at the beginning.') -}}
  {%- elif message.role == 'assistant' -%}
    {%- set thought = message.reasoning_content -%}
    {%- if thought is not string -%}
      {%- set thought = '' -%}
      {%- if SPLITS and '</think>' in content -%}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1] -%}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
      {%- endif -%}
    {%- endif -%}
    {%- set thought = thought | trim -%}
    {%- set thinks = loop.index0 > last.query or KEEPS -%}
    {{- '<|im_start|>assistant\\n' + ('<think>\\n' if thinks else '') -}}
    {%- if thinks and bare and not thought -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}
    {%- generation -%}
    {%- if thinks and (thought or not bare) -%}{{- thought + '\\n</think>\\n\\n' -}}{%- endif -%}
    {{- content -}}
    CALLS
    {{- '<|im_end|>' -}}
    {%- endgeneration -%}
    {{- '\\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n<think>\\n' + ('\\n</think>\\n\\n' if bare else '') -}}
{%- endif -%}
"""


def _quoted(name: str) -> str:
    """A quotation as it stands in a string of Jinja."""
    return str(published_texts()["quoted"][name]).replace("\n", "\\n").replace("'", "\\'")


def _qwen(
    *,
    bare: str = "enable_thinking is defined and enable_thinking is false",
    keeps: str = "false",
    splits: str = "true",
    value: str = _AS_JSON,
    effort: str = "''",
    empty_system: str = "messages[0].role == 'system'",
) -> str:
    """One of the line.

    Args:
        bare: when the prompt closes an empty thought.
        keeps: when thoughts of earlier questions are written.
        splits: whether thoughts inside the content are told apart.
        value: an argument of a call.
        effort: what the system prompt begins with.
        empty_system: when a system prompt is written though there are no tools.
    """
    between = "('\\n' if not loop.first else '\\n\\n' if content else '')"
    calls = _CALLS.replace("BREAK", between).replace("VALUE", value)
    text = _QWEN.replace("    CALLS\n", calls).replace("BARE", bare).replace("KEEPS", keeps)
    text = text.replace("SPLITS", splits).replace("EFFORT", effort)
    text = text.replace("HAS_SYSTEM", empty_system)
    return text.replace("TOOLS<", _quoted("tools") + "<").replace("RULES'", _quoted("rules") + "'")


def _efforts() -> str:
    high, low = (_quoted(f"effort {name}") for name in ("xhigh", "low"))
    return f"'' if bare else {{'xhigh': '{high}', 'medium': '', 'low': '{low}'}}[NAME]".replace(
        "NAME", "reasoning_effort | default('xhigh')"
    )


_EXTRA = """\
{%- macro more(fields, known) -%}
  {%- for key, value in (fields or {}) | items if key not in known -%}
    {{- '\\n<' + key + '>' -}}
    {{- VALUE -}}
    {{- '</' + key + '>' -}}
  {%- endfor -%}
{%- endmacro -%}
""".replace("VALUE", _AS_PYTHON)

_NEMOTRON = (
    _EXTRA
    + """\
{%- set bare = enable_thinking is defined and not enable_thinking -%}
{%- set drops = truncate_history_thinking | default(true) -%}
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set last = namespace(query=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set last.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- '<|im_start|>system\\n' + system -}}
{%- if tools -%}
  {{- ('\\n\\n' if system else '') + 'TOOLS<tools>' -}}
  {%- for tool in tools -%}
    {%- set tool = tool.function or tool -%}
    {{- '\\n<function>\\n<name>' + tool.name + '</name>' -}}
    {%- if tool.description is defined -%}
      {{- '\\n<description>' + tool.description | trim + '</description>' -}}
    {%- endif -%}
    {{- '\\n<parameters>' -}}
    {%- for name, fields in (tool.parameters.properties or {}) | items -%}
      {{- '\\n<parameter>\\n<name>' + name + '</name>' -}}
      {%- if fields.type is defined -%}{{- '\\n<type>' ~ fields.type ~ '</type>' -}}{%- endif -%}
      {%- if fields.description is defined -%}
        {{- '\\n<description>' + fields.description | trim + '</description>' -}}
      {%- endif -%}
      {%- if fields.enum is defined -%}
        {{- '\\n<enum>' + fields.enum | tojson + '</enum>' -}}
      {%- endif -%}
      {{- more(fields, ['name', 'type', 'description', 'enum']) + '\\n</parameter>' -}}
    {%- endfor -%}
    {{- more(tool.parameters, ['type', 'properties', 'required']) -}}
    {%- if tool.parameters.required is defined -%}
      {{- '\\n<required>' + tool.parameters.required | tojson + '</required>' -}}
    {%- endif -%}
    {{- '\\n</parameters>' + more(tool, ['type', 'name', 'description', 'parameters']) -}}
    {{- '\\n</function>' -}}
  {%- endfor -%}
  {{- '\\n</tools>RULES' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) -%}
  {%- set at = loop.index0 + (1 if messages[0].role == 'system' else 0) -%}
  {%- set content = message.content or '' -%}
  {%- if message.role == 'assistant' -%}
    {%- set thought = message.reasoning_content or '' -%}
    {%- set tagged = '<think>' in content or '</think>' in content -%}
    {%- set whole = '<think>\\n' + thought + '\\n</think>\\n' + content if thought | trim
        else content if tagged else '<think></think>' + content -%}
    {%- if drops and at < last.query -%}
      {%- set rest = whole.split('</think>')[-1] -%}
      {%- set whole = '<think></think>' + (rest | trim if message.tool_calls else rest) -%}
    {%- endif -%}
    {%- set whole = whole | trim -%}
    {%- set opened = '<think></think>' if whole.startswith('<think></think>') else '<think>\\n' -%}
    {%- set rest = whole[opened | length:] -%}
    {{- '<|im_start|>assistant\\n' + opened -}}
    {{- rest[:rest | length - rest.lstrip() | length] -}}
    {%- generation -%}
    {{- rest.lstrip() -}}
    {{- '\\n' if message.tool_calls else '' -}}
    CALLS
    {{- '<|im_end|>' -}}
    {%- endgeneration -%}
    {{- '\\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.previtem.role != 'tool' -%}{{- '<|im_start|>user\\n' -}}{%- endif -%}
    {{- '<tool_response>\\n' + content + '\\n</tool_response>\\n' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\\n' + content + (HINT) + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n<think>' + ('</think>' if bare else '\\n') -}}
{%- endif -%}
"""
)


def _nemotron(hint: str = "''") -> str:
    """One of the line.

    Args:
        hint: what is written behind the last question.
    """
    calls = _CALLS.replace("BREAK + ", "").replace("VALUE", _AS_PYTHON)
    calls = calls.replace("</tool_call>'", "</tool_call>\\n'")
    text = _NEMOTRON.replace("    CALLS\n", calls).replace("HINT", hint)
    return text.replace("TOOLS<", _quoted("tools") + "<").replace("RULES'", _quoted("rules") + "'")


_LOW = "'\\n\\n{reasoning effort: low}' if low_effort and at == last.query else ''"

OLDER_GEMMA = "Gemma 4, 31B on 2026-05-28"
"""Its published bytes were had; it gives the same texts where nobody thinks, no argument is null
and no prompt follows a result."""

_CHATML = ("<|im_start|>", "<|im_end|>")
_IMAGES = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_TURNS = (
    *("<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", "<|think|>", "<|image|>"),
)


def _with_images(text: str, special: tuple[str, ...], marker: str) -> Template:
    return Template(text, "", special, takes_parts=True, marker=marker)


@cache
def published_templates() -> dict[str, Template]:
    """By the models that they came with; their sources and revisions are in the file of texts."""
    bare_unless = "not (enable_thinking is defined and enable_thinking is true)"
    asked_to_keep = "(preserve_thinking is defined and preserve_thinking is true)"
    qwen = {
        "Qwen3.5, 4B and larger": _qwen(value=_AS_PYTHON),
        "Qwen3.5, 2B and smaller": _qwen(value=_AS_PYTHON, bare=bare_unless),
        "Qwen3.6": _qwen(keeps=asked_to_keep),
        "Qwen3.8": _qwen(
            keeps="(preserve_thinking is undefined or preserve_thinking is true)",
            splits="false",
            effort=_efforts(),
            empty_system="system",
        ),
    }
    nemotron = {"Nemotron 3 Nano": _nemotron(), "Nemotron 3 Super": _nemotron(_LOW)}
    gemmas = {
        "Gemma 4, E2B and E4B": gemma(),
        "Gemma 4, 26B-A4B and 31B": gemma("<|channel>thought\\n<channel|>"),
        OLDER_GEMMA: gemma("<|channel>thought\\n<channel|>"),
    }
    return {
        **{
            n: _with_images(text, (*_CHATML, *_IMAGES), "<|image_pad|>") for n, text in qwen.items()
        },
        **{name: Template(text, "", _CHATML) for name, text in nemotron.items()},
        **{name: _with_images(text, _TURNS, "<|image|>") for name, text in gemmas.items()},
    }


_THINKING = ("enable_thinking", (True, False))
_KEEPING = ("preserve_thinking", (True, False))


def manner(name: str) -> Manner:
    """What conversations a published template takes."""
    if name.startswith("Nemotron"):
        effort = (("low_effort", (True, False)),) if "Super" in name else ()
        drops = ("truncate_history_thinking", (True, False))
        return Manner(images=False, variables=(_THINKING, drops, *effort))
    if name == OLDER_GEMMA:
        return Manner(image_results=True, words_beside_calls=False, thoughts=False, nulls=False)
    if name.startswith("Gemma"):
        return Manner(image_results=True, variables=(_THINKING, _KEEPING), words_beside_calls=False)
    keeps = (_KEEPING,) if name in ("Qwen3.6", "Qwen3.8") else ()
    effort = (("reasoning_effort", ("xhigh", "medium", "low")),) if name == "Qwen3.8" else ()
    return Manner(variables=(_THINKING, *keeps, *effort))
