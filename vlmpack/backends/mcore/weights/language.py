"""The sizes and the map of a language model, by its family.

Qwen-shaped ones have rotary grouped-query attention, a gated MLP or experts, and RMSNorm.

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

Nemotron-H has layers that are a Mamba-2, attention without positions, an MLP or experts.

| Megatron                                   | transformers (layers.N.)                            |
|--------------------------------------------|-----------------------------------------------------|
| input_layernorm, pre_mlp_layernorm         | norm.weight: a layer has one of the two             |
| self_attention.in_proj.weight              | mixer.in_proj: rows of z, of x, of B, of C, of dt   |
| self_attention.conv1d.{weight,bias}        | mixer.conv1d, channels of x, of B, of C             |
| self_attention.{dt_bias, A_log, D}         | mixer.{dt_bias, A_log, D}                           |
| self_attention.norm.weight                 | mixer.norm.weight, split over TP as the heads are   |
| self_attention.out_proj.weight             | mixer.out_proj.weight, columns split over TP        |
| self_attention.linear_{qkv,proj}           | mixer.{q,k,v,o}_proj, as above                      |
| mlp.linear_fc{1,2}.weight                  | mixer.{up,down}_proj.weight                         |
| mlp.router.weight                          | mixer.gate.weight                                   |
| experts.local_experts.N.linear_fc{1,2}     | one expert of mixer.experts.{up,down}_proj          |
| mlp.shared_experts.linear_fc{1,2}          | mixer.shared_experts.{up,down}_proj                 |

A tensor-parallel rank has the rows and channels of its heads of a Mamba-2, and of the groups that
these are in, as Megatron's own mixer divides them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch

from vlmpack.attention import RopeLayout
from vlmpack.backends.boxes import TensorSlice, whole
from vlmpack.backends.mcore.weights import MegatronFamily
from vlmpack.backends.mcore.weights.base import Piece, split, stack_pieces
from vlmpack.backends.mcore.weights.dims import (
    LINEAR,
    DeltaNetDims,
    ExpertDims,
    LanguageDims,
    MambaDims,
)
from vlmpack.errors import CapabilityError
from vlmpack.families.base import ModulePaths
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

    def _part(self, names: str | Sequence[str], shape: tuple[int, ...], dim: int) -> list[Piece]:
        """This TP rank's part of a tensor, or of each of several that are alike, split evenly along
        a dimension."""
        width = shape[dim] // self.sizes.tensor
        cut = (dim, self.tp_rank * width, (self.tp_rank + 1) * width)
        each = [names] if isinstance(names, str) else names
        return stack_pieces([split(name, shape, *cut) for name in each])

    def _rank_rows(self, name: str, parts: tuple[int, ...], *inner: int) -> Iterator[TensorSlice]:
        """This rank's rows of each part of a tensor, one slice after the other."""
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
            return self._part(prefix + name, (delta.value_heads,), 0)
        if name == "conv1d.weight":
            return stack_pieces([*self._rank_rows(prefix + name, mixed, 1, delta.taps)])
        if name == "out_proj.weight":
            return self._part(prefix + name, (hidden, delta.values), 1)
        if name != "in_proj.weight":
            raise KeyError(prefix + name)
        parts = {
            "qkv": mixed,
            "z": (delta.values,),
            "b": (delta.value_heads,),
            "a": (delta.value_heads,),
        }
        slices = (
            self._rank_rows(f"{prefix}in_proj_{part}.weight", rows, hidden)
            for part, rows in parts.items()
        )
        return stack_pieces([*chain.from_iterable(slices)])

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
            return self._part(f"{attention}o_proj.weight", shape, 1)
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
            return self._part(f"{prefix}down_proj.weight", (self.dims.hidden, columns), 1)
        names = [f"{prefix}{part}_proj.weight" for part in self.INTO_MLP]
        return self._part(names, (columns, self.dims.hidden), 0)

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
        own = dims.groups // self.sizes.tensor
        queries = dims.heads // dims.groups * (2 if dims.family.output_gate else 1)
        inner = (dims.hidden,) if kind == "weight" else ()
        boxes = []
        for group in range(self.tp_rank * own, (self.tp_rank + 1) * own):
            for part, heads in (("q", queries), ("k", 1), ("v", 1)):
                rows = heads * dims.head_dim  # of one group
                shape = (rows * dims.groups, *inner)
                name = f"{prefix}{part}_proj.{kind}"
                boxes.append(split(name, shape, 0, group * rows, (group + 1) * rows))
        return stack_pieces(boxes)


BIAS = "e_score_correction_bias"
"""The bias by which experts are chosen, in transformers' names: a buffer of `mixer.gate`."""


