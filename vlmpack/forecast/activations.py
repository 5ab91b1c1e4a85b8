"""Bytes that one layer of a decoder keeps of each token for the backward pass.

The decoder has width h, its query and key heads have widths q and k. A token passes f columns of
the MLP. A number takes e bytes, and a norm keeps n bytes of a column.

    norms         n of each column that passes one, so n h for each norm over the width
    normed heads  n - e of each column, since only a rotation reads their output
    attention     (2 q + 2 k) e, and 3 e of each column of a gate behind it
    MLP           4 f e, or 3 f e without a gate
    experts       3 e of each column of their copies of a token
    own inputs    6 p e and two norms of p, for per-layer inputs of width p
    autocast      2 h e more of attention and h e more of a gated MLP, since each matrix casts its
                  input anew, unless a fused norm makes the dtype that they take
    local layers  Megatron's keep f e more of a gated MLP and (q + k) e more of attention

A recurrence has D channels of the convolution, and H heads with keys of K and values of V columns.
Its keys have H_k K columns before heads share them, and its chunks C slots. It computes in float32,
whatever type the model computes in.

    convolution   3 D, 2 D where its input is bfloat16
    delta rule    5 H K + 4 H V + 7 H C + 2 H K V / C, in bfloat16 2 H_k K more
    scan          2 H_k K + 4 H K + 2 H V + 4 H C + 2 H K V / C, in bfloat16 H V more
    gated norm    6 H V, 5 H V in bfloat16
    steps         12 H
    LFM2          6 D, 4 D in bfloat16, for the convolution alone with its gates

Packages' kernels keep their inputs and compute anew in the backward pass what else they need:

    convolution              2 D e
    flash-linear-attention   (2 H_k K + H V + 64 H) e
    mamba-ssm                H V e

With `model.fused_layers` n covers the norm's input and output. It is 2 e, under autocast 4 + e. A
gated MLP keeps 3 f e, Megatron's too. Rotations keep only cos and sin, fused or not.

`selective` recomputation keeps the outputs of matrix products and attention:

    attention     (2 q + 2 k) e, and e of a gate's columns
    MLP           2 f e, or f e without a gate
    experts       e of each column of their copies
    recurrence    the output of its projection
    projections   h e of each one back to the width

The counts for norms, attention and MLP follow Korthikanti et al., 2205.05198, section 4, without
dropout and without attention scores, which varlen kernels do not keep. Those for recurrences were
counted from what autograd keeps of `vlmpack/recurrence`, over sizes that vary one by one. Those for
packages were counted from the tensors that they save.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from vlmpack.forecast.parameters import LayerSizes, RecurrentSizes
from vlmpack.recipe.schema import ModelSection
from vlmpack.recurrence import KINDS, Kind, packaged_kinds
from vlmpack.recurrence.rows import chunk_size

PACKAGES = {
    "convolution": "causal-conv1d",
    "delta_rule": "flash-linear-attention",
    "scan": "mamba-ssm",
}
"""Where a kernel for each kind of recurrence comes from."""

KERNEL_CHUNK = 64
"""Slots of a chunk of the packages' delta rule."""


@dataclass(frozen=True, slots=True)
class Recurrences:
    """How recurrences run.

    Args:
        chunk: C, slots of a chunk of the torch forms.
        kernels: kinds that a package's kernel computes.
    """

    chunk: int = 64
    kernels: Collection[Kind] = ()


def recurrences_on(device: torch.device, model: ModelSection) -> Recurrences:
    """How recurrences will run on a device, by the recipe and the installed packages."""
    kinds: Collection[Kind] = ()
    if device.type == "cuda" and model.recurrence != "torch":
        needs_kernels = model.recurrence == "kernels"  # nothing else runs
        kinds = KINDS if needs_kernels else packaged_kinds(getattr(torch, model.dtype))
    return Recurrences(chunk_size(device), kinds)


@dataclass(frozen=True, slots=True)
class Forms:
    """The implementations of parts of layers.

    Args:
        recurrences: how those run.
        norms: whether an RMS norm is one kernel.
        activations: whether the activation of a gated MLP is.
        cuda: whether the head's chunks are a GPU's.
        captured: whether the decoder is replayed.
    """

    recurrences: Recurrences = Recurrences()
    norms: bool = False
    activations: bool = False
    cuda: bool = True
    captured: bool = False


def forms_on(device: torch.device, model: ModelSection, *, captured: bool = False) -> Forms:
    """The implementations on a device, by the recipe and the installed packages."""
    from vlmpack.backends.fused import is_fused

    (norms, gated), cuda = is_fused(model.fused_layers, device), device.type == "cuda"
    megatrons = model.fused_layers != "none" and cuda and model.backend == "mcore"
    return Forms(
        recurrences_on(device, model),
        norms=norms,
        activations=gated or megatrons,
        cuda=cuda,
        captured=captured,
    )


