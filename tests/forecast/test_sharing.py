"""What a plan says that sharing saves, counted by hand."""

from __future__ import annotations

import numpy as np
from support.plans import mode_of

from vlmpack.data.modes import RowShape
from vlmpack.forecast.layout import Layout, lay_out
from vlmpack.forecast.sharing import shared_slots, shared_sums, sharing_note
from vlmpack.packing.batch import Cut
from vlmpack.packing.planned import PlannedSample, PlannedSequence


def layout_and_samples() -> tuple[Layout, list[PlannedSample]]:
    """Two bins: five questions about an image of 10 tokens and 40 patches, then one more of them
    with a text, and a hole."""
    image = (Cut(10, b"i"),)
    samples: list[PlannedSample] = [(PlannedSequence(14, image),)] * 6
    samples += [(PlannedSequence(6, ()),), (PlannedSequence(0, ()),)]
    tokens = np.asarray([sample[0].length for sample in samples])
    layout = Layout(
        numbers=np.arange(8),
        tokens=tokens,
        patches=np.asarray([40] * 6 + [0, 0]),
        bins=np.asarray([5, 3]),
        steps=np.asarray([2]),
        sequences=tokens[:, None],
    )
    return layout, samples


def test_a_bin_takes_what_its_samples_share_once() -> None:
    layout, samples = layout_and_samples()
    found = shared_slots(layout, lambda numbers: samples, 4)
    assert found.tolist() == [12 + 5 * 4, 16 + 8]
    rows = lay_out(layout, RowShape(sequence_multiple=4, row_multiple=8), found)
    assert rows.slots.tolist() == [32, 24]
    assert lay_out(layout, RowShape(sequence_multiple=4)).slots.tolist() == [80, 24]


def test_a_bin_has_an_image_that_its_samples_share_once() -> None:
    layout, samples = layout_and_samples()
    assert layout.by_bin(layout.patches).tolist() == [200, 40]
    assert shared_sums(layout, lambda numbers: samples, 4, layout.patches).tolist() == [40, 40]
    squares = shared_sums(layout, lambda numbers: samples, 4, layout.patches**2)
    assert squares.tolist() == [1600, 1600]


def test_shared_tokens_are_in_a_row_once_and_never_less_than_no_padding() -> None:
    found = mode_of(tokens=9000, held_tokens=3000, slots=4000, row_tokens=1000, rows=5)
    assert (found.fill, found.padding, found.row_fill) == (0.75, 0.25, 0.6)


def test_the_note_has_tokens_patches_and_groups() -> None:
    layout, samples = layout_and_samples()
    note = sharing_note(layout, lambda numbers: samples, 4)
    assert "rows hold 50 tokens where its samples alone have 90 (1.80 times as many)" in note
    assert "80 patches instead of 240 (3.00 times)" in note
    assert "5 samples share something, in groups of 5.0" in note
