"""Pieces of Megatron's parameters: flat ranges as boxes, and the Qwen map at TP 1 and 2."""

from __future__ import annotations

import random
import re
from math import prod

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.shards import TINY_MODEL

from vlmpack.attention import RopeLayout
from vlmpack.backends.boxes import TensorSlice
from vlmpack.backends.mcore.weights import MegatronFamily, megatron_family
from vlmpack.backends.mcore.weights.base import flat_boxes, stack_pieces
from vlmpack.backends.mcore.weights.dims import DeltaNetDims, LanguageDims
from vlmpack.backends.mcore.weights.language import QwenLanguageMap
from vlmpack.errors import CapabilityError
from vlmpack.recipe.schema import ParallelismSection

LAYERS, HIDDEN, HEADS, GROUPS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 4, 128, 4, 2, 32, 384, 576


def random_piece(draw):
    """A whole array of running numbers, and a random box of it as a piece somewhere."""
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 4)))
    start = tuple(draw.randint(0, n - 1) for n in shape)
    stop = tuple(draw.randint(a + 1, n) for a, n in zip(start, shape, strict=True))
    box = TensorSlice(name="w", shape=shape, start=start, stop=stop)
    before = TensorSlice(
        name="b", shape=(9, *box.lengths[1:]), start=(0,) * len(shape), stop=(2, *box.lengths[1:])
    )
    skipped = draw.random() < 0.5
    pieces = stack_pieces([before, box] if skipped else [box])
    return np.arange(prod(shape)).reshape(shape), pieces[-1], 2 * skipped


def test_boxes_cover_a_flat_range_once_and_in_order():
    draw = random.Random(0)
    for _ in range(2000):
        whole, piece, rows_before = random_piece(draw)
        box = piece.box
        row_elements = prod(box.lengths[1:])
        local = whole[box.index].reshape(-1)
        offset = rows_before * row_elements
        assert (piece.start, piece.stop) == (rows_before, rows_before + box.lengths[0])
        start = draw.randint(0, offset + local.size)
        stop = draw.randint(start, offset + local.size + 3)
        found, expected_start = [], max(start, offset)
        for part in flat_boxes(piece, start, stop):
            assert part.start == expected_start, "a gap, an overlap, or another order"
            assert part.stop - part.start == prod(part.box.lengths) > 0
            assert (part.box.name, part.box.shape) == (box.name, box.shape)
            found.append(whole[part.box.index].reshape(-1))
            expected_start = part.stop
        low, high = max(0, start - offset), max(0, stop - offset)
        assert np.array_equal(np.concatenate([*found, local[:0]]), local[low:high])


@pytest.mark.parametrize("shape", [(7,), (6, 5), (4, 3, 5), (3, 2, 3, 4)])
def test_a_range_is_few_boxes(shape):
    """A partial row, whole rows and a partial row in each dimension."""
    (piece,) = stack_pieces(
        [TensorSlice(name="w", shape=shape, start=(0,) * len(shape), stop=shape)]
    )
    total = prod(shape)
    for start in range(total):
        for stop in range(start + 1, total + 1):
            boxes = list(flat_boxes(piece, start, stop))
            assert len(boxes) <= 2 * len(shape) - 1
    assert len(list(flat_boxes(piece, 0, total))) == 1


