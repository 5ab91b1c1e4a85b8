"""Boxes, points and polygons of a record.

    "objects": {"ref": ["the 7"], "bbox": [[32, 40, 60, 96]]}      in pixels of the original image
    "messages": [..., {"role": "assistant", "content": "{{ref:0}} is at {{box:0}}"}]

`bbox` holds boxes (x1, y1, x2, y2) and points (x, y), `point` points, `polygon` three corners or
more, `ref` labels. `image_id` is the image of each shape, counted from 0. `bbox_type` says another
space than original pixels. A list of `{"bbox_2d": [x1, y1, x2, y2], "label": ...}` is read as well.

The numbers are written by the encoder, which knows what the model sees (`encode/coordinates.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vlmpack.errors import schema_error
from vlmpack.words import counted, kind_of

Kind = Literal["box", "point", "polygon"]
Space = Literal["real", "norm1", "norm1000", "model"]
"""Pixels of the original image, shares of its sides, thousandths of them, or the model's own."""

MAX_SHAPES = 1000
LARGEST = 10_000_000
MAX_NUMBERS = 1000
"""A shape has at most so many: a polygon of 500 corners."""

_KEYS = frozenset(("ref", "bbox", "point", "polygon", "image_id", "bbox_type"))


@dataclass(frozen=True, slots=True)
class Shape:
    """A box (x1, y1, x2, y2), a point (x, y) or a polygon (x, y of each corner) on one image."""

    kind: Kind
    numbers: tuple[float, ...]
    image: int = 0


@dataclass(frozen=True, slots=True)
class Objects:
    """The shapes of a record.

    Args:
        boxes: the entries of `bbox`, points among them.
        space: that all numbers are in.
    """

    boxes: tuple[Shape, ...] = ()
    points: tuple[Shape, ...] = ()
    polygons: tuple[Shape, ...] = ()
    labels: tuple[str, ...] = ()
    space: Space = "real"

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All of them: boxes, points, polygons."""
        return (*self.boxes, *self.points, *self.polygons)

    def document(self) -> dict[str, Any]:
        """As a record has them."""
        named = {"bbox": self.boxes, "point": self.points, "polygon": self.polygons}
        shapes = {name: [list(each.numbers) for each in of] for name, of in named.items() if of}
        images = [shape.image for shape in self.shapes]
        more: dict[str, Any] = {"ref": list(self.labels)} if self.labels else {}
        more |= {"image_id": images} if any(images) else {}
        return shapes | more | ({} if self.space == "real" else {"bbox_type": self.space})

    def of(self, kind: str) -> tuple[Shape, ...]:
        """Those that places of a kind name."""
        return {"box": self.boxes, "point": self.points, "polygon": self.polygons}[kind]


def objects_of(value: object) -> Objects | None:
    """What a record's `objects` holds; None where there is none. Lists without entries are kept, so
    that no text has a place for them.

    Raises:
        DataError: (schema) what was found and what was expected.
    """
    if value is None or value in ("", []):
        return None
    if isinstance(value, list):
        _bound(len(value))
        value = _of_list(value)
    if not isinstance(value, dict):
        raise schema_error(f"'objects' is {kind_of(value)}; expected an object with 'bbox'")
    if unknown := sorted(value.keys() - _KEYS):
        raise schema_error(
            f"'objects' has {unknown[0][:60]!r}; expected {', '.join(sorted(_KEYS))}"
        )
    space: Any = value.get("bbox_type") or "real"
    if space not in get_args(Space):
        raise schema_error(
            f"objects.bbox_type is {str(space)[:60]!r}; expected {', '.join(get_args(Space))}"
        )
    listed = {name: _listed(value, name) for name in ("bbox", "point", "polygon")}
    total = sum(map(len, listed.values()))
    _bound(total)
    images = _listed(value, "image_id") or [0] * total
    if len(images) != total or not all(type(each) is int and each >= 0 for each in images):
        raise schema_error(
            f"objects.image_id has {counted(len(images), 'entry', 'entries')} for "
            f"{counted(total, 'shape')}; expected the number of an image for each, from 0"
        )
    numbered = iter(images)
    made = {
        name: tuple(
            _shape(shape, f"objects.{name}[{n}]", name, next(numbered))
            for n, shape in enumerate(shapes)
        )
        for name, shapes in listed.items()
    }
    labels = _listed(value, "ref")
    for n, label in enumerate(labels):
        if not isinstance(label, str) or not label:
            raise schema_error(f"objects.ref[{n}] is {kind_of(label)}; expected a text")
    return Objects(made["bbox"], made["point"], made["polygon"], tuple(labels), space)


def _bound(total: int) -> None:
    if total > MAX_SHAPES:
        raise schema_error(f"'objects' has {total:,} shapes; at most {MAX_SHAPES:,} are read")


def _of_list(items: list[Any]) -> dict[str, list[Any]]:
    """What models write as JSON, [{"bbox_2d": [x1, y1, x2, y2], "label": "the 7"}], as `Objects`
    has it."""
    shapes: list[Any] = []
    labels: list[Any] = []
    for n, item in enumerate(items):
        held = {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else {}
        labels += [held.pop("label")] if "label" in held else []
        if len(held) != 1 or not held.keys() <= {"bbox_2d", "point_2d"}:
            names = ", ".join(map(repr, [*held][:6])) or kind_of(item)
            raise schema_error(
                f"objects[{n}] has {names[:60]}; expected 'bbox_2d' or 'point_2d', and 'label' if "
                "it has one. Boxes of another order or space go into an object with 'bbox'"
            )
        shapes += held.values()
    return {"bbox": shapes, "ref": labels}


def _listed(value: Mapping[str, Any], name: str) -> list[Any]:
    entries = value.get(name)
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise schema_error(f"objects.{name} is {kind_of(entries)}; expected a list")
    return entries


def _shape(value: object, where: str, name: str, image: int) -> Shape:
    numbers = value
    if name == "polygon" and isinstance(value, list) and all(isinstance(p, list) for p in value):
        numbers = [number for corner in value for number in corner]
    sizes = {"bbox": (2, 4), "point": (2,), "polygon": range(6, MAX_NUMBERS + 1, 2)}[name]
    if not isinstance(numbers, list) or len(numbers) not in sizes:
        given = counted(len(numbers), "number") if isinstance(numbers, list) else kind_of(value)
        wanted = {
            "bbox": "x1, y1, x2, y2, or x, y",
            "point": "x, y",
            "polygon": f"x, y of 3 to {MAX_NUMBERS // 2} corners",
        }
        raise schema_error(f"{where} is {given}; expected {wanted[name]}")
    for number in numbers:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not abs(number) <= LARGEST:  # NaN is not
            raise schema_error(
                f"{where} has {repr(number)[:40]}; expected numbers up to {LARGEST:,}"
            )
    kind: Kind = "polygon" if name == "polygon" else "box" if len(numbers) == 4 else "point"
    shape = Shape(kind, tuple(map(float, numbers)), image)
    if kind == "box" and not (numbers[0] < numbers[2] and numbers[1] < numbers[3]):
        raise schema_error(
            f"{where} is {numbers}; expected x1 < x2 and y1 < y2. A place without an area is a "
            "point: give x, y"
        )
    return shape
