"""Chat templates that know tools and thoughts, written anew in the manner of published ones, with
`{% generation %}` marks round what the assistant writes, end of turn included.

`without_marks` takes the marks out: what is left writes the same texts, and what the assistant
wrote has to be found.
"""

from __future__ import annotations

import re

from support.templates import Template

_CHATML = ("<|im_start|>", "<|im_end|>")

QWEN3 = """\
{%- set last = namespace(query=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set last.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
  {{- '# Tools\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
  {{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
  {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else '' -%}
  {%- if message.role == 'user' -%}
    {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- set thought = '' -%}
    {%- if message.reasoning_content is string -%}
      {%- set thought = message.reasoning_content -%}
    {%- elif '</think>' in content -%}
      {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- set bare = enable_thinking is defined and enable_thinking is false -%}
    {%- set thinks = loop.index0 > last.query and (thought or (loop.last and not bare)) -%}
    {%- if bare and thinks -%}{{- '<think>\\n' -}}
    {%- elif bare and loop.last -%}{{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
    {%- generation -%}
    {%- if thinks -%}
      {{- '' if bare else '<think>\\n' -}}
      {{- thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
    {%- else -%}
      {{- content -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {%- if content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
      {%- set call = call.function or call -%}
      {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
      {{- call.arguments if call.arguments is string else call.arguments | tojson -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}
    {%- endgeneration -%}
    {{- '\\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}
    {{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- endif -%}
{%- endif -%}
"""
"""Calls as JSON, results inside a user's turn, thoughts of earlier questions dropped, empty ones in
the last turn alone."""

QWEN3_5 = """\
{%- macro words(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- else -%}
    {%- for part in content or [] -%}
      {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set last = namespace(query=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set last.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
  {{- '\\n</tools>' -}}
  {%- if messages[0].role == 'system' -%}{{- '\\n\\n' + words(messages[0].content) -}}{%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
  {{- '<|im_start|>system\\n' + words(messages[0].content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set content = words(message.content) | trim -%}
  {%- if message.role == 'user' -%}
    {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- set thought = message.reasoning_content | default('') | trim -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- set bare = enable_thinking is defined and enable_thinking is false -%}
    {%- if loop.index0 > last.query -%}
      {{- '<think>\\n' -}}
      {%- if bare and not thought -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}
      {%- generation -%}
      {%- if thought or not bare -%}{{- thought + '\\n</think>\\n\\n' -}}{%- endif -%}
      CALLS
    {%- else -%}
      {%- generation -%}
      CALLS
    {%- endif -%}
    {{- '\\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n<think>\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}
    {{- '\\n</think>\\n\\n' -}}
  {%- endif -%}
{%- endif -%}
""".replace(
    "CALLS",
    """{{- content -}}
      {%- for call in message.tool_calls or [] -%}
        {%- if content or not loop.first -%}{{- '\\n\\n' -}}{%- endif -%}
        {%- set call = call.function or call -%}
        {{- '<tool_call>\\n<function=' + call.name + '>\\n' -}}
        {%- for name, value in call.arguments | items -%}
          {{- '<parameter=' + name + '>\\n' -}}
          {{- value if value is string else value | tojson -}}
          {{- '\\n</parameter>\\n' -}}
        {%- endfor -%}
        {{- '</function>\\n</tool_call>' -}}
      {%- endfor -%}
      {{- '<|im_end|>' -}}
      {%- endgeneration -%}""",
)
"""Calls with a tag for each parameter; the prompt opens the thoughts; contents are trimmed."""

HERMES = """\
{%- if tools -%}
  {{- '<|im_start|>system\\nYou call functions. <tools>' -}}
  {%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
  {{- '</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- generation -%}
    {%- if message.content -%}{{- message.content -}}{%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {{- '\\n' if message.content or not loop.first else '' -}}
      {{- '<tool_call>\\n{"arguments": ' + call.function.arguments | tojson -}}
      {{- ', "name": "' + call.function.name + '"}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}
    {%- endgeneration -%}
    {{- '\\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.previtem.role != 'tool' -%}{{- '<|im_start|>tool\\n' -}}{%- endif -%}
    {{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""The arguments before the name, results in a turn of the tool."""

