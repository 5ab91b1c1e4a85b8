"""Chat templates that know tools and thoughts, written anew in the manner of published ones, with
`{% generation %}` marks round what the assistant writes, end of turn included.

`without_marks` takes the marks out: what is left writes the same texts, and what the assistant
wrote has to be found.
"""

from __future__ import annotations

import re

from support.templates import Template, template_text

_CHATML = ("<|im_start|>", "<|im_end|>")

QWEN3 = template_text("qwen3")
"""Calls as JSON, results inside a user's turn, thoughts of earlier questions dropped, empty ones in
the last turn alone."""

QWEN3_5 = template_text("qwen3_5").replace(
    "CALLS",
    template_text("qwen3_5_calls"),
)
"""Calls with a tag for each parameter; the prompt opens the thoughts; contents are trimmed."""

HERMES = template_text("hermes")
"""The arguments before the name, results in a turn of the tool."""

LLAMA_3 = template_text("llama_3")
"""Tools in the first question, one call a turn and no words beside it."""

MISTRAL = template_text("mistral")
"""No generation prompt; the tools stand before the last question, so they move."""

NEMOTRON = template_text("nemotron")
"""The prompt opens a thought; a turn without one begins otherwise than the prompt ends."""

GEMMA_4 = template_text("gemma_4")
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