def language_map(tp_rank, tp_size, vocabulary=VOCABULARY):
    dims = LanguageDims(
        layers=LAYERS,
        hidden=HIDDEN,
        heads=HEADS,
        groups=GROUPS,
        head_dim=HEAD_DIM,
        intermediate=INTERMEDIATE,
        vocabulary=vocabulary,
        norm_eps=1e-6,
        tied=False,
        inv_freq=torch.ones(HEAD_DIM // 2),
        rope=RopeLayout(),
        family=MegatronFamily(qkv_bias=True),
    )
    sizes = ParallelismSection(tensor=tp_size)
    return QwenLanguageMap(prefix="model.", dims=dims, sizes=sizes, tp_rank=tp_rank)


def megatron_shapes(tp_size, vocabulary=VOCABULARY):
    """Local shapes of GPTModel's parameters, layer norms apart."""
    rows = -(-vocabulary // tp_size)
    shapes = {
        "embedding.word_embeddings.weight": (rows, HIDDEN),
        "output_layer.weight": (rows, HIDDEN),
        "decoder.final_layernorm.weight": (HIDDEN,),
    }
    qkv = (HEADS + 2 * GROUPS) * HEAD_DIM // tp_size
    for layer in range(LAYERS):
        shapes |= {
            f"decoder.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm.weight": (HIDDEN,),
                "pre_mlp_layernorm.weight": (HIDDEN,),
                "self_attention.linear_qkv.weight": (qkv, HIDDEN),
                "self_attention.linear_qkv.bias": (qkv,),
                "self_attention.linear_proj.weight": (HIDDEN, HEADS * HEAD_DIM // tp_size),
                "mlp.linear_fc1.weight": (2 * INTERMEDIATE // tp_size, HIDDEN),
                "mlp.linear_fc2.weight": (HIDDEN, INTERMEDIATE // tp_size),
            }.items()
        }
    return shapes


@pytest.fixture(scope="module")
def wholes():
    """The language model's tensors as published, and a head."""
    found = {
        name: tensor
        for name, tensor in load_file(str(TINY_MODEL / "model.safetensors")).items()
        if name.startswith("model.")
    }
    return found | {"lm_head.weight": found["model.embed_tokens.weight"] + 1}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_ranks_cover_every_tensor_and_reassemble_its_bits(wholes, tp_size):
    covered = {name: torch.zeros(w.shape, dtype=torch.int32) for name, w in wholes.items()}
    again = {name: torch.full_like(w, float("nan")) for name, w in wholes.items()}
    replicated = dict.fromkeys(wholes, 0)
    for rank in range(tp_size):
        language = language_map(rank, tp_size)
        for name, shape in megatron_shapes(tp_size).items():
            pieces = language.pieces(name, shape[0], 0)
            assert [piece.start for piece in pieces] == [0, *(p.stop for p in pieces[:-1])]
            assert pieces[-1].stop == shape[0]
            local = torch.cat([wholes[piece.box.name][piece.box.index] for piece in pieces])
            assert local.shape == shape
            for piece in pieces:
                assert piece.box.shape == wholes[piece.box.name].shape
                assert piece.replicated == ("norm" in name)
                replicated[piece.box.name] += piece.replicated
                if piece.replicated and rank:
                    continue
                covered[piece.box.name][piece.box.index] += 1
                again[piece.box.name][piece.box.index] = local[piece.start : piece.stop]
    for name, whole in wholes.items():
        assert bool((covered[name] == 1).all()), f"{name}: an element is missing, or there twice"
        assert torch.equal(again[name], whole)
        assert replicated[name] in (0, tp_size)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_queries_keys_and_values_of_a_group_lie_together(wholes, tp_size):
    """Megatron splits (groups, queries per group + 2, head width)."""
    per_group = HEADS // GROUPS
    prefix = "model.layers.1.self_attn."
    for rank in range(tp_size):
        rows = (HEADS + 2 * GROUPS) * HEAD_DIM // tp_size
        name = "decoder.layers.1.self_attention.linear_qkv.weight"
        pieces = language_map(rank, tp_size).pieces(name, rows, 0)
        local = torch.cat([wholes[p.box.name][p.box.index] for p in pieces])
        local = local.view(GROUPS // tp_size, per_group + 2, HEAD_DIM, HIDDEN)
        for number in range(GROUPS // tp_size):
            group = rank * GROUPS // tp_size + number
            q, k, v = (
                wholes[f"{prefix}{part}_proj.weight"].view(-1, HEAD_DIM, HIDDEN) for part in "qkv"
            )
            queries = q[group * per_group : (group + 1) * per_group]
            assert torch.equal(local[number, :per_group], queries)
            assert torch.equal(local[number, per_group], k[group])
            assert torch.equal(local[number, per_group + 1], v[group])


def test_padding_rows_of_the_vocabulary_belong_to_no_tensor():
    found = [
        language_map(rank, 4, vocabulary=9).pieces("output_layer.weight", 3, 0) for rank in range(4)
    ]
    assert [[(p.box.start[0], p.box.stop[0]) for p in pieces] for pieces in found] == [
        [(0, 3)],
        [(3, 6)],
        [(6, 9)],
        [],
    ]
    uneven = [
        language_map(rank, 2, vocabulary=9).pieces("output_layer.weight", 5, 0) for rank in range(2)
    ]
    assert [(p.start, p.stop) for (p,) in uneven] == [(0, 5), (0, 4)]


def test_layers_of_a_stage_are_counted_from_its_first():
    (piece,) = language_map(0, 1).pieces("decoder.layers.1.input_layernorm.weight", HIDDEN, 2)
    assert piece.box.name == "model.layers.3.input_layernorm.weight"


def test_norms_inside_a_fused_linear_layer_are_the_same_tensors():
    language = language_map(0, 1)
    for fused, plain in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ):
        names = [
            language.pieces(f"decoder.layers.0.{name}", HIDDEN, 0)[0].box.name
            for name in (fused, plain)
        ]
        assert names[0] == names[1]


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.mlp.shared.weight", "decoder.layers.x.weight", "pos.weight"]
)
def test_an_unknown_parameter_is_not_guessed(name):
    with pytest.raises(KeyError, match=re.escape(name.rsplit(".", 2)[-2])):
        language_map(0, 1).pieces(name, 1, 0)


def test_an_unknown_family_names_the_other_engine():
    with pytest.raises(CapabilityError, match=r"'llava'.*qwen2_5_vl.*model\.backend: hf"):
        megatron_family("llava")


def delta_net_pieces(rank, ranks, name):
    dims = DeltaNetDims(
        key_heads=4, value_heads=8, key_width=3, value_width=5, taps=4, layers=frozenset({0})
    )
    return language_map(rank, ranks)._delta_net("l.", dims, name)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_has_its_heads_of_a_layer_that_carries_state(ranks):
    """Rows of in_proj, one head after the other: those of queries and keys are numbered from 0, of
    values from 100; each is in one rank, in the order of heads."""
    keys, values, hidden = 4 * 3, 8 * 5, HIDDEN
    wholes = {
        "l.in_proj_qkv.weight": torch.cat(
            (torch.arange(keys), torch.arange(keys), 100 + torch.arange(values))
        ),
        "l.in_proj_z.weight": torch.arange(values),
        "l.in_proj_b.weight": torch.arange(8),
        "l.in_proj_a.weight": torch.arange(8),
    }
    wholes = {name: rows[:, None].expand(-1, hidden) for name, rows in wholes.items()}
    for rank in range(ranks):
        pieces = delta_net_pieces(rank, ranks, "in_proj.weight")
        assert {p.box.name: p.box.shape for p in pieces} == {
            n: (*w.shape,) for n, w in wholes.items()
        }
        local = torch.cat([wholes[p.box.name][p.box.index] for p in pieces])[:, 0].tolist()
        parts = (keys, keys, values, values, 8, 8)
        starts = (0, 0, 100, 0, 0, 0)
        expected = [
            start + rank * size // ranks + row
            for start, size in zip(starts, parts, strict=True)
            for row in range(size // ranks)
        ]
        assert local == expected
        filters = delta_net_pieces(rank, ranks, "conv1d.weight")
        rows = [n for p in filters for n in range(p.box.start[0], p.box.stop[0])]
        assert [wholes["l.in_proj_qkv.weight"][row, 0].item() for row in rows] == expected[
            : len(rows)
        ]
        assert filters[0].box.shape == (2 * keys + values, 1, 4)
    with pytest.raises(KeyError, match=r"l\.beta"):
        delta_net_pieces(0, 1, "beta")
