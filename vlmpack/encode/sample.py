"""One conversation with images, as every cooking schema delivers it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vlmpack.encode.objects import Objects
from vlmpack.encode.rollouts import Rollout
from vlmpack.errors import DataError, schema_error

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
class VideoPart:
    """The place of one video, which is stored as frames.

    Args:
        index: the place of its first frame among the sample's images. The other frames follow.
        times: of each frame, in seconds, increasing.
        fps: frames a second, where the data gives a rate and no times.
    """

    index: int
    times: tuple[float, ...]
    fps: float | None = None


Shown = ImagePart | VideoPart
"""What a message shows."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Args:
        learn: False where the data excludes an assistant's turn from the loss. Other roles' turns
            are never learnt.
        fields: what the chat template gets of the turn besides its content, under transformers'
            names. An assistant has `tool_calls` and thoughts (`reasoning_content`), a tool has
            `name` and `tool_call_id`. These are JSON values, which nobody changes.
    """

    role: Role
    parts: tuple[TextPart | Shown, ...]
    learn: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def text(self) -> str:
        """The message's text parts, concatenated."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def shown(self) -> tuple[Shown, ...]:
        """The message's images and videos, in order."""
        return tuple(part for part in self.parts if not isinstance(part, TextPart))


@dataclass(frozen=True, slots=True)
class TemplateInputs:
    """The inputs of the chat template besides the turns."""

    tools: Sequence[Mapping[str, Any]] = field(default=(), hash=False)
    variables: Mapping[str, Any] = field(default_factory=dict, hash=False)


NO_INPUTS = TemplateInputs()


def strings(value: object) -> Iterator[str]:
    """Every string of a JSON value, the keys of objects too."""
    pending = [value]  # no recursion: a record may be nested as deeply as JSON is read
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            pending += item


def shown_by(messages: Sequence[Message]) -> tuple[Shown, ...]:
    """The images and videos of some turns, in token order."""
    return tuple(part for message in messages for part in message.shown)


def shows_video(shown: Sequence[Shown]) -> bool:
    """Whether a video is among images and videos."""
    return any(isinstance(part, VideoPart) for part in shown)


def num_files(shown: Sequence[Shown]) -> int:
    """Image files that images and videos have: one each, and as many as a video has frames."""
    return sum(len(part.times) if isinstance(part, VideoPart) else 1 for part in shown)


def said(role: Role, text: str) -> Message:
    """A turn of words alone."""
    return Message(role, (TextPart(text),))


@dataclass(frozen=True, slots=True, kw_only=True)
class VLMSample:
    """One sample, before it is encoded.

    Args:
        key: the WebDataset key; unique within a shard.
        messages: the turns, in order; image and video parts point into `images`.
        images: encoded image files as bytes, in token order, the frames of videos
            among them. Empty while only text and image sizes are needed (lengths).
        image_names: the images' names in messages, which are members of the record or file names.
        task: a label that evaluation groups its figures by, if the data has one.
        answers: the chosen and the rejected answer of a pair, without images. Empty where the turns
            hold what is learnt.
        num_common: how many of its first turns other samples of its record have too; 0 for none.
        is_continued: whether another sample of its record continues after this one's question.
        objects: boxes, points and polygons that its texts have places for.
        is_written: whether these are written into the texts (`Encoder.written`).
        rollout: what a sampler said of the last answer; None where none has drawn it.
    """

    key: str
    url: str
    messages: tuple[Message, ...]
    images: tuple[bytes, ...] = ()
    task: str | None = None
    image_names: tuple[str, ...] = field(default=(), compare=False)
    inputs: TemplateInputs = NO_INPUTS
    answers: tuple[tuple[Message, ...], ...] = ()
    num_common: int = 0
    is_continued: bool = False
    objects: Objects | None = None
    is_written: bool = False
    rollout: Rollout | None = None

    @property
    def conversations(self) -> tuple[tuple[Message, ...], ...]:
        """The sequences to encode: the turns, or a pair's prompt, which is not learnt, with each
        answer.
        """
        if not self.answers:
            return (self.messages,)
        prompt = tuple(replace(message, learn=False) for message in self.messages)
        return tuple((*prompt, *answer) for answer in self.answers)

    @property
    def shown(self) -> tuple[Shown, ...]:
        """The images and videos of the messages, in token order."""
        return shown_by(self.messages)

    @property
    def num_images(self) -> int:
        """Number of image files that the messages show: images, and frames of videos."""
        return num_files(self.shown)

    @property
    def has_video(self) -> bool:
        """Whether a message shows a video."""
        return shows_video(self.shown)


@dataclass(frozen=True, slots=True)
class SampleLength:
    """The cost of a sample, in tokens of the packed row and patches of the tower.

    The tokens of a pair are those of both sequences. Its images are encoded once, and so their
    patches count once.

    Args:
        num_chosen_tokens: of a pair's first sequence; 0 for other samples.
    """

    num_tokens: int
    num_image_tokens: int
    num_label_tokens: int
    num_patches: int
    num_chosen_tokens: int = 0


PAIR_NAMES = ("chosen", "rejected")
"""The two sequences of a pair, in the order of its row."""


def refuse_other_form(sample: VLMSample, *, pairs: bool) -> None:
    """Raise DataError (schema) for a pair where none is wanted, or for anything else where pairs
    are wanted.
    """
    if (fault := other_form(bool(sample.answers), pairs=pairs)) is not None:
        raise fault


def other_form(is_pair: bool, *, pairs: bool) -> DataError | None:
    """The fault of a record of the form that an objective does not learn from; None without one."""
    if is_pair and not pairs:
        return schema_error(
            "the record is a pair ('chosen' and 'rejected'), and the objective learns from one "
            "answer, the last of the turns. Expected a record with one answer, or "
            "objective.name: dpo"
        )
    if pairs and not is_pair:
        return schema_error(
            "the record has no 'chosen' and no 'rejected' answer, and objective.name: dpo learns "
            "from pairs. Expected both with the turns of the prompt, or objective.name: sft"
        )
    return None
