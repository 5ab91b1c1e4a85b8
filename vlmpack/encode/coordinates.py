"""The numbers and labels of a record's objects, written into its texts as the model has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlmpack.encode.objects import Objects, Shape
from vlmpack.encode.places import with_texts, write_places
from vlmpack.encode.sample import VLMSample
from vlmpack.errors import schema_error
from vlmpack.families.coordinates import CoordinateRule, quoted
from vlmpack.words import counted

Size = tuple[int, int]
"""(width, height) in pixels."""


@dataclass(frozen=True, slots=True)
class ObjectWriter:
    """Writes the objects of one sample.

    Args:
        originals: the images' sizes after EXIF rotation, before any resize.
        shown: their sizes as the model sees them; those of `originals` where the rule does not ask.
        name: of the family, or of the recipe's section that says the rule, for messages.
    """

    rule: CoordinateRule
    objects: Objects
    originals: Sequence[Size]
    shown: Sequence[Size]
    name: str

    def write(self, kind: str, numbers: tuple[int, ...] | None) -> str:
        """What a place is written as.

        Raises:
            DataError: (schema) a shape outside its image, or one that the family has no form of.
        """
        if kind == "ref":
            assert numbers is not None
            return self.rule.label.format(label=self.objects.labels[numbers[0]])
        if kind == "objects":
            return self._answer(numbers)
        assert numbers is not None
        shape = self.objects.of(kind)[numbers[0]]
        text = self._shape(shape)
        return text if shape.kind == "polygon" else self.rule.alone.format(shape=text)

    def _answer(self, numbers: tuple[int, ...] | None) -> str:
        rule, shapes, labels = self.rule, self.objects.shapes, self.objects.labels
        form = rule.entry if labels else rule.bare
        entries = []
        for n in range(len(shapes)) if numbers is None else numbers:
            key = rule.keys.get(shapes[n].kind, "")
            if not form or ("{key}" in form and not key):
                with_labels = "with labels" if labels else "without labels"
                raise schema_error(
                    f"{{{{objects}}}}: no form of a whole answer {with_labels} is known here "
                    f"for a {shapes[n].kind} in {self.name}; write each entry by itself: "
                    f"{{{{{shapes[n].kind}:0}}}}"
                )
            label = labels[n] if labels else ""
            entries.append(
                form.format(
                    key=key,
                    shape=self._shape(shapes[n]),
                    label=rule.label.format(label=label),
                    quoted=quoted(label),
                )
            )
        return rule.answer.format(entries=rule.joint.join(entries))

    def _shape(self, shape: Shape) -> str:
        form = {"box": self.rule.box, "point": self.rule.point, "polygon": self.rule.corner}
        if not form[shape.kind]:
            raise schema_error(
                f"no form of a {shape.kind} is known for {self.name}; say one with "
                f"data.coordinates, or leave such shapes out"
            )
        if shape.image >= len(self.originals):
            raise schema_error(
                f"a {shape.kind} of 'objects' is on image {shape.image}, the sample has "
                f"{counted(len(self.originals), 'image')}, counted from 0 (objects.image_id)"
            )
        written = [self._number(shape, place) for place in range(len(shape.numbers))]
        if shape.kind != "polygon":
            names = ("x1", "y1", "x2", "y2") if shape.kind == "box" else ("x", "y")
            return form[shape.kind].format(**dict(zip(names, written, strict=True)))
        corners = (
            self.rule.corner.format(x=x, y=y)
            for x, y in zip(written[::2], written[1::2], strict=True)
        )
        return self.rule.polygon.format(corners=", ".join(corners))

    def _number(self, shape: Shape, place: int) -> str:
        value, side, space = shape.numbers[place], place % 2, self.objects.space
        original = self.originals[shape.image][side]
        most = {"real": original, "norm1": 1, "norm1000": 1000}.get(space)
        if value < 0 or (most is not None and value > most):
            width, height = self.originals[shape.image]
            raise schema_error(
                f"a {shape.kind} of 'objects' has {'xy'[side]} {value!r}, outside 0 to "
                f"{most or 'any'} ({space}) of image {shape.image}, which has {width} x {height} "
                "pixels after EXIF rotation"
            )
        return self.rule.number(value, space, original, self.shown[shape.image][side])


def with_objects(sample: VLMSample, writer: ObjectWriter) -> VLMSample:
    """The sample with every place in its texts written.

    Raises:
        DataError: (schema) as `ObjectWriter.write`.
    """

    def change(text: str) -> str:
        return write_places(text, writer.write)

    answers = tuple(with_texts(answer, change) for answer in sample.answers)
    messages = with_texts(sample.messages, change)
    return replace(sample, messages=messages, answers=answers, is_written=True)


_FOUR = re.compile(r"\[\s*" + r"\s*,\s*".join([r"(\d+(?:\.\d+)?)"] * 4) + r"\s*\]")


def box_beyond(sample: VLMSample, shown: Sequence[Size]) -> str | None:
    """A box in an answer's text beyond all images as the model sees them; None without one.

    Args:
        shown: the images' sizes after the processor's resize.
    """
    width, height = (max(sides) for sides in zip(*shown, strict=True))
    for turns in (sample.messages, *sample.answers):
        for turn in turns:
            if turn.role == "assistant":
                for match in _FOUR.finditer(turn.text):
                    x1, y1, x2, y2 = map(float, match.groups())
                    if x1 < x2 and y1 < y2 and (x2 > width or y2 > height):
                        return match[0]
    return None


def no_rule(family: str) -> str:
    """Why objects of a family cannot be written, with the way out."""
    return (
        f"the record has 'objects', and no rule is known here by which {family} writes boxes. Say "
        "one with data.coordinates (space, grid, order, rounding, box), or write the numbers into "
        "the text"
    )
