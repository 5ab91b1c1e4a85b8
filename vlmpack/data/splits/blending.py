"""How many draws of an epoch each source with a weight gets: by samples, or by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from vlmpack.data.config import DataConfig
from vlmpack.data.plan.blend import draws_per_source
from vlmpack.errors import EmptyDataError


def blended_draws(
    config: DataConfig, epoch_size: int, contents: Sequence[tuple[int, int]] | None
) -> tuple[int, ...]:
    """Draws per source, as `data.weights` has it.

    Args:
        config: of a split whose sources have weights.
        epoch_size: draws of an epoch.
        contents: (usable samples, their tokens) of each source; asked for with weights of tokens
            alone. A sample that is known to be bad is drawn, and has no token.

    Raises:
        EmptyDataError: a source without a token, where tokens count.
    """
    weights = [source.weight or 0.0 for source in config.sources]
    if config.weights == "samples":
        return draws_per_source(weights, epoch_size)
    assert contents is not None
    for source, (_, tokens) in zip(config.sources, contents, strict=True):
        if not tokens:
            raise EmptyDataError(
                f"{config.key}.{source.name}: no usable sample, but its weight is {source.weight}"
            )
    means = [Fraction(tokens, samples) for samples, tokens in contents]
    return draws_per_source(weights, epoch_size, means)
