"""Qwen-shaped language models: rotary grouped-query attention, gated MLP or experts, RMSNorm.

| Megatron                                   | transformers                                        |
|--------------------------------------------|-----------------------------------------------------|
| embedding.word_embeddings.weight           | embed_tokens.weight, rows split over TP             |
| self_attention.linear_qkv.{weight,bias}    | q, k, v of one query group after another            |
| self_attention.linear_proj.weight          | o_proj.weight, columns split over TP                |
| mlp.linear_fc1.weight                      | gate_proj.weight, up_proj.weight, rows of each      |
| mlp.linear_fc2.weight                      | down_proj.weight, columns split over TP             |
| self_attention.{q,k}_layernorm.weight      | {q,k}_norm.weight                                   |
| mlp.router.weight                          | mlp.gate.weight                                     |
| experts.local_experts.N.linear_fc{1,2}     | one expert of experts.{gate_up,down}_proj           |
| input_layernorm, pre_mlp_layernorm         | input_layernorm, post_attention_layernorm           |
| decoder.final_layernorm.weight             | norm.weight                                         |
| output_layer.weight                        | lm_head.weight, or embed_tokens.weight where tied   |

With Transformer Engine the two norms of a layer live inside the linear layer that follows them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vlmpack.backends.boxes import whole
from vlmpack.backends.mcore.weights.base import Piece, split, stack_pieces

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

_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenLanguageMap:
    """The pieces of one rank's language-model parameters.

    Args:
        prefix: of the decoder in transformers' names, with the final dot.
        head: transformers' name of the output layer's weight.
        hidden: model width.
        heads: query heads.
        groups: key-value heads.
        head_dim: width of a head.
        intermediate: width of the MLP.
        vocabulary: rows of the embedding, without Megatron's padding.
        experts: experts of a mixture-of-experts layer; 0 without.
        expert_intermediate: width of an expert.
        tp_rank, tp_size: tensor parallelism; experts are whole.
        ep_rank, ep_size: expert parallelism.
    """

    prefix: str
    head: str
    hidden: int
    heads: int
    groups: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tp_rank: int
    tp_size: int
    experts: int = 0
    expert_intermediate: int = 0
    ep_rank: int = 0
    ep_size: int = 1

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
            return self._vocabulary(f"{self.prefix}embed_tokens.weight", rows)
        if name == "output_layer.weight":
            return self._vocabulary(self.head, rows)
        if name == "decoder.final_layernorm.weight":
            return self._replicated(f"{self.prefix}norm.weight")
        match = _LAYER.fullmatch(name)
        if match is None:
            raise KeyError(name)
        return self._layer(f"{self.prefix}layers.{first_layer + int(match[1])}.", match[2])

    def _replicated(self, name: str, *shape: int) -> list[Piece]:
        return stack_pieces([whole(name, shape or (self.hidden,))], replicated=True)

    def _vocabulary(self, name: str, rows: int) -> list[Piece]:
        """Rows of the vocabulary; the padding rows at its end belong to no tensor."""
        shape = (self.vocabulary, self.hidden)
        start = self.tp_rank * rows
        stop = min(start + rows, self.vocabulary)
        return stack_pieces([split(name, shape, 0, start, stop)]) if start < stop else []

    def _layer(self, prefix: str, name: str) -> list[Piece]:
        if name in _NORMS:
            return self._replicated(prefix + _NORMS[name])
        if name in _HEAD_NORMS:
            return self._replicated(prefix + _HEAD_NORMS[name], self.head_dim)
        if name == "mlp.router.weight":
            return self._replicated(f"{prefix}mlp.gate.weight", self.experts, self.hidden)
        if expert := _EXPERT.fullmatch(name):
            return self._expert(f"{prefix}mlp.experts.", int(expert[1]), expert[2])
        if name in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            return self._qkv(prefix, name.rsplit(".", 1)[1])
        if name == "self_attention.linear_proj.weight":
            return self._columns(f"{prefix}self_attn.o_proj.weight", self.heads * self.head_dim)
        if name == "mlp.linear_fc2.weight":
            return self._columns(f"{prefix}mlp.down_proj.weight", self.intermediate)
        if name == "mlp.linear_fc1.weight":
            share = self.intermediate // self.tp_size
            start = self.tp_rank * share
            shape = (self.intermediate, self.hidden)
            return stack_pieces(
                [
                    split(f"{prefix}mlp.{part}_proj.weight", shape, 0, start, start + share)
                    for part in ("gate", "up")
                ]
            )
        raise KeyError(prefix + name)

    def _expert(self, prefix: str, local: int, layer: str) -> list[Piece]:
        """One expert, which transformers keeps as one of the rows of a (E, out, in) tensor."""
        number = self.ep_rank * (self.experts // self.ep_size) + local
        inner = {
            "linear_fc1": (2 * self.expert_intermediate, self.hidden),
            "linear_fc2": (self.hidden, self.expert_intermediate),
        }[layer]
        name = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}[layer]
        box = split(prefix + name, (self.experts, *inner), 0, number, number + 1)
        return [Piece(box=box, start=0, stop=inner[0], replicated=False)]

    def _columns(self, name: str, width: int) -> list[Piece]:
        share = width // self.tp_size
        start = self.tp_rank * share
        return stack_pieces([split(name, (self.hidden, width), 1, start, start + share)])

    def _qkv(self, prefix: str, kind: str) -> list[Piece]:
        share = self.groups // self.tp_size
        per_group = self.heads // self.groups
        inner = (self.hidden,) if kind == "weight" else ()
        boxes = []
        for group in range(self.tp_rank * share, (self.tp_rank + 1) * share):
            for part, total, heads in (
                ("q", self.heads, per_group),
                ("k", self.groups, 1),
                ("v", self.groups, 1),
            ):
                start = group * heads * self.head_dim
                boxes.append(
                    split(
                        f"{prefix}self_attn.{part}_proj.{kind}",
                        (total * self.head_dim, *inner),
                        0,
                        start,
                        start + heads * self.head_dim,
                    )
                )
        return stack_pieces(boxes)
