"""Random boxes of every family with a rule, through the map of 12 settings, read back by what its
publisher says alone."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from encode.test_objects import drawn, picture
from support.box_reader import PUBLISHED, Size, far_off, smart_resize
from support.shards import TINY_MODEL

from vlmpack.encode import Encoder
from vlmpack.encode.objects import Objects, Shape
from vlmpack.encode.sample import ImagePart, Message, TextPart, VLMSample, said
from vlmpack.encode.settings import EncoderSettings
from vlmpack.families.coordinates import GENERIC, CoordinateRule
from vlmpack.families.registry import served_family
from vlmpack.recipe.data import ImagesSection

TIE = 1 + 1e-6
"""Half a step, with what floating point adds to it."""
BOXES_A_SAMPLE = 25


@dataclass(frozen=True)
class Setting:
    """How images come to the model.

    Args:
        sizes: least and largest side.
        shrunk: what a plan multiplies sides by, in 256ths.
        orientations: of EXIF, in files; empty where sizes alone are known.
        bounds: of the area that is shown, if they are not the processor's.
        aspect: of a side to the other at most.
    """

    sizes: tuple[int, int] = (60, 2500)
    images: int = 1
    shrunk: int = 256
    orientations: tuple[int, ...] = ()
    bounds: tuple[int, int] = (784, 802816)
    aspect: float = 8.0


SETTINGS = {
    "one image": Setting(),
    "small bounds": Setting(bounds=(4 * 784, 40_000)),
    "large bounds": Setting(bounds=(1_000_000, 4_000_000)),
    "shrunk by half": Setting(shrunk=128),
    "shrunk to little": Setting(sizes=(1000, 2500), shrunk=17),
    "upright": Setting(sizes=(60, 300), orientations=(1, 2, 3, 4)),
    "turned": Setting(sizes=(60, 300), orientations=(5, 6, 7, 8)),
    "two images": Setting(images=2),
    "four images": Setting(images=4, shrunk=200),
    "tiny": Setting(sizes=(1, 40), aspect=1.5),
    "huge": Setting(sizes=(4000, 12_000), aspect=2.0),
    "odd": Setting(sizes=(30, 6000), aspect=190.0),
}
assert len(SETTINGS) == 12


def rule_of(family: str) -> CoordinateRule:
    rule = GENERIC.get(family) or served_family(family).coordinates
    assert rule is not None
    return rule


def encoder_of(rule: CoordinateRule, bounds: tuple[int, int]) -> Encoder:
    """Qwen2.5-VL's images with the rule of a family: nothing else of it is asked here."""
    low, high = bounds
    budget = ImagesSection(min_pixels=low, max_pixels=high)
    encoder = Encoder(TINY_MODEL, EncoderSettings(budget=budget))
    vars(encoder)["coordinates"] = rule
    return encoder


