"""A conversation -> token ids and the tokens that the assistant wrote.

The chat template is the tokenizer's own. Which characters the assistant wrote follows from the
template: see `turns.py`. The image marker in a user's words stays text: see `literals.py`.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vlmpack.encode.clock import with_date
from vlmpack.encode.content import Form, find_forms, turn_dicts
from vlmpack.encode.image_text import Span, WrittenOut, write_out
from vlmpack.encode.literals import hide_literals, put_back, renamed_tokenizer
from vlmpack.encode.sample import ImagePart, Message, Role, TextPart
from vlmpack.encode.template_bounds import bound_templates
from vlmpack.encode.token_places import with_whole_places, without, written_by
from vlmpack.encode.turns import AssistantTurns, difference
from vlmpack.errors import DataError, ModelError, VlmpackError, schema_error

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""A template that marks what the assistant writes."""


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """Token ids of a conversation, one placeholder for each run of an image.

    Args:
        input_ids: the ids.
        from_assistant: for each id, whether it belongs to an assistant turn (its end-of-turn token
            included) that the data does not exclude, and writes no image: the loss's targets.
        from_image: for each id, whether it writes an image.
        excluded: for each id, whether it belongs to an assistant turn that the data excludes.
    """

    input_ids: list[int]
    from_assistant: list[bool]
    from_image: list[bool]
    excluded: list[bool]


