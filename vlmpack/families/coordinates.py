"""How a family writes boxes, points and polygons: the space of the numbers, and the text.

    norm     x / W * grid    by the sides of the original image, so no resize changes it
    shown    x * (w / W)     pixels of the image that the model sees
    pixels   x               pixels of the original image

W and H are the sides after EXIF rotation, w and h those that patches are made of. Numbers are
rounded once, at the end, and clamped: norm to 0..grid, shown to 0..w-1, pixels to 0..W. The
expressions are the publishers', since their order decides ties.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from string import Formatter
from typing import Literal

from vlmpack.recipe.data import CoordinatesSection


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateRule:
    """The numbers and the text of one family.

    Args:
        grid: of `norm`, what a side is divided into.
        decimals: digits behind the point.
        box: of four numbers, named x1, y1, x2, y2.
        point: of two, named x and y; empty where the family states none.
        corner: of a polygon, named x and y; empty where the family states no polygon.
        polygon: around the corners, which a comma and a space join.
        alone: around a box or a point that stands alone in a text.
        label: around a label in a text.
        entry: one shape with its label in a whole answer, named key, shape, label and quoted (the
            label as JSON); empty where no form with labels is stated.
        bare: one shape without a label there; empty where none is stated.
        joint: between two entries.
        answer: around all entries.
        keys: of `entry`, by kind.
        source: who says so.
        second_hand: whether that is not the publisher.
    """

    space: Literal["norm", "shown", "pixels"] = "norm"
    grid: int = 1000
    rounding: Literal["round", "floor"] = "round"
    decimals: int = 0
    box: str
    point: str = ""
    corner: str = ""
    polygon: str = "[{corners}]"
    alone: str = "{shape}"
    label: str = "{label}"
    entry: str = ""
    bare: str = ""
    joint: str = ""
    answer: str = "{entries}"
    keys: Mapping[str, str] = field(default_factory=dict, hash=False)
    source: str
    second_hand: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """All that the rule writes, where special tokens may be; 0 for each number."""
        written = (self.box, self.point, self.corner, self.polygon, self.label, self.answer)
        return tuple(re.sub(r"\{[xy][12]?\}", "0", text) for text in written)

    @property
    def said(self) -> str:
        """All that decides texts, for fingerprints."""
        return repr(replace(self, source="", second_hand=False))

    def number(self, value: float, given: str, original: int, shown: int) -> str:
        """One number as the model gets it.

        Args:
            given: the space of `value`, as `encode.objects.Space`.
            original: pixels of the side that it runs along, of the original image.
            shown: of the image that the model sees.
        """
        if given == "model":
            return f"{self._rounded(value):.{self.decimals}f}"
        share = {"norm1": value, "norm1000": value / 1000}.get(given)
        if self.space == "norm":
            exact, most = (value / original if share is None else share) * self.grid, self.grid
        elif self.space == "shown":
            exact = value * (shown / original) if share is None else share * shown
            most = shown - 1
        else:
            exact, most = value if share is None else share * original, original
        return f"{min(max(self._rounded(exact), 0), most) + 0.0:.{self.decimals}f}"  # no -0

    def read(self, text: str, *, polygons: bool = False) -> Iterator[tuple[float, ...]]:
        """The numbers of each shape in a text, x before y, in the rule's space: four of a box, two
        of a point, six or more of a polygon. White space in a shape is of no account.

        Args:
            polygons: whether three corners or more make a polygon. They are points otherwise.
        """
        polygon = self.polygon if polygons and self.corner else ""
        forms = (
            form_pattern(polygon, self.corner),
            form_pattern(self.box),
            form_pattern(self.point),
        )
        for match in re.finditer("|".join(filter(None, forms)), text):
            found = {name: value for name, value in match.groupdict().items() if value}
            if "corners" in found:
                corners = re.finditer(form_pattern(self.corner), found["corners"])
                yield tuple(float(each[name]) for each in corners for name in ("x", "y"))
            else:
                yield tuple(
                    float(found[n]) for n in ("x1", "y1", "x2", "y2", "x", "y") if n in found
                )

    def original(self, value: float, original: int, shown: int) -> float:
        """What `number` wrote, in pixels of the original image.

        Args:
            original, shown: as of `number`.
        """
        return value * original / self.most(original, shown)

    def most(self, original: int, shown: int) -> int:
        """The last number of a side; arguments as of `number`."""
        return {"norm": self.grid, "shown": shown, "pixels": original}[self.space]

    def _rounded(self, value: float) -> float:
        if self.rounding == "round":
            return float(round(value, self.decimals))
        scale = 10**self.decimals
        # 0.29 * 100 is a little less than 29, which is no reason to write 0.28.
        return float(math.floor(value * scale + (1e-9 if self.decimals else 0)) / scale)


FENCED = "```json\n[\n{entries}\n]\n```"
_BOX_2D = {"box": "bbox_2d", "point": "point_2d"}
_ENTRY = '\t{{"{key}": {shape}, "label": {quoted}}}'
_BARE = '\t{{"{key}": {shape}}}'


def json_list(**changes: object) -> CoordinateRule:
    """The fenced JSON list of the Qwen lines: one object a line."""
    settings: dict[str, object] = {
        "box": "[{x1}, {y1}, {x2}, {y2}]",
        "point": "[{x}, {y}]",
        "entry": _ENTRY,
        "bare": _BARE,
        "joint": ",\n",
        "answer": FENCED,
        "keys": _BOX_2D,
        **changes,
    }
    return CoordinateRule(**settings)  # type: ignore[arg-type]


GLM = CoordinateRule(
    box="[{x1},{y1},{x2},{y2}]",
    point="[{x},{y}]",
    corner="[{x},{y}]",
    alone="[{shape}]",
    entry="{{'label': {quoted}, '{key}': {shape}}}",
    bare="{shape}",
    joint=", ",
    answer="<|begin_of_box|>[{entries}]<|end_of_box|>",
    keys={"box": "bbox_2d"},
    source="zai-org/GLM-V README, zai-org/GLM-skills glmv-grounding",
)
HUNYUAN = CoordinateRule(
    box="({x1},{y1}),({x2},{y2})",
    entry="{label}{shape}",
    source="Tencent-Hunyuan/HunyuanOCR utils.py",
)
PADDLEOCR = CoordinateRule(
    label="<|TEXT_START|>{label}<|TEXT_END|>",
    # The corners, from the top left one on as the clock goes.
    box="<|LOC_BEGIN|><|LOC_{x1}|><|LOC_{y1}|><|LOC_{x2}|><|LOC_{y1}|><|LOC_{x2}|><|LOC_{y2}|>"
    "<|LOC_{x1}|><|LOC_{y2}|><|LOC_END|>",
    entry="{label}{shape}",
    source="paddlex 3.7.2, spotting of PaddleOCR-VL 1.5",
)
DEEPSEEK_OCR = CoordinateRule(
    grid=999,
    label="<|ref|>{label}<|/ref|>",
    box="<|det|>[[{x1}, {y1}, {x2}, {y2}]]<|/det|>",
    entry="{label}{shape}",
    source="deepseek-ai/DeepSeek-OCR-2 run_dpsk_ocr2_image.py",
)
QWEN2_5_OMNI = json_list(space="shown", source="ms-swift 4.6.0", second_hand=True)
QWEN3_OMNI = json_list(source="ms-swift 4.6.0", second_hand=True)

GENERIC: Mapping[str, CoordinateRule] = {
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), GLM),
    "hunyuan_vl": HUNYUAN,
    "paddleocr_vl": PADDLEOCR,
    "deepseek_ocr2": DEEPSEEK_OCR,
    "qwen2_5_omni_thinker": QWEN2_5_OMNI,
    "qwen3_omni_moe_thinker": QWEN3_OMNI,
}
"""By model_type, of classes that no family's file serves."""


