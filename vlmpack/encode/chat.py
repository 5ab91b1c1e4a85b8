"""A conversation -> token ids and the tokens that the assistant wrote.

The chat template is the tokenizer's own (`template.py`). It determines which characters the
assistant wrote (`turns.py`). The image marker in a user's words stays text (`markers.py`).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from vlmpack.encode.markers import (
    Span,
    WrittenOut,
    hide_in_inputs,
    hide_literals,
    put_back,
    refuse_escaped,
    renamed_tokenizer,
    with_whole_places,
    without,
    write_out,
    written_by,
)
from vlmpack.encode.omissions import refuse_lost, refuse_unused_variables, refuse_without_system
from vlmpack.encode.sample import (
    NO_INPUTS,
    ImagePart,
    Message,
    TemplateInputs,
    TextPart,
    VideoPart,
    shown_by,
    strings,
)
from vlmpack.encode.settings import refuse_variables
from vlmpack.encode.special_tokens import refuse_beyond, refuse_structure, special_tokens, structure
from vlmpack.encode.template import ChatTemplate
from vlmpack.encode.turns import difference
from vlmpack.errors import DataError, ModelError, schema_error


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """Token ids of a conversation, one placeholder for each run of an image.

    Args:
        from_assistant: for each id, whether it is a target of the loss. It belongs to an assistant
            turn that the data does not exclude (end-of-turn token included), and writes no image.
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
        takes_images: whether the model has a vision tower. Its template then gets a message as a
            list of parts, and a language model's as a string, unless it takes only the other.
        marker: what the template writes for an image; empty where it takes no images.
        video_markers: what it may write for a video, the longest first. The whole marker is
            replaced.
        image_texts: sample texts of the family's images, such as one of each size.
        date: today's date for a template that reads the clock; None for others.
        variables: the template's variables in all conversations. A record's own override them.
        rows: of the model's embedding; None where they are not known.
    """

    tokenizer: Any
    takes_images: bool = True
    marker: str = ""
    date: datetime.date | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    video_markers: tuple[str, ...] = ()
    spelt: tuple[str, ...] = ()
    image_texts: tuple[str, ...] = ()
    rows: int | None = None

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise ModelError(
                f"model.path: {self.tokenizer.name_or_path} has no chat template "
                f"(chat_template.jinja, chat_template.json or tokenizer_config.json); finetuning "
                f"on conversations needs one"
            )
        self.template.refuse_bad_syntax()
        if self.variables:
            refuse_variables(
                self.variables,
                read=self.template.variables,
                special=[*self._special_tokens, self.marker],
                where=self.tokenizer.name_or_path,
            )
        if self.spelt:
            refuse_structure(
                self.spelt,
                known=special_tokens(self.tokenizer),
                kept=self.structure,
                where=self.tokenizer.name_or_path,
            )

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, with the date."""
        return ChatTemplate(self.tokenizer, self.takes_images, self.date, self.variables)

    def render(self, messages: tuple[Message, ...], inputs: TemplateInputs = NO_INPUTS) -> str:
        """The template's text for some turns; see `ChatTemplate.render`."""
        return self.template.render(messages, inputs)

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
            f"{self.marker!r} for an image{why}. It may be that of the language model alone. "
            "Expected the processor's, in chat_template.jinja or chat_template.json"
        )

    def refuse_other_ids(self) -> None:
        """Raise ModelError where a conversation has other ids than `apply_chat_template` gives it
        in the form that transformers documents."""
        shown = (ImagePart(0),) if self.takes_images else ()
        messages = (
            Message("user", (*shown, TextPart("What is it?"))),
            Message("assistant", (TextPart("It is Seven."),)),
        )
        try:
            theirs = self.template.ids_of_transformers(messages)
            ours = self.encode(messages, [self.marker] * len(shown)).input_ids
        except DataError:  # a template that wants other turns
            return
        if theirs is not None and theirs != ours:
            decode = self.tokenizer.decode
            raise ModelError(
                f"model.path: the chat template of {self.tokenizer.name_or_path} gives "
                f"{decode(ours)!r} here, and {decode(theirs)!r} by apply_chat_template. Expected "
                "the same ids, since a model would be asked differently than it was trained"
            )

    @property
    def _special_tokens(self) -> list[str]:
        """Those that no text may spell: all but the image marker and those that are named."""
        return sorted(special_tokens(self.tokenizer) - {self.marker, *self.spelt})

    @cached_property
    def structure(self) -> dict[str, str]:
        """Special tokens that no text may ever spell, with the reason."""
        texts = {
            "what images are written with": "\n".join(self.image_texts),
            "the chat template": "\n".join(self.template.written),
        }
        markers = {self.marker, *self.video_markers} - {""}
        return structure(self.tokenizer, texts, markers)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a model's answer, without special tokens but those that texts may spell."""
        if self.spelt:
            others = [*special_tokens(self.tokenizer) - {*self.spelt}]
            dropped = set(self.tokenizer.convert_tokens_to_ids(others))
            ids = [token for token in ids if token not in dropped]
        return str(self.tokenizer.decode(ids, skip_special_tokens=not self.spelt))

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._special_tokens)) or r"(?!)")

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
        before, marker, after = image[start : len(image) - tail].partition(self.marker)
        return (before, after) if marker else ("", "")

    @cached_property
    def _with_literals(self) -> Any:
        """The tokenizer for texts that spell the image marker."""
        renamed = renamed_tokenizer(self.tokenizer, self.marker)
        return with_whole_places(renamed) or renamed

    @cached_property
    def _with_whole_places(self) -> Any:
        """The tokenizer for other texts, where its own places of tokens are cut; else None."""
        return with_whole_places(self.tokenizer.backend_tokenizer)

    def encode(
        self,
        messages: tuple[Message, ...],
        images: Sequence[str] = (),
        inputs: TemplateInputs = NO_INPUTS,
        *,
        last_alone: bool = False,
    ) -> ChatTokens:
        """Tokenise a whole conversation.

        Args:
            images: what each image and video is written as, in order (`ImageLayout.text`).
            last_alone: whether only the last turn is learnt. The others are context, and their
                places in the text are not needed.

        Raises:
            DataError: (schema) the text spells a special token, which would turn data into
                structure. The template's turns cannot be told apart, or it leaves a part of the
                conversation out.
        """
        self._refuse_special(messages, inputs)
        if messages and messages[0].role == "assistant":
            raise schema_error(
                "the conversation starts with the assistant; expected a user's turn first",
            )
        shown, inputs, has_literals = self._hidden(messages, inputs)
        text = self.render(shown, inputs)
        refuse_without_system(shown, inputs, text, self.render)
        first = len(shown) - 1 if last_alone else 0
        refuse_lost(shown, inputs, text, self.render, first=first)
        learnt, excluded = self._learnt_and_excluded(shown, inputs, text, last_alone)
        written = self._write_out(messages, text, images, [*learnt, *excluded])
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

    def encode_prompt(
        self,
        messages: tuple[Message, ...],
        images: Sequence[str] = (),
        inputs: TemplateInputs = NO_INPUTS,
    ) -> list[int]:
        """Token ids that ask for the next assistant turn; arguments as of `encode`.

        Where the template has no generation prompt, what it writes before an answer is added.
        """
        self._refuse_special(messages, inputs)
        shown, inputs, has_literals = self._hidden(messages, inputs)
        prompt = self.template.render(shown, inputs, generation_prompt=True)
        text = prompt + self.template.shape(inputs).header
        written = self._write_out(messages, text, images)
        return self._tokenise(written.text, has_literals)[0]

    def _write_out(
        self,
        messages: Sequence[Message],
        text: str,
        images: Sequence[str],
        spans: Sequence[Span] = (),
    ) -> WrittenOut:
        """The text with what its images and videos are written as; see `write_out`."""
        kinds = [isinstance(part, VideoPart) for part in shown_by(messages)]
        marks = [self.video_marker(text) if is_video else self.marker for is_video in kinds]
        return write_out(text, spans, self.marker, images, marks if any(kinds) else ())

    def video_marker(self, text: str) -> str:
        """The marker of a video in a rendered conversation."""
        return next((each for each in self.video_markers if each in text), self.video_markers[-1])

    def own_ids(self, *images: str) -> set[int]:
        """Ids that any conversation may have: what the template writes around one."""
        talk = (Message("user", (TextPart("x"),)), Message("assistant", (TextPart("y"),)))
        texts = [*images, *self.spelt]
        for messages in (talk, (Message("system", (TextPart("z"),)), *talk)):
            with suppress(DataError):  # a template that takes no system prompt
                texts.append(self.render(messages))
        return {each for text in texts for each in self._read(text, has_literals=False)[0]}

    def _tokenise(self, text: str, has_literals: bool) -> tuple[list[int], list[Span]]:
        """Ids that the embedding has rows for, and the characters that each of them writes."""
        ids, places = self._read(text, has_literals)
        refuse_beyond(self.tokenizer, ids, self.rows)
        return ids, places

    def _read(self, text: str, has_literals: bool) -> tuple[list[int], list[Span]]:
        backend = self._with_literals if has_literals else self._with_whole_places
        if has_literals:
            refuse_escaped(text)
        if backend is not None:
            spelt = put_back(text, self.marker) if has_literals else text
            encoding = backend.encode(spelt, add_special_tokens=False)
            return list(encoding.ids), list(encoding.offsets)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])

    def _hidden(
        self, messages: tuple[Message, ...], inputs: TemplateInputs
    ) -> tuple[tuple[Message, ...], TemplateInputs, bool]:
        """Both with the image marker's spelling hidden, and whether there was any."""
        shown, in_turns = hide_literals(messages, self.marker)
        inputs, in_inputs = hide_in_inputs(inputs, self.marker)
        return shown, inputs, in_turns or in_inputs

    def _learnt_and_excluded(
        self, messages: tuple[Message, ...], inputs: TemplateInputs, text: str, last_alone: bool
    ) -> tuple[list[Span], list[Span]]:
        """Character spans of what the assistant wrote, and of its turns that the data excludes.

        The second list is empty unless needed. A mark of the template may hold white space before
        its turn.
        """
        said = self.template.spans(messages, inputs, text, last_alone=last_alone)
        if last_alone:
            return said, []
        excluded = self.template.turns(inputs).spans(messages, text, only_excluded=True)
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

    def _refuse_special(self, messages: tuple[Message, ...], inputs: TemplateInputs) -> None:
        """Raise DataError (schema) where a text spells a special token, or a variable of the record
        is none of the template's."""
        named = [(f"the {message.role}'s text", message.text) for message in messages]
        for message in messages:
            for name, value in message.fields.items():
                named += [(f"the {message.role}'s {name}", text) for text in strings(value)]
        named += [("a tool's schema", text) for text in strings(inputs.tools)]
        named += [("a value of chat_template_kwargs", text) for text in strings(inputs.variables)]
        for where, text in named:
            match = self._special.search(text)
            if match is not None:
                raise schema_error(
                    f"{where} spells the special token {match.group()!r}, which the tokenizer "
                    f"would read as structure; escape or remove it"
                    + (
                        ""
                        if match.group() in self.structure
                        else ", or name it in data.special_tokens"
                    ),
                )
        if inputs.variables:
            refuse_unused_variables(inputs.variables, self.template.variables)
