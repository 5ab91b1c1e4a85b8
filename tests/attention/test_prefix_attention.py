"""Rows with shared prefixes, against the samples that they stand for, one by one."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from attention.test_segments import inputs, params_of

from vlmpack.attention import segment_attention
from vlmpack.attention.prefix_attention import PrefixGroups, prefix_attention
from vlmpack.packing.prefix_tree import PrefixTree

ROWS = {
    "two answers": ((-1, 0, 0), (9, 4, 4)),
    "unequal answers": ((-1, 0, 0, 0), (7, 1, 5, 5)),
    "two prompts": ((-1, 0, 0, -1, 3), (5, 2, 3, 6, 2)),
    "a tree": ((-1, 0, 1, 1, 0, 4), (6, 3, 2, 4, 1, 5)),
    "none": ((-1, -1), (4, 6)),
    "an empty path": ((-1, 0, 0), (0, 3, 3)),
}


def one_by_one(tensors, prefix_tree, physical, *, window=None):
    """Each segment computed as the end of a sample of its path and itself; gaps are zeros."""
    starts = (0, *accumulate(physical))
    rows = torch.zeros_like(tensors[0])
    for number, length in enumerate(prefix_tree.lengths):
        chain = (*prefix_tree.path(number), number)
        slots = torch.cat([starts[n] + torch.arange(prefix_tree.lengths[n]) for n in chain])
        if not len(slots):
            continue
        alone = [part[slots] for part in tensors]
        out = segment_attention(*alone, params_of((len(slots),)), window=window)
        rows = rows.index_copy(0, starts[number] + torch.arange(length), out[len(slots) - length :])
    return rows


def attend(tensors, params, prefix_tree, **options):
    groups = PrefixGroups(prefix_tree, params.segment_lengths, tensors[0].device)
    return prefix_attention(*tensors, groups, **options)


def real(prefix_tree, physical):
    starts = (0, *accumulate(physical))
    return torch.cat(
        [start + torch.arange(n) for start, n in zip(starts, prefix_tree.lengths, strict=False)]
    )


@pytest.mark.cases(quick=0.2, slow="*")
@pytest.mark.parametrize("window", [None, 1, 4, 100], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("multiple", [1, 8], ids=["no gaps", "gaps"])
@pytest.mark.parametrize("row", ROWS)
def test_equals_the_samples_one_by_one(row, multiple, window):
    prefix_tree = PrefixTree(*ROWS[row])
    physical = tuple(-(-n // multiple) * multiple for n in prefix_tree.lengths)
    params = params_of(prefix_tree.lengths, physical if multiple > 1 else None)
    tensors = inputs(sum(physical), kv_heads=2, dtype=torch.float64)
    slots = real(prefix_tree, physical)
    ours = attend(tensors, params, prefix_tree, window=window)[slots]
    theirs = one_by_one(tensors, prefix_tree, physical, window=window)[slots]
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).double()
    mine = torch.autograd.grad((ours * weights).sum(), tensors)
    stock = torch.autograd.grad((theirs * weights).sum(), tensors)
    for one, two in zip(mine, stock, strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-12)


def test_branches_are_strangers_and_the_path_sees_none_of_them():
    prefix_tree = PrefixTree((-1, 0, 0), (5, 3, 3))
    tensors = [part.detach() for part in inputs(11)]
    params = params_of(prefix_tree.lengths)
    before = attend(tensors, params, prefix_tree)
    for part in tensors:
        part[5:8] = 7.0  # the first answer
    after = attend(tensors, params, prefix_tree)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[8:], after[8:])
    assert not torch.equal(before[5:8], after[5:8])
    for part in tensors:
        part[:5] = 3.0  # the prompt reaches both
    assert not torch.equal(attend(tensors, params, prefix_tree)[8:], after[8:])


def test_a_branch_that_sees_its_sibling_is_found():
    tensors = inputs(11, dtype=torch.float64)
    right, wrong = PrefixTree((-1, 0, 0), (5, 3, 3)), PrefixTree((-1, 0, 1), (5, 3, 3))
    theirs = one_by_one(tensors, right, right.lengths)
    ours = attend(tensors, params_of(wrong.lengths), wrong)
    assert (ours - theirs)[8:].abs().max() > 0.05


@pytest.mark.parametrize(
    ("parents", "lengths", "said"),
    [
        ((0,), (3,), "segment 0 goes on from segment 0; expected an earlier one"),
        ((-1, 2, 0), (3, 1, 1), "segment 1 goes on from segment 2"),
        ((-1,), (3, 1), "1 parents for 2 segments"),
    ],
)
def test_forks_that_are_none_are_refused(parents, lengths, said):
    with pytest.raises(ValueError, match=said):
        PrefixTree(parents, lengths)


def test_forks_of_another_row_are_refused():
    with pytest.raises(ValueError, match="room for"):
        attend(inputs(8), params_of((4, 4)), PrefixTree((-1, 0), (4, 5)))


def test_a_row_has_each_of_its_masks_once():
    prefix_tree = PrefixTree((-1, 0, 0, -1, 3, 3, 0), (5, 3, 4, 5, 3, 3, 3))
    groups = PrefixGroups(prefix_tree, prefix_tree.lengths, torch.device("cpu"))
    asked = [groups.mask(each.seen, each.length, 4) for each in groups.groups]
    assert [each.seen for each in groups.groups] == [0, 5, 5, 0, 5, 5]
    assert len({id(mask) for mask in asked}) == 3, "of a prompt, of branches of 3, and of 4"
    again = [groups.mask(each.seen, each.length, 4) for each in groups.groups]
    assert all(one is two for one, two in zip(asked, again, strict=True))
    other = groups.mask(5, 3, 3)
    assert not torch.equal(other, asked[1]), "another window has another mask"
