"""docs/images/leak.png: a leak that `vlmpack verify` finds, slot by slot.

    python benchmarks/leak_picture.py docs/images/leak.png

The leak test of `verify` on a tiny Qwen3.5 and a row of conversations: the ids of one of them are
replaced, the row is computed again, and the final hidden states of every slot are compared. Three
times: the recurrent layers' kernels take the row for one segment, all but the convolution do, and
none does, as it should be.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]

from support.hybrid import hybrid_folder  # noqa: E402
from support.shards import TINY_MODEL, text_samples  # noqa: E402
from support.verified import Subject  # noqa: E402

from vlmpack.backends.hf import engine  # noqa: E402
from vlmpack.packing import PackCollator  # noqa: E402
from vlmpack.proof.measure import Check  # noqa: E402
from vlmpack.proof.verify import leak  # noqa: E402
from vlmpack.recurrence import RowSegments  # noqa: E402
from vlmpack.report.document import INK, MUTED, PALE_BLUE, RED, SMALL, figure, png  # noqa: E402

PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Neither part of a layer resets", ("convolution", "delta_rule")),
    ("Its convolution alone resets", ("delta_rule",)),
    ("Both reset, as in vlmpack", ()),
)
CHANGED = 1
"""The sample whose ids are replaced; the second of the row."""
CAPTION = (
    "samples of a packed row; the ids of sample 2 are replaced\n"
    "bars: relative change of each slot's final hidden state"
)
FLOOR = 1e-8
"""Where the axis of changes begins; what did not change has no bar."""


@dataclass(frozen=True)
class Found:
    """What the leak test saw.

    Args:
        change: (T,) of each slot, relative to what stood there.
        ends: of the samples' segments, and the row's.
        verdict: of the whole test.
    """

    change: Tensor
    ends: tuple[int, ...]
    verdict: Check


@contextmanager
def without_resets(kinds: Sequence[str]) -> Iterator[None]:
    """Recurrences of these kinds take a row for one segment, whatever they are told."""
    choose = engine.choose_recurrence

    def broken(chosen: Any) -> Any:
        def function(*args: Any, **options: Any) -> Any:
            return chosen.function(*map(_one_segment, args), **options)

        return replace(chosen, function=function)

    def choose_broken(*args: Any, **options: Any) -> Any:
        right = choose(*args, **options)
        return replace(right, **{kind: broken(getattr(right, kind)) for kind in kinds})

    engine.choose_recurrence = choose_broken
    try:
        yield
    finally:
        engine.choose_recurrence = choose


def _one_segment(argument: Any) -> Any:
    if not isinstance(argument, RowSegments):
        return argument
    width = argument.width
    return RowSegments((width,), torch.tensor([0, width], dtype=torch.int32))


def leak_test(subject: Subject, kinds: Sequence[str]) -> Found:
    """The check of `verify`, with what it compares for the sample that is changed."""
    seen: list[tuple[Any, Tensor]] = []
    differences = leak._differences

    def recorded(row: Any, before: Any, after: Any) -> list[float]:
        was, now = before.hidden[0], after.hidden[0]
        seen.append((row, (now - was).norm(dim=-1) / was.norm(dim=-1)))
        return differences(row, before, after)

    collator = PackCollator(
        pad_token_id=subject.encoder.pad_token_id,
        num_position_axes=subject.encoder.num_position_axes,
        pad_to_multiple_of=1,
        total_multiple_of=sum(sample.length for sample in subject.samples) + 24,
    )
    leak._differences = recorded
    try:
        with without_resets(kinds):
            verdict = subject.checks(collator)[leak.NAME]
    finally:
        leak._differences = differences
    row, change = seen[CHANGED]
    return Found(change.flatten(), (*row.ends, row.num_slots), verdict)


def draw(path: Path) -> None:
    """The picture as a file."""
    with tempfile.TemporaryDirectory() as folder:
        model = hybrid_folder(Path(folder), "qwen3_5_text")
        subject = Subject(model, text_samples()[:5], recipe_folder=TINY_MODEL)
        found = [(title, leak_test(subject, kinds)) for title, kinds in PANELS]
    with figure(4.6, width_inches=5.0) as drawing:
        for place, (title, each) in enumerate(found):
            axes = drawing.add_axes((0.11, 0.72 - 0.275 * place, 0.87, 0.19))
            _panel(axes, each, last=place == len(found) - 1, first=place == 0)
            axes.set_title(title, weight="bold", color=INK)
            word = "pass" if each.verdict.status == "pass" else "FAIL"
            said = f"leak test: {word}, {each.verdict.measured:.2g}"
            axes.set_title(said, loc="right", color=RED if word == "FAIL" else INK)
            print(title, said, each.verdict.detail)
        drawing.text(
            0.545, 0.02, CAPTION, color=MUTED, fontsize=SMALL, ha="center", linespacing=1.4
        )
        path.write_bytes(_few_colours(png(drawing)))


def _panel(axes: Any, found: Found, *, first: bool, last: bool) -> None:
    """One row: how much each slot changed, on a logarithmic axis."""
    starts = (0, *found.ends)
    own = slice(starts[CHANGED], starts[CHANGED + 1])
    colours = [RED] * len(found.change)
    colours[own] = [PALE_BLUE] * (own.stop - own.start)
    axes.bar(range(len(colours)), found.change, width=1.0, align="edge", color=colours)
    axes.set_yscale("log")
    axes.set_ylim(FLOOR, 20)
    axes.set_yticks([1e-6, 1e-3, 1], ["1e-6", "0.001", "1"])
    axes.set_xlim(0, starts[-1])
    for end in starts[1:-1]:
        axes.axvline(end, color=MUTED, linewidth=0.8)
    names = [str(n + 1) for n in range(len(starts) - 2)] + ["pad"]
    middles = [(a + b) / 2 for a, b in pairwise(starts)]
    axes.set_xticks(middles if last else [], names if last else [])
    axes.tick_params(axis="x", length=0)
    if first:
        place = {"y": 3e-7, "ha": "center", "va": "center", "fontsize": SMALL}
        axes.text((own.start + own.stop) / 2, s="its own", color=INK, **place)
        axes.text((own.stop + starts[-1]) / 2, s="leaked into others", color="white", **place)


def _few_colours(data: bytes) -> bytes:
    """The same picture of 64 colours: a third of the bytes."""
    with Image.open(BytesIO(data)) as image:
        small = image.convert("RGB").quantize(64)
    found = BytesIO()
    small.save(found, format="png", optimize=True)
    return found.getvalue()


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
