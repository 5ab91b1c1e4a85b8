"""What processes share out of a language model, and which ways go up evenly.

`SharedSizes` is of megatron-core. The recipe's rules read it from config.json, the engine from
transformers' config. `HeadDegrees` is of the hf engine, and both read config.json. So what
`vlmpack recipe check` passes is what the engine takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Literal

from vlmpack.recipe.schema import ParallelismSection

Knob = Literal["tensor", "context", "pipeline", "expert"]

_MOST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSizes:
    """Sizes of a language model, by the names of config.json; 0 for what it does not have.

    Args:
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key-value heads.
        intermediate_size: columns of the MLP.
        num_experts: of a layer.
        shared_expert_intermediate_size: columns of the expert that all tokens pass.
        linear_num_key_heads: heads of queries and keys of GatedDeltaNet.
        mamba_num_heads: heads of Mamba-2.
        n_groups: groups of these.
        deepstack_layers: first layers behind which image features enter (DeepStack).
    """

    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    intermediate_size: int = 0
    num_experts: int = 0
    shared_expert_intermediate_size: int = 0
    linear_num_key_heads: int = 0
    mamba_num_heads: int = 0
    n_groups: int = 0
    deepstack_layers: int = 0

    def over(self, knob: Knob) -> dict[str, int]:
        """What a knob shares out in equal parts, by the names of config.json."""
        if knob == "pipeline":
            return {"num_hidden_layers": self.num_hidden_layers}
        if knob == "expert":
            return {"num_experts": self.num_experts}
        return {
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "intermediate_size": self.intermediate_size,
            "shared_expert_intermediate_size": self.shared_expert_intermediate_size,
            "linear_num_key_heads": self.linear_num_key_heads,
            "n_groups": self.n_groups,
        }

    def uneven(self, split: ParallelismSection, of: str) -> Iterator[tuple[Knob, str]]:
        """Knobs of a split that do not go up, each with the reason.

        Args:
            split: the sizes of the replica.
            of: the model, as it is called in messages.
        """
        if context := self._over_context(split.tensor, split.context):
            taken = [c for c in range(1, _MOST + 1) if not self._over_context(split.tensor, c)]
            yield (
                "context",
                f"{split.context} processes share the heads of layers that carry state, and "
                f"{context} of {of} is not divided by parallelism.tensor {split.tensor} x context "
                f"{split.context}. Sizes that do, with this tensor: {', '.join(map(str, taken))}",
            )
        shared: tuple[tuple[Knob, int], ...] = (
            ("tensor", split.tensor),
            ("pipeline", split.pipeline),
            ("expert", split.expert),
        )
        for knob, parts in shared:
            sizes = self.over(knob)
            if uneven := [f"{key} {size}" for key, size in sizes.items() if size % parts]:
                fitting = ", ".join(map(str, _divisors(gcd(*sizes.values()))))
                yield (
                    knob,
                    f"{parts} does not divide {' and '.join(uneven)} of {of}; sizes that do: "
                    f"{fitting}",
                )
        first = self.num_hidden_layers // split.pipeline
        if self.num_hidden_layers and self.deepstack_layers > first:
            yield (
                "pipeline",
                f"{split.pipeline} leaves the first stage {first} of the num_hidden_layers "
                f"{self.num_hidden_layers} of {of}, but image features enter behind the first "
                f"{self.deepstack_layers} (DeepStack). Use fewer stages",
            )

    def _over_context(self, tensor: int, context: int) -> str:
        """The sizes of layers that carry state which context parallelism does not divide.

        Tensor parallelism divides heads of GatedDeltaNet, and heads of Mamba-2 by groups or parts
        of them. Context parallelism divides these once more. Empty if all sizes are divided, or if
        tensor parallelism alone fails.
        """
        if (
            self.linear_num_key_heads % (tensor * context)
            and not self.linear_num_key_heads % tensor
        ):
            return f"linear_num_key_heads {self.linear_num_key_heads}"
        if not self.n_groups or self.n_groups % tensor:
            return ""
        own = self.n_groups // tensor
        if self.mamba_num_heads % (tensor * context) or (own % context and context % own):
            return f"mamba_num_heads {self.mamba_num_heads} in n_groups {self.n_groups}"
        return ""


def shared_by(context: int, heads: int) -> str:
    """How CP ranks of the hf engine share a row, of which so many exchange heads; in words."""
    if heads == context:
        return "exchange of heads"
    ring = context // heads
    if heads == 1:
        return f"a ring of {ring}"
    return f"exchange of heads between {heads}, and a ring of {ring} such groups"


def shares_heads(heads: int, groups: int, tensor: int, context: int) -> bool:
    """Whether ranks can each run a whole row for some of its query heads: as many each, with whole
    groups of key-value heads, or all in one.

    Args:
        heads: query heads.
        groups: key-value heads, which tensor parallelism divides.
        tensor: TP.
        context: CP.
    """
    if heads % (tensor * context):
        return False
    each, of_group = heads // (tensor * context), heads // groups
    return groups // tensor % context == 0 or of_group % each == 0


def sizes_that_share(heads: int, groups: int, tensor: int) -> str:
    """Every CP for which `shares_heads` is true, for a message."""
    every = range(1, heads + 1)
    return ", ".join(str(size) for size in every if shares_heads(heads, groups, tensor, size))


@dataclass(frozen=True, slots=True)
class HeadDegrees:
    """In which sizes ranks that share a row on the hf engine can exchange heads.

    CP = U x R. U neighbours exchange heads, and R of these are a ring over keys and values.

    Args:
        heads: query and key-value heads of each kind of attention layer; empty if unknown.
        whole: why attention needs the whole row on each rank; empty where it need not.
        states: names, heads and groups of layers that carry state. All ranks share these.
    """

    heads: tuple[tuple[int, int], ...] = ()
    whole: str = ""
    states: tuple[tuple[str, int, int], ...] = ()

    def fitting(self, context: int) -> list[int]:
        """Every U of a CP."""
        return [
            degree
            for degree in range(1, context + 1)
            if context % degree == 0
            and all(shares_heads(*pair, 1, degree) for pair in self.heads)
            and (degree == context or (self.heads and not self.whole))
            and not self._uneven_states(context)
        ]

    def chosen(self, split: ParallelismSection) -> int:
        """U of a recipe: what it asks for, else the largest up to the fewest key-value heads.

        One with copies of keys and values is taken where it sends less.

        Raises:
            ValueError: no such U fits; with those that do.
        """
        fitting, asked = self.fitting(split.context), split.context_heads
        if not fitting or asked not in (None, *fitting):
            raise ValueError(self._refusal(split, fitting))
        if asked is not None:
            return asked
        few = min((groups for _, groups in self.heads), default=split.context)
        without = max((degree for degree in fitting if degree <= few), default=fitting[0])
        more = [degree for degree in fitting if degree > few]
        return min((without, *more), key=lambda degree: self.sent(split.context, degree))

    @property
    def keys_of_query(self) -> float:
        """Key-value heads for each query head."""
        heads, groups = (sum(of) for of in zip(*self.heads, strict=True)) if self.heads else (1, 1)
        return groups / heads

    def sent(self, context: int, degree: int) -> float:
        """Heads of each slot that a rank sends in a step, for a segment that fills the row.

        Queries and outputs, keys and values are exchanged for heads in both passes. On a ring of R
        keys and values go to R - 1 ranks. Half of these see the first chunk alone, so three
        quarters of the slots are sent. They go in both passes, and their gradients come back.
        """
        total = 0.0
        for heads, groups in self.heads:
            keys = max(groups, degree)
            total += 4 * (heads + keys) * (degree - 1) / degree
            total += 3 * 2 * keys * 3 / 4 * (context // degree - 1)
        return total

    def _uneven_states(self, context: int) -> list[str]:
        return [
            f"{name} {heads} in {groups} groups"
            for name, heads, groups in self.states
            if not shares_heads(heads, groups, 1, context)
        ]

    def _refusal(self, split: ParallelismSection, fitting: list[int]) -> str:
        context, asked, sizes = split.context, split.context_heads, fitting
        if fitting and asked is not None and context % asked:
            named = ", ".join(map(str, fitting))
            return f"{asked} does not divide parallelism.context {context}. Use one of {named}"
        if not fitting:
            sizes = [size for size in range(1, _MOST + 1) if self.fitting(size)]
        each = ([] if fitting else self._uneven_states(context)) or [
            f"num_attention_heads {heads} in num_key_value_heads {groups}"
            for heads, groups in self.heads
        ]
        why = f", each by all, since the model {self.whole}" if self.whole else ""
        return (
            f"{asked if fitting else context} processes cannot share out the "
            f"{' and '.join(each) or 'heads'}{why}. "
            f"Sizes that can: {', '.join(map(str, sizes))}"
        )


def _divisors(number: int) -> list[int]:
    """The divisors up to 64: no more than that share a layer."""
    return [size for size in range(1, min(number, _MOST) + 1) if number % size == 0]
