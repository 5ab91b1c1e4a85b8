"""The chat templates of Qwen3.5 to 3.8, Nemotron 3 and Gemma 4, written anew: they give the texts
of the published ones, with `{% generation %}` marks round what the assistant writes.

What a published template writes in words of its own (how to call a function, how long to think) is
quoted where the texts are, in `tests/encode/published_texts.json`, with its source and revision.
Left out: videos, sound, `add_vision_id`, and tools whose parameters name several types.

The chat template of Gemma 4, written anew: `published_templates.py` says what it equals.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from support.conversations import Manner
from support.shards import ROOT
from support.templates import Template, template_text

_GEMMA = template_text("published_gemma")


def gemma(empty: str = "") -> str:
    """One of the line.

    Args:
        empty: what a prompt without thinking ends in.
    """
    return _GEMMA.replace("EMPTY", empty)


TEXTS = ROOT / "tests/encode/published_texts.json"


@cache
def published_texts() -> dict[str, Any]:
    """Conversations, what the published templates make of them, and where these come from."""
    return dict(json.loads(TEXTS.read_text(encoding="utf-8")))


_CALLS = template_text("published_calls")
_AS_PYTHON = "(value | tojson) if value is mapping or (value is sequence and value is not string) "
_AS_PYTHON += "else value | string"
_AS_JSON = "value if value is string else value | tojson"

_QWEN = template_text("published_qwen")


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


_EXTRA = template_text("published_extra").replace("VALUE", _AS_PYTHON)

_NEMOTRON = _EXTRA + template_text("published_nemotron")


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
