"""Nemotron-H: layers that are a Mamba-2, attention without positions, an MLP or experts.

| Megatron                                   | transformers (layers.N.)                            |
|--------------------------------------------|-----------------------------------------------------|
| input_layernorm, pre_mlp_layernorm         | norm.weight: a layer has one of the two             |
| self_attention.in_proj.weight              | mixer.in_proj: rows of z, of x, of B, of C, of dt   |
| self_attention.conv1d.{weight,bias}        | mixer.conv1d, channels of x, of B, of C             |
| self_attention.{dt_bias, A_log, D}         | mixer.{dt_bias, A_log, D}                           |
| self_attention.norm.weight                 | mixer.norm.weight, split over TP as the heads are   |
| self_attention.out_proj.weight             | mixer.out_proj.weight, columns split over TP        |
| self_attention.linear_{qkv,proj}           | mixer.{q,k,v,o}_proj, as `qwen` has them            |
| mlp.linear_fc{1,2}.weight                  | mixer.{up,down}_proj.weight                         |
| mlp.router.weight                          | mixer.gate.weight                                   |
| experts.local_experts.N.linear_fc{1,2}     | one expert of mixer.experts.{up,down}_proj          |
| mlp.shared_experts.linear_fc{1,2}          | mixer.shared_experts.{up,down}_proj                 |

A tensor-parallel rank has the rows and channels of its heads of a Mamba-2, and of the groups that
these are in, as Megatron's own mixer shares them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vlmpack.attention import RopeLayout
from vlmpack.backends.mcore.weights import MegatronFamily
from vlmpack.backends.mcore.weights.base import Piece, stack_pieces
from vlmpack.backends.mcore.weights.dims import LINEAR, ExpertDims, LanguageDims, MambaDims
from vlmpack.backends.mcore.weights.qwen import QwenLanguageMap
from vlmpack.errors import CapabilityError

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
            f"moe_latent_size is {text.moe_latent_size}: megatron-core has projections in front of "
            f"experts and behind them in Transformer Engine's layers alone, and the mcore engine "
            f"has none of its own; use model.backend: hf"
        )
    if text.n_group != 1 or not text.norm_topk_prob or text.num_experts_per_tok < 2:
        raise CapabilityError(
            f"n_group {text.n_group}, norm_topk_prob {text.norm_topk_prob} and "
            f"num_experts_per_tok {text.num_experts_per_tok}: the mcore engine chooses two or more "
            f"of all experts (n_group 1) and renormalises their weights; use model.backend: hf"
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
            return self._share(whole, (self.dims.hidden, inner), 1)
        if name == "norm.weight":
            return self._share(whole, (inner,), 0)
        if name in ("dt_bias", "A_log", "D"):
            return self._share(whole, (heads,), 0)
        if name == "conv1d.weight":
            return stack_pieces([*self._stretches(whole, mixed, 1, mamba.taps)])
        if name == "conv1d.bias":
            return stack_pieces([*self._stretches(whole, mixed)])
        if name == "in_proj.weight":
            rows = (inner, *mixed, heads)
            return stack_pieces([*self._stretches(whole, rows, self.dims.hidden)])
        raise KeyError(whole)
