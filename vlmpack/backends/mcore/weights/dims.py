"""Sizes of a language model from the model folder's config, and its rotary frequencies.

`LanguageDims` has those of a Qwen-shaped model. Other classes have those of layers that are neither
attention nor an MLP. Frequencies follow the plain rule, or the scaling of Llama 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import pi
from typing import Any, Literal

import torch
from torch import Tensor

from vlmpack.attention import RopeLayout
from vlmpack.backends.mcore.weights import MegatronFamily
from vlmpack.errors import CapabilityError
from vlmpack.recipe.head_degrees import shares_heads
from vlmpack.recipe.schema import ParallelismSection
from vlmpack.recipe.shared_sizes import SharedSizes
from vlmpack.recurrence import Kind


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """(D / 2,) float32: theta^(-2i / D) (RoFormer, 2104.09864), scaled.

    Llama 3.1 divides slow frequencies by `factor`, keeps fast ones and interpolates those in
    between, for contexts beyond the one that it was pretrained on. Wavelengths longer than
    context / `low_freq_factor` tokens are slow, those shorter than context / `high_freq_factor` are
    fast; the context is that of the first pretraining.

    Args:
        rope: `rope_parameters` of a transformers config.
        head_dim: D, width of a head.

    Raises:
        CapabilityError: another rule.
    """
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise CapabilityError(
            f"rope_type {kind!r} is not in the mcore engine, which knows 'default' and "
            f"'llama3'; use model.backend: hf"
        )
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32)
    frequencies: Tensor = 1.0 / (rope["rope_theta"] ** (exponents / head_dim))
    if kind == "default":
        return frequencies
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * pi)
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = (1 - ramp) * frequencies / rope["factor"] + ramp * frequencies
    return scaled


LINEAR = "linear_attention"
"""What config.json calls a layer that carries state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDims:
    """A mixture of experts.

    Args:
        layers: numbers of the layers that have experts; the others have one MLP.
        shared: width of the expert for all tokens; 0 without.
        shared_gate: whether the shared expert has its own gate.
        score: what turns router logits into weights. `softmax` is over the chosen experts, which is
            that over all, renormalised. `sigmoid` is of each expert, renormalised over the chosen
            ones. These are chosen by the sigmoids and a bias that is no parameter.
    """

    count: int
    top_k: int
    intermediate: int
    layers: frozenset[int]
    shared: int = 0
    shared_gate: bool = True
    score: Literal["softmax", "sigmoid"] = "softmax"
    scaling: float = 1.0

    @classmethod
    def from_transformers(cls, text: Any) -> ExpertDims | None:
        """Read a transformers text config; None without experts."""
        count = getattr(text, "num_experts", 0) or getattr(text, "num_local_experts", 0)
        if not count:
            return None
        step = getattr(text, "decoder_sparse_step", 1)
        dense = set(getattr(text, "mlp_only_layers", None) or ())
        return cls(
            count=count,
            top_k=text.num_experts_per_tok,
            intermediate=text.moe_intermediate_size,
            layers=frozenset(
                layer
                for layer in range(text.num_hidden_layers)
                if layer not in dense and (layer + 1) % step == 0
            ),
            shared=getattr(text, "shared_expert_intermediate_size", 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetDims:
    """Layers of GatedDeltaNet instead of attention, by number in `layers`. `taps` is the
    convolution's width.

    Each of `key_heads` serves as many of `value_heads`.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    layers: frozenset[int]

    @property
    def keys(self) -> int:
        """Columns of all keys."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Columns of all values."""
        return self.value_heads * self.value_width

    @classmethod
    def from_transformers(cls, text: Any) -> DeltaNetDims | None:
        """Read a transformers text config; None without such layers."""
        kinds = getattr(text, "layer_types", None) or ()
        layers = frozenset(n for n, kind in enumerate(kinds) if kind == LINEAR)
        if not layers:
            return None
        return cls(
            key_heads=text.linear_num_key_heads,
            value_heads=text.linear_num_value_heads,
            key_width=text.linear_key_head_dim,
            value_width=text.linear_value_head_dim,
            taps=text.linear_conv_kernel_dim,
            layers=layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaDims:
    """Layers of Mamba-2, by number in `layers`. `taps` is the convolution's width.

    The heads of a group share a norm, and what they write and read, of width `state`. Steps are
    kept above `least_step`.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    conv_bias: bool
    least_step: float
    layers: frozenset[int]

    @property
    def inner(self) -> int:
        """Columns of all heads."""
        return self.heads * self.head_dim

    @property
    def written(self) -> int:
        """Columns of what all groups write, and of what they read."""
        return self.groups * self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageDims:
    """The language model's sizes, as transformers' config gives them.

    Args:
        padding: the token whose embedding is not trained, as torch's `padding_idx`; None without.
        inv_freq: (R / 2,) float32, frequencies of the rotary positions, R columns of a head.
        deep_features: layers after which DeepStack features are added.
        kinds: for layers of one part, what each is: `linear_attention`, `full_attention`, `mlp` or
            `moe`. Empty where each is a mixer with an MLP.
        gated_mlp: whether MLPs and experts are SwiGLU. Otherwise they are a squared ReLU between
            two products.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    intermediate: int
    vocabulary: int
    norm_eps: float
    tied: bool
    inv_freq: Tensor
    rope: RopeLayout
    family: MegatronFamily
    experts: ExpertDims | None = None
    padding: int | None = None
    deep_features: int = 0
    delta_net: DeltaNetDims | None = None
    mamba: MambaDims | None = None
    kinds: tuple[str, ...] = ()
    gated_mlp: bool = True

    @classmethod
    def from_transformers(cls, config: Any, family: MegatronFamily) -> LanguageDims:
        """Read a transformers config, that of a language model alone included.

        Raises:
            CapabilityError: a feature that the Megatron engine does not build.
        """
        text = config.get_text_config()
        rope = text.rope_parameters
        if text.hidden_act != "silu":
            raise CapabilityError(f"hidden_act {text.hidden_act!r}, the mcore engine knows 'silu'")
        kinds = {*(getattr(text, "layer_types", None) or ())} - {"full_attention", LINEAR}
        if kinds:
            raise CapabilityError(
                f"layers of {', '.join(sorted(kinds))} are not in the mcore engine; use "
                f"model.backend: hf"
            )
        # A language model alone counts along one axis, which is then all of them.
        section = rope.get("mrope_section") if text is not config else None
        vision = config.to_dict().get("vision_config") or {}
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=text.num_attention_heads,
            groups=text.num_key_value_heads,
            head_dim=head_dim,
            intermediate=getattr(text, "intermediate_size", 0),  # none where all are experts
            vocabulary=text.vocab_size,
            norm_eps=text.rms_norm_eps,
            tied=config.tie_word_embeddings,
            inv_freq=inverse_frequencies(
                rope, int(head_dim * rope.get("partial_rotary_factor", 1.0))
            ),
            rope=RopeLayout(
                mrope_section=tuple(section) if section else None,
                interleaved=family.interleaved_rope,
            ),
            family=family,
            experts=ExpertDims.from_transformers(text),
            deep_features=len(vision.get("deepstack_visual_indexes", ())),
            delta_net=DeltaNetDims.from_transformers(text),
        )

    @property
    def state_kinds(self) -> tuple[Kind, ...]:
        """The kinds of recurrence in layers that carry state. Empty without such layers."""
        if self.mamba is not None:
            return ("convolution", "scan")
        return ("convolution", "delta_rule") if self.delta_net is not None else ()

    def check_captured(self, sizes: ParallelismSection) -> None:
        """Raise CapabilityError where context parallelism cannot divide a captured row's heads."""
        if not shares_heads(self.heads, self.groups, sizes.tensor, sizes.context):
            raise CapabilityError(
                f"parallelism.context is {sizes.context}. With parallelism.tensor {sizes.tensor} "
                f"it does not divide the {self.heads} query heads and {self.groups} key-value "
                "heads of a captured row evenly. Set training.cuda_graphs: none"
            )

    @property
    def shared_sizes(self) -> SharedSizes:
        """The sizes that processes divide."""
        experts, scan = self.experts, self.mamba
        return SharedSizes(
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.groups,
            intermediate_size=self.intermediate,
            num_experts=experts.count if experts is not None else 0,
            shared_expert_intermediate_size=experts.shared if experts is not None else 0,
            linear_num_key_heads=self.delta_net.key_heads if self.delta_net is not None else 0,
            mamba_num_heads=scan.heads if scan is not None else 0,
            n_groups=scan.groups if scan is not None else 0,
            deepstack_layers=self.deep_features,
        )

    def check(self, sizes: ParallelismSection) -> None:
        """Raise CapabilityError for sizes that do not divide, with both numbers."""
        for knob, message in self.shared_sizes.uneven(sizes, "the model"):
            raise CapabilityError(f"parallelism.{knob}: {message}")
        if sizes.expert > 1 and self.experts is None:
            raise CapabilityError(f"parallelism.expert is {sizes.expert}, the model has no experts")
        if self.experts is not None and sizes.tensor > 1 and not sizes.sequence:
            raise CapabilityError(
                f"parallelism.tensor is {sizes.tensor}: with experts it needs "
                f"parallelism.sequence: true"
            )
