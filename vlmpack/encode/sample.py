"""One conversation with images, as every cooking schema delivers it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """A run of text inside a message. `<image>` in it is plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """The place of one image: `index` counts the sample's images from 0, in token order."""

    index: int


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Args:
        role: whose it is.
        parts: what it says and shows, in order.
        learn: False where the data excludes an assistant's turn from the loss. The turns of others
            are never learnt.
        fields: what the chat template gets of the turn beside its content, under transformers'
            names: an assistant's `tool_calls` and thoughts (`reasoning_content`), a tool's `name`
            and `tool_call_id`. JSON values, which nobody changes.
    """

    role: Role
    parts: tuple[TextPart | ImagePart, ...]
    learn: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def text(self) -> str:
        """The message's text parts, concatenated."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


@dataclass(frozen=True, slots=True)
class Beside:
    """What the chat template gets beside the turns.

    Args:
        tools: JSON schemas of the tools that the assistant may call.
        variables: further variables of the template by name (`chat_template_kwargs`).
    """

    tools: Sequence[Mapping[str, Any]] = field(default=(), hash=False)
    variables: Mapping[str, Any] = field(default_factory=dict, hash=False)


NOTHING_BESIDE = Beside()


def strings(value: object) -> Iterator[str]:
    """Every string of a JSON value, the keys of objects too."""
    left = [value]  # no recursion: a record may be nested as deeply as JSON is read
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            left += item


def said(role: Role, text: str) -> Message:
    """A turn of words alone."""
    return Message(role, (TextPart(text),))


@dataclass(frozen=True, slots=True, kw_only=True)
class VLMSample:
    """One sample, cooked but not encoded.

    Args:
        key: the WebDataset key; unique within a shard.
        url: the shard it came from, for messages.
        messages: the turns, in order; image parts point into `images`.
        images: encoded image files as bytes, in token order. Empty while only
            text and image sizes are needed (lengths).
        image_names: what messages call the images: their members, or the files that they come from.
        task: a label that evaluation groups its figures by, if the data has one.
        beside: what the chat template gets beside the turns.
        answers: of a pair, the chosen answer to the turns and the rejected one, without images.
            Empty where the turns hold what is learnt.
        num_common: how many turns, the first ones, all samples of its record begin with; 0 where
            it is a record's only one.
    """

    key: str
    url: str
    messages: tuple[Message, ...]
    images: tuple[bytes, ...] = ()
    task: str | None = None
    image_names: tuple[str, ...] = field(default=(), compare=False)
    beside: Beside = NOTHING_BESIDE
    answers: tuple[tuple[Message, ...], ...] = ()
    num_common: int = 0

    @property
    def conversations(self) -> tuple[tuple[Message, ...], ...]:
        """What is encoded: the turns, or of a pair the prompt with each answer. A prompt is not
        learnt, whoever speaks in it."""
        if not self.answers:
            return (self.messages,)
        prompt = tuple(replace(message, learn=False) for message in self.messages)
        return tuple((*prompt, *answer) for answer in self.answers)

    @property
    def num_images(self) -> int:
        """Number of image parts in the messages."""
        return sum(isinstance(part, ImagePart) for m in self.messages for part in m.parts)


@dataclass(frozen=True, slots=True)
class SampleLength:
    """What a sample costs, in tokens of the packed row and patches of the tower. Of a pair, tokens
    are those of both sequences, and patches those of its images, which are encoded once.

    Args:
        num_chosen_tokens: of a pair's first sequence alone; 0 where there is no pair.
    """

    num_tokens: int
    num_image_tokens: int
    num_label_tokens: int
    num_patches: int
    num_chosen_tokens: int = 0
