"""Boxes read back from texts, by what publishers say alone: nothing of the package is imported.

A family is a form of one box, the space of its numbers, and which of x and y comes first. `w, h`
are the sides of the image that the model sees, `W, H` those of the original after its EXIF
rotation. A publisher that shows only how numbers are read is read in that way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Size = tuple[int, int]
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Published:
    """What a publisher says.

    Args:
        form: a regular expression of one box, a group a number.
        grid: steps along each side; None for pixels of the image that the model sees.
    """

    form: str
    grid: int | None = 1000
    y_first: bool = False


N = r"(\d+)"
FOUR = rf"\[{N}, {N}, {N}, {N}\]"
JSON_LIST = Published(FOUR)
PUBLISHED = {
    "qwen2_vl": Published(rf"<\|box_start\|>\({N},{N}\),\({N},{N}\)<\|box_end\|>"),
    "qwen2_5_vl": Published(FOUR, grid=None),
    "qwen3_vl": JSON_LIST,
    "qwen3_5": JSON_LIST,
    "qwen2_5_omni_thinker": Published(FOUR, grid=None),
    "qwen3_omni_moe_thinker": JSON_LIST,
    "internvl": Published(rf"<box>\[{FOUR}\]</box>"),
    "gemma4": Published(FOUR, y_first=True),
    "glm4v": Published(rf"\[\[{N},{N},{N},{N}\]\]"),
    "hunyuan_vl": Published(rf"\({N},{N}\),\({N},{N}\)"),
    "paddleocr_vl": Published(
        r"<\|LOC_BEGIN\|>" + "".join(rf"<\|LOC_{N}\|>" for _ in range(8)) + r"<\|LOC_END\|>"
    ),
    "deepseek_ocr2": Published(rf"<\|det\|>\[{FOUR}\]<\|/det\|>", grid=999),
}


def numbers_in(family: str, text: str) -> list[int]:
    """The numbers of the one box in a text, as they stand there."""
    (found,) = re.findall(PUBLISHED[family].form, text)
    return [*map(int, found)]


def read_box(family: str, text: str, size: Size, shown: Size) -> Box:
    """x1, y1, x2, y2 in pixels of the original image."""
    said, numbers = PUBLISHED[family], numbers_in(family, text)
    if len(numbers) == 8:  # the corners, clockwise from the top left
        x1, y1, right, top, x2, y2, left, bottom = numbers
        assert (right, top, left, bottom) == (x2, y1, x1, y2), text
        numbers = [x1, y1, x2, y2]
    a, b, c, d = numbers
    if said.y_first:
        a, b, c, d = b, a, d, c
    wide, high = shown if said.grid is None else (said.grid, said.grid)
    width, height = size
    return a / wide * width, b / high * height, c / wide * width, d / high * height


def far_off(family: str, box: list[float], text: str, size: Size, shown: Size) -> float:
    """The largest error of the four numbers, in half steps of the family's grid: 1 is right.

    Pixels of the shown image end at w - 1, so that there a step is right. A tie of the rounding
    may fall to either side, a little more than half a step.
    """
    said = PUBLISHED[family]
    most = 0.0
    for place, (found, given) in enumerate(
        zip(read_box(family, text, size, shown), box, strict=True)
    ):
        side = size[place % 2]
        step = side / (shown[place % 2] if said.grid is None else said.grid)
        at_border = said.grid is None and given > side - step
        most = max(most, abs(found - given) / step * (1 if at_border else 2))
    return most


def smart_resize(size: Size, least: int, largest: int, factor: int = 28) -> Size:
    """The size that a Qwen processor resizes an image to: multiples of the factor, area in bounds.

    As transformers has it, where a short side may round to nothing before the area is raised.
    """
    width, height = size
    h, w = (round(side / factor) * factor for side in (height, width))
    if h * w > largest:
        beta = (height * width / largest) ** 0.5
        h, w = (max(factor, int(side / beta / factor) * factor) for side in (height, width))
    elif h * w < least:
        beta = (least / (height * width)) ** 0.5
        h, w = (-int(-side * beta // factor) * factor for side in (height, width))
    return w, h
