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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from vlmpack.backends.boxes import TensorSlice, whole
from vlmpack.backends.mcore.weights.base import Piece, split, stack_pieces
from vlmpack.backends.mcore.weights.dims import DeltaNetDims, ExpertDims, LanguageDims
from vlmpack.recipe.schema import ParallelismSection

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

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
    INTO_MLP: ClassVar[tuple[str, ...]] = ("gate", "up")
    ATTENTION: ClassVar[str] = "self_attn."
    MLP: ClassVar[str] = "mlp."
    SHARED_EXPERT: ClassVar[str] = "mlp.shared_expert."
    NORMS: ClassVar[Mapping[str, str]] = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    }

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

    def _stateful(self, prefix: str, number: int, name: str) -> list[Piece] | None:
        """What a layer that carries state has under `self_attention`; None of another layer."""
        delta = self.dims.delta_net
        if delta is None or number not in delta.layers:
            return None
        return self._delta_net(f"{prefix}linear_attn.", delta, name)

    def _replicated(self, name: str, *shape: int) -> list[Piece]:
        return stack_pieces([whole(name, shape)], replicated=True)

    def _vocabulary(self, name: str, rows: int) -> list[Piece]:
        """Rows of the vocabulary; the padding rows at its end belong to no tensor."""
        shape = (self.dims.vocabulary, self.dims.hidden)
        start = self.tp_rank * rows
        stop = min(start + rows, self.dims.vocabulary)
        return stack_pieces([split(name, shape, 0, start, stop)]) if start < stop else []

    def _share(self, names: str | Sequence[str], shape: tuple[int, ...], dim: int) -> list[Piece]:
        """This TP rank's part of a tensor, or of each of several that are alike, split evenly along
        a dimension."""
        share = shape[dim] // self.sizes.tensor
        cut = (dim, self.tp_rank * share, (self.tp_rank + 1) * share)
        each = [names] if isinstance(names, str) else names
        return stack_pieces([split(name, shape, *cut) for name in each])

    def _stretches(self, name: str, parts: tuple[int, ...], *inner: int) -> Iterator[TensorSlice]:
        """This rank's rows of each part of a tensor, one stretch after the other."""
        before, ranks = 0, self.sizes.tensor
        for rows in parts:
            start = before + self.tp_rank * rows // ranks
            yield split(name, (sum(parts), *inner), 0, start, start + rows // ranks)
            before += rows

    def _delta_net(self, prefix: str, delta: DeltaNetDims, name: str) -> list[Piece]:
        """What a layer of GatedDeltaNet has under `self_attention`."""
        hidden, mixed = self.dims.hidden, (delta.keys, delta.keys, delta.values)
        if name == "out_norm.weight":
            return self._replicated(f"{prefix}norm.weight", delta.value_width)
        if name in ("dt_bias", "A_log"):
            return self._share(prefix + name, (delta.value_heads,), 0)
        if name == "conv1d.weight":
            return stack_pieces([*self._stretches(prefix + name, mixed, 1, delta.taps)])
        if name == "out_proj.weight":
            return self._share(prefix + name, (hidden, delta.values), 1)
        if name != "in_proj.weight":
            raise KeyError(prefix + name)
        parts = {
            "qkv": mixed,
            "z": (delta.values,),
            "b": (delta.value_heads,),
            "a": (delta.value_heads,),
        }
        stretches = (
            self._stretches(f"{prefix}in_proj_{part}.weight", rows, hidden)
            for part, rows in parts.items()
        )
        return stack_pieces([*chain.from_iterable(stretches)])

    def _of_layer(self, number: int, name: str) -> list[Piece]:
        """The pieces of a layer's parameter, by Megatron's name inside the layer."""
        dims, experts, prefix = self.dims, self.dims.experts, f"{self.prefix}layers.{number}."
        attention, mlp = prefix + self.ATTENTION, prefix + self.MLP
        part, _, own = name.partition(".")
        stateful = self._stateful(prefix, number, own) if part == "self_attention" else None
        if stateful is not None:
            return stateful
        if name in self.NORMS:
            return self._replicated(prefix + self.NORMS[name], dims.hidden)
        if name in _HEAD_NORMS:
            return self._replicated(prefix + _HEAD_NORMS[name], dims.head_dim)
        if experts is not None and name == "mlp.router.weight":
            return self._replicated(f"{mlp}gate.weight", experts.count, dims.hidden)
        if experts is not None and (expert := EXPERT.fullmatch(name)):
            return self._expert(f"{mlp}experts.", experts, int(expert[1]), expert[2])
        if name in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            return self._qkv(attention, name.rsplit(".", 1)[1])
        if name == "self_attention.linear_proj.weight":
            shape = (dims.hidden, dims.heads * dims.head_dim)
            return self._share(f"{attention}o_proj.weight", shape, 1)
        if experts is not None and name == "mlp.shared_experts.gate_weight":
            return self._replicated(f"{mlp}shared_expert_gate.weight", 1, dims.hidden)
        if experts is not None and name.startswith("mlp.shared_experts."):
            return self._mlp(prefix + self.SHARED_EXPERT, name.split(".")[2], experts.shared)
        if name in ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"):
            return self._mlp(mlp, name.split(".")[1], dims.intermediate)
        raise KeyError(prefix + name)

    def _mlp(self, prefix: str, layer: str, columns: int) -> list[Piece]:
        """One layer of an MLP."""
        if layer == "linear_fc2":
            return self._share(f"{prefix}down_proj.weight", (self.dims.hidden, columns), 1)
        names = [f"{prefix}{part}_proj.weight" for part in self.INTO_MLP]
        return self._share(names, (columns, self.dims.hidden), 0)

    def _expert(self, prefix: str, experts: ExpertDims, local: int, layer: str) -> list[Piece]:
        """One expert, which transformers keeps as one of the rows of a (E, out, in) tensor."""
        number = self.ep_rank * (experts.count // self.sizes.expert) + local
        into, hidden, inside = self.INTO_MLP, self.dims.hidden, experts.intermediate
        name, inner = f"{'_'.join(into)}_proj", (len(into) * inside, hidden)
        if layer == "linear_fc2":
            name, inner = "down_proj", (hidden, inside)
        box = split(prefix + name, (experts.count, *inner), 0, number, number + 1)
        return [Piece(box=box, start=0, stop=inner[0], replicated=False)]

    def _qkv(self, prefix: str, kind: str) -> list[Piece]:
        """Queries, keys and values of one query group after another."""
        dims = self.dims
        share = dims.groups // self.sizes.tensor
        queries = dims.heads // dims.groups * (2 if dims.family.output_gate else 1)
        inner = (dims.hidden,) if kind == "weight" else ()
        boxes = []
        for group in range(self.tp_rank * share, (self.tp_rank + 1) * share):
            for part, heads in (("q", queries), ("k", 1), ("v", 1)):
                rows = heads * dims.head_dim  # of one group
                shape = (rows * dims.groups, *inner)
                name = f"{prefix}{part}_proj.{kind}"
                boxes.append(split(name, shape, 0, group * rows, (group + 1) * rows))
        return stack_pieces(boxes)
