"""Writes what published chat templates make of conversations: `tests/encode/published_texts.json`.

    python -m support.record_published FOLDER     in tests/, where FOLDER/SHA256.jinja are templates

The templates themselves are not kept here; the file says which they are, by digest, and where they
were found.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from support.conversations import Conversation, Drawn
from support.published_templates import OLDER_GEMMA, TEXTS, manner, published_texts
from transformers.utils.chat_template_utils import render_jinja_template

DRAWN = 80
"""Conversations of each template whose texts are kept as one digest."""


def render(template: str, conversation: Conversation, *, prompt: bool = False) -> str:
    """By transformers, as a tokenizer whose `<bos>` is one would."""
    texts, _ = render_jinja_template(
        [conversation.turns],
        tools=conversation.tools,
        chat_template=template,
        add_generation_prompt=prompt,
        bos_token="<bos>",
        **conversation.variables,
    )
    return str(texts[0])


def shortened(text: str) -> str:
    """With the quotations by name."""
    for name, quoted in published_texts()["quoted"].items():
        text = text.replace(quoted, f"{{{{{name}}}}}")
    return text


def applies(case: dict[str, Any], name: str) -> bool:
    """Whether a case is one of a template: it has no variables that the template does not know, and
    no images that it does not write."""
    known = {variable for variable, _ in manner(name).variables}
    images = any(isinstance(turn["content"], list) for turn in case["turns"])
    if name == OLDER_GEMMA:
        spelt = json.dumps(case)
        words = any(turn["content"] and "tool_calls" in turn for turn in case["turns"])
        if words or case["prompt"] or '"reasoning_content"' in spelt or "null" in spelt:
            return False
    return set(case.get("variables", {})) <= known and (manner(name).images or not images)


def digest_of_drawn(template: str, name: str) -> str:
    """SHA-256 of the texts of `DRAWN` random conversations, with and without a prompt in turn."""
    whole, drawn = hashlib.sha256(), Drawn(manner(name), name, plain=name == OLDER_GEMMA)
    for number in range(DRAWN):
        text = render(template, drawn.one(), prompt=number % 2 == 0)
        whole.update(text.encode() + b"\0")
    return whole.hexdigest()


def main(folder: Path) -> None:
    content = published_texts()
    templates = {}
    for name, source in content["sources"].items():
        path = folder / f"{source['sha256']}.jinja"
        if path.is_file():
            templates[name] = path.read_text(encoding="utf-8")
    for case in content["conversations"]:
        conversation = Conversation(case["turns"], case.get("tools"), case.get("variables", {}))
        found: dict[str, list[str]] = {}
        for name, text in templates.items():
            if applies(case, name):
                made = render(text, conversation, prompt=case["prompt"])
                found.setdefault(shortened(made), []).append(name)
        case["texts"] = [{"of": names, "text": text} for text, names in found.items()]
    content["drawn"] = {name: digest_of_drawn(text, name) for name, text in templates.items()}
    TEXTS.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