def size_for(rng: random.Random, setting: Setting) -> Size:
    low, high = setting.sizes
    one = rng.randint(low, high)
    least = max(low, -int(-one // setting.aspect))
    other = rng.randint(least, max(least, min(high, int(one * setting.aspect))))
    return (one, other) if rng.random() < 0.5 else (other, one)


Written = tuple[list[float], str, Size, Size]
"""A box, its text, and the size of its image as it is and as the model sees it."""


def written(
    family: str,
    setting: Setting,
    count: int,
    rule: CoordinateRule | None = None,
    taken_for: Callable[[Size], Size] = lambda size: size,
    on_image: Callable[[int], int] = lambda image: image,
    in_all: bool = False,
) -> Iterator[Written]:
    """So many boxes as the encoder writes them.

    Args:
        rule, taken_for, on_image: what a fault makes of the rule, of an image's size, and of the
            image of a box.
        in_all: whether boxes lie in the square that all images have, so that none is outside of a
            wrong one and refused.
    """
    rng = random.Random(f"{family} {setting}")
    encoder = encoder_of(rule or rule_of(family), setting.bounds)
    pool = [size_for(rng, setting) for _ in range(24)]
    files = {(size, turn): picture(size, turn) for size in pool for turn in setting.orientations}
    answer = "\n".join(f"{{{{box:{n}}}}}" for n in range(BOXES_A_SAMPLE))
    shown = tuple(map(ImagePart, range(setting.images)))
    turns = (Message("user", (*shown, TextPart("Where?"))), said("assistant", answer))
    for _ in range(0, count, BOXES_A_SAMPLE):
        sizes = [rng.choice(pool) for _ in shown]
        images = [rng.randrange(setting.images) for _ in range(BOXES_A_SAMPLE)]
        side = min(map(min, sizes))
        boxes = [drawn(rng, (side, side) if in_all else sizes[image]) for image in images]
        shapes = [
            Shape("box", tuple(box), on_image(image))
            for box, image in zip(boxes, images, strict=True)
        ]
        sample = VLMSample(key="", url="", messages=turns, objects=Objects(tuple(shapes)))
        given = [
            (max(1, w * setting.shrunk // 256), max(1, h * setting.shrunk // 256)) for w, h in sizes
        ]
        seen = [smart_resize(size, *setting.bounds) for size in given]
        if setting.orientations:
            data = [files[size, rng.choice(setting.orientations)] for size in sizes]
            found = encoder.written(replace(sample, images=tuple(data)))
        else:
            found = encoder.written(sample, given, [*map(taken_for, sizes)])
        lines = found.messages[-1].text.split("\n")
        for box, line, image in zip(boxes, lines, images, strict=True):
            yield box, line, sizes[image], seen[image]


@pytest.mark.parametrize(
    "count", [100, pytest.param(10_000, marks=pytest.mark.soak)], ids=["some", "all"]
)
@pytest.mark.parametrize("family", PUBLISHED)
def test_boxes_come_back_in_each_setting(family: str, count: int) -> None:
    """At most half a step of the grid off, and a step at the border of a shown image."""
    worst: dict[str, float] = {}
    for name, setting in SETTINGS.items():
        errors = [far_off(family, *each) for each in written(family, setting, count)]
        assert len(errors) == count
        worst[name] = max(errors)
    print(family, count * len(SETTINGS), {name: round(error, 4) for name, error in worst.items()})
    assert max(worst.values()) <= TIE, worst
    assert max(worst.values()) > 0.5, "the boxes try the rounding"


class RoundedUp(CoordinateRule):
    """A rule that takes the next step."""

    def _rounded(self, value: float) -> float:
        return float(math.ceil(value))


def swapped(form: str) -> str:
    names = {"x1": "y1", "y1": "x1", "x2": "y2", "y2": "x2"}
    return re.sub(r"\{(\w+)\}", lambda match: f"{{{names[match[1]]}}}", form)


def rounded_up(rule: CoordinateRule) -> CoordinateRule:
    return RoundedUp(**{each.name: getattr(rule, each.name) for each in dataclasses.fields(rule)})


FAULTS: dict[str, Callable[[CoordinateRule], dict[str, Any]]] = {
    "the map is not applied": lambda rule: {"rule": replace(rule, space="pixels")},
    "x and y are swapped": lambda rule: {"rule": replace(rule, box=swapped(rule.box))},
    "it is rounded up": lambda rule: {"rule": rounded_up(rule)},
    "the box is of the other image": lambda rule: {"on_image": lambda image: 1 - image},
    "the rotation is forgotten": lambda rule: {"taken_for": lambda size: size[::-1]},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", PUBLISHED)
def test_a_fault_of_the_map_is_found(family: str, fault: str) -> None:
    """In most boxes; without it in none."""
    setting, count = Setting(sizes=(700, 2500), images=2, aspect=2.5), 200
    honest = written(family, setting, count, in_all=True)
    assert all(far_off(family, *each) <= TIE for each in honest)
    faulty = written(family, setting, count, in_all=True, **FAULTS[fault](rule_of(family)))
    assert sum(far_off(family, *each) > TIE for each in faulty) > 0.6 * count
