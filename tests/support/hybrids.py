"""Tiny models whose layers carry state: transformers' own classes, seeded random weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from support.tiny_family import PLAIN_ROPE, TEXT
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vlmpack.attention import choose_attention
from vlmpack.backends.hf.attention import register_attention
from vlmpack.backends.hf.model import transformers_spelling
from vlmpack.backends.hf.recurrence import kernel_places, packed_row, replace_kernels
from vlmpack.packing import PackedSeqParams
from vlmpack.recurrence import RecurrenceChoice, RowSegments, choose_recurrence

CPU = torch.device("cpu")
FILLER = 560
"""The id in slots of no sample. Not the padding id: its embedding is zero, and so would all of its
hidden states be, whatever reached them."""

_DELTA = {
    # At 0.1 float32 gradients of stock models with a delta rule are 1.5e-5 from those in double.
    "initializer_range": 0.05,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "head_dim": 24,
}
_LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
}
_QWEN = {**TEXT, **_DELTA, **_LAYERS}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5_text": {**_QWEN, "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5}},
    "nemotron_h": {
        **TEXT,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "head_dim": 24,
        "ssm_state_size": 12,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
    },
    "qwen3_next": {**_QWEN, **_MOE, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_5_moe_text": {**_QWEN, **_MOE},
    "olmo_hybrid": {**TEXT, **_LAYERS, **_DELTA},
    "lfm2": {
        **TEXT,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
        "rope_parameters": PLAIN_ROPE,
    },
    "lfm2_moe": {
        **TEXT,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "num_dense_layers": 1,
    },
    "bamba": {**TEXT, **_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **TEXT,
        **_MAMBA,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "falcon_h1": {**TEXT, **_MAMBA, "mamba_d_ssm": 128, "num_hidden_layers": 2},
    "zamba2": {
        **TEXT,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
        "mamba_d_state": 12,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "chunk_size": 16,
        "num_mem_blocks": 1,
    },
    "mamba2": {
        "vocab_size": TEXT["vocab_size"],
        "hidden_size": 64,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 12,
        "n_groups": 2,
        "num_hidden_layers": 2,
        "chunk_size": 16,
        "pad_token_id": 568,
        "bos_token_id": 568,
        "eos_token_id": 570,
    },
}
"""Those whose rows are right, by `model_type`."""

_OLD = {"vocab_size": TEXT["vocab_size"], "hidden_size": 64, "state_size": 8}
UNPACKABLE: Mapping[str, Mapping[str, Any]] = {
    "mamba": {**_OLD, "num_hidden_layers": 2},
    "falcon_mamba": {**_OLD, "num_hidden_layers": 2},
    "jamba": {
        **TEXT,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
    },
}
"""Those that cannot be packed, and must say so."""


MILD = (0.02, 0.5)
"""Decays A of delta rules, for comparisons with transformers' own torch rule in float32: it takes
decays between two tokens as differences of sums over a chunk, so that it loses digits where the
decay is strong (published models draw A up to 16). The gradients of what makes the decays are off
by 3e-4 then, in its rule and not in ours: 1e-5 would compare with its rounding."""


def hybrid(model_type: str, decays: tuple[float, float] = MILD, **changes: Any) -> Any:
    """A tiny causal language model in train mode, in float32.

    Args:
        model_type: a key of `CONFIGS` or `UNPACKABLE`.
        decays: the smallest and the largest A of layers with a delta rule.
        changes: values of its config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**CONFIGS, **UNPACKABLE}[model_type]
    config = AutoConfig.for_model(model_type, **{**sizes, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    for name, parameter in model.named_parameters():
        if name.endswith("linear_attn.A_log"):
            spread = torch.linspace(*decays, parameter.numel())
            parameter.data.copy_(spread.log())
    return model


def samples(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    """(s,) ids of each sample."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 560, (length,), generator=draw) for length in lengths]


def row_params(
    lengths: Sequence[int], *, multiple: int = 1, ghost: int = 0, empty: int = 0
) -> PackedSeqParams:
    """The boundaries of a row: gaps up to a multiple, a ghost segment, and empty segments."""
    fillers = [ghost] * bool(ghost) + [0] * empty
    physical = [-(-length // multiple) * multiple for length in lengths] + fillers
    logical, padded = (
        torch.tensor([0, *accumulate(part)], dtype=torch.int32)
        for part in ([*lengths, *fillers], physical)
    )
    return PackedSeqParams(
        cu_seqlens_q=logical,
        cu_seqlens_kv=logical,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=max(physical),
        max_seqlen_kv=max(physical),
        segment_lengths=tuple(physical),
    )


@contextmanager
def replaced_kernels(model: nn.Module, choice: RecurrenceChoice) -> Iterator[dict[str, str]]:
    """`replace_kernels` for the length of a block."""
    stood = [(module, name, getattr(module, name)) for module, name, _ in kernel_places(model)]
    try:
        yield replace_kernels(model, choice)
    finally:
        for module, name, before in stood:
            setattr(module, name, before)


@contextmanager
def packing(model: Any, choice: RecurrenceChoice | None = None) -> Iterator[Any]:
    """The model with our attention and our recurrences; as it was behind the block."""
    choice = choice or choose_recurrence("auto", device=CPU, dtype=torch.float32)
    attention = choose_attention("segments", device=CPU, dtype=torch.float32)
    base = model.model if hasattr(model, "model") else model.backbone
    before = base.config._attn_implementation
    with replaced_kernels(model, choice) as replaced:
        base.set_attn_implementation(register_attention(attention))
        try:
            yield replaced
        finally:
            base.set_attn_implementation(before)


def packed_hidden(
    model: Any, ids: Sequence[Tensor], params: PackedSeqParams, told: RowSegments | None = None
) -> Tensor:
    """(T, D) final hidden states of a row.

    Args:
        model: inside `packing`.
        ids: of the samples.
        params: the row's boundaries.
        told: the segments that recurrences are told of; those of `params` if None.
    """
    parts, places = [], []
    for length, sample in zip(params.segment_lengths, [*ids, *[None] * 99], strict=False):
        filled = torch.full((length,), FILLER)
        if sample is not None:
            filled[: sample.shape[0]] = sample
        parts.append(filled)
        places.append(torch.arange(length))
    base = model.model if hasattr(model, "model") else model.backbone
    positions = {} if hasattr(model, "backbone") else {"position_ids": torch.cat(places)[None]}
    with packed_row():
        output = base(
            inputs_embeds=model.get_input_embeddings()(torch.cat(parts)[None]),
            use_cache=False,
            row_segments=RowSegments.of(params) if told is None else told,
            packed_seq_params=params,
            **positions,
            **transformers_spelling(params),
        )
    return output.last_hidden_state[0]


def sample_slots(ids: Sequence[Tensor], params: PackedSeqParams) -> list[slice]:
    """Where each sample's own tokens lie in the row."""
    starts = [0, *accumulate(params.segment_lengths)]
    return [slice(start, start + len(sample)) for start, sample in zip(starts, ids, strict=False)]


def _losses(model: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    logits = model.get_output_embeddings()(hidden[:-1])
    return cross_entropy(logits, ids[1:], reduction="none")


def packed_losses(
    model: Any, ids: Sequence[Tensor], params: PackedSeqParams, told: RowSegments | None = None
) -> list[Tensor]:
    """(s - 1,) losses of the tokens of each sample, from a row."""
    hidden = packed_hidden(model, ids, params, told)
    slots = sample_slots(ids, params)
    return [_losses(model, hidden[where], sample) for where, sample in zip(slots, ids, strict=True)]


def losses_alone(model: Any, ids: Sequence[Tensor]) -> list[Tensor]:
    """(s - 1,) losses of the tokens of each sample, by stock transformers one by one."""
    base = model.model if hasattr(model, "model") else model.backbone
    found = []
    for sample in ids:
        embeds = model.get_input_embeddings()(sample[None])
        output = base(inputs_embeds=embeds, use_cache=False)
        found.append(_losses(model, output.last_hidden_state[0], sample))
    return found


def gradients(model: nn.Module, losses: Sequence[Tensor]) -> dict[str, Tensor]:
    """The gradient of the sum of all losses, by parameter."""
    model.zero_grad(set_to_none=True)
    torch.cat(list(losses)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
