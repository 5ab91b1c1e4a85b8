"""How rows become chunks: the pictures of the module, and that nothing is lost on the way."""

from __future__ import annotations

import pytest
import torch
from support.recurrences import LAYOUTS, segments

from vlmpack.recurrence.rows import decays, entry_decays, row_chunks, segment_chunks

CUTS = {"segments": segment_chunks, "row": row_chunks}


def test_segments_of_one_length_in_chunks_share_a_step():
    chunks = segment_chunks(segments((5, 2, 0, 3)), 2)
    assert chunks.steps == (3, 2, 1)
    slots = torch.arange(1, 11).view(10, 1)
    # a0 a1 | c0 c1 | b0 b1 || a2 a3 | c2 . || a4 .
    wanted = [[1, 2], [8, 9], [6, 7], [3, 4], [10, 0], [5, 0]]
    assert chunks.split(slots)[:, 0].tolist() == wanted
    assert chunks.reads is None


def test_a_cut_through_the_row_knows_what_each_slot_sees():
    chunks = row_chunks(segments((5, 2, 0, 4)), 2)
    assert chunks.steps == (1,) * 6
    assert chunks.reads.tolist() == [
        [False, False],
        [True, True],
        [True, False],
        [True, False],
        [True, True],
        [True, False],  # the last slot is none of the row's
    ]
    crossing = [[[True, False], [same, True]] for same in (True, True, False, False, True, False)]
    assert chunks.visible.tolist() == crossing


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS)
def test_every_slot_comes_back_with_its_gradient(cut, lengths):
    row = segments(lengths)
    chunks = cut(row, 64)
    assert sum(chunks.steps) == chunks.count
    assert sorted(chunks.steps, reverse=True) == list(chunks.steps)
    x = torch.randn(row.width, 3, 2, requires_grad=True)
    back = chunks.join(chunks.split(x), row.width)
    assert torch.equal(back, x)
    weights = torch.randn_like(x)
    assert torch.equal(torch.autograd.grad((back * weights).sum(), x)[0], weights)


def test_a_cut_is_made_once_a_row():
    row = segments((5, 2))
    assert segment_chunks(row, 4) is segment_chunks(row, 4)
    assert row_chunks(row, 4) is not segment_chunks(row, 4)


def test_decays_are_sums_between_two_slots():
    g = -torch.rand(1, 2, 4, dtype=torch.float64)
    visible = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    within = decays(g, visible)
    for i in range(4):
        for j in range(4):
            want = g[0, :, j + 1 : i + 1].sum(-1).exp() if j <= i else torch.zeros(2)
            assert torch.allclose(within[0, :, i, j], want.double(), atol=1e-15)
    assert torch.allclose(entry_decays(g, None), g.cumsum(-1).exp())
    reads = torch.tensor([[True, True, False, False]])
    assert torch.equal(entry_decays(g, reads)[0, :, 2:], torch.zeros(2, 2).double())
