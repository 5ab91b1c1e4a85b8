"""Rotary positions against transformers' own, for one axis, MRoPE and interleaved MRoPE."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen25
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as qwen3_moe

from vlmpack.attention import RopeLayout, apply_rope, rope_cos_sin
from vlmpack.attention.rope import axis_of_frequency

HEAD_DIM = 32
TOKENS = 50
TOLERANCE = 1e-6
"""Absolute, for unit-variance vectors in float32: both sides do the same few operations."""


def mrope_positions():
    """(3, T) with different axes, as an image in the middle makes them, and large values."""
    draw = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 3000, (3, TOKENS), generator=draw)
    positions[:, :10] = torch.arange(10)
    return positions


def rotated_by_transformers(rotary, apply, positions, query, key):
    """(T, H, D) rotated with transformers' cos and sin of (3, 1, T) positions."""
    cos, sin = rotary(query, positions[:, None])
    query, key = (part.transpose(0, 1)[None] for part in (query, key))
    rotated = apply(query, key, cos, sin)
    return [part[0].transpose(0, 1) for part in rotated]


def qwen25_rotary(sections=(4, 6, 6)):
    config = qwen25.Qwen2_5_VLTextConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": list(sections),
        },
    )
    return qwen25.Qwen2_5_VLRotaryEmbedding(config)


def heads(seed=1, head_dim=HEAD_DIM):
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(TOKENS, 4, head_dim, generator=draw),
        torch.randn(TOKENS, 2, head_dim, generator=draw),
    )


@pytest.mark.parametrize("sections", [(4, 6, 6), (2, 2, 12), (16, 0, 0)], ids=str)
def test_mrope_equals_transformers(sections):
    rotary = qwen25_rotary(sections)
    positions = mrope_positions()
    query, key = heads()
    theirs = rotated_by_transformers(rotary, qwen25.apply_rotary_pos_emb, positions, query, key)
    cos, sin = rope_cos_sin(positions, rotary.inv_freq, RopeLayout(mrope_section=sections))
    ours = apply_rope([query, key], cos, sin)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() < TOLERANCE
    if sections[0] != 16:
        temporal = positions[:1].expand(3, -1)
        wrong = apply_rope(
            [query], *rope_cos_sin(temporal, rotary.inv_freq, RopeLayout(mrope_section=sections))
        )[0]
        assert (wrong - theirs[0]).abs().max() > 0.1, "the axes make no difference"


def test_one_axis_equals_transformers():
    rotary = qwen25_rotary()
    positions = mrope_positions()[:1]
    query, key = heads()
    theirs = rotated_by_transformers(
        rotary, qwen25.apply_rotary_pos_emb, positions.expand(3, -1), query, key
    )
    ours = apply_rope([query, key], *rope_cos_sin(positions, rotary.inv_freq, RopeLayout()))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() < TOLERANCE


@pytest.mark.parametrize("sections", [(6, 5, 5), (6, 3, 3), (4, 6, 6), (24, 20, 20)], ids=str)
@pytest.mark.parametrize("kind", ["Qwen3VL", "Qwen3VLMoe"])
def test_interleaved_mrope_equals_transformers_qwen3_vl(kind, sections):
    """(24, 20, 20) with heads of 128 is what the published models have."""
    module = {"Qwen3VL": qwen3, "Qwen3VLMoe": qwen3_moe}[kind]
    head_dim = 2 * sum(sections)
    config = getattr(module, f"{kind}TextConfig")(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=head_dim,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": list(sections),
            "mrope_interleaved": True,
        },
    )
    rotary = getattr(module, f"{kind}TextRotaryEmbedding")(config)
    positions = mrope_positions()
    query, key = heads(head_dim=head_dim)
    theirs = rotated_by_transformers(rotary, module.apply_rotary_pos_emb, positions, query, key)
    layout = RopeLayout(mrope_section=sections, interleaved=True)
    ours = apply_rope([query, key], *rope_cos_sin(positions, rotary.inv_freq, layout))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() < TOLERANCE
    block = RopeLayout(mrope_section=sections)
    wrong = apply_rope([query], *rope_cos_sin(positions, rotary.inv_freq, block))[0]
    assert (wrong - theirs[0]).abs().max() > 0.1, "the two layouts are the same here"


