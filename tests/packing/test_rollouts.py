"""What samplers said of answers stands beside the tokens that it is of, however rows are packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.samples import image_sample, text_sample

from vlmpack.errors import PackingError
from vlmpack.packing import IGNORE_INDEX, PackCollator, PadCollator, slice_for_context
from vlmpack.packing.batch import DrawnAnswer
from vlmpack.packing.pairs import sample_in

PACKED = PackCollator(pad_token_id=0, num_position_axes=3, pad_to_multiple_of=4)
PADDED = PadCollator(pad_token_id=0, num_position_axes=3)


def drawn(sample, temperature=1.0, *, is_raw=False):
    """The sample, with a log-probability that tells each of its label tokens from all others."""
    labels = (sample.labels != IGNORE_INDEX).nonzero()[:, 0]
    log_p = -(labels + len(sample.key) * 1000.0)
    return replace(sample, drawn=DrawnAnswer(log_p=log_p, temperature=temperature, is_raw=is_raw))


@pytest.fixture
def samples():
    made = [
        image_sample("a", axes=3),
        text_sample("bb", range(30, 38), axes=3, num_targets=4),
        image_sample("ccc", axes=3),
    ]
    return [drawn(sample, 0.5 + n) for n, sample in enumerate(made)]


@pytest.mark.parametrize("collate", [PACKED, PADDED])
def test_columns_are_of_the_label_tokens(samples, collate):
    batch = collate(samples)
    assert batch.num_pairs == 0
    rollouts, sequences = batch.rollouts, batch.label_sequences
    places = [batch.label_positions[sequences == n] for n in range(3)]
    assert all(len(each) for each in places)
    for n, (sample, own) in enumerate(zip(samples, places, strict=True)):
        found = rollouts.sampler[sequences == n]
        assert torch.equal(found, sample.drawn.log_p)
        inside = (own - own[0]).tolist()
        first = -found[0] - len(sample.key) * 1000
        assert inside == (-found - len(sample.key) * 1000 - first).tolist()
    assert batch.own_temperatures().tolist() == torch.tensor([0.5, 1.5, 2.5])[sequences].tolist()
    for n, sample in enumerate(samples):
        again = sample_in(batch, n)
        assert torch.equal(again.drawn.log_p, sample.drawn.log_p)
        assert again.drawn.temperature == sample.drawn.temperature
        assert again.sequences == ()


def test_temperatures_of_one_divide_nothing(samples):
    plain = [replace(s, drawn=replace(s.drawn, temperature=1.0)) for s in samples]
    batch = PACKED(plain)
    assert batch.rollouts.temperatures is None and batch.own_temperatures() is None
    assert not batch.rollouts.is_raw
    assert sample_in(batch, 1).drawn.temperature == 1.0
    raw = replace(plain[1], drawn=replace(plain[1].drawn, is_raw=True))
    assert PACKED([plain[0], raw]).rollouts.is_raw


def test_each_rank_of_a_row_knows_its_own_tokens(samples):
    row, found = PACKED(samples), {}
    for rank in range(2):
        part = slice_for_context(row, rank=rank, size=2)
        positions, targets = part.own_labels()
        slots = part.context.row_index[positions]
        assert torch.equal(row.labels.flatten()[slots], targets)
        own = zip(
            part.own_part(row.rollouts.sampler).tolist(),
            part.own_temperatures().tolist(),
            strict=True,
        )
        found |= dict(zip(slots.tolist(), own, strict=True))
    whole = zip(row.rollouts.sampler.tolist(), row.own_temperatures().tolist(), strict=True)
    assert found == dict(zip(row.label_positions.tolist(), whole, strict=True))


def test_other_columns_are_refused(samples):
    with pytest.raises(PackingError, match="'a' is a rollout and sample 'bb' is none"):
        PACKED([samples[0], replace(samples[1], drawn=None)])
    short = replace(samples[1].drawn, log_p=samples[1].drawn.log_p[1:])
    with pytest.raises(PackingError, match="label tokens, but log-probabilities of the shape"):
        PADDED([replace(samples[1], drawn=short)])


def test_samples_without_draws_are_as_before():
    batch = PACKED([text_sample("bb", range(30, 38), axes=3, num_targets=4)])
    assert batch.rollouts is None and batch.label_sequences is None
    assert PACKED([]).own_temperatures() is None