def nemotron_h_dims(config: Any, family: MegatronFamily) -> LanguageDims:
    """Sizes from a transformers config, that of a language model alone included.

    Raises:
        CapabilityError: a feature that the mcore engine does not build.
    """
    text = config.get_text_config()
    kinds = tuple(text.layers_block_type)
    for key, found, known in (
        ("mlp_hidden_act", text.mlp_hidden_act, "relu2"),
        ("mamba_hidden_act", text.mamba_hidden_act, "silu"),
        ("mlp_bias", text.mlp_bias, False),
        ("use_bias", text.use_bias, False),
    ):
        if found != known:
            raise CapabilityError(
                f"{key} is {found!r}, the mcore engine knows {known!r}; use model.backend: hf"
            )
    return LanguageDims(
        layers=len(kinds),
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        groups=text.num_key_value_heads,
        head_dim=text.head_dim,
        intermediate=text.intermediate_size if "mlp" in kinds else 0,
        vocabulary=text.vocab_size,
        norm_eps=text.layer_norm_epsilon,
        tied=False,  # the class ties nothing, whatever its config says
        inv_freq=torch.empty(0),  # nothing is rotated
        rope=RopeLayout(mrope_section=None),
        family=family,
        experts=_experts(text, kinds),
        mamba=_mamba(text, kinds),
        kinds=kinds,
        gated_mlp=False,
    )


def _mamba(text: Any, kinds: tuple[str, ...]) -> MambaDims | None:
    layers = frozenset(number for number, kind in enumerate(kinds) if kind == LINEAR)
    if not layers:
        return None
    return MambaDims(
        heads=text.mamba_num_heads,
        head_dim=text.mamba_head_dim,
        groups=text.n_groups,
        state=text.ssm_state_size,
        taps=text.conv_kernel,
        conv_bias=text.use_conv_bias,
        least_step=text.time_step_min,
        layers=layers,
    )


def _experts(text: Any, kinds: tuple[str, ...]) -> ExpertDims | None:
    layers = frozenset(number for number, kind in enumerate(kinds) if kind == "moe")
    if not layers:
        return None
    if text.moe_latent_size is not None:
        raise CapabilityError(
            f"moe_latent_size is {text.moe_latent_size}. megatron-core has projections before and "
            "after the experts only in Transformer Engine's layers, and the mcore engine has "
            "none. Use model.backend: hf"
        )
    if text.n_group != 1 or not text.norm_topk_prob or text.num_experts_per_tok < 2:
        raise CapabilityError(
            f"n_group {text.n_group}, norm_topk_prob {text.norm_topk_prob} and "
            f"num_experts_per_tok {text.num_experts_per_tok}. The mcore engine chooses two or "
            "more of all experts (n_group 1) and renormalises their weights. Use model.backend: "
            "hf"
        )
    return ExpertDims(
        count=text.n_routed_experts,
        top_k=text.num_experts_per_tok,
        intermediate=text.moe_intermediate_size,
        layers=layers,
        shared=text.moe_shared_expert_intermediate_size,
        shared_gate=False,
        score="sigmoid",
        scaling=float(text.routed_scaling_factor),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHMap(QwenLanguageMap):
    """The pieces of one rank's language-model parameters; see `QwenLanguageMap`."""

    EMBEDDING: ClassVar[str] = "embeddings.weight"
    FINAL_NORM: ClassVar[str] = "norm_f.weight"
    INTO_MLP: ClassVar[tuple[str, ...]] = ("up",)
    ATTENTION: ClassVar[str] = "mixer."
    MLP: ClassVar[str] = "mixer."
    SHARED_EXPERT: ClassVar[str] = "mixer.shared_experts."
    NORMS: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("input_layernorm.weight", "pre_mlp_layernorm.weight"), "norm.weight"
    )

    def _stateful(self, prefix: str, number: int, name: str) -> list[Piece] | None:
        mamba = self.dims.mamba
        if mamba is None or number not in mamba.layers:
            return None
        return self._mamba(f"{prefix}mixer.", mamba, name)

    def _mamba(self, prefix: str, mamba: MambaDims, name: str) -> list[Piece]:
        inner, written, heads = mamba.inner, mamba.written, mamba.heads
        mixed = (inner, written, written)
        whole = prefix + name
        if name == "out_proj.weight":
            return self._part(whole, (self.dims.hidden, inner), 1)
        if name == "norm.weight":
            return self._part(whole, (inner,), 0)
        if name in ("dt_bias", "A_log", "D"):
            return self._part(whole, (heads,), 0)
        if name == "conv1d.weight":
            return stack_pieces([*self._rank_rows(whole, mixed, 1, mamba.taps)])
        if name == "conv1d.bias":
            return stack_pieces([*self._rank_rows(whole, mixed)])
        if name == "in_proj.weight":
            rows = (inner, *mixed, heads)
            return stack_pieces([*self._rank_rows(whole, rows, self.dims.hidden)])
        raise KeyError(whole)


def language_dims(config: Any, family: MegatronFamily) -> LanguageDims:
    """Sizes from a transformers config, that of a language model alone included.

    Raises:
        CapabilityError: a feature that the mcore engine does not build.
    """
    if family.one_part_layers:
        return nemotron_h_dims(config, family)
    return LanguageDims.from_transformers(config, family)


def language_map(
    paths: ModulePaths,
    dims: LanguageDims,
    sizes: ParallelismSection,
    *,
    tp_rank: int,
    ep_rank: int = 0,
) -> QwenLanguageMap:
    """The pieces of one rank's parameters."""
    made = NemotronHMap if dims.kinds else QwenLanguageMap
    return made(
        prefix=paths.language + ".",
        dims=dims,
        sizes=sizes,
        tp_rank=tp_rank,
        ep_rank=ep_rank,
        head=paths.head or "lm_head",
    )
