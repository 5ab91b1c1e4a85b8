"""Kernels of the fake GPU against attention with a mask, in float32."""

from __future__ import annotations

import pytest
import torch
from fake_cuda.kernels import sdpa_flash_backward, sdpa_flash_forward
from torch.nn.functional import scaled_dot_product_attention


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=str)
def test_dense_flash_attention_is_causal_at_the_last_key(heads, causal):
    """Its queries are the last ones of its keys; heads may share keys."""
    draw = torch.Generator().manual_seed(0)
    queries, keys = heads
    query, grad = (torch.randn(2, queries, 5, 8, generator=draw).bfloat16() for _ in range(2))
    key, value = (torch.randn(2, keys, 9, 8, generator=draw).bfloat16() for _ in range(2))
    out, lse, *rest = sdpa_flash_forward(query, key, value, 0.0, causal, False)
    found = sdpa_flash_backward(
        grad, query, key, value, out, lse, *rest[:4], 0.0, causal, *rest[4:6]
    )
    leaves = [x.float().requires_grad_() for x in (query, key, value)]
    mask = torch.ones(5, 9, dtype=torch.bool).tril(9 - 5 if causal else 9)
    exact = scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    assert out.shape == exact.shape and lse.shape == (2, queries, 5)
    torch.testing.assert_close(out.float(), exact.detach(), rtol=2e-2, atol=2e-2)
    wanted = torch.autograd.grad((exact * grad.float()).sum(), leaves)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.float(), other, rtol=5e-2, atol=5e-2)
    first = torch.ones(5, 9, dtype=torch.bool).tril()
    wrong = scaled_dot_product_attention(*leaves, attn_mask=first, enable_gqa=True)
    assert (out.float() - wrong).abs().max() > 0.3
