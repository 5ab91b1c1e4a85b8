"""The numbers and the text of boxes beside those of ms-swift, by ms-swift's own code.

    pip download ms-swift==4.6.0 --no-deps --no-binary :all:
    tar xzf ms_swift-4.6.0.tar.gz
    python benchmarks/conformance/boxes_of_swift.py ms_swift-4.6.0 OUT.json

Its functions are taken out of its files and run as they stand. The rest of ms-swift is not needed
for them. `objects` of a record have the same form in both.
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vlmpack.encode import Encoder
from vlmpack.encode.coordinates import ObjectWriter
from vlmpack.encode.objects import Objects, Shape
from vlmpack.families.coordinates import GENERIC
from vlmpack.families.registry import served_family

BOXES, SEED = 20_000, 7
COMMAND = "python benchmarks/conformance/boxes_of_swift.py ms_swift-4.6.0 OUT.json"
QWEN2_5_VL = Encoder(Path(__file__).resolve().parents[2] / "assets/tiny-qwen2_5_vl")
"""Says how large an image is shown; ms-swift takes the sizes of the image that it resized."""
CASES = {
    # family -> norm_bbox, file and class of ms-swift's template, QWENVL_BBOX_FORMAT
    "qwen2_vl": ("norm1000", "qwen.py", "Qwen2VLTemplate", "legacy"),
    "qwen2_5_vl": ("none", "qwen.py", "Qwen2VLTemplate", "new"),
    "qwen3_vl": ("norm1000", "qwen.py", "Qwen2VLTemplate", "new"),
    "qwen3_5": ("norm1000", "qwen.py", "Qwen2VLTemplate", "new"),
    "qwen3_omni_moe_thinker": ("norm1000", "qwen.py", "Qwen2VLTemplate", "new"),
    "internvl": ("norm1000", "internvl.py", "Internvl2Template", ""),
}


def taken(path: Path, class_name: str, *names: str) -> dict[str, Any]:
    """Methods of a class as functions, without the rest of its module."""
    [found] = [
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    ]
    methods = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name in names]
    for method in methods:
        method.returns, method.decorator_list = None, []
        for argument in method.args.args:
            argument.annotation = None
    module: dict[str, Any] = {}
    exec(compile(ast.Module(methods, []), str(path), "exec"), module)
    return {name: module[name] for name in names}


class Theirs:
    """What ms-swift writes for a box on an image of a size, which it shows in another."""

    def __init__(self, folder: Path, family: str) -> None:
        norm, file, class_name, form = CASES[family]
        templates = folder / "swift/template"
        base = taken(templates / "base.py", "Template", "normalize_bbox", "_get_bbox_str")
        own = taken(templates / "templates" / file, class_name, "replace_bbox")
        self.normalize, self.replace = base["normalize_bbox"], own["replace_bbox"]
        self.template = SimpleNamespace(
            norm_bbox=norm, bbox_format=form, _get_bbox_str=base["_get_bbox_str"]
        )

    def write(self, box: list[float], size: tuple[int, int], shown: tuple[int, int]) -> str:
        image = SimpleNamespace(width=shown[0], height=shown[1])
        objects = {"bbox": [[*box]], "width": [size[0]], "height": [size[1]]}
        self.normalize(self.template, SimpleNamespace(objects=objects, images=[image]))
        [text] = self.replace(self.template, objects["bbox"][0], 0, None)
        return str(text)


def is_tie(box: list[float], size: Any, shown: Any, space: str) -> bool:
    """Whether a number lies halfway between two steps, where the order of operations decides."""
    steps = [
        value / size[n % 2] * (shown[n % 2] if space == "shown" else 1000)
        for n, value in enumerate(box)
    ]
    return any(abs(step % 1 - 0.5) < 1e-9 for step in steps)


def compared(folder: Path, family: str) -> dict[str, Any]:
    """How many boxes are written alike, and how the others differ."""
    theirs, rng, found = Theirs(folder, family), random.Random(SEED), Counter[str]()
    rule = GENERIC.get(family) or served_family(family).coordinates
    assert rule is not None
    examples: dict[str, Any] = {}
    for _ in range(BOXES):
        size = (rng.randint(30, 4000), rng.randint(30, 4000))
        shown = QWEN2_5_VL.image_rule.shown_size(*size) if rule.space == "shown" else size
        # Whole numbers and borders in half of them.
        part = rng.choice((1.0, rng.random()))
        (x1, x2), (y1, y2) = (sorted(rng.sample(range(side + 1), 2)) for side in size)
        box = [x1 * part, y1 * part, x2 * part, y2 * part]
        writer = ObjectWriter(rule, Objects((Shape("box", tuple(box)),)), [size], [shown], family)
        ours, other = writer.write("box", (0,)), theirs.write(box, size, shown)
        if ours == other:
            kind = "alike"
        elif rule.space == "shown" and (
            box[2] / size[0] > 1 - 1 / shown[0] or box[3] / size[1] > 1 - 1 / shown[1]
        ):
            kind = "at the border: theirs is w or h, beyond the last pixel"
        else:
            kind = "a tie of the rounding" if is_tie(box, size, shown, rule.space) else "otherwise"
        found[kind] += 1
        examples.setdefault(kind, {"box": box, "size": size, "ours": ours, "theirs": other})
    return {"boxes": BOXES, **found, "examples": examples}


def main(folder: Path, out: Path) -> None:
    """Compare all families, and write what was found."""
    report = {"ms-swift": folder.name, "seed": SEED, "command": COMMAND}
    result = report | {"families": {family: compared(folder, family) for family in CASES}}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for family, each in result["families"].items():  # type: ignore[attr-defined]
        print(family, {name: count for name, count in each.items() if name != "examples"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
