"""The recipe with what is made of it once, on one rank: what the other builders take."""

from __future__ import annotations

from dataclasses import dataclass

from vlmpack.backends.policy import TrainingPolicy
from vlmpack.build.extensions import NO_EXTENSIONS, Extensions
from vlmpack.build.policy import policy_of
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What data, engine and stepper of a recipe are built from.

    Args:
        recipe: resolved, its date settled.
        ranks: who this process is.
        encoder: the processor of the recipe's model folder, by `build_encoder`.
        extensions: what a program handed over beside the recipe.
    """

    recipe: Recipe
    ranks: Ranks
    encoder: Encoder
    extensions: Extensions = NO_EXTENSIONS

    @property
    def policy(self) -> TrainingPolicy:
        """What is trained."""
        return policy_of(self.recipe)