LLAMA_3 = """\
{%- set date = date_string if date_string is defined else '26 Jul 2024' -%}
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date + '\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content | trim -}}{%- endif -%}
{{- '<|eot_id|>' -}}
{%- set first = namespace(user=true) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {%- if tools and first.user -%}
      {{- 'Given the following functions, please respond with a JSON for a call.\\n\\n' -}}
      {%- for tool in tools -%}{{- tool | tojson(indent=4) + '\\n\\n' -}}{%- endfor -%}
    {%- endif -%}
    {%- set first.user = false -%}
    {{- message.content | trim + '<|eot_id|>' -}}
  {%- elif 'tool_calls' in message -%}
    {%- if message.tool_calls | length != 1 -%}
      {{- raise_exception('This model takes one call at a time!') -}}
    {%- endif -%}
    {%- set call = message.tool_calls[0].function -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
    {%- generation -%}
    {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson -}}
    {{- '}<|eot_id|>' -}}
    {%- endgeneration -%}
  {%- elif message.role == 'assistant' -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
    {%- generation -%}{{- message.content | trim + '<|eot_id|>' -}}{%- endgeneration -%}
  {%- elif message.role == 'tool' -%}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson -}}
    {{- '<|eot_id|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""
"""Tools in the first question, one call a turn and no words beside it."""

MISTRAL = """\
{{- bos_token -}}
{%- set last = namespace(query=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set last.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- if tools and loop.index0 == last.query -%}
      {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}
    {%- endif -%}
    {{- '[INST] ' + message.content + '[/INST]' -}}
  {%- elif message.tool_calls -%}
    {%- generation -%}
    {{- '[TOOL_CALLS] [' -}}
    {%- for call in message.tool_calls -%}
      {%- if call.id | length != 9 -%}{{- raise_exception('ids have 9 characters') -}}{%- endif -%}
      {{- '{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- call.function.arguments | tojson + ', "id": "' + call.id + '"}' -}}
      {{- ', ' if not loop.last else ']' + eos_token -}}
    {%- endfor -%}
    {%- endgeneration -%}
  {%- elif message.role == 'assistant' -%}
    {%- generation -%}{{- ' ' + message.content | trim + eos_token -}}{%- endgeneration -%}
  {%- elif message.role == 'tool' -%}
    {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' -}}
    {{- message.tool_call_id + '"}[/TOOL_RESULTS]' -}}
  {%- endif -%}
{%- endfor -%}
"""
"""No generation prompt; the tools stand before the last question, so they move."""

NEMOTRON = """\
{%- set last = namespace(query=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set last.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- endif -%}
{%- for tool in tools or [] -%}
  {{- '\\n<function>\\n<name>' + tool.function.name + '</name>\\n<description>' -}}
  {{- tool.function.description + '</description>\\n</function>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages -%}
  {%- set content = message.content or '' -%}
  {%- if message.role == 'user' -%}
    {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- set thought = message.reasoning_content or '' -%}
    {%- set thinks = thought and loop.index0 > last.query -%}
    {{- '<|im_start|>assistant\\n<think>' + ('\\n' if thinks else '</think>') -}}
    {%- generation -%}
    {{- (thought + '\\n</think>\\n' if thinks else '') + content -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
      {%- for name, value in call.function.arguments | items -%}
        {{- '<parameter=' + name + '>\\n' + value | string + '\\n</parameter>\\n' -}}
      {%- endfor -%}
      {{- '</function>\\n</tool_call>\\n' -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}
    {%- endgeneration -%}
    {{- '\\n' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response>\\n' -}}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""
"""The prompt opens a thought; a turn without one begins otherwise than the prompt ends."""

GEMMA_4 = """\
{{- bos_token -}}
{%- set now = namespace(open=false, query=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set now.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools or messages[0].role == 'system' -%}
  {{- '<|turn>system\\n' -}}
  {%- if messages[0].role == 'system' -%}{{- messages[0].content | trim -}}{%- endif -%}
  {%- for tool in tools or [] -%}
    {{- '<|tool>declaration:' + tool.function.name + tool.function.parameters | tojson -}}
    {{- '<tool|>' -}}
  {%- endfor -%}
  {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {{- '<|turn>user\\n' + message.content | trim + '<turn|>\\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- if not now.open -%}{{- '<|turn>model\\n' -}}{%- endif -%}
    {%- set now.open = false -%}
    {%- set thought = message.get('reasoning') or message.get('reasoning_content') -%}
    {%- generation -%}
    {%- if thought and loop.index0 > now.query and message.tool_calls -%}
      {{- '<|channel>thought\\n' + thought + '\\n<channel|>' -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {{- '<|tool_call>call:' + call.function.name + '{' -}}
      {%- for name, value in call.function.arguments | dictsort -%}
        {{- ',' if not loop.first else '' -}}
        {{- name + ':' -}}
        {{- '<|"|>' + value + '<|"|>' if value is string else value | tojson -}}
      {%- endfor -%}
      {{- '}<tool_call|>' -}}
    {%- endfor -%}
    {%- if message.tool_calls -%}{{- '<|tool_response>' -}}
    {%- else -%}{{- message.content | trim + '<turn|>' -}}
    {%- endif -%}
    {%- endgeneration -%}
    {%- if message.tool_calls -%}
      {%- set now.open = true -%}
      {%- set at = loop.index0 -%}
      {%- set scan = namespace(on=true, first=true) -%}
      {%- for result in messages[at + 1:] -%}
        {%- if scan.on and result.role == 'tool' -%}
          {{- '' if scan.first else '<|tool_response>' -}}
          {%- set scan.first = false -%}
          {%- set named = namespace(name='unknown') -%}
          {%- for call in message.tool_calls -%}
            {%- if call.id == result.tool_call_id -%}
              {%- set named.name = call.function.name -%}
            {%- endif -%}
          {%- endfor -%}
          {{- 'response:' + named.name + '{value:<|"|>' + result.content -}}
          {{- '<|"|>}<tool_response|>' -}}
        {%- else -%}{%- set scan.on = false -%}
        {%- endif -%}
      {%- endfor -%}
    {%- else -%}{{- '\\n' -}}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not now.open -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""
"""Results inside the model's own turn, written where the calls are, with the calls' names; thoughts
beside calls alone; the model stops at the token that begins a result."""

TOOL_TEMPLATES = {
    "qwen3": Template(QWEN3, "", _CHATML),
    "qwen3.5": Template(
        QWEN3_5,
        "",
        (*_CHATML, "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
        takes_parts=True,
        marker="<|image_pad|>",
    ),
    "hermes": Template(HERMES, "", _CHATML),
    "nemotron": Template(NEMOTRON, "", _CHATML),
    "llama-3": Template(
        LLAMA_3,
        "",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"),
    ),
    "mistral": Template(
        MISTRAL,
        "",
        (
            *("[INST]", "[/INST]", "<s>", "</s>", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
            *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        system=False,
    ),
    "gemma-4": Template(
        GEMMA_4,
        "",
        (
            *("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
            *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", '<|"|>', "<bos>"),
        ),
    ),
}
"""With marks."""

THINKING = ("qwen3", "qwen3.5", "nemotron", "gemma-4")
"""Those that write thoughts."""


def without_marks(template: Template) -> Template:
    """The same template, which says nothing of what the assistant writes."""
    text = re.sub(r"\{%- (end)?generation -%\}", "", template.text)
    assert text.count("generation -%}") == 0 < template.text.count("generation -%}")
    return template._replace(text=text)
