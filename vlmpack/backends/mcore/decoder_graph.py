"""Megatron's layers of rows of one shape, recorded once and replayed; see `backends.decoder_graph`.

megatron-core's own capture of a layer asserts at replay that there are no `packed_seq_params`: what
a graph reads has to be a tensor, and these are an object. Here the object is made anew of the
buffers for each recording, and the layers are called one after the other, without what Megatron's
block does around them (states of random numbers are set there, which no graph may; nothing draws).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vlmpack.backends.decoder_graph import DecoderGraph, StaticRow, boundaries_alone
from vlmpack.backends.fused import Rotate
from vlmpack.backends.mcore.attention import megatron_params
from vlmpack.backends.recording import Recorder


def capture_layers(decoder: Any, recorder: Recorder, *, rotate: Rotate | None) -> DecoderGraph:
    """Record a stage that has all layers at its first row.

    Rows are those of `RowParams`: `embeds` is (T', 1, D), T' = T / TP with sequence parallelism;
    `where` has cosines and sines, (T, D / 2).

    Collectives inside of layers (tensor parallelism) are recorded with them: ranks that share a row
    record and replay it together.

    Args:
        decoder: Megatron's TransformerBlock.
        recorder: makes the recording.
        rotate: what rotates queries and keys as one kernel.
    """

    def run(row: StaticRow) -> Tensor:
        cos, sin = row.where["cosines"], row.where["sines"]
        width = cos.shape[0]
        params = megatron_params(
            boundaries_alone(row.boundaries, width),
            cos=cos,
            sin=sin,
            context=None,
            deep=row.deep,
            rotate=rotate,
            width=width,
        )
        hidden = row.embeds
        for layer in decoder.layers:
            hidden, _ = layer(hidden_states=hidden, attention_mask=None, packed_seq_params=params)
        output: Tensor = decoder.final_layernorm(hidden)
        return output

    # Megatron's hooks add each gradient to `main_grad` and drop it.
    return DecoderGraph(decoder, run, recorder, hooks_take_gradients=True)
