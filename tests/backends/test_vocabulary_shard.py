"""The head split over tensor-parallel ranks against the whole head; ranks are threads here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F

from vlmpack.backends.cross_entropy import VocabularyShard, linear_cross_entropy

WIDTH = 16


class ThreadGroup:
    """The two all-reduces, between threads."""

    def __init__(self, size):
        self.size, self.barrier = size, Barrier(size, timeout=60)
        self.slots = [None] * size
        self.calls = [0] * size

    def reduce(self, rank, values, combine):
        self.calls[rank] += 1
        self.slots[rank] = values.clone()
        self.barrier.wait()
        total = combine(torch.stack(self.slots))
        self.barrier.wait()
        return values.copy_(total)

    def shard(self, rank, start):
        return VocabularyShard(
            start=start,
            all_max=lambda values: self.reduce(rank, values, lambda all_: all_.amax(dim=0)),
            all_sum=lambda values: self.reduce(rank, values, lambda all_: all_.sum(dim=0)),
        )

    def run(self, work):
        """work(rank) on every rank at once."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, range(self.size)))


def inputs(rows, vocabulary, scale=1.0):
    draw = torch.Generator().manual_seed(0)
    hidden = scale * torch.randn(rows, WIDTH, generator=draw)
    weight = torch.randn(vocabulary, WIDTH, generator=draw)
    return hidden, weight, torch.randint(0, vocabulary, (rows,), generator=draw)


def sharded(hidden, weight, targets, mixing, size, rows_per_chunk, temperatures=None):
    """Losses and gradients by rank; padding rows are left out as the model leaves them out."""
    vocabulary = weight.shape[0]
    share = -(-vocabulary // size)
    group = ThreadGroup(size)

    def work(rank):
        start = rank * share
        mine = weight[start : start + share].clone().requires_grad_()
        own_hidden = hidden.clone().requires_grad_()
        losses = linear_cross_entropy(
            own_hidden,
            mine,
            targets,
            rows_per_chunk=rows_per_chunk,
            shard=group.shard(rank, start),
            temperatures=temperatures,
        )
        gradients = torch.autograd.grad((losses * mixing).sum(), (own_hidden, mine))
        return losses.detach(), *gradients

    found = group.run(work)
    assert len(set(group.calls)) == 1, "ranks entered different numbers of collectives"
    return found, group.calls[0]


@pytest.mark.parametrize("temperatures", [None, torch.linspace(0.3, 2.0, 21)], ids=["1", "each"])
@pytest.mark.parametrize("rows_per_chunk", [1, 4, 21, None])
@pytest.mark.parametrize(("vocabulary", "size"), [(50, 2), (48, 4), (51, 2), (49, 4)])
def test_losses_and_gradients_of_the_whole_head(vocabulary, size, rows_per_chunk, temperatures):
    """51 over 2 and 49 over 4 do not divide: the last rank has fewer real rows."""
    hidden, weight, targets = inputs(21, vocabulary)
    mixing = torch.linspace(-1, 2, 21)
    hidden.requires_grad_()
    weight.requires_grad_()
    by = 1.0 if temperatures is None else temperatures[:, None]
    whole = F.cross_entropy(hidden @ weight.T / by, targets, reduction="none")
    expected = torch.autograd.grad((whole * mixing).sum(), (hidden, weight))
    given = (hidden.detach(), weight.detach(), targets, mixing, size, rows_per_chunk)
    found, calls = sharded(*given, temperatures)
    assert calls == 2 * (-(-21 // (rows_per_chunk or 21)))
    for losses, _, _ in found:
        assert torch.equal(losses, found[0][0]), "ranks disagree about the loss"
        torch.testing.assert_close(losses, whole.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        torch.stack([hidden_part for _, hidden_part, _ in found]).sum(0),
        expected[0],
        rtol=1e-5,
        atol=1e-5,
    )
    rows = torch.cat([weight_part for _, _, weight_part in found])
    torch.testing.assert_close(rows, expected[1], rtol=1e-5, atol=1e-5)


def test_targets_of_one_rank_alone():
    hidden, weight, _ = inputs(6, 40)
    for targets in (torch.zeros(6, dtype=torch.int64), torch.full((6,), 39)):
        whole = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
        found, _ = sharded(hidden, weight, targets, torch.ones(6), 4, None)
        for losses, _, _ in found:
            torch.testing.assert_close(losses, whole, rtol=1e-6, atol=1e-6)


def test_padding_rows_would_count_if_they_were_not_left_out():
    """What the model prevents: zero rows have logits of zero, which the softmax sums."""
    hidden, weight, targets = inputs(6, 51)
    padded = torch.cat((weight, torch.zeros(1, WIDTH)))
    whole = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    right, _ = sharded(hidden, weight, targets, torch.ones(6), 2, None)
    wrong, _ = sharded(hidden, padded, targets, torch.ones(6), 2, None)
    torch.testing.assert_close(right[0][0], whole, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(wrong[0][0], whole, rtol=1e-6, atol=1e-6)


def test_no_label_token_enters_no_collective_on_any_rank():
    hidden, weight, targets = inputs(0, 50)
    found, calls = sharded(hidden, weight, targets, torch.ones(0), 2, None)
    assert calls == 0
    for losses, hidden_part, weight_part in found:
        assert losses.shape == (0,)
        assert hidden_part.shape == (0, WIDTH)
        assert not weight_part.any()


def test_large_logits_on_one_rank_do_not_overflow():
    hidden, weight, targets = inputs(5, 50, scale=1e4)
    whole = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    found, _ = sharded(hidden, weight, targets, torch.ones(5), 2, 2)
    for losses, hidden_part, _ in found:
        assert torch.isfinite(losses).all()
        assert torch.isfinite(hidden_part).all()
        torch.testing.assert_close(losses, whole)
