"""A row of fixed shape computes what each sample would have computed alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.runs import find_differences, run_batch

from vlmpack.packing import FixedShape, pack_batch_sequences


@pytest.mark.parametrize("alignment", [1, 8])
def test_losses_and_gradients_are_those_of_each_sample_alone(vlm, encoded, reference, alignment):
    free = pack_batch_sequences(encoded, pad_token_id=561, pad_to_multiple_of=alignment)
    shape = FixedShape(row_tokens=free.num_slots + 16 * alignment, max_sequences=9)
    fixed = pack_batch_sequences(
        encoded, pad_token_id=561, pad_to_multiple_of=alignment, fixed=shape
    )
    assert fixed.cu_seqlens.shape == (9 + 2,) and fixed.segment_lengths[-2:] == (0, 0)
    assert fixed.max_seqlen == fixed.num_slots > free.max_seqlen
    assert find_differences(run_batch(vlm, fixed), reference) == []
    # the control: with the fill at the end of the first sample, every later one begins too late
    first, *others = fixed.segment_lengths
    ghost = others[5]
    assert ghost >= 16 * alignment
    moved = replace(fixed, segment_lengths=(first + ghost, *others[:5], 0, 0, 0, 0))
    found = find_differences(run_batch(vlm, fixed, moved.packed_seq_params()), reference)
    assert any(line.startswith("loss of") for line in found)
