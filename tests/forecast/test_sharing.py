"""What a plan says that sharing saves, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from support.plans import mode_of

from vlmpack.alignment import Alignment
from vlmpack.data.modes import Online, RowShape
from vlmpack.data.plan.rank_bins import token_cost
from vlmpack.forecast.make import imbalance_figures
from vlmpack.forecast.modes import Layout, PlannedMode, held_by, lay_out, sharing_note, shown_by
from vlmpack.packing.batch import Prefix
from vlmpack.packing.budget import RowBudget
from vlmpack.packing.prefix_rows import PlannedSample, PlannedSequence
from vlmpack.recipe.schema import PackingSection


def layout_and_samples() -> tuple[Layout, list[PlannedSample]]:
    """Two bins: five questions about an image of 10 tokens and 40 patches, then one more of them
    with a text, and a hole."""
    image = (Prefix(10, b"i"),)
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


def layout_mode(alignment: int) -> Online:
    """A mode whose segments are rounded up."""
    return Online(
        packing=PackingSection(mode="online", share_prefix=True),
        budget=RowBudget(max_tokens=512, alignment=alignment),
        multiples=Alignment(alignment, alignment),
    )


def test_a_bin_takes_what_its_samples_share_once() -> None:
    layout, samples = layout_and_samples()
    found = held_by(layout, lambda numbers: samples, 4).slots
    assert found.tolist() == [12 + 5 * 4, 16 + 8]
    rows = lay_out(layout, RowShape(sequence_multiple=4, row_multiple=8), found)
    assert rows.slots.tolist() == [32, 24]
    assert lay_out(layout, RowShape(sequence_multiple=4)).slots.tolist() == [80, 24]


def test_a_bin_has_an_image_that_its_samples_share_once() -> None:
    layout, samples = layout_and_samples()
    assert layout.by_bin(layout.patches).tolist() == [200, 40]
    held = held_by(layout, lambda numbers: samples, 4)
    assert shown_by(layout, held, layout.patches).tolist() == [40, 40]
    squares = shown_by(layout, held, layout.patches**2)
    assert squares.tolist() == [1600, 1600]


def test_shared_tokens_are_in_a_row_once_and_never_less_than_no_padding() -> None:
    found = mode_of(tokens=9000, held_tokens=3000, slots=4000, row_tokens=1000, rows=5)
    assert (found.fill, found.padding, found.row_fill) == (0.75, 0.25, 0.6)


def test_the_note_has_tokens_patches_and_groups() -> None:
    layout, samples = layout_and_samples()
    note = sharing_note(layout, held_by(layout, lambda numbers: samples, 4))
    assert "rows hold 50 tokens where its samples alone have 90 (1.80 times as many)" in note
    assert "80 patches instead of 240 (3.00 times)" in note
    assert "5 samples share something, in groups of 5.0" in note


def test_what_is_shorter_than_the_alignment_is_held_by_each() -> None:
    """Rows of segments of 16 share no image of 10 tokens: they hold it as often as it is shown."""
    layout, samples = layout_and_samples()
    held = {each: held_by(layout, lambda numbers: samples, each) for each in (1, 8, 16)}
    assert [held[each].tokens.tolist() for each in held] == [[30, 20], [30, 20], [70, 20]]
    assert held[16].starts_anew.tolist() == [True] * 7 + [False], "a hole begins nothing"
    assert "5 samples share" in sharing_note(layout, held[8])
    assert "0 samples share" in sharing_note(layout, held[16])
    online = layout_mode(alignment=16)
    mode = PlannedMode(
        mode=online, layout=layout, micro_batch_size=1, planned=lambda numbers: samples
    )
    assert mode.held_tokens == 90
    shared = replace(mode, mode=layout_mode(alignment=8))
    assert shared.held_tokens == 50


def test_samples_are_planned_once_a_mode() -> None:
    layout, samples = layout_and_samples()
    asked = []

    def planned(numbers: Any) -> list[PlannedSample]:
        asked.append(numbers)
        return samples

    mode = PlannedMode(
        mode=layout_mode(alignment=4), layout=layout, micro_batch_size=1, planned=planned
    )
    assert (mode.held_tokens, mode.rows.slots.sum()) == (50, 56)
    assert mode.image_sums(layout.patches).tolist() == [40, 40]
    assert len(asked) == 1


def test_ranks_are_as_far_apart_as_what_they_compute() -> None:
    """One bin a rank, of 30 and 20 tokens: as samples alone they have 70 and 20."""
    layout, samples = layout_and_samples()
    mode = PlannedMode(
        mode=layout_mode(alignment=4), layout=layout, micro_batch_size=1, planned=lambda _: samples
    )
    [shared] = imbalance_figures(mode, 2, token_cost)
    assert shared.total_dealt == 30 / 25
    [alone] = imbalance_figures(replace(mode, planned=None), 2, token_cost)
    assert alone.total_dealt == 70 / 45
