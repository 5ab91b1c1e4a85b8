"""What one optimizer step does to each component: trained ones have gradients, frozen ones stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmpack.backends.engine import Engine
from vlmpack.distributed import Ranks
from vlmpack.proof.measure import Check, names_of
from vlmpack.recipe.trainable import Component
from vlmpack.training.first_step import SEES_IMAGES


@dataclass(frozen=True, slots=True)
class BeforeStep:
    """What is known of an engine before its optimizer step.

    Args:
        norms: of the gradients, by component.
        digests: of this rank's frozen parameters.
    """

    norms: Tensor
    digests: Tensor

    @classmethod
    def of(cls, engine: Engine) -> BeforeStep:
        """Between `finish_gradients` and `step`. Collective."""
        _, digests = engine.frozen_digests()
        return cls(engine.gradient_norms().cpu(), digests.clone())


def check_trained(
    engine: Engine, ranks: Ranks, before: BeforeStep, *, num_seen_images: int
) -> list[Check]:
    """After the step. Collective.

    Args:
        engine: after its step.
        ranks: who this process is.
        before: the step.
        num_seen_images: image tokens of the rows that a label comes after; without any, tower and
            projector have nothing to learn from.
    """
    names, digests = engine.frozen_digests()
    moved = [names[at] for at in torch.nonzero(digests != before.digests).flatten().tolist()]
    everywhere = sorted({name for some in ranks.gather_objects(moved) for name in some})
    held = sorted({name for some in ranks.gather_objects(names) for name in some})
    still = [
        count.component
        for count, norm in zip(engine.components, before.norms.tolist(), strict=True)
        if count.trained and not norm > 0
    ]
    return [_frozen(held, everywhere), _with_gradients(engine, still, num_seen_images)]


def _frozen(held: Sequence[str], moved: Sequence[str]) -> Check:
    name = "frozen parameters stay"
    if moved:
        return Check(
            name=name,
            status="fail",
            detail=f"{len(moved)} of {len(held)} moved in one step: {names_of(moved, 3)}",
            look_at="`trainable` of the recipe, and what the optimizer was given",
        )
    detail = f"{len(held)} parameters, bit by bit" if held else "nothing is frozen"
    return Check(name=name, status="pass", detail=detail)


def _with_gradients(engine: Engine, still: Sequence[Component], num_seen_images: int) -> Check:
    name = "trained components learn"
    modes = ", ".join(f"{count.component} {count.mode}" for count in engine.components)
    unseen = [component for component in still if component in SEES_IMAGES]
    if still and still == unseen and not num_seen_images:
        return Check(
            name=name,
            status="too few",
            detail=f"no label comes after an image, so {names_of(unseen)} has nothing to learn "
            f"from ({modes})",
        )
    if still:
        return Check(
            name=name,
            status="fail",
            detail=f"no gradient at all in {names_of(still)} ({modes})",
            look_at="`trainable` of the recipe: what freezes these parameters",
        )
    return Check(name=name, status="pass", detail=modes)