@dataclass(frozen=True)
class ChatEncoder:
    """Chat template and tokenizer of a model folder.

    Args:
        tokenizer: a fast tokenizer of transformers with a chat template.
        takes_images: whether the model has a vision tower. Its template then gets a message as a
            list of parts, and a language model's as a string, unless it takes only the other.
        marker: what the template writes for an image; empty where it takes none.
        date: what a template that reads the clock writes as today's; None for others.
    """

    tokenizer: Any
    takes_images: bool = True
    marker: str = ""
    date: datetime.date | None = None

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise ModelError(
                f"model.path: {self.tokenizer.name_or_path} has no chat template "
                f"(chat_template.jinja, chat_template.json or tokenizer_config.json); finetuning "
                f"on conversations needs one"
            )
        self._refuse_bad_syntax()

    def _refuse_bad_syntax(self) -> None:
        """Raise ModelError where the template cannot be compiled."""
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        bound_templates()
        try:
            text = self.tokenizer.get_chat_template()
            render_jinja_template([], chat_template=text)
        except TemplateSyntaxError as error:
            folder = Path(self.tokenizer.name_or_path)
            file = folder / "chat_template.jinja"
            own = file.is_file() and file.read_text(encoding="utf-8") == text
            name = f"{file}" if own else f"the chat template of {folder}"
            raise ModelError(f"model.path: {name}, line {error.lineno}: {error.message}") from error
        except Exception as error:  # compiling a hostile one may raise anything
            raise ModelError(
                f"model.path: the chat template of {self.tokenizer.name_or_path} cannot be "
                f"compiled ({type(error).__name__}: {error})"
            ) from error

    def refuse_without_images(self) -> None:
        """Raise ModelError where images are taken, but the template writes none."""
        if not self.takes_images:
            return
        why = ""
        try:
            text = self.render((Message("user", (ImagePart(0), TextPart("x"))),))
            if text.count(self.marker) == 1:
                return
        except DataError as error:
            why = f" ({error})"
        raise ModelError(
            f"model.path: the chat template of {self.tokenizer.name_or_path} does not write "
            f"{self.marker!r} for an image{why}; it may be that of the language model alone: "
            f"expected the processor's, in chat_template.jinja or chat_template.json"
        )

    @property
    def template(self) -> str:
        """The chat template, with the date."""
        text = str(self.tokenizer.get_chat_template())
        return text if self.date is None else with_date(text, self.date)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Special tokens that no text may spell: all but the image marker."""
        added = self.tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special}
        special |= set(self.tokenizer.all_special_tokens)
        special -= {self.marker}
        return re.compile("|".join(re.escape(token) for token in sorted(special)) or r"(?!)")

    @cached_property
    def _turns(self) -> AssistantTurns:
        return AssistantTurns(lambda turns, prompt: self.render(turns, generation_prompt=prompt))

    @cached_property
    def _around_image(self) -> tuple[str, str]:
        """What the template writes before and after an image's marker, because of the image."""
        try:
            image, text = (
                self.render((Message("user", (part,)),)) for part in (ImagePart(0), TextPart("x"))
            )
        except DataError:  # a template that wants words beside an image
            return "", ""
        start, tail = difference(image, text)
        before, found, after = image[start : len(image) - tail].partition(self.marker)
        return (before, after) if found else ("", "")

    @cached_property
    def _with_literals(self) -> Any:
        """The tokenizer for texts that spell the image marker."""
        renamed = renamed_tokenizer(self.tokenizer, self.marker)
        return with_whole_places(renamed) or renamed

    @cached_property
    def _with_whole_places(self) -> Any:
        """The tokenizer for other texts, where its own places of tokens are cut; else None."""
        return with_whole_places(self.tokenizer.backend_tokenizer)

    def render(self, messages: tuple[Message, ...], *, generation_prompt: bool = False) -> str:
        """The template's text for some turns.

        Raises:
            DataError: (schema) the template refuses them, or an image for a model without tower.
        """
        return self._apply(self._as_dicts(messages), generation_prompt=generation_prompt)

    def _as_dicts(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        if not self.takes_images and any(
            isinstance(part, ImagePart) for message in messages for part in message.parts
        ):
            raise no_vision_tower()
        return turn_dicts(messages, self._forms)

    @cached_property
    def _forms(self) -> dict[Role, Form]:
        return find_forms(self._apply, "parts" if self.takes_images else "string")

    def _apply(self, turns: list[dict[str, Any]], *, generation_prompt: bool = False) -> str:
        with template_faults():
            return str(
                self.tokenizer.apply_chat_template(
                    turns,
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                )
            )

    def encode(self, messages: tuple[Message, ...], images: Sequence[str] = ()) -> ChatTokens:
        """Tokenise a whole conversation.

        Args:
            messages: its turns.
            images: what each image is written as, in order (`ImageLayout.text`).

        Raises:
            DataError: (schema) a special token spelt in the text, which would turn data into
                structure; or a template whose turns cannot be told apart.
        """
        self._refuse_special(messages)
        if messages and messages[0].role == "assistant":
            raise schema_error(
                "the conversation starts with the assistant; expected a user's turn first",
            )
        shown, has_literals = hide_literals(messages, self.marker)
        text = self.render(shown)
        _refuse_without_system(shown, text)
        learnt, excluded = self._learnt_and_excluded(shown, text)
        written = write_out(text, [*learnt, *excluded], self.marker, images)
        ids, places = self._tokenise(written.text, has_literals)
        from_image = [False] * len(ids)
        if written.images:
            words = written_by(places, without([(0, len(written.text))], written.images))
            from_image = [not word for word in words]
        learnt, excluded = written.spans[: len(learnt)], written.spans[len(learnt) :]
        return ChatTokens(
            input_ids=ids,
            from_assistant=written_by(places, without(learnt, self._around(written))),
            from_image=from_image,
            excluded=written_by(places, excluded),
        )

    def encode_prompt(self, messages: tuple[Message, ...], images: Sequence[str] = ()) -> list[int]:
        """Token ids that ask for the next assistant turn; arguments as of `encode`.

        Where the template has no generation prompt, what it writes before an answer is added.
        """
        self._refuse_special(messages)
        shown, has_literals = hide_literals(messages, self.marker)
        text = self.render(shown, generation_prompt=True) + self._turns.shape.header
        written = write_out(text, (), self.marker, images)
        return self._tokenise(written.text, has_literals)[0]

    def _tokenise(self, text: str, has_literals: bool) -> tuple[list[int], list[Span]]:
        """Ids, and the characters that each of them writes."""
        backend = self._with_literals if has_literals else self._with_whole_places
        if backend is not None:
            spelt = put_back(text, self.marker) if has_literals else text
            found = backend.encode(spelt, add_special_tokens=False)
            return list(found.ids), list(found.offsets)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])

    def _spans(self, messages: tuple[Message, ...], text: str) -> list[Span]:
        """Character spans that the assistant wrote: by the template's own `{% generation %}` marks,
        an end-of-turn token right behind one included; else by its turns."""
        if not _MARKS.search(self.template):
            return self._turns.spans(messages, text)
        from transformers.utils.chat_template_utils import render_jinja_template

        with template_faults():
            found: Any = render_jinja_template(  # annotated as a string, returns a pair
                [self._as_dicts(messages)],
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        texts, spans = found
        assert texts == [text]
        close = self._turns.shape.close
        return [(a, b + len(close) if text.startswith(close, b) else b) for a, b in spans[0]]

    def mask_of_transformers(self, messages: tuple[Message, ...]) -> list[bool] | None:
        """Which tokens of a rendered conversation transformers itself takes for the assistant's;
        None for a template without marks. What is learnt does not come from here: see `verify`."""
        if not _MARKS.search(self.template):
            return None
        with template_faults():
            found = self.tokenizer.apply_chat_template(
                self._as_dicts(messages),
                chat_template=self.template,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        return [bool(flag) for flag in found["assistant_masks"]]

    def _learnt_and_excluded(
        self, messages: tuple[Message, ...], text: str
    ) -> tuple[list[Span], list[Span]]:
        """Character spans of what the assistant wrote, and of its turns that the data excludes.

        A mark of the template may hold more than its turn: white space before it.
        """
        said = self._spans(messages, text)
        excluded = self._turns.spans(messages, text, only_excluded=True)
        dropped = [(a, b) for a, b in said if any(a < end and start < b for start, end in excluded)]
        return [span for span in said if span not in dropped], [*excluded, *dropped]

    def _around(self, written: WrittenOut) -> list[Span]:
        """Images with what the template writes around them."""
        before, after = self._around_image
        text = written.text
        return [
            (
                start - len(before) if text.endswith(before, 0, start) else start,
                end + len(after) if text.startswith(after, end) else end,
            )
            for start, end in written.images
        ]

    def _refuse_special(self, messages: tuple[Message, ...]) -> None:
        for message in messages:
            found = self._special.search(message.text)
            if found is not None:
                raise schema_error(
                    f"the {message.role}'s text spells the special token {found.group()!r}, which "
                    f"the tokenizer would read as structure; escape or remove it",
                )


@contextmanager
def template_faults() -> Iterator[None]:
    """A template that refuses a conversation, cannot take its parts or takes too long is a fault of
    the data. It is a program of the model folder, so it may raise anything."""
    from jinja2 import TemplateError

    bound_templates()
    try:
        yield
    except VlmpackError:
        raise
    except Exception as error:
        is_plain = isinstance(error, TemplateError | TypeError | ValueError)
        said = f"{error}" if is_plain else f"{type(error).__name__}: {error}"
        raise schema_error(f"the chat template refuses the conversation: {said}") from error


def _refuse_without_system(messages: tuple[Message, ...], text: str) -> None:
    """Mistral's templates write a system prompt into a prompt, but into no finished conversation:
    what is learnt would be said without it."""
    for message in messages:
        if message.role == "system" and not all(
            part.text.strip() in text for part in message.parts if isinstance(part, TextPart)
        ):
            raise schema_error(
                "the chat template leaves the system prompt out of a conversation that ends with "
                "the assistant; put it into the first user's turn, or use another template",
            )


def no_vision_tower() -> DataError:
    """Images for a language model alone."""
    return schema_error(
        "the sample has images, but the model has no vision tower; use a vision-language model, or "
        "leave such samples out",
    )
