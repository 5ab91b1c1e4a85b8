"""The numbers and labels of a record's objects, written into its texts as the model has them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from PIL import Image, ImageDraw

from vlmpack.encode.decode import size_of, which_image
from vlmpack.encode.fingerprint import digest
from vlmpack.encode.images import Sizes
from vlmpack.encode.objects import LARGEST, Objects, Shape
from vlmpack.encode.places import place_in, with_texts, write_places
from vlmpack.encode.sample import Message, VLMSample
from vlmpack.encode.settings import EncoderSettings
from vlmpack.errors import DataError, schema_error
from vlmpack.families.base import Family, ImageRule, ShowsWhole
from vlmpack.families.coordinates import CoordinateRule, form_pattern, quoted, rule_of_section
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
        text = self.shape(shape)
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
                    shape=self.shape(shapes[n]),
                    label=rule.label.format(label=label),
                    quoted=quoted(label),
                )
            )
        return rule.answer.format(entries=rule.joint.join(entries))

    def shape(self, shape: Shape) -> str:
        """A shape by itself, as `write`."""
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
        original, shown = self.originals[shape.image][side], self.shown[shape.image][side]
        own = self.rule.most(original, shown)
        most = {"real": original, "norm1": 1, "norm1000": 1000, "model": own}[space]
        if not 0 <= value <= most:
            width, height = self.originals[shape.image]
            raise schema_error(
                f"a {shape.kind} has {'xy'[side]} {value!r}, outside 0 to "
                f"{most} ({space}) of image {shape.image}, which has {width} x {height} "
                "pixels after EXIF rotation"
            )
        return self.rule.number(value, space, original, shown)


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


def shapes_named(text: str, objects: Objects) -> list[Shape]:
    """The shapes that places of a text name, in order."""
    found: list[Shape] = []

    def note(kind: str, numbers: tuple[int, ...] | None) -> str:
        if kind != "ref":
            shapes = objects.shapes if kind == "objects" else objects.of(kind)
            found.extend(shapes if numbers is None else (shapes[n] for n in numbers))
        return ""

    write_places(text, note)
    return found


Read = tuple[float, ...]
"""A shape as it is read: the number of its image, then x and y of its corners in pixels of the
original. A box has two corners, a point one, a polygon three or more."""


@dataclass(frozen=True, slots=True)
class Grounding:
    """Reads the shapes in a model's answer, beside those of the true one.

    Args:
        originals, shown: the images' sizes, as of `ObjectWriter`; those of `shown` stay the
            originals' where images are cut or padded.
        truth: the shapes that the true answer names, in order, rounded as they are written.
        polygons: whether three corners or more are a polygon.
    """

    rule: CoordinateRule
    originals: tuple[Size, ...]
    shown: tuple[Size, ...]
    truth: tuple[Read, ...] = ()
    polygons: bool = False

    def read(self, text: str) -> tuple[Read, ...]:
        """The shapes in a text; none where it has another form than the rule's.

        A text does not say which image a shape is on. The n-th is on that of the true answer's
        n-th, and further ones are on that of the last.
        """
        if not self.originals:
            return ()
        shapes = []
        for place, numbers in enumerate(self.rule.read(text, polygons=self.polygons)):
            image = int(self.truth[min(place, len(self.truth) - 1)][0]) if self.truth else 0
            shapes.append(self._pixels(image, numbers))
        return tuple(shapes)

    def rounded(self, shape: Shape, space: str) -> Read:
        """A shape as a reader of its numbers finds it (`Objects.space`)."""
        sides = [*zip(self.originals[shape.image], self.shown[shape.image], strict=True)]
        written = (self.rule.number(x, space, *sides[n % 2]) for n, x in enumerate(shape.numbers))
        return self._pixels(shape.image, map(float, written))

    def _pixels(self, image: int, numbers: Iterable[float]) -> Read:
        sides = [*zip(self.originals[image], self.shown[image], strict=True)]
        return (
            float(image),
            *(self.rule.original(x, *sides[n % 2]) for n, x in enumerate(numbers)),
        )


TRUTH_COLOR, ANSWER_COLOR = "#18864b", "#e4572e"
DRAWN_SIDE = 336
"""Pixels of the longer side that a picture with shapes has at least."""


def draw_shapes(
    image: Image.Image,
    truth: Iterable[Sequence[float]] = (),
    answer: Iterable[Sequence[float]] = (),
) -> Image.Image:
    """A copy of an image, small ones enlarged by a whole factor, with shapes drawn on it.

    Args:
        truth, answer: x and y of the corners of each shape, in pixels of the image. The truth is
            green, the answer orange.
    """
    factor = max(1, -(-DRAWN_SIDE // max(image.size)))
    drawn = image.convert("RGB").resize([factor * side for side in image.size])
    pen, width = ImageDraw.Draw(drawn), max(2, max(drawn.size) // 160)
    for color, shapes in ((TRUTH_COLOR, truth), (ANSWER_COLOR, answer)):
        for shape in shapes:
            at = [min(max(factor * x, -LARGEST), LARGEST) for x in shape]
            corners = [*zip(at[::2], at[1::2], strict=True)]
            if len(corners) == 1:
                pen.circle(corners[0], 4 * width, outline=color, width=width)
            elif len(corners) == 2:
                low, high = zip(*map(sorted, zip(*corners, strict=True)), strict=True)
                pen.rectangle([low, high], outline=color, width=width)
            else:
                pen.polygon(corners, outline=color, width=width)
    return drawn


_NUMBER = r"-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"
_PAIR = rf"\(\s*{_NUMBER}\s*,\s*{_NUMBER}\s*\)"
_FOUR = re.compile(r"\[\s*" + r"\s*,\s*".join([_NUMBER] * 4) + rf"\s*\]|{_PAIR}\s*,\s*{_PAIR}")
"""Four numbers that nothing calls a box."""
_MARKED = re.compile(
    r"(?:(?:b?box|point)_2d['\"]?\s*:|<\|box_start\|>|<b?box>|<point>|<\|det\|>)[\s\[(]*"
    rf"{_NUMBER}(?:[\s,()\[\]]{{1,6}}{_NUMBER}){{1,3}}"
)
"""Numbers that a text calls a box or a point."""
_MOVES = "pixels_of_original"
_READ_TURNS = ("user", "assistant")

Doubts = dict[str, tuple[int, str]]
"""What may be wrong with coordinates -> samples, and the first one."""

_DOUBTS = {
    "box": "have a box in an answer whose numbers may not be those of the model, such as {}. "
    "Numbers in texts do not follow an image that is resized. Give them as objects of the record, "
    "or set data.boxes_in_text (docs/grounding.md)",
    "place": "have a place of an object, such as {}, and no 'objects', so it stays text",
    "share": "have boxes of at most one pixel, such as {}. If they are shares of the image's "
    "sides, say so with objects.bbox_type: norm1",
}


def note_doubt(doubts: Doubts, doubt: tuple[str, str] | None, key: str) -> None:
    """Count what `Encoder.doubt` found in a sample."""
    if doubt is not None:
        kind, example = doubt
        count, first = doubts.get(kind, (0, f"{example[:80]} ({key})"))
        doubts[kind] = count + 1, first


def doubt_lines(doubts: Doubts, samples: int) -> list[str]:
    """A line for each kind: its count, an example, and the remedy."""
    return [
        f"{count:,} of {counted(samples, 'sample')} {_DOUBTS[kind].format(first)}"
        for kind, (count, first) in sorted(doubts.items())
    ]


def doubt_of_objects(sample: VLMSample) -> tuple[str, str] | None:
    """What may be wrong with the objects of a sample, or with places of those that it lacks."""
    if sample.objects is None:
        place = place_in(_texts(sample, _READ_TURNS))
        return None if place is None else ("place", place)
    boxes = [shape.numbers for shape in sample.objects.boxes if shape.kind == "box"]
    if boxes and sample.objects.space == "real" and max(map(max, boxes)) <= 1:
        return "share", str([*boxes[0]])
    return None


def stray_box(
    sample: VLMSample,
    rule: CoordinateRule,
    sizes: Callable[[], tuple[Sequence[Size], Sequence[Size]]],
) -> str | None:
    """A box or point in an answer whose numbers may not be those of the image that the model sees.

    They are beyond the space of the family's numbers. In pixels of an image that the model sees
    resized, what a text calls a box is in doubt as well.

    Args:
        sizes: asked where there is a box: the images' sizes after EXIF rotation, and as shown.
    """
    found = [each for text in _texts(sample, ("assistant",)) for each in _boxes_in(text)]
    if not found:
        return None
    originals, shown = sizes()
    if not originals:
        return None
    whole, seen = ([max(sides) for sides in zip(*each, strict=True)] for each in (originals, shown))
    in_pixels = rule.space != "norm"
    is_resized = [tuple(size) for size in originals] != [tuple(size) for size in shown]
    most = [rule.most(*sides) for sides in zip(whole, seen, strict=True)]
    for text, numbers in found:
        beyond = _is_beyond(numbers, most)
        if _FOUR.match(text) is None:
            is_stray = beyond or (in_pixels and is_resized)
        else:
            is_stray = beyond and _has_area(numbers)
            is_stray &= in_pixels or not _is_beyond(numbers, whole)
        if is_stray:
            return text
    return None


def beyond_images(text: str, rule: CoordinateRule, shown: Sequence[Size]) -> tuple[int, str | None]:
    """How many boxes and points a text has, and the first one beyond the rule's last number.

    Four numbers that nothing calls a box count where the rule's are pixels.

    Args:
        shown: the images' sizes as the model sees them; none are needed for shares of a grid.
    """
    in_pixels = rule.space != "norm"
    most = [rule.grid, rule.grid]
    if in_pixels:
        most = [max(sides) for sides in zip(*shown, strict=True)]
    found = [
        (box, numbers)
        for box, numbers in _boxes_in(text)
        if _FOUR.match(box) is None or (in_pixels and _has_area(numbers))
    ]
    return len(found), next((box for box, numbers in found if _is_beyond(numbers, most)), None)


def _boxes_in(text: str) -> list[tuple[str, list[float]]]:
    return [
        (match[0], [float(each) for each in re.findall(_NUMBER, match[0].replace("_2d", ""))])
        for match in (*_MARKED.finditer(text), *_FOUR.finditer(text))
    ]


def _has_area(numbers: Sequence[float]) -> bool:
    return numbers[0] < numbers[2] and numbers[1] < numbers[3]


def with_boxes_of_texts(sample: VLMSample, writer: ObjectWriter) -> VLMSample:
    """The sample with boxes in its texts moved from pixels of the original image to the model's
    numbers, where they stand in the form of its family.

    Raises:
        DataError: (schema) a box in another form, without an area, of shares, outside the image, or
            of one of several images.
    """
    rule, key = writer.rule, writer.rule.keys.get("point")
    forms = [re.compile("(?P<before>)" + form_pattern(rule.box))]
    if key:
        forms.append(re.compile(rf"(?P<before>['\"]{key}['\"]\s*:\s*){form_pattern(rule.point)}"))

    def write(match: re.Match[str]) -> str:
        return match["before"] + writer.shape(_shape_in(match))

    def change(text: str) -> str:
        left = text
        for form in forms:
            left = form.sub("", left)
        if other := _MARKED.search(left) or _FOUR.search(left):
            why = f"{other[0][:80]!r} is no box in the form of {writer.name}"
            raise schema_error(f"{why} (data.boxes_in_text: {_MOVES}); give it as an object")
        if left != text and len(writer.originals) > 1:
            why = f"a text has boxes, and the sample {len(writer.originals)} images"
            raise schema_error(f"{why} (data.boxes_in_text: {_MOVES}); give them as objects")
        for form in forms:
            text = form.sub(write, text)
        return text

    def changed(turns: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(
            with_texts([turn], change)[0] if turn.role in _READ_TURNS else turn for turn in turns
        )

    answers = tuple(map(changed, sample.answers))
    return replace(sample, messages=changed(sample.messages), answers=answers, is_written=True)


def _shape_in(match: re.Match[str]) -> Shape:
    """What a text has in the family's form. Raises as `with_boxes_of_texts`."""
    if "x" in match.re.groupindex:
        return Shape("point", (float(match["x"]), float(match["y"])))
    x1, y1, x2, y2 = (float(match[name]) for name in ("x1", "y1", "x2", "y2"))
    if not (x1 < x2 and y1 < y2 and max(x2, y2) > 1):
        raise schema_error(
            f"{match[0][:80]!r} is no box in pixels (data.boxes_in_text: {_MOVES}); expected "
            "x1 < x2 and y1 < y2, and numbers above 1. Give shares of the sides as objects"
        )
    return Shape("box", (x1, y1, x2, y2))


