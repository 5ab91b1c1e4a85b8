"""Turns as Gemma writes them, with the marks of the committed tokenizer: the assistant is called
model."""

from __future__ import annotations

import re

ANSWER = re.compile(r"(?<=<\|im_start\|>model\n).*?<\|im_end\|>", re.DOTALL)
"""What the assistant says, and the end of its turn."""

_TEMPLATE = """\
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{- '<|im_start|>' + role + '\n' -}}
{%- if message.content is string -%}{{- message.content | trim -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- 'IMAGE' -}}
{%- elif part.type == 'text' -%}{{- part.text | trim -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>model\n' -}}{%- endif -%}
"""


def gemma_template(marker: str) -> str:
    """The chat template, with what it writes for an image."""
    return _TEMPLATE.replace("IMAGE", marker)
