"""Qwen-shaped language models: rotary grouped-query attention, gated MLP or experts, RMSNorm.

| Megatron                                   | transformers                                        |
|--------------------------------------------|-----------------------------------------------------|
| embedding.word_embeddings.weight           | embed_tokens.weight, rows split over TP             |
| self_attention.linear_qkv.{weight,bias}    | q, k, v of one query group after another            |
| self_attention.linear_proj.weight          | o_proj.weight, columns split over TP                |
| self_attention.{in_proj, conv1d, ...}      | linear_attn, see below                              |
| mlp.linear_fc1.weight                      | gate_proj.weight, up_proj.weight, rows of each      |
| mlp.linear_fc2.weight                      | down_proj.weight, columns split over TP             |
| self_attention.{q,k}_layernorm.weight      | {q,k}_norm.weight                                   |
| mlp.router.weight                          | mlp.gate.weight                                     |
| experts.local_experts.N.linear_fc{1,2}     | one expert of experts.{gate_up,down}_proj           |
| mlp.shared_experts.linear_fc{1,2}          | mlp.shared_expert, split as an MLP is               |
| mlp.shared_experts.gate_weight             | mlp.shared_expert_gate.weight                       |
| input_layernorm, pre_mlp_layernorm         | input_layernorm, post_attention_layernorm           |
| decoder.final_layernorm.weight             | norm.weight                                         |
| output_layer.weight                        | lm_head.weight, or embed_tokens.weight where tied   |

Where attention has a gate on its output, it is in the rows of q, behind each head's queries. With
Transformer Engine the two norms of a layer live inside the linear layer that follows them.

A layer of GatedDeltaNet, of which a tensor-parallel rank has the rows and channels of its heads:

| Megatron (self_attention.) | transformers (linear_attn.)                                         |
|----------------------------|---------------------------------------------------------------------|
| in_proj.weight             | in_proj_qkv, rows of q, of k, of v; in_proj_z, in_proj_b, in_proj_a |
| conv1d.weight              | conv1d.weight, channels of q, of k, of v                            |
| dt_bias, A_log             | dt_bias, A_log                                                      |
| out_norm.weight            | norm.weight                                                         |
| out_proj.weight            | out_proj.weight, columns split over TP                              |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from vlmpack.backends.boxes import TensorSlice, whole
from vlmpack.backends.mcore.weights.base import Piece, split, stack_pieces
from vlmpack.backends.mcore.weights.dims import DeltaNetDims, ExpertDims, LanguageDims
from vlmpack.recipe.schema import ParallelismSection


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetMap:
    """The pieces of one layer's mixer on one rank."""

    prefix: str
    dims: DeltaNetDims
    hidden: int
    ranks: int
    rank: int

    def pieces(self, name: str) -> list[Piece]:
        """The pieces of a parameter.

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


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}

_HEAD_NORMS = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}

EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenLanguageMap:
    """One rank's pieces of the language model. Experts are whole under tensor parallelism.

    Args:
        head: transformers' name of what makes logits, where it is not the embedding.
    """

    EMBEDDING: ClassVar[str] = "embed_tokens.weight"
    FINAL_NORM: ClassVar[str] = "norm.weight"

    prefix: str
    dims: LanguageDims
    sizes: ParallelismSection
    tp_rank: int
    ep_rank: int = 0
    head: str = "lm_head"

    def pieces(self, name: str, rows: int, first_layer: int) -> list[Piece]:
        """The pieces of a parameter of Megatron's GPTModel.

        Args:
            name: Megatron's name inside GPTModel.
            rows: length of the local parameter's first dimension.
            first_layer: number of the stage's first layer, from 0.

        Raises:
            KeyError: a parameter that this map does not know.
        """
        if name == "embedding.word_embeddings.weight":
            return self._vocabulary(self.prefix + self.EMBEDDING, rows)
        if name == "output_layer.weight":
            tied = self.prefix + self.EMBEDDING
            return self._vocabulary(tied if self.dims.tied else f"{self.head}.weight", rows)
        if name == "decoder.final_layernorm.weight":
            return self._replicated(self.prefix + self.FINAL_NORM, self.dims.hidden)
        match = _LAYER.fullmatch(name)
        if match is None:
            raise KeyError(name)
        return self._of_layer(first_layer + int(match[1]), match[2])

    def _of_layer(self, number: int, inside: str) -> list[Piece]:
        """The pieces of a layer's parameter, by Megatron's name inside the layer."""
        prefix, delta = f"{self.prefix}layers.{number}.", self.dims.delta_net
        mixer = inside.removeprefix("self_attention.")
        if delta is not None and number in delta.layers and mixer != inside:
            named = DeltaNetMap(
                prefix=f"{prefix}linear_attn.",
                dims=delta,
                hidden=self.dims.hidden,
                ranks=self.sizes.tensor,
                rank=self.tp_rank,
            )
            return named.pieces(mixer)
        return self._layer(prefix, inside)

    def _replicated(self, name: str, *shape: int) -> list[Piece]:
        return stack_pieces([whole(name, shape)], replicated=True)

    def _vocabulary(self, name: str, rows: int) -> list[Piece]:
        """Rows of the vocabulary; the padding rows at its end belong to no tensor."""
        shape = (self.dims.vocabulary, self.dims.hidden)
        start = self.tp_rank * rows
        stop = min(start + rows, self.dims.vocabulary)
        return stack_pieces([split(name, shape, 0, start, stop)]) if start < stop else []

    def _share(self, name: str, shape: tuple[int, ...], dim: int) -> TensorSlice:
        """This TP rank's part of a tensor that is split evenly along a dimension."""
        share = shape[dim] // self.sizes.tensor
        return split(name, shape, dim, self.tp_rank * share, (self.tp_rank + 1) * share)

    def _layer(self, prefix: str, name: str) -> list[Piece]:
        dims = self.dims
        if name in _NORMS:
            return self._replicated(prefix + _NORMS[name], dims.hidden)
        if name in _HEAD_NORMS:
            return self._replicated(prefix + _HEAD_NORMS[name], dims.head_dim)
        if dims.experts is not None and name == "mlp.router.weight":
            return self._replicated(f"{prefix}mlp.gate.weight", dims.experts.count, dims.hidden)
        if dims.experts is not None and (expert := EXPERT.fullmatch(name)):
            return self._expert(f"{prefix}mlp.experts.", dims.experts, int(expert[1]), expert[2])
        if name in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            return self._qkv(f"{prefix}self_attn.", name.rsplit(".", 1)[1])
        if name == "self_attention.linear_proj.weight":
            shape = (dims.hidden, dims.heads * dims.head_dim)
            return stack_pieces([self._share(f"{prefix}self_attn.o_proj.weight", shape, 1)])
        if dims.experts is not None and name == "mlp.shared_experts.gate_weight":
            return self._replicated(f"{prefix}mlp.shared_expert_gate.weight", 1, dims.hidden)
        if dims.experts is not None and name.startswith("mlp.shared_experts."):
            shared = f"{prefix}mlp.shared_expert."
            return self._mlp(shared, name.split(".")[2], dims.experts.shared)
        if name in ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"):
            return self._mlp(f"{prefix}mlp.", name.split(".")[1], dims.intermediate)
        raise KeyError(prefix + name)

    def _mlp(self, prefix: str, layer: str, columns: int) -> list[Piece]:
        """One layer of a gated MLP."""
        if layer == "linear_fc2":
            shape = (self.dims.hidden, columns)
            return stack_pieces([self._share(f"{prefix}down_proj.weight", shape, 1)])
        shape = (columns, self.dims.hidden)
        names = (f"{prefix}{part}_proj.weight" for part in ("gate", "up"))
        return stack_pieces([self._share(name, shape, 0) for name in names])

    def _expert(self, prefix: str, experts: ExpertDims, local: int, layer: str) -> list[Piece]:
        """One expert, which transformers keeps as one of the rows of a (E, out, in) tensor."""
        number = self.ep_rank * (experts.count // self.sizes.expert) + local
        name, inner = self._expert_parts(experts)[layer]
        box = split(prefix + name, (experts.count, *inner), 0, number, number + 1)
        return [Piece(box=box, start=0, stop=inner[0], replicated=False)]

    def _expert_parts(self, experts: ExpertDims) -> dict[str, tuple[str, tuple[int, int]]]:
        """transformers' name and shape of each of an expert's layers."""
        return {
            "linear_fc1": ("gate_up_proj", (2 * experts.intermediate, self.dims.hidden)),
            "linear_fc2": ("down_proj", (self.dims.hidden, experts.intermediate)),
        }

    def _qkv(self, prefix: str, kind: str) -> list[Piece]:
        """Queries, keys and values of one query group after another."""
        dims = self.dims
        share = dims.groups // self.sizes.tensor
        queries = dims.heads // dims.groups * (2 if dims.output_gate else 1)
        inner = (dims.hidden,) if kind == "weight" else ()
        boxes = []
        for group in range(self.tp_rank * share, (self.tp_rank + 1) * share):
            for part, heads in (("q", queries), ("k", 1), ("v", 1)):
                rows = heads * dims.head_dim  # of one group
                shape = (rows * dims.groups, *inner)
                name = f"{prefix}{part}_proj.{kind}"
                boxes.append(split(name, shape, 0, group * rows, (group + 1) * rows))
        return stack_pieces(boxes)
