"""A conversation -> token ids and the tokens that the assistant wrote.

The chat template is the tokenizer's own. Which characters the assistant wrote follows from the
template itself: the text up to turn i with a generation prompt, and the text with turn i, differ
by exactly that turn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vlmpack.errors import DataError, ModelError
from vlmpack.families.sample import ImagePart, Message, TextPart


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """Token ids of a conversation, one placeholder an image.

    Args:
        input_ids: the ids.
        from_assistant: for each id, whether it belongs to an assistant turn (its end-of-turn token
            included): these are the targets of the loss.
    """

    input_ids: list[int]
    from_assistant: list[bool]


@dataclass(frozen=True)
class ChatEncoder:
    """Chat template and tokenizer of a model folder.

    Args:
        tokenizer: a fast tokenizer of transformers with a chat template.
        takes_images: whether the template gets a message as a list of parts. Templates of language
            models get a string: some would write the list itself out, as text.
    """

    tokenizer: Any
    takes_images: bool = True

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise ModelError(
                f"{self.tokenizer.name_or_path} has no chat template (chat_template.jinja or "
                f"tokenizer_config.json); finetuning on conversations needs one"
            )

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special}
        special |= set(self.tokenizer.all_special_tokens)
        return re.compile("|".join(re.escape(token) for token in sorted(special)) or r"(?!)")

    def render(self, messages: tuple[Message, ...], *, generation_prompt: bool = False) -> str:
        """The template's text for some turns.

        Raises:
            DataError: (schema) the template refuses them, or an image for a model without tower.
        """
        turns = [{"role": message.role, "content": self._content(message)} for message in messages]
        from jinja2 import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=generation_prompt
                )
            )
        except (TemplateError, ValueError) as error:
            raise DataError(
                f"the chat template refuses the conversation: {error}", error_class="schema"
            ) from error

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        images = [isinstance(part, ImagePart) for part in message.parts]
        if not self.takes_images:
            if any(images):
                raise no_vision_tower()
            return message.text
        return [
            {"type": "image"}
            if isinstance(part, ImagePart)
            else {"type": "text", "text": part.text}
            for part in message.parts
        ]

    def encode(self, messages: tuple[Message, ...]) -> ChatTokens:
        """Tokenise a whole conversation.

        Raises:
            DataError: (schema) a special token spelt in the text, which would turn data into
                structure; or a template whose turns do not follow from a prefix.
        """
        self._refuse_special(messages)
        if messages and messages[0].role == "assistant":
            raise DataError(
                "the conversation starts with the assistant; expected a user's turn first",
                error_class="schema",
            )
        text = self.render(messages)
        spans = self._assistant_spans(messages, text)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in encoded["offset_mapping"]]
        from_assistant = [any(a <= start < b for a, b in spans) for start in starts]
        return ChatTokens(list(encoded["input_ids"]), from_assistant)

    def encode_prompt(self, messages: tuple[Message, ...]) -> list[int]:
        """Token ids that ask for the next assistant turn."""
        self._refuse_special(messages)
        text = self.render(messages, generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _refuse_special(self, messages: tuple[Message, ...]) -> None:
        for message in messages:
            found = self._special.search(message.text)
            if found is not None:
                raise DataError(
                    f"the {message.role}'s text spells the special token {found.group()!r}, which "
                    f"the tokenizer would read as structure; escape or remove it",
                    error_class="schema",
                )

    def _assistant_spans(self, messages: tuple[Message, ...], text: str) -> list[tuple[int, int]]:
        """Character spans of the assistant's turns, end-of-turn token included."""
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            head = self.render(messages[:index], generation_prompt=True)
            last = index == len(messages) - 1
            turn = text if last else self.render(messages[: index + 1])
            if turn.startswith(head) and text.startswith(turn):
                spans.append((len(head), len(turn.rstrip())))
                continue
            end = None if last else self._end_of_turn(messages[: index + 2], head, text)
            if end is None:
                raise DataError(
                    f"the chat template renders turn {index} differently when later turns follow, "
                    f"so the assistant's tokens cannot be told apart",
                    error_class="schema",
                )
            spans.append((len(head), end))
        return spans

    def _end_of_turn(self, messages: tuple[Message, ...], head: str, text: str) -> int | None:
        """Where the last but one turn ends, for templates that write it differently once another
        follows (Qwen3's drops the empty thoughts of earlier turns).

        That is after the first special token, since no text spells one; None unless it lies before
        the next turn's text.
        """
        match = self._special.search(text, len(head)) if text.startswith(head) else None
        if match is None:
            return None
        following = messages[-1]
        other = "y" if following.text.startswith("x") else "x"
        changed = Message(following.role, (TextPart(other), *following.parts))
        same = self.render((*messages[:-1], changed)).startswith(text[: match.end()])
        return match.end() if same else None


def no_vision_tower() -> DataError:
    """Images for a language model alone."""
    return DataError(
        "the sample has images, but the model has no vision tower; use a vision-language model, or "
        "leave such samples out",
        error_class="schema",
    )
