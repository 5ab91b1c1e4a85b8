"""Decoders over rows of one shape: recorded, run eagerly, and as a stream of operators."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.families import tiny_family_folder
from support.samples import text_sample
from support.shards import mixed_samples
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlmpack.attention import choose_attention
from vlmpack.attention.varlen import boundary_attention
from vlmpack.backends.hf.attention import register_attention
from vlmpack.backends.hf.load import load_model
from vlmpack.backends.hf.model import packed_model
from vlmpack.backends.hf.recurrence import recurrence_kinds, replace_kernels
from vlmpack.backends.hf.router_loss import set_experts
from vlmpack.backends.recompute import recompute_layers
from vlmpack.encode import Encoder
from vlmpack.packing import EncodedSample, FixedShape, PackedBatch, pack_batch_sequences
from vlmpack.recurrence import choose_recurrence

CPU = torch.device("cpu")


def packed(
    folder: Path, *, fixed_shape: bool, checkpointing: bool = False, attention: str = "auto"
) -> tuple[Any, Encoder]:
    """The model of a folder with what an engine chooses for rows of that kind, and its encoder."""
    encoder = Encoder(folder)
    model: Any = load_model(folder)
    language = model.get_submodule(encoder.family.modules.language)
    choice = choose_attention(
        attention,
        device=CPU,
        dtype=torch.float32,
        fixed_shape=fixed_shape,  # type: ignore[arg-type]
    )
    language.set_attn_implementation(register_attention(choice))
    set_experts(language)
    kinds = recurrence_kinds(language)
    recurrences = choose_recurrence(
        device=CPU, dtype=torch.float32, kinds=kinds, fixed_shape=fixed_shape
    )
    replace_kernels(language, recurrences)
    if checkpointing:
        recompute_layers(model, "full", draws=False)
        model.train()
    return packed_model(model, encoder), encoder


@dataclass(frozen=True)
class Rows:
    """The rows of a tiny family: fixed ones of one shape, and the same samples as free ones."""

    fixed: list[PackedBatch]
    free: list[PackedBatch]


def text_row(*lengths: int, axes: int = 3) -> list[EncodedSample]:
    """Samples of text, as many tokens long, that learn all but their first token."""
    return [
        text_sample(str(number), range(3, 3 + length), axes=axes, num_targets=length - 1)
        for number, length in enumerate(lengths)
    ]


def rows_of(encoder: Encoder, *, max_sequences: int = 8) -> Rows:
    """Rows of 1 to `max_sequences` of the mixed samples, with many images, one and none."""
    found = [
        encoder.encode(sample.cooked())
        for sample in mixed_samples()
        if encoder.takes_images or not sample.images
    ]
    text = [sample for sample in found if sample.media is None]
    images = [sample for sample in found if sample.media is not None]
    full = (found * max_sequences)[: min(max_sequences, len(found))]
    chosen = [full, full[:1], text[:1], images[:2], full[::-1], text[:2]]
    width = sum(sample.length for sample in found) + 5
    return rows_from([row for row in chosen if row and len(row) <= max_sequences], encoder, width)


def rows_from(
    chosen: Sequence[Sequence[EncodedSample]],
    encoder: Encoder,
    width: int,
    *,
    max_sequences: int = 8,
) -> Rows:
    """Rows of these samples."""
    shape = FixedShape(row_tokens=width, max_sequences=max_sequences)
    pad = encoder.pad_token_id
    return Rows(
        fixed=[pack_batch_sequences(row, pad_token_id=pad, fixed=shape) for row in chosen],
        free=[pack_batch_sequences(row, pad_token_id=pad) for row in chosen],
    )


class EagerRecording:
    """The same stretch over the same buffers, run anew each time: nothing is kept of a row."""

    def __init__(self, stretch: Callable[[], Tensor], wrt: Sequence[Tensor]) -> None:
        self.stretch, self.wrt = stretch, wrt

    def forward(self) -> Tensor:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            self.output = self.stretch()
        return self.output.detach()

    def backward(self, gradient: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", enabled=False):
            return torch.autograd.grad(self.output, self.wrt, gradient)


class _Stream(TorchDispatchMode):
    """Each operator with the shapes and dtypes of its tensors, and its other arguments."""

    def __init__(self, heard: list[str]) -> None:
        super().__init__()
        self.heard = heard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        said = ", ".join(_said(leaf) for leaf in tree_leaves((args, kwargs or {})))
        self.heard.append(f"{func}({said})")
        return func(*args, **(kwargs or {}))


def _said(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        device = "" if leaf.device.type == "cpu" else f"{leaf.device.type} "
        return f"{device}{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return str(leaf._type()) if isinstance(leaf, torch.ScriptObject) else repr(leaf)


class StreamRecording(EagerRecording):
    """Runs eagerly and writes down the operators of each row, forward and backward."""

    def __init__(self, stretch: Callable[[], Tensor], wrt: Sequence[Tensor]) -> None:
        super().__init__(stretch, wrt)
        self.streams: list[list[str]] = []

    def forward(self) -> Tensor:
        self.streams.append([])
        with _Stream(self.streams[-1]):
            return super().forward()

    def backward(self, gradient: Tensor) -> tuple[Tensor, ...]:
        with _Stream(self.streams[-1]):
            return super().backward(gradient)


HOST_READS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal(")
"""Operators that wait for the device, or make shapes of what they find there."""


def host_reads(streams: Sequence[Sequence[str]]) -> list[str]:
    """The operators of all rows that no graph can capture."""
    return [
        each
        for stream in streams
        for each in stream
        if any(name in each for name in HOST_READS)
        or (each.startswith("aten.index.") and re.search(r", (cuda )?bool\[", each))
    ]


def first_difference(streams: Sequence[Sequence[str]]) -> str | None:
    """Where a row's operators differ from the first row's; None where all are the same."""
    first, *others = streams
    for number, other in enumerate(others, start=1):
        if len(first) != len(other):
            return f"row {number}: {len(other)} operators, row 0: {len(first)}"
        for place, (ours, theirs) in enumerate(zip(other, first, strict=True)):
            if ours != theirs:
                return f"row {number}, operator {place}: {ours}, row 0: {theirs}"
    return None


def family(name: str, tmp: Path, **options: Any) -> tuple[Any, Encoder]:
    """`packed` of a tiny family."""
    return packed(tiny_family_folder(name, tmp), **options)


ROW: list[int] = []
"""Lengths of the row that a planted attention is asked for."""


def reads_a_number(query: Any, key: Any, value: Any, params: Any, **options: Any) -> Tensor:
    """An attention with a host read."""
    first = params.cu_seqlens_physical[1].item()
    return boundary_attention(query, key, value, params, **options) * (first > 0)


def bakes_the_longest(query: Any, key: Any, value: Any, params: Any, **options: Any) -> Tensor:
    """An attention that takes the longest segment as a Python number."""
    found = boundary_attention(query, key, value, params, **options)
    return torch.cat((found[: max(ROW)], found[max(ROW) :]))


def has_a_shape_of_the_row(query: Any, key: Any, value: Any, params: Any, **options: Any) -> Tensor:
    """An attention with a shape that follows from what a tensor holds."""
    ends = params.cu_seqlens_physical[1:]
    assert ends[ends < query.shape[0]].ndim == 1
    return boundary_attention(query, key, value, params, **options)


PLANTED = {
    reads_a_number: "aten._local_scalar_dense",
    bakes_the_longest: "aten.slice",
    has_a_shape_of_the_row: "aten.index",
}
"""Attentions that no graph can hold, each with the operator by which it is found."""


def bakes_a_window(query: Any, key: Any, value: Any, params: Any, **options: Any) -> Tensor:
    """An attention that keeps the longest segment of the row that it was recorded on."""
    return boundary_attention(query, key, value, params, **{**options, "window": max(ROW)})
