"""Run by `tests/backends/mcore/test_te_contract.py`, in a process of its own: Megatron looks for
Transformer Engine when it is imported, and here it finds the stand-in of `played_te`.

    python -m backends.mcore.te_worker FILE

FILE gets, pickled: what Transformer Engine was handed for rows, by version and CP, through
Megatron's own wrapper; and losses and gradients of the tiny model with its layers and with ours.
"""

# ruff: noqa: E402 - the stand-in comes first

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from backends.mcore import played_te

played_te.play(played_te.VERSIONS[0])

import megatron.core.extensions.transformer_engine as extension
import torch
from backends.mcore.te_rows import ROWS, SIZES, Call
from fake_cuda.stand_ins import liger_everywhere
from megatron.core.transformer.enums import AttnMaskType
from support.engines import EVERYTHING, single_rank
from support.layouts import LAYOUTS, stepper_with
from support.token_losses import TINY_MODEL, in_rows

from vlmpack.attention import AttentionChoice, segment_attention
from vlmpack.backends.engine import Compute
from vlmpack.backends.fused import choose_fused
from vlmpack.backends.mcore.attention import megatron_params
from vlmpack.backends.mcore.engine import MegatronEngine
from vlmpack.backends.mcore.groups import megatron_on_cpu
from vlmpack.backends.mcore.transformer_engine import RotatedTEAttention
from vlmpack.backends.row_operators import rotate
from vlmpack.encode import Encoder
from vlmpack.packing import slice_for_context
from vlmpack.recipe.schema import ModelSection, ParallelismSection

HEADS, WIDTH = 2, 4
DESCRIBED: list[str] = []
"""What the log says of fused layers, of each engine."""


def fused() -> dict[str, Any]:
    """A step with its layers and our rotation, and how often that was called."""
    calls = []

    def counted(tensors: Any, cos: Any, sin: Any) -> Any:
        calls.append([tuple(x.shape) for x in tensors])
        return rotate(tensors, cos, sin)

    def choose(*asked: Any) -> Any:
        ops, why = choose_fused(*asked)
        return replace(ops, rotate=counted), why

    with liger_everywhere(), patch("vlmpack.backends.mcore.engine.choose_fused", choose):
        step = trained(played_te.VERSIONS[0], Compute(torch.float32, None), "liger")
    return {"step": step, "calls": calls, "said": DESCRIBED[-1]}


def attention_of(size: int) -> Any:
    """Our attention, through Megatron's wrapper, of a rank of a CP group of that size."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        context_parallel_size=size,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    groups = SimpleNamespace(tp=None, cp=object())
    with megatron_on_cpu():
        return RotatedTEAttention(
            config,
            1,
            AttnMaskType.causal,
            "self",
            softmax_scale=None,
            cp_comm_type="p2p",
            pg_collection=groups,
        )


def handed() -> Iterator[Call]:
    """Every row at every size, by version; ranks are checked to be handed the same."""
    torch.distributed.get_process_group_ranks = lambda _: []  # type: ignore[assignment]
    for version, size in product(played_te.VERSIONS, SIZES):
        played_te.play(version)
        extension.TEDotProductAttention.cp_stream = object()
        attention = attention_of(size)
        for name, make in ROWS.items():
            row = make(size)
            params = row.packed_seq_params()
            slots, calls = [], []
            for rank in range(size):
                context = slice_for_context(row, rank=rank, size=size).context
                own = context.row_index.tolist()
                angles = torch.zeros(len(own), WIDTH // 2)
                made = megatron_params(params, cos=angles, sin=angles, context=context, deep=())
                query, key, value = (torch.ones(len(own), HEADS, WIDTH) for _ in range(3))
                attention(
                    query,
                    key,
                    value,
                    None,
                    attn_mask_type=AttnMaskType.causal,
                    packed_seq_params=made,
                )
                calls.append(played_te.CURRENT.calls.pop())
                slots.append(own)
            assert all(call.keys() == calls[0].keys() for call in calls)
            bounds = [value for k, value in calls[-1].items() if k.startswith("cu_seqlens")]
            same = len({id(each) for each in bounds})
            yield Call(version, size, name, calls[-1], slots, len(bounds), same)


def trained(
    version: str, compute: Compute, fused_layers: str = "none"
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Loss and gradient norm of an SGD step of the tiny model, and its weights afterwards. AdamW's
    first step would make as much of a gradient's rounding as of a gradient."""
    played_te.play(version)
    model = ModelSection(
        path=str(TINY_MODEL), backend="mcore", dtype="float32", fused_layers=fused_layers
    )
    parts = (model, ParallelismSection(), Encoder(TINY_MODEL), single_rank(), EVERYTHING)
    engine = MegatronEngine(*parts, compute)
    report, _ = stepper_with(engine, "sgd").train(
        0, in_rows(LAYOUTS["one"]), num_skipped=0, stop=False
    )
    weights = {name: tensor.clone() for name, tensor in engine.whole_tensors()}
    kinds = {type(module).__name__ for module in engine.model.gpt.modules()}
    assert ("RotatedTEAttention" in kinds) is (compute.attention is None)
    DESCRIBED.append(engine.description["fused layers"])
    return [report.loss, report.grad_norm], weights


def main(path: Path) -> None:
    segments = AttentionChoice("segments", segment_attention, "")
    found = {
        "ours": trained(played_te.VERSIONS[0], Compute(torch.float32, segments)),
        "theirs": trained(played_te.VERSIONS[0], Compute(torch.float32, None)),
        "fused": fused(),
        "calls": list(handed()),
    }
    path.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