def _is_beyond(numbers: Sequence[float], most: Sequence[float]) -> bool:
    return any(number > most[place % 2] for place, number in enumerate(numbers))


def _texts(sample: VLMSample, roles: Collection[str]) -> list[str]:
    turns = (turn for part in (sample.messages, *sample.answers) for turn in part)
    return [turn.text for turn in turns if turn.role in roles]


OBJECTS_VERSION = 1
"""Raise it when objects are written otherwise, whatever the rule of the family."""


class WritesObjects(ABC):
    """The part of an `Encoder` that writes the objects of samples into their texts."""

    family: Family
    settings: EncoderSettings

    @property
    @abstractmethod
    def takes_images(self) -> bool:
        """Whether the model has a vision tower."""

    @property
    @abstractmethod
    def image_rule(self) -> ImageRule:
        """The family's rule with the folder's sizes, or the budget's."""

    def written(
        self, sample: VLMSample, sizes: Sizes | None = None, originals: Sizes | None = None
    ) -> VLMSample:
        """The sample with its objects written into its texts, as this model has them.

        Others are returned as they are, unless `boxes_in_text` says what their texts' boxes are.

        Args:
            sizes: (width, height) of each image as the model's processor gets it; read from the
                files where it is None.
            originals: the same before a plan shrank them. None: of the files where the sample has
                some, else `sizes`.

        Raises:
            DataError: (schema) the family has no rule; a shape outside its image, or without a
                form; a box in a text that is refused.
        """
        policy, rule, name = self.settings.boxes_in_text, self.coordinates, self.family.name
        is_plain = sample.objects is None
        if sample.is_written or (is_plain and (policy == "keep" or not sample.num_images)):
            return sample
        if rule is None:
            raise schema_error(no_rule(name))
        if is_plain and policy == "refuse":
            if box := self._stray_box(sample, sizes, originals):
                raise schema_error(
                    f"an answer has the box {box[:80]!r}, whose numbers may not be those of the "
                    "model (data.boxes_in_text: refuse); give it as an object"
                )
            return sample
        if sample.has_video and sample.objects is not None:
            raise schema_error(
                "the record has 'objects' and a video, whose frames have no rule; leave one out"
            )
        said_by = name if self.settings.coordinates is None else "data.coordinates"
        both = self._original_and_shown(sample, sizes, originals)
        writer = ObjectWriter(rule, sample.objects or Objects(), *both, said_by)
        return (with_boxes_of_texts if sample.objects is None else with_objects)(sample, writer)

    def _original_and_shown(
        self, sample: VLMSample, sizes: Sizes | None, originals: Sizes | None
    ) -> tuple[Sizes, Sizes]:
        """The sizes of a sample's images, and those that the model sees where it counts their
        pixels. See `written`."""
        if originals is None and sample.images:
            originals = self.sizes_of(sample)
        originals = originals or sizes or ()
        if self.coordinates is None or self.coordinates.space != "shown":
            return originals, originals
        return originals, self.shown_sizes(sizes or originals)

    def sizes_of(self, sample: VLMSample) -> Sizes:
        """(width, height) of each of a sample's image files, after EXIF rotation."""
        most, names = self.settings.max_image_pixels, sample.image_names
        return [
            size_of(data, which_image(n, names), max_pixels=most)
            for n, data in enumerate(sample.images)
        ]

    def shown_sizes(self, sizes: Sizes) -> Sizes:
        """The sizes that the model sees.

        Raises:
            DataError: (schema) images that are cut or padded; (decode) a size that is refused.
        """
        rule = self.image_rule
        try:
            if isinstance(rule, ShowsWhole):
                return [rule.shown_size(*size) for size in sizes]
        except ValueError as error:
            raise DataError(str(error), error_class="decode") from error
        except KeyError:
            pass  # a processor that says nothing of it
        raise schema_error(
            f"data.coordinates.space: shown is not known for images of {self.family.name}, which "
            "may be cut or padded; use norm or pixels"
        )

    def doubt(self, sample: VLMSample, sizes: Sizes | None = None) -> tuple[str, str] | None:
        """What may be wrong with the coordinates of a sample that can be encoded, and an example.
        None where there is nothing.

        Args:
            sizes: as of `encode`, or of a sample without its image bytes.
        """
        if sample.objects is None and self.settings.boxes_in_text == "keep":
            box = self._stray_box(sample, sizes)
            if box is not None:
                return "box", box
        return doubt_of_objects(sample)

    def _stray_box(
        self, sample: VLMSample, sizes: Sizes | None, originals: Sizes | None = None
    ) -> str | None:
        rule = self.coordinates
        if rule is None or not self.takes_images or not sample.num_images or sample.has_video:
            return None
        both = partial(self._original_and_shown, sample, sizes, originals)
        return stray_box(sample, rule, both)

    @cached_property
    def coordinates(self) -> CoordinateRule | None:
        """How objects are written: as the recipe says, else as the family does."""
        if self.settings.coordinates is not None:
            return rule_of_section(self.settings.coordinates)
        return self.family.coordinates

    @property
    def objects_said(self) -> str:
        """A digest of how objects are written. Only samples that have some depend on it, so that it
        is no part of the fingerprint; bounds of images and `data.coordinates` are."""
        rule = "none" if self.coordinates is None else self.coordinates.said
        return digest(f"{OBJECTS_VERSION} {rule}".encode())


def no_rule(
    family: str,
    subject: str = "the record has 'objects'",
    instead: str = "or write the numbers into the text",
) -> str:
    """Why objects of a family cannot be written or read, with the way out.

    Args:
        subject: what asks for it.
        instead: what else helps.
    """
    return (
        f"{subject}, and no rule is known here by which {family} writes boxes. Say one with "
        f"data.coordinates (space, grid, order, rounding, box), {instead}"
    )