@cache
def form_pattern(form: str, corner: str = "") -> str:
    """What finds the text of a form, with a group for each of its names."""
    number, more = r"(?<![\d.])-?\d{1,7}(?:\.\d{1,20})?(?!\d)", ""
    if corner:
        one = re.sub(r"\?P<\w+>", "?:", form_pattern(corner))
        more = rf"{one}(?:\s*,\s*{one}){{2,}}"
    found = ""
    for literal, name, *_ in Formatter().parse(form.strip()):
        # One run of white space at a place alone: two side by side are tried in every split.
        parts = [*map(re.escape, "".join(literal.split()))]
        if name:
            is_known = f"(?P<{name}>" in found
            parts.append(f"(?P={name})" if is_known else f"(?P<{name}>{more or number})")
        between = r"\s+" if literal.isspace() else r"\s*"
        found += (between if found and parts else "") + between.join(parts)
    return found


def rule_of_section(section: CoordinatesSection) -> CoordinateRule:
    """The rule that a recipe says (`data.coordinates`)."""
    x_first = section.order == "xy"
    box = "[{x1}, {y1}, {x2}, {y2}]" if x_first else "[{y1}, {x1}, {y2}, {x2}]"
    point = "[{x}, {y}]" if x_first else "[{y}, {x}]"
    return CoordinateRule(
        space=section.space,
        grid=section.grid,
        rounding=section.rounding,
        decimals=section.decimals,
        box=section.box or box,
        point=section.point or point,
        corner=section.point or point,
        polygon=section.polygon or "[{corners}]",
        source="data.coordinates",
    )


def quoted(label: str) -> str:
    """A label as JSON has it."""
    return json.dumps(label, ensure_ascii=False)
