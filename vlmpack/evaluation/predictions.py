"""From questions and answers to rows of a file.

Question + answer -> Prediction, a row of predictions-*.jsonl; see `metrics` for what they score
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from PIL.Image import Image

from vlmpack.encode import Encoder, ImagePart, Message, TextPart, VideoPart, VLMSample
from vlmpack.encode.coordinates import Grounding, Read, draw_shapes, no_rule, shapes_named
from vlmpack.encode.decode import decode_image
from vlmpack.encode.objects import Objects
from vlmpack.encode.sample import NO_INPUTS, Shown, TemplateInputs, num_files, shown_by
from vlmpack.encode.turns import CALLS
from vlmpack.errors import DataError, RunDirError, schema_error, writing
from vlmpack.whole_file import parse_small_json, regular_text, write_atomically
from vlmpack.words import counted, kind_of

PREDICTIONS_BEFORE = "predictions-before.jsonl"
PREDICTIONS_AFTER = "predictions-after.jsonl"


def predictions_at(step: int) -> str:
    """The file of answers given on the way, after so many optimizer steps."""
    return f"predictions-step-{step:08d}.jsonl"


_STEP = re.compile(r"predictions-step-(\d+)\.jsonl")
_MARK_BEFORE_STOP = re.compile(r"\] (?=[,.;:?!])")
_MARK = r"\[(?:image \d+|video of [\d,]+ frames?)\]"
_OUTER_MARKS = re.compile(rf"^(\s|{_MARK})+|(\s|{_MARK})+$")


def grounding_of(encoder: Encoder, sample: VLMSample, truth: str = "") -> Grounding:
    """Reads the shapes in answers about a sample's images.

    Args:
        truth: the true answer's text, before its objects are written.

    Raises:
        DataError: (schema) the family has no rule; (decode) an image that cannot be read.
    """
    if encoder.coordinates is None:
        raise schema_error(no_rule(encoder.family.name))
    sizes, objects = encoder.sizes_of(sample), sample.objects or Objects()
    try:
        shown = encoder.shown_sizes(sizes)
    except DataError:
        if encoder.coordinates.space == "shown":
            raise
        shown = sizes  # of images that are cut or padded
    grounding = Grounding(
        rule=encoder.coordinates,
        originals=tuple(sizes),
        shown=tuple(shown),
        polygons=bool(objects.polygons),
    )
    named = (grounding.rounded(each, objects.space) for each in shapes_named(truth, objects))
    return replace(grounding, truth=tuple(named))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question and its true answer.

    Args:
        shard: path or URL of the shard it came from.
        messages: the turns before the answer.
        images: encoded image files of those turns, in token order.
        truth: the text of the sample's last assistant turn; "" if unknown.
        inputs: other inputs of the chat template.
        grounding: reads boxes and points in answers, whose tokens they keep; None where its record
            has no objects.
    """

    key: str
    shard: str
    messages: tuple[Message, ...]
    images: tuple[bytes, ...]
    truth: str
    task: str | None = None
    inputs: TemplateInputs = NO_INPUTS
    grounding: Grounding | None = None

    @classmethod
    def from_sample(cls, sample: VLMSample, encoder: Encoder | None = None) -> Question:
        """The last question that the sample's assistant answered in words.

        Args:
            encoder: writes the sample's objects; None where it has none.

        Raises:
            DataError: (schema) no assistant turn, or images that do not match the placeholders.
        """
        if len(sample.images) != sample.num_images:
            raise DataError(
                f"{sample.num_images} image placeholders in the messages, but "
                f"{len(sample.images)} images",
                error_class="schema",
                key=sample.key,
                shard=sample.url,
            )
        places = sample.conversations[0]  # of a pair, with the chosen answer
        said = places if encoder is None else encoder.written(sample).conversations[0]
        turns = [
            place
            for place, message in enumerate(said)
            if message.role == "assistant" and message.learn and CALLS not in message.fields
        ]
        if not turns:
            raise DataError(
                "no assistant turn, or none that the data does not exclude and that calls no tool, "
                "so there is no true answer to compare with",
                error_class="schema",
                key=sample.key,
                shard=sample.url,
            )
        messages, grounding = said[: turns[-1]], None
        if encoder is not None and sample.objects is not None:
            grounding = grounding_of(encoder, sample, places[turns[-1]].text)
        return cls(
            key=sample.key,
            shard=sample.url,
            messages=messages,
            images=sample.images[: num_files(shown_by(messages))],
            truth=said[turns[-1]].text,
            task=sample.task,
            inputs=sample.inputs,
            grounding=grounding,
        )

    @property
    def text(self) -> str:
        """The last turn on one line; `[image n]` or `[video of n frames]` stand for media."""
        parts = self.messages[-1].parts if self.messages else ()
        line = "".join(_in_line(part) for part in parts)
        inner = _OUTER_MARKS.sub("", line)
        return _MARK_BEFORE_STOP.sub("]", " ".join(inner.split()))


