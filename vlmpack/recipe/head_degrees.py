"""In which sizes ranks of the hf engine share a row, and what their attention then sends.

Rules and engine read `HeadDegrees` from config.json. The formula is `attention_columns`. The choice
of U asks it, and so does `vlmpack.forecast.communication`.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmpack.recipe.schema import ParallelismSection, Recomputed
from vlmpack.recipe.shared_sizes import MOST


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


def head_copies(groups: int, degree: int) -> int:
    """How many ranks have each key-value head, where so many exchange heads."""
    return max(1, degree // groups)


def attention_columns(
    query: float, key: float, *, context: int, degree: int, again: float
) -> tuple[float, float]:
    """What a rank sends for the attention of a layer in a step, in columns of each of its slots.

    Queries and outputs, keys and values are exchanged for heads in each pass. On a ring of
    R = CP / U keys and values go to R - 1 ranks. Half of these see the first chunk alone, so three
    quarters of the slots of a segment that fills the row are sent. They go in each pass, and their
    gradients come back.

    Args:
        query, key: columns of all heads; of keys with their `head_copies`.
        degree: U.
        again: 1 where the layer is computed again, else 0.

    Returns:
        Columns of the tensors that are exchanged, of which a rank keeps one in U, and columns that
        are sent on the ring.
    """
    passes = 2 + again
    ring = (passes + 1) * 2 * key * 3 / 4 * (context // degree - 1)
    return passes * 2 * (query + key), ring


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

    def chosen(self, split: ParallelismSection, recomputed: Recomputed = "none") -> int:
        """U of a recipe: what it asks for, else the largest up to the fewest key-value heads.

        One with copies of keys and values is taken where it sends less.

        Args:
            recomputed: layers that are computed again send more.

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
        again = 1 / recomputed if isinstance(recomputed, int) else float(recomputed != "none")
        return min((without, *more), key=lambda degree: self.sent(split.context, degree, again))

    @property
    def keys_of_query(self) -> float:
        """Key-value heads for each query head."""
        heads, groups = (sum(of) for of in zip(*self.heads, strict=True)) if self.heads else (1, 1)
        return groups / heads

    def sent(self, context: int, degree: int, again: float) -> float:
        """Heads of each slot that a rank sends in a step, for a segment that fills the row; `again`
        is the share of layers that are computed again."""
        total = 0.0
        for heads, groups in self.heads:
            keys = groups * head_copies(groups, degree)
            exchanged, ring = attention_columns(
                heads, keys, context=context, degree=degree, again=again
            )
            total += exchanged * (degree - 1) / degree + ring
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
            sizes = [size for size in range(1, MOST + 1) if self.fitting(size)]
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
