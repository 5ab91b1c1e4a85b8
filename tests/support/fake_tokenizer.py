"""As much of a tokenizer as a chat template needs."""

from __future__ import annotations

from typing import Any

from transformers.utils import chat_template_utils


class FakeTokenizer:
    """Renders with transformers, tokenises nothing.

    Args:
        text: the template.
    """

    name_or_path = "a-model"
    special_tokens_map: dict[str, str] = {"bos_token": "<s>", "eos_token": "</s>"}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        self.chat_template = text

    def get_chat_template(self, tools: list[Any] | None = None) -> str:
        return self.chat_template

    def apply_chat_template(self, messages: list[Any], **options: Any) -> str:
        del options["tokenize"]
        text = options.pop("chat_template", None) or self.chat_template
        found: Any = chat_template_utils.render_jinja_template(
            [messages], chat_template=text, **options, **self.special_tokens_map
        )
        return str(found[0][0])
