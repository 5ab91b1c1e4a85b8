"""What one sample holds never reaches another: bit for bit where no length changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.runs import pack, starts_of

CHANGED_LENGTH_TOLERANCE = 1e-5
"""Relative L2 of logits: other rows of a matmul may be blocked differently when T changes."""


def logits_by_sample(vlm, batch):
    """Each sample's (s, V) logits in a packed row."""
    with torch.no_grad():
        hidden = vlm.hidden_states(batch, batch.packed_seq_params())
        logits = hidden @ vlm.model.get_output_embeddings().weight.T
    spans = zip(batch.keys, starts_of(batch), batch.lengths, strict=True)
    return {key: logits[start : start + length] for key, start, length in spans}


def other_pixels(sample):
    """The same image sizes, other pixels."""
    noise = torch.randn_like(sample.media.pixel_values, generator=torch.Generator().manual_seed(0))
    return replace(sample, media=replace(sample.media, pixel_values=noise))


def other_text(sample):
    """Other ids at the same length; placeholders stay."""
    ids = sample.input_ids.clone()
    is_text = torch.ones_like(ids, dtype=torch.bool)
    is_text[sample.media_positions] = False
    ids[is_text] = (ids[is_text] + 7) % 500
    return replace(sample, input_ids=ids)


def without_last_tokens(sample):
    """Three tokens less, and the labels end as they must."""
    labels = sample.labels[:-3].clone()
    labels[-1] = -100
    return replace(
        sample,
        input_ids=sample.input_ids[:-3],
        labels=labels,
        position_ids=sample.position_ids[:, :-3],
    )


@pytest.mark.cases(quick="other_pixels-1", slow="other_text-8")
@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("change", [other_pixels, other_text], ids=lambda f: f.__name__)
def test_other_samples_logits_are_bit_equal(vlm, encoded, change, alignment):
    before = logits_by_sample(vlm, pack(encoded, alignment=alignment))
    changed = 0
    for index, sample in enumerate(encoded):
        if change is other_pixels and sample.media is None:
            continue
        row = [*encoded[:index], change(sample), *encoded[index + 1 :]]
        after = logits_by_sample(vlm, pack(row, alignment=alignment))
        assert not torch.equal(after[sample.key], before[sample.key]), "the change had no effect"
        for key in before.keys() - {sample.key}:
            assert torch.equal(after[key], before[key]), (sample.key, key)
        changed += 1
    assert changed >= 4


@pytest.mark.parametrize("index", range(6))
def test_other_samples_logits_survive_a_changed_length(vlm, encoded, index):
    before = logits_by_sample(vlm, pack(encoded, alignment=4))
    row = [*encoded[:index], without_last_tokens(encoded[index]), *encoded[index + 1 :]]
    batch = pack(row, alignment=4)
    assert batch.lengths != pack(encoded, alignment=4).lengths
    after = logits_by_sample(vlm, batch)
    for key in before.keys() - {encoded[index].key}:
        error = (after[key] - before[key]).norm() / before[key].norm()
        assert error <= CHANGED_LENGTH_TOLERANCE, (key, float(error))


def test_the_id_and_label_of_a_gap_reach_nobody(vlm, encoded):
    one = logits_by_sample(vlm, pack(encoded, alignment=16, pad=561))
    other = logits_by_sample(vlm, pack(encoded, alignment=16, pad=3))
    for key, logits in one.items():
        assert torch.equal(other[key], logits), key