def test_axes_of_frequencies():
    block = RopeLayout(mrope_section=(2, 1, 3))
    assert axis_of_frequency(block, 6).tolist() == [0, 0, 1, 2, 2, 2]
    interleaved = RopeLayout(mrope_section=(3, 2, 1), interleaved=True)
    assert axis_of_frequency(interleaved, 6).tolist() == [0, 1, 2, 0, 1, 0]
    assert axis_of_frequency(RopeLayout(), 3).tolist() == [0, 0, 0]


def test_gradients_equal_autograd():
    cos, sin = rope_cos_sin(
        mrope_positions(), torch.rand(HEAD_DIM // 2), RopeLayout(mrope_section=(4, 6, 6))
    )
    query, key = (part.requires_grad_() for part in heads())

    def by_autograd(x):
        first, second = x.chunk(2, dim=-1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

    weights = heads(seed=2)
    ours = sum(
        (x * w).sum() for x, w in zip(apply_rope([query, key], cos, sin), weights, strict=True)
    )
    theirs = sum((by_autograd(x) * w).sum() for x, w in zip((query, key), weights, strict=True))
    for mine, other in zip(
        torch.autograd.grad(ours, (query, key)),
        torch.autograd.grad(theirs, (query, key)),
        strict=True,
    ):
        assert (mine - other).abs().max() < TOLERANCE


@pytest.mark.parametrize("axes", [1, 2, 4])
def test_another_number_of_axes_is_refused(axes):
    """One-dimensional positions in an MRoPE model trained silently wrong elsewhere."""
    layout = RopeLayout(mrope_section=(4, 6, 6))
    with pytest.raises(ValueError, match=rf"shape \({axes}, 5\), expected \(3, T\)"):
        rope_cos_sin(torch.zeros(axes, 5, dtype=torch.int64), torch.ones(16), layout)


def test_mrope_positions_in_a_one_axis_model_are_refused():
    with pytest.raises(ValueError, match=r"expected \(1, T\)"):
        rope_cos_sin(torch.zeros(3, 5, dtype=torch.int64), torch.ones(16), RopeLayout())
    with pytest.raises(ValueError, match=r"expected \(1, T\)"):
        rope_cos_sin(torch.zeros(5, dtype=torch.int64), torch.ones(16), RopeLayout())


def test_sections_that_do_not_fill_the_head_are_refused():
    layout = RopeLayout(mrope_section=(4, 4, 4))
    with pytest.raises(ValueError, match="sums to 12, but the head has 16 frequencies"):
        rope_cos_sin(torch.zeros(3, 5, dtype=torch.int64), torch.ones(16), layout)


def test_positions_keep_their_precision_in_a_bfloat16_model():
    """bfloat16 cannot tell position 2049 from 2048: angles are float32 in every model."""
    positions = torch.tensor([[2048, 2049]])
    cos, sin = rope_cos_sin(positions, torch.ones(16, dtype=torch.bfloat16), RopeLayout())
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(cos[:, 0], torch.tensor([2048.0, 2049.0]).cos())
    query = torch.randn(2, 4, 32).bfloat16()
    assert apply_rope([query], cos, sin)[0].dtype == torch.bfloat16


def test_a_slice_of_a_row_rotates_as_the_whole_row_did():
    """No state runs along the row: any subset of tokens in any order gives the same vectors."""
    layout = RopeLayout(mrope_section=(4, 6, 6))
    positions, inv_freq = mrope_positions(), torch.rand(16)
    (query, _), pick = heads(), torch.tensor([40, 3, 17])
    whole = apply_rope([query], *rope_cos_sin(positions, inv_freq, layout))[0]
    part = apply_rope([query[pick]], *rope_cos_sin(positions[:, pick], inv_freq, layout))[0]
    assert torch.equal(part, whole[pick])


def test_cos_and_sin_are_contiguous():
    """Strided ones made the rotation half as fast, in every layer."""
    for table in rope_cos_sin(
        torch.arange(12).view(3, 4), torch.ones(4), RopeLayout(mrope_section=(2, 1, 1))
    ):
        assert table.is_contiguous()
        assert table.shape == (4, 4)
