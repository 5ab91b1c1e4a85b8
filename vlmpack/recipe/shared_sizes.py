"""What processes share out of a language model, and which ways go up evenly.

The recipe's rules read `SharedSizes` from config.json, megatron-core's engine from transformers'
config. So what `vlmpack recipe check` passes is what the engine takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Literal

from vlmpack.recipe.schema import ParallelismSection

Knob = Literal["tensor", "context", "pipeline", "expert"]

MOST = 64
"""No more processes than these share a layer."""


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
            taken = [c for c in range(1, MOST + 1) if not self._over_context(split.tensor, c)]
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


def _divisors(number: int) -> list[int]:
    """The divisors up to `MOST`."""
    return [size for size in range(1, min(number, MOST) + 1) if number % size == 0]