@dataclass(frozen=True, slots=True)
class Numbers:
    """The bytes that a column of a token takes.

    Args:
        number: e, bytes of an activation.
        norm: n, bytes that a norm keeps.
        head_norm: those that a norm of heads keeps beside its output.
        cast: whether each matrix casts its input anew, as under autocast.
        mixed: whether layers are Megatron's local ones: queries, keys and values are one matrix's,
            which lives as long as the values do.
        gated: how often a gated MLP keeps its columns.
    """

    number: int
    norm: int
    head_norm: int
    cast: bool = False
    mixed: bool = False
    gated: int = 4


def layer_bytes(
    layer: LayerSizes, hidden: int, numbers: Numbers, recurrences: Recurrences
) -> tuple[int, int, int]:
    """Bytes a token, by what divides them.

    Returns:
        Those of norms over the width (a sequence-parallel rank has its part), those of heads and
        columns (a tensor-parallel rank has its part), and those that every rank keeps.
    """
    e = numbers.number
    wide = e * (2 * layer.query + 2 * layer.key + 3 * layer.gate)
    wide += e * (numbers.gated if layer.gated else 3) * layer.mlp
    wide += numbers.head_norm * layer.head_norms
    if numbers.mixed:
        wide += e * (layer.query + layer.key)
    whole = 3 * e * layer.sent + (6 * e + 2 * numbers.norm) * layer.own_input
    if layer.recurrent is not None:
        wide += _recurrent_bytes(layer.recurrent, e, recurrences)
    norms = numbers.norm * layer.norms
    if numbers.cast:  # query, key and value; gate and up
        norms += e * (2 * bool(layer.query and layer.key))
        norms += e * bool(layer.mlp and layer.gated and not layer.sent)
    return norms * hidden, wide, whole


def product_bytes(layer: LayerSizes, hidden: int, e: int) -> tuple[int, int]:
    """Bytes a token of what a layer's matrix products and attention make.

    Returns:
        Those of heads and columns (a tensor-parallel rank has its part), and those that every rank
        keeps.
    """
    wide = e * (2 * layer.query + 2 * layer.key + layer.gate)
    wide += e * (2 if layer.gated else 1) * layer.mlp
    back = bool(layer.query) + bool(layer.mlp and not layer.sent) + bool(layer.own_input)
    whole = e * (layer.sent + layer.own_input)
    if layer.recurrent is not None:
        back += 1
        wide += e * _projected(layer.recurrent)
    return wide, whole + e * hidden * back


def _projected(sizes: RecurrentSizes) -> int:
    """Columns of what enters a recurrence, gates included."""
    if sizes.kind == "convolution":
        return 3 * sizes.channels
    return sizes.channels + sizes.inner + (2 if sizes.kind == "delta_rule" else 1) * sizes.heads


def _recurrent_bytes(sizes: RecurrentSizes, e: int, recurrences: Recurrences) -> int:
    low, packaged = e < 4, recurrences.kernels
    if sizes.kind == "convolution":
        each = 6 * e if sizes.kind in packaged else 16 if low else 24
        return each * sizes.channels
    convolution = 2 * e if "convolution" in packaged else 8 if low else 12
    rule = rule_bytes(sizes, e, recurrences)
    norm, steps = 4 * (5 if low else 6) * sizes.inner, 48 * sizes.heads
    return convolution * sizes.channels + rule + norm + steps


def rule_bytes(sizes: RecurrentSizes, e: int, recurrences: Recurrences) -> int:
    """Bytes a token of the delta rule or the scan alone, its output included where it keeps it."""
    shared, inner, heads = sizes.heads * sizes.key_width, sizes.inner, sizes.heads
    delta_rule = sizes.kind == "delta_rule"
    if sizes.kind in recurrences.kernels:
        return e * (inner + (2 * sizes.keys + KERNEL_CHUNK * heads) * delta_rule)
    chunk, low = recurrences.chunk, e < 4
    states = 2 * sizes.key_width * inner // chunk
    if delta_rule:
        return 4 * (5 * shared + 4 * inner + 7 * heads * chunk + states + 2 * sizes.keys * low)
    own = 2 * sizes.keys + 4 * shared + 2 * inner + 4 * heads * chunk
    return 4 * (own + states + inner * low)


def state_lines(
    decoder: Sequence[LayerSizes], hidden: int, numbers: Numbers, recurrences: Recurrences
) -> tuple[str, ...]:
    """The memory of layers that carry state, in words. Empty if there are none."""
    layers = [layer for layer in decoder if layer.recurrent is not None]
    kinds = {layer.recurrent.kind for layer in layers if layer.recurrent is not None}
    if not kinds:
        return ()

    def mean(form: Recurrences) -> int:
        return sum(sum(layer_bytes(one, hidden, numbers, form)) for one in layers) // len(layers)

    if kinds <= {*recurrences.kernels}:
        return (
            f"a layer that carries state, by a package's kernel: {mean(recurrences):,} bytes a "
            "token",
        )
    packages = " and ".join(PACKAGES[kind] for kind in sorted({"convolution", *kinds}))
    return (
        f"a layer that carries state, by torch's operators: {mean(recurrences):,} bytes a token; "
        f"with {packages}, for CUDA: {mean(Recurrences(kernels=KINDS)):,}",
    )
