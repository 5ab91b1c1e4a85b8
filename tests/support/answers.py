"""Conversations with thoughts, under a template that drops those of earlier turns, as Qwen3's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

DROPPING = (
    "{%- set last = namespace(at=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set last.at = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{%- set earlier = m.role == 'assistant' and loop.index0 < last.at %}"
    "{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- for part in ([{'type': 'text', 'text': m.content}] if m.content is string else m.content) "
    "%}{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part.text.split('</think>')[-1].lstrip('\\n') if earlier else part.text }}"
    "{%- endif %}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def dropping_folder(model: Path, folder: Path) -> Path:
    """A model folder with that template."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(DROPPING)
    return folder


def asks(text: str, *, image: bool = False) -> dict[str, Any]:
    """A user's turn."""
    content: list[dict[str, str]] = [{"type": "image"}] if image else []
    return {"role": "user", "content": [*content, {"type": "text", "text": text}]}


def replies(thought: str, text: str) -> dict[str, Any]:
    """An answer with its thought."""
    words = f"<think>\n{thought}\n</think>\n\n{text}"
    return {"role": "assistant", "content": [{"type": "text", "text": words}]}