@dataclass(frozen=True, slots=True)
class Shapes:
    """Boxes, points and polygons of a question, in pixels of its original images.

    Args:
        truth, answer: what each says (`encode.coordinates.Read`); empty where it has no shape. A
            prediction's truth is what its objects say, other texts are read in the rule's form.
        images: (W, H, w, h) of each image: its sides, and those that the model sees.
    """

    truth: tuple[Read, ...]
    answer: tuple[Read, ...]
    images: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def of(cls, grounding: Grounding, truth: str, answer: str) -> Shapes:
        sizes = zip(grounding.originals, grounding.shown, strict=True)
        images = tuple((*original, *shown) for original, shown in sizes)
        return cls(grounding.read(truth), grounding.read(answer), images)

    def on(self, number: int, data: bytes) -> Image:
        """An image as the model sees it, with the shapes on it.

        Raises:
            DataError: (decode) `data` is no image that can be read, or another one.
        """
        width, height, *seen = self.images[number]
        image = decode_image(data, number, max_pixels=width * height).resize(seen)
        return self.drawn(number, image)

    def drawn(self, number: int, image: Image) -> Image:
        """The same on what the model sees, which is there."""
        width, height, *_ = self.images[number]
        across = (image.width / width, image.height / height)
        truth, answer = (
            [[x * across[n % 2] for n, x in enumerate(xy)] for at, *xy in of if at == number]
            for of in (self.truth, self.answer)
        )
        return draw_shapes(image, truth, answer)

    @classmethod
    def from_json(cls, value: Any) -> Shapes:
        """Raises KeyError, TypeError or ValueError for another value than `asdict` makes of one."""
        truth, answer = (
            tuple(tuple(map(float, shape)) for shape in value[name]) for name in ("truth", "answer")
        )
        images = tuple((int(W), int(H), int(w), int(h)) for W, H, w, h in value["images"])
        if {shape[0] for shape in (*truth, *answer)} - {*range(len(images))}:
            raise ValueError("a shape is on an image that is not there")
        return cls(truth, answer, images)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One answered question; a row of a predictions file.

    Args:
        shard: path or URL of its shard; with the key it names the sample.
        correct: whether they are equal once stripped.
        shapes: what both say where; None where the record has no objects.
    """

    key: str
    shard: str
    task: str | None
    num_images: int
    question: str
    truth: str
    answer: str
    correct: bool
    shapes: Shapes | None = None

    @classmethod
    def of(cls, question: Question, answer: str) -> Prediction:
        shapes, grounding = None, question.grounding
        if grounding is not None:
            shapes = replace(Shapes.of(grounding, "", answer), truth=grounding.truth)
        return cls(
            key=question.key,
            shard=question.shard,
            task=question.task,
            num_images=len(question.images),
            question=question.text,
            truth=question.truth,
            answer=answer,
            correct=answer.strip() == question.truth.strip(),
            shapes=shapes,
        )

    def as_json(self) -> dict[str, Any]:
        """As a line of the file has it."""
        return {name: x for name, x in asdict(self).items() if name != "shapes" or x is not None}


def make_predictions(
    questions: Sequence[Question], answers: Sequence[str | None]
) -> list[Prediction]:
    """Rows for the questions that were answered; those that could not be asked are left out."""
    return [
        Prediction.of(question, answer)
        for question, answer in zip(questions, answers, strict=True)
        if answer is not None
    ]


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write one JSON object a line; the file appears whole or not at all.

    Raises:
        RunDirError: the folder cannot be written.
    """
    lines = [json.dumps(row.as_json(), ensure_ascii=False) + "\n" for row in predictions]
    with writing(path, RunDirError):
        write_atomically(path, "".join(lines))


def drop_predictions_after(folder: Path, step: int) -> None:
    """Remove the answers of steps that a resume takes again."""
    for at, path in given_on_the_way(folder):
        if at > step:
            path.unlink(missing_ok=True)


def given_on_the_way(folder: Path) -> list[tuple[int, Path]]:
    """(step, file) of the answers that a run gave on the way, by step."""
    named = ((_STEP.fullmatch(path.name), path) for path in folder.glob("predictions-step-*"))
    return sorted((int(name[1]), path) for name, path in named if name is not None)


def read_predictions(path: Path) -> list[Prediction]:
    """Read what `write_predictions` wrote.

    Raises:
        RunDirError: the file cannot be read, or a line is no prediction; the message has its
            number.
    """
    try:
        lines = regular_text(path).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirError(f"{path} cannot be read: {error}") from error
    return [
        _prediction(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _prediction(line: str, where: str) -> Prediction:
    try:
        values = parse_small_json(line)
        if values.get("shapes") is not None:
            values["shapes"] = Shapes.from_json(values["shapes"])
        prediction = Prediction(**values)
        for name, kind in get_type_hints(Prediction).items():
            if not isinstance(getattr(prediction, name), kind):
                raise TypeError(f"{name} is {kind_of(getattr(prediction, name))}")
        return prediction
    except (ValueError, TypeError, KeyError) as error:
        expected = ", ".join(field.name for field in fields(Prediction))
        raise RunDirError(f"{where}: no prediction ({error}); expected {expected}") from error


def _in_line(part: TextPart | Shown) -> str:
    match part:
        case TextPart():
            return part.text
        case ImagePart():
            return f" [image {part.index + 1}] "
        case VideoPart():
            return f" [video of {counted(len(part.times), 'frame')}] "
