"""What is trained, by component, and how fast: the sections `trainable` and `optim`.

`OptimizerFacts` is what the rules, the engine and `vlmpack plan` know of an optimizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from vlmpack.recipe.sources import Section, as_tuple

OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"]

BITSANDBYTES = "bitsandbytes>=0.50"
"""What has those that torch has not, and 4-bit weights, as pip is told; extra `qlora`."""

LEAST_IN_8_BITS = 4096
"""Elements from which bitsandbytes keeps moments of a tensor in 8 bits; float32 below."""
BLOCK = 256
"""Elements of a tensor whose 8-bit moments share a float32 scale (2110.02861)."""
LEAST_PAGED = 100_000
"""Elements from which bitsandbytes puts moments of a tensor in pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerFacts:
    """What the recipe knows of one optimizer."""

    in_8_bits: bool = False
    """Whether moments of large tensors are 8-bit codes, with a float32 scale for each block."""

    paged: bool = False
    """Whether moments of large tensors are in memory that the GPU and its host share by pages."""

    @property
    def is_torchs(self) -> bool:
        """Whether torch has it; else bitsandbytes."""
        return not self.in_8_bits and not self.paged


FACTS: Mapping[OptimizerName, OptimizerFacts] = {
    "adamw": OptimizerFacts(),
    "adamw_8bit": OptimizerFacts(in_8_bits=True),
    "paged_adamw": OptimizerFacts(paged=True),
    "paged_adamw_8bit": OptimizerFacts(in_8_bits=True, paged=True),
}


Component = Literal["vision", "projector", "language"]
Mode = Literal["frozen", "full", "lora"]
Beta = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]

Targets = Literal["all-linear", "attention", "experts"]
TARGETS: tuple[str, ...] = get_args(Targets)
"""The words of `trainable.lora.targets`. Any other is the end of a name."""

COMPONENTS: tuple[Component, ...] = ("vision", "projector", "language")

Number = TypeVar("Number", int, float)


class _Pattern(dict[str, Number]):
    """Numbers by ends of names, which nobody changes: recipes are hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self))


def _of_layer(pattern: Mapping[str, Number], layer: str, default: Number) -> Number:
    """The number of the first end that a layer's name has."""
    return next((n for end, n in pattern.items() if f".{layer}".endswith(f".{end}")), default)


class LoraSection(Section):
    """Low-rank adapters (LoRA, 2106.09685), with peft's names and files. They are the same in every
    component whose mode is `lora`."""

    rank: int = Field(default=16, ge=1)
    """Rank of the update of a weight."""

    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / rank, or with `rslora` by alpha / sqrt(rank)."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """For the hf engine. Share of an adapter's input that is zeroed while training, token by
    token."""

    targets: Annotated[
        Targets | Literal["adapter"] | tuple[Name, ...],
        Field(examples=[["q_proj", "v_proj"], ["all-linear", "experts"]]),
        BeforeValidator(as_tuple),
    ] = "all-linear"
    """What gets an adapter, in the components whose mode is `lora`. `all-linear` is every linear
    layer. `attention` is those of queries, keys, values and outputs. `experts` is the matrices of
    routed experts, which are no layers, and never the router. A list may hold these words, and
    ends of layers' names (`q_proj`, `self_attn.o_proj`). It means all that any of them means.
    `adapter` is the layers that `model.adapter` has."""

    rank_pattern: Annotated[dict[str, Annotated[int, Field(ge=1)]], AfterValidator(_Pattern)] = (
        Field(default_factory=_Pattern, examples=[{"q_proj": 8}])
    )
    """Ranks of layers that have another one, by ends of their names. The first that fits counts,
    so longer ends come first."""

    alpha_pattern: Annotated[dict[str, Annotated[float, Field(gt=0)]], AfterValidator(_Pattern)] = (
        Field(default_factory=_Pattern, examples=[{"q_proj": 16.0}])
    )
    """The same for `alpha`."""

    modules_to_save: Annotated[
        tuple[Name, ...], Field(examples=[["embed_tokens"]]), BeforeValidator(as_tuple)
    ] = ()
    """For the hf engine. Modules of the components whose mode is `lora` that are trained in full,
    by ends of their names. Their weights are saved beside the adapters."""

    expert_form: Literal["parameters", "matrices"] = "parameters"
    """How adapters of routed experts are written. `parameters` is peft's `target_parameters`, as
    transformers' classes have them. `matrices` is an adapter for each matrix of each expert
    (`experts.0.gate_proj`), as in transformers 4. The update is the same."""

    dora: bool = False
    """Split weights into magnitude and direction, and train both (DoRA, 2402.09353)."""

    rslora: bool = False
    """Scale by the square root of the rank (rsLoRA, 2312.03732)."""

    quantize: Literal["none", "nf4", "int8"] = "none"
    """For the hf engine. `nf4` keeps the frozen weights of adapted layers in 4 bits (QLoRA,
    2305.14314), by the package bitsandbytes. `int8` keeps them in 8 bits, with a scale for each row
    (2208.07339). Both run on a CPU too, slowly."""

    def rank_of(self, layer: str) -> int:
        """The rank of a layer's adapter, by the layer's name."""
        return _of_layer(self.rank_pattern, layer, self.rank)

    def alpha_of(self, layer: str) -> float:
        """The alpha of a layer's adapter."""
        return _of_layer(self.alpha_pattern, layer, self.alpha)

    def scaling_of(self, layer: str) -> float:
        """The factor of B A (2312.03732 for the root)."""
        rank = self.rank_of(layer)
        return self.alpha_of(layer) / (math.sqrt(rank) if self.rslora else rank)

    def saves(self, parameter: str) -> bool:
        """Whether a parameter lies in one of `modules_to_save`."""
        return any(f".{module}." in f".{parameter}" for module in self.modules_to_save)

    @property
    def words(self) -> tuple[str, ...]:
        """`targets` as a list."""
        return (self.targets,) if isinstance(self.targets, str) else self.targets

    @property
    def on_experts(self) -> bool:
        """Whether routed experts have adapters."""
        return "experts" in self.words


