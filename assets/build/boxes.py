"""Printed digits scattered on canvases, with a box around each: train, val and test.

A row of a parquet file has turns, one image and `objects` in ms-swift's form. Boxes are in pixels
of the stored image. Every second canvas has more pixels than the demo's recipes show
(`SHOWN_PIXELS`), so its boxes must follow a resize. The fonts are those of the pretraining, so that
finetuning has to learn places alone.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from assets.build import glyph as glyphs
from assets.build.rows import RowStyle, colours
from assets.build.typeface import load_fonts, print_digit

SEED = 38
SPLITS = {"train": 4000, "val": 100, "test": 200}
SHOWN_PIXELS = 7600
"""`images.max_pixels` of the recipes: 9 image tokens."""
GRIDS = ((3, 3), (3, 2), (2, 3))
"""Columns and rows of cells, each of which is shown as about one image token."""
CELL = 28
MOST_DIGITS = 3
"""On a canvas. Those with one teach where things are, the others which is which."""
SMALL, LARGE = (0.95, 1.03), (1.6, 2.4)
"""Sides of a canvas, in those that it is shown with: shown as it is, or shrunk."""
READ_EVERY = 4
"""One training canvas in so many is read, so that digits are not forgotten."""
HEIGHT = (0.72, 0.9)
"""Of a digit, in its cell."""
NARROWEST = 0.6
"""Least width of a digit, in its height."""
QUALITY = 60

Box = tuple[int, int, int, int]
Glyphs = list[list[np.ndarray]]
"""Of each digit, one a font."""


def scattered(
    rng: np.random.Generator, glyphs_of: Glyphs, digits: list[int], *, is_large: bool
) -> tuple[np.ndarray, list[Box]]:
    """Ink coverage (H, W) and the box of each digit, each somewhere in a cell, line by line."""
    columns, rows = GRIDS[int(rng.integers(len(GRIDS)))]
    side = CELL * rng.uniform(*(LARGE if is_large else SMALL))
    ink, boxes = np.zeros((round(rows * side), round(columns * side)), np.float32), list[Box]()
    cells = sorted(rng.permutation(columns * rows)[: len(digits)])
    for digit, cell in zip(digits, cells, strict=True):
        shape = glyphs_of[digit][int(rng.integers(len(glyphs_of[digit])))]
        tall = round(rng.uniform(*HEIGHT) * side)
        wide = round(tall * min(1.0, max(NARROWEST, shape.shape[1] / shape.shape[0])))
        row, column = divmod(int(cell), columns)
        x, y = (
            int(place * side + rng.uniform(0, side - long))
            for place, long in ((column, wide), (row, tall))
        )
        ink[y : y + tall, x : x + wide] = glyphs.resize(shape, tall, wide)
        boxes.append((x, y, x + wide, y + tall))
    return ink, boxes


def picture(rng: np.random.Generator, ink: np.ndarray) -> bytes:
    """A WebP file."""
    paper, pen = (colour[:1] for colour in colours(rng, RowStyle(colour_share=0)))
    pixels = np.clip(np.rint(paper + ink[..., None] * (pen - paper)), 0, 255).astype(np.uint8)
    into = io.BytesIO()
    Image.fromarray(np.repeat(pixels, 3, axis=2)).save(into, "WEBP", quality=QUALITY, method=6)
    return into.getvalue()


def row(
    rng: np.random.Generator,
    glyphs_of: Glyphs,
    *,
    count: int,
    is_large: bool,
    asks_all: bool,
    reads: bool,
) -> dict[str, Any]:
    """One canvas with `count` digits: a question about one, about each, or about what they are."""
    digits = [int(digit) for digit in rng.permutation(10)[:count]]
    ink, boxes = scattered(rng, glyphs_of, digits, is_large=is_large)
    if reads:
        order = []
        turns = [("Read the digits.", "".join(map(str, digits)))]
    else:
        order = [int(place) for place in rng.permutation(count)[: count if asks_all else 1]]
        turns = [
            (f"Where is the {{{{ref:{n}}}}}?", f"{{{{ref:{n}}}}} {{{{box:{n}}}}}")
            for n in range(len(order))
        ]
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    messages[0]["content"] = "<image>" + messages[0]["content"]
    return {
        "messages": messages,
        "task": "read" if reads else f"{count} on the canvas",
        "images": [{"bytes": picture(rng, ink), "path": None}],
        "objects": {
            "ref": [str(digits[place]) for place in order],
            "bbox": [list(boxes[place]) for place in order],
        },
    }


def write_boxes(folder: Path) -> None:
    """All splits and the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    fonts = load_fonts()
    glyphs_of = [[print_digit(digit, font) for font in fonts] for digit in range(10)]
    manifest: dict[str, Any] = {"seed": SEED, "splits": {}}
    for stream, (name, count) in enumerate(SPLITS.items()):
        rng = np.random.default_rng([SEED, stream])
        rows = [
            row(
                rng,
                glyphs_of,
                count=1 + n // 2 % MOST_DIGITS,
                is_large=bool(n % 2),
                asks_all=name == "train",
                reads=name == "train" and n // 6 % READ_EVERY == 0,
            )
            for n in range(count)
        ]
        path = folder / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd", row_group_size=100)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest["splits"][name] = {"samples": count, "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
