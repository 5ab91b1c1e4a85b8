"""Megatron's layers of rows of one shape, recorded once and replayed; see `backends.decoder_graph`.

megatron-core's own capture of a layer asserts at replay that there are no `packed_seq_params`,
because a graph reads only tensors. Here that object is built from the buffers for each recording.
The layers are called one after the other, without the random-number states that Megatron's block
sets around them. No graph may set these, and nothing draws.

Where tokens are sent to experts, the host must know how many each gets, which no graph allows. A
layer's mixer is then recorded alone, with its norm and its residual sum, and the rest runs between:

    dense      [ every layer, final norm ]
    experts    [ mixer 0 ] MLP 0 [ mixer 1 ] MLP 1 ...         a recording each

Collectives inside the recording (tensor and context parallelism) are recorded too. Ranks that share
a row record and replay it together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from vlmpack.backends.decoder_graph import DecoderGraph, Recorder, StaticRow, boundaries_alone
from vlmpack.backends.fused import Rotate
from vlmpack.backends.mcore.attention import RowParams, megatron_params
from vlmpack.backends.mcore.config import has_mixer
from vlmpack.packing import Batch

ORDER = "natural order"
"""The name of the order of context-parallel ranks' slices, in what a recording reads of a row."""


def static_params(row: StaticRow, rotate: Rotate | None) -> RowParams:
    """The layers' params of a row whose numbers the host does not know.

    Args:
        row: `where` has cosines and sines, (T / CP, R / 2), and under context parallelism the
            natural order, (T,).
    """
    cos, sin = row.where["cosines"], row.where["sines"]
    order = row.where.get(ORDER)
    width = cos.shape[0] if order is None else order.shape[0]
    return megatron_params(
        boundaries_alone(row.boundaries, width),
        cos=cos,
        sin=sin,
        context=None,
        deep=row.deep,
        rotate=rotate,
        width=width,
        natural_order=order,
    )


def capture_layers(decoder: Any, recorder: Recorder, *, rotate: Rotate | None) -> DecoderGraph:
    """Record a stage that has all layers at its first row, (T', 1, D) of `RowParams`."""

    def run(row: StaticRow) -> Tensor:
        params = static_params(row, rotate)
        hidden = row.embeds
        for layer in decoder.layers:
            hidden, _ = layer(hidden_states=hidden, attention_mask=None, packed_seq_params=params)
        output: Tensor = decoder.final_layernorm(hidden)
        return output

    # Megatron's hooks add each gradient to `main_grad` and drop it.
    return DecoderGraph(decoder, run, recorder, hooks_take_gradients=True)


def recomputed_parts(model: Any, *, captured: bool) -> list[dict[int, nn.Module]]:
    """The part of each layer that is recomputed as one. It is the whole layer, unless a mixer is
    recorded alone."""
    layers = {layer.layer_number - 1: layer for layer in model.gpt.decoder.layers}
    if not captured or model.dims.experts is None:
        return [layers]
    return [
        {
            place: module
            for place, layer in layers.items()
            if not isinstance(module := getattr(layer, part), IdentityOp)
        }
        for part in ("self_attention", "mlp")
    ]


class MixerGraphs:
    """The recorded mixers of a stage with all layers, replayed where the row's params have
    `replayed`.
    """

    def __init__(self, layers: Sequence[Any], recorder: Recorder, *, rotate: Rotate | None) -> None:
        self.rotate = rotate
        self.graphs: list[DecoderGraph] = []
        for layer in filter(has_mixer, layers):
            own = layer._forward_attention
            run = partial(self._run, own)
            graph = DecoderGraph(layer, run, recorder, hooks_take_gradients=True)
            layer._forward_attention = partial(_replayed, own, graph)
            self.graphs.append(graph)

    def _run(self, own: Callable[..., Any], row: StaticRow) -> Tensor:
        hidden: Tensor
        params = static_params(row, self.rotate)
        hidden, _ = own(hidden_states=row.embeds, attention_mask=None, packed_seq_params=params)
        return hidden

    def takes(self, batch: Batch) -> bool:
        """As `DecoderGraph.takes`."""
        return self.graphs[0].takes(batch)

    @property
    def captures(self) -> int:
        """Recordings of a layer; of each as many."""
        return self.graphs[0].captures

    @property
    def replays(self) -> int:
        """Rows that were replayed."""
        return self.graphs[0].replays


def _replayed(
    own: Callable[..., Any], graph: DecoderGraph, *, packed_seq_params: RowParams, **given: Any
) -> tuple[Tensor, None]:
    """In the place of a layer's own part in front of its MLP."""
    if packed_seq_params.replayed is None:
        output: tuple[Tensor, None] = own(packed_seq_params=packed_seq_params, **given)
        return output
    boundaries = packed_seq_params.cu_seqlens_q
    assert boundaries is not None
    row = StaticRow(
        embeds=given["hidden_states"], boundaries=boundaries, where=packed_seq_params.replayed
    )
    return graph(row), None
