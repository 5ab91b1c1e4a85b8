"""A layer of GatedDeltaNet: Megatron's names of its mixer, and transformers'.

| Megatron (self_attention.) | transformers (linear_attn.)                                         |
|----------------------------|---------------------------------------------------------------------|
| in_proj.weight             | in_proj_qkv, rows of q, of k, of v; in_proj_z, in_proj_b, in_proj_a |
| conv1d.weight              | conv1d.weight, channels of q, of k, of v                            |
| dt_bias, A_log             | dt_bias, A_log                                                      |
| out_norm.weight            | norm.weight                                                         |
| out_proj.weight            | out_proj.weight, columns split over TP                              |

A tensor-parallel rank has the rows and channels of its heads of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vlmpack.backends.boxes import TensorSlice, whole
from vlmpack.backends.mcore.weights.base import Piece, split, stack_pieces
from vlmpack.backends.mcore.weights.layer_dims import DeltaNetDims


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetMap:
    """The pieces of one layer's mixer on one rank.

    Args:
        prefix: of transformers' names, with the final dot.
        dims: sizes of the layer.
        hidden: model width.
        ranks: of tensor parallelism.
        rank: this one of them.
    """

    prefix: str
    dims: DeltaNetDims
    hidden: int
    ranks: int
    rank: int

    def pieces(self, name: str) -> list[Piece]:
        """The pieces of a parameter.

        Args:
            name: Megatron's name inside the mixer.

        Raises:
            KeyError: a parameter that this map does not know.
        """
        dims, prefix = self.dims, self.prefix
        if name == "out_norm.weight":
            box = whole(f"{prefix}norm.weight", (dims.value_width,))
            return stack_pieces([box], replicated=True)
        if name in ("dt_bias", "A_log"):
            return stack_pieces([self._rows(prefix + name, dims.value_heads)])
        if name == "conv1d.weight":
            return stack_pieces([*self._mixed(prefix + name, 1, dims.taps)])
        if name == "out_proj.weight":
            share = dims.values // self.ranks
            start, stop = self.rank * share, (self.rank + 1) * share
            return stack_pieces([split(prefix + name, (self.hidden, dims.values), 1, start, stop)])
        if name != "in_proj.weight":
            raise KeyError(prefix + name)
        return stack_pieces(
            [
                *self._mixed(f"{prefix}in_proj_qkv.weight", self.hidden),
                self._rows(f"{prefix}in_proj_z.weight", dims.values, self.hidden),
                self._rows(f"{prefix}in_proj_b.weight", dims.value_heads, self.hidden),
                self._rows(f"{prefix}in_proj_a.weight", dims.value_heads, self.hidden),
            ]
        )

    def _rows(self, name: str, rows: int, *inner: int) -> TensorSlice:
        share = rows // self.ranks
        return split(name, (rows, *inner), 0, self.rank * share, (self.rank + 1) * share)

    def _mixed(self, name: str, *inner: int) -> Iterator[TensorSlice]:
        """This rank's rows of queries, of keys and of values, one stretch after the other."""
        parts = (self.dims.keys, self.dims.keys, self.dims.values)
        shape, before = (sum(parts), *inner), 0
        for rows in parts:
            start = before + self.rank * rows // self.ranks
            yield split(name, shape, 0, start, start + rows // self.ranks)
            before += rows
