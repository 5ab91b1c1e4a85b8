"""What CUDA's kernels are given; the kernels themselves run in tests/fake_cuda and tests/gpu."""

from __future__ import annotations

import pytest
import torch

from vlmpack.attention.varlen import dense_attention, whole_heads


@pytest.mark.parametrize(("width", "whole"), [(12, 16), (20, 24), (72, 72), (256, 256)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_heads_filled_up_to_a_multiple_of_eight_attend_as_before(width, whole, scale):
    draw = torch.Generator().manual_seed(width)
    parts = [torch.randn(9, 2, width, generator=draw) for _ in range(3)]
    *filled, given = whole_heads(*parts, scale)
    assert {part.shape for part in filled} == {(9, 2, whole)}

    def attended(tensors, factor):
        batched = [part.transpose(0, 1)[None] for part in tensors]
        return dense_attention(*batched, mask=None, causal=True, scale=factor)

    expected, found = attended(parts, scale), attended(filled, given)
    assert (found[..., :width] - expected).abs().max() < 1e-6
    assert not found[..., width:].any()
    wrong = attended(filled, None)[..., :width]  # by the width that the kernel sees
    assert (scale is None and whole == width) or (wrong - expected).abs().max() > 1e-3