class TrainableSection(Section):
    """What is trained. A component is `frozen`, `full` (all its weights) or `lora` (adapters beside
    its frozen weights)."""

    vision: Mode = "full"
    """The vision tower, without its projector."""

    projector: Mode = "full"
    """What maps the tower's features to the language model's width."""

    language: Mode = "full"
    """The language model, with input embeddings and head."""

    lora: LoraSection = LoraSection()
    """Shape of the adapters."""

    def uses(self, mode: Mode) -> tuple[str, ...]:
        """The components of that mode."""
        return tuple(name for name in COMPONENTS if getattr(self, name) == mode)

    def drops(self) -> bool:
        """Whether adapters have dropout."""
        return self.lora.dropout > 0 and bool(self.uses("lora"))


class OptimSection(Section):
    """AdamW and its learning-rate schedule."""

    name: OptimizerName = "adamw"
    """`adamw` is torch's. The others are bitsandbytes', for the hf engine without sharding.
    `adamw_8bit` keeps moments of large tensors in 8 bits. `paged_adamw` keeps them in pages that
    leave the GPU where it is full. `paged_adamw_8bit` does both."""

    master: Literal["float32", "bfloat16_stochastic"] = "float32"
    """What the optimizer keeps of weights. With `bfloat16_stochastic`, weights of trained linear
    layers are bfloat16, as are their moments and gradients. That is 8 bytes a weight in place of
    18. Steps are rounded at random, by `training.seed`. It needs the hf engine, one process,
    `model.dtype` bfloat16 and `adamw`."""

    lr: float = Field(gt=0, examples=[1e-5])
    """Peak learning rate."""

    vision_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the vision tower, with the same schedule. If null, `lr`."""

    projector_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the projector. If null, `lr`."""

    language_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the language model. If null, `lr`."""

    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end of the decay, one step after the last, as a fraction of the peak."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear warm-up. The first of N runs at 1/N of the peak, the N-th at the
    peak. The warm-up of transformers is a step behind, as its first step runs at 0."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate goes from the peak to the minimum after the warm-up. `constant` stays at the
    peak."""

    betas: Annotated[tuple[Beta, Beta], BeforeValidator(as_tuple)] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""

    eps: float = Field(default=1e-8, gt=0)
    """AdamW's term in the denominator."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, per unit of learning rate. It applies to weights with two or more
    dimensions, LoRA matrices included."""

    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Global norm of all trained gradients above which they are scaled down. If null, there is no
    clipping."""

    @property
    def facts(self) -> OptimizerFacts:
        """What the optimizer is."""
        return FACTS[self.name]

    @property
    def rounds(self) -> bool:
        """Whether weights are in bfloat16 and steps are rounded at random."""
        return self.master == "bfloat16_stochastic"

    def peak(self, component: str) -> float:
        """The peak learning rate of a component."""
        own: float | None = getattr(self, f"{component}_lr")
        return self.lr if own is None else own
