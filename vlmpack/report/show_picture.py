"""Bins as one picture: each row to scale, and under it the images as the model gets them.

[ segment 0 |  segment 1  | padding ]     blue: tokens, pale: image tokens, orange: labels
0  key  68 tokens, 11 labels, 1 x 8 x 12
[ image ] [ image ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vlmpack.proof.rows.show import ShownBin, ShownSample

WIDTH = 1200
MARGIN = 24
BAR_HEIGHT = 22
GAP = 10
LINE = 20
MIN_SIDE = 56
"""Images whose longer side is below this are enlarged by a whole factor, pixel by pixel."""
MAX_IMAGE_HEIGHT = 480
MAX_HEIGHT = 20_000
"""What lies below is left out, and said so."""

INK = "#1f2933"
MUTED = "#6b7785"
PADDING = "#e4e7eb"
TOKENS = ("#2563a8", "#5b93c9")
"""Neighbouring samples take turns."""
IMAGE_TOKENS = "#bcd3ec"
LABELS = "#c2570c"


def draw_bins(bins: Sequence[ShownBin], path: Path) -> None:
    """Write the picture as a PNG."""
    sheet = _Sheet()
    for item in bins:
        _draw_bin(sheet, item)
    sheet.save(path)


@dataclass(slots=True)
class _Block:
    """Something at a place of the sheet; drawn when the sheet's height is known."""

    top: int
    left: int
    image: Image.Image | None = None
    text: str = ""
    color: str = INK
    size: int = 14


class _Sheet:
    """Collects blocks from top to bottom."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.y = MARGIN
        self.is_full = False

    def text(self, text: str, *, color: str = INK, size: int = 14) -> None:
        """One line."""
        if self._has_room(LINE):
            self.blocks.append(_Block(self.y, MARGIN, text=text, color=color, size=size))
            self.y += LINE + (size - 14)

    def bar(self, image: Image.Image) -> None:
        """A row's bar."""
        if self._has_room(image.height + 4):
            self.blocks.append(_Block(self.y, MARGIN, image))
            self.y += image.height + 4

    def images(self, images: Sequence[Image.Image]) -> None:
        """Images side by side, wrapped."""
        left, tallest = MARGIN, 0
        for image in images:
            if left + image.width > WIDTH - MARGIN and left > MARGIN:
                self.y += tallest + GAP
                left, tallest = MARGIN, 0
            if not self._has_room(image.height):
                return
            self.blocks.append(_Block(self.y, left, image))
            left += image.width + GAP
            tallest = max(tallest, image.height)
        self.y += tallest + GAP

    def _has_room(self, height: int) -> bool:
        if self.is_full:
            return False
        if self.y + height > MAX_HEIGHT - MARGIN - LINE:
            self.is_full = True
            note = "the rest is left out: the picture would be too high"
            self.blocks.append(_Block(self.y, MARGIN, text=note, color=LABELS))
            self.y += LINE
            return False
        return True

    def save(self, path: Path) -> None:
        """Draw all blocks."""
        sheet = Image.new("RGB", (WIDTH, self.y + MARGIN), "white")
        pen = ImageDraw.Draw(sheet)
        for block in self.blocks:
            if block.image is not None:
                sheet.paste(block.image, (block.left, block.top))
            else:
                font = ImageFont.load_default(block.size)
                text = _clipped(block.text, font)
                pen.text((block.left, block.top), text, fill=block.color, font=font)
        sheet.save(path, "PNG")


def _draw_bin(sheet: _Sheet, item: ShownBin) -> None:
    lines = item.lines()
    sheet.text(next(lines), size=18)
    for row in range(item.num_rows):
        samples = [sample for sample in item.samples if sample.row == row]
        sheet.bar(_row_bar(samples, item.samples, item.num_columns))
    sheet.text(
        "blue: tokens of a sample; pale blue: image tokens; orange below: slots with loss; grey: "
        "padding",
        color=MUTED,
        size=12,
    )
    for place, sample in enumerate(item.samples):
        grids = ", ".join(f"{t} x {h} x {w}" for t, h, w in sample.grids)
        sheet.text(
            f"{place}  {sample.key}  ({Path(sample.shard).name})  {sample.num_tokens} tokens, "
            f"{sample.num_labels} labels" + (f", grids {grids}" if grids else ", no image")
        )
        if sample.images:
            sheet.images([_fitted(image) for image in sample.images])
    for hole in item.holes:
        sheet.text(f"hole  {hole.key}  {hole.error_class}: {hole.reason}", color=LABELS)
    sheet.y += GAP


def _row_bar(
    samples: Sequence[ShownSample], all_samples: Sequence[ShownSample], columns: int
) -> Image.Image:
    """A row to scale; a white line ends each sample."""
    width = WIDTH - 2 * MARGIN
    bar = Image.new("RGB", (width, BAR_HEIGHT), PADDING)
    pen = ImageDraw.Draw(bar)

    def at(slot: int) -> int:
        return round(slot * width / columns)

    def fill(begin: int, end: int, color: str, top: int = 0) -> None:
        pen.rectangle((at(begin), top, max(at(begin), at(end) - 1), BAR_HEIGHT - 1), fill=color)

    order = {id(sample): place for place, sample in enumerate(all_samples)}
    for sample in samples:
        slot = sample.start
        for run in sample.runs:
            plain = TOKENS[order[id(sample)] % len(TOKENS)]
            color = IMAGE_TOKENS if run.kind == "image" else plain
            fill(slot, slot + run.num_tokens, color)
            slot += run.num_tokens
        for slot, has_loss in enumerate(sample.labels, start=sample.start):
            if has_loss:
                fill(slot, slot + 1, LABELS, BAR_HEIGHT * 2 // 3)
    for sample in samples[1:]:
        pen.line((at(sample.start), 0, at(sample.start), BAR_HEIGHT), fill="white", width=2)
    return bar


def _fitted(image: Image.Image) -> Image.Image:
    """Its own pixels where they fit; tiny images are enlarged, large ones made smaller."""
    factor = -(-MIN_SIDE // max(image.size))
    if factor > 1:
        size = (image.width * factor, image.height * factor)
        return image.resize(size, Image.Resampling.NEAREST)
    shrunk = image.copy()
    shrunk.thumbnail((WIDTH - 2 * MARGIN, MAX_IMAGE_HEIGHT), Image.Resampling.LANCZOS)
    return shrunk


def _clipped(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    """As much of a line as fits the sheet."""
    room = WIDTH - 2 * MARGIN
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(text + " ...") > room:
        text = text[: int(len(text) * 0.95)]
    return text + " ..."
