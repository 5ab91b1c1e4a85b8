"""What is trained, checked where it shows: at the first optimizer step of every launch.

Every component that is to be trained has a gradient, and no frozen weight moves. Later steps are
not looked at, so nothing more is read from the device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from vlmpack.backends.engine import Engine
from vlmpack.backends.policy import component_of
from vlmpack.distributed import Ranks
from vlmpack.errors import TrainabilityError
from vlmpack.packing import Batch, PackedBatch
from vlmpack.recipe.trainable import Component

logger = logging.getLogger("vlmpack")

SEES_IMAGES: tuple[Component, ...] = ("vision", "projector")
"""Components whose gradients come from images alone."""

MAX_NAMES = 3


class FirstStepCheck:
    """Looks at gradients and frozen weights until each was seen once.

    Every rank makes the same calls in the same order.

    Args:
        engine: the model.
        ranks: who this process is.
    """

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self.engine = engine
        self.ranks = ranks
        trained = [count for count in engine.components if engine.policy.trains(count.component)]
        self._waiting: set[Component] = {count.component for count in trained}
        self._frozen_unseen = True
        self._before: tuple[list[str], torch.Tensor] | None = None

    @property
    def pending(self) -> bool:
        """Whether there is still something to look at."""
        return bool(self._waiting) or self._frozen_unseen

    @property
    def without_gradient(self) -> list[Component]:
        """Trained components that still wait for a label after an image."""
        return sorted(self._waiting.intersection(SEES_IMAGES))

    def name_untrained(self) -> None:
        """Warn of them; for the end of a launch that has taken steps."""
        if self.without_gradient:
            logger.warning(
                "%s: without a gradient, since in no step of this launch a label came after an "
                "image; weight decay, if any, shrank them. Freeze them (trainable), or look at "
                "the data",
                ", ".join(self.without_gradient),
            )

    def before_step(self, *, lr: float, num_seen_images: int) -> None:
        """Look at the gradients, and keep digests of what is frozen.

        Args:
            lr: learning rate of the step; at 0 nothing can move.
            num_seen_images: image tokens of the global batch that a label comes after.

        Raises:
            TrainabilityError: on every rank, for a component without a gradient.
        """
        due = {c for c in self._waiting if num_seen_images or c not in SEES_IMAGES}
        if due:
            norms = self.engine.gradient_norms().tolist()
            for count, norm in zip(self.engine.components, norms, strict=True):
                if count.component in due and norm == 0.0:
                    raise TrainabilityError(
                        f"trainable.{count.component} is {count.mode}, but after the first "
                        f"backward pass {_with_images(count.component)}all its {count.trained:,} "
                        f"trained parameters have a gradient of zero: they would not be trained. "
                        f"No weight has changed. Freeze it, or report this with the recipe"
                    )
            self._waiting -= due
        if self._frozen_unseen and lr > 0:
            self._before = self.engine.frozen_digests()

    def after_step(self) -> None:
        """See that the step moved nothing that is frozen.

        Raises:
            TrainabilityError: on every rank, with the names of what moved.
        """
        if self._before is None:
            return
        (names, before), self._before = self._before, None
        self._frozen_unseen = False
        after = self.engine.frozen_digests()[1]
        moved = [
            name for name, same in zip(names, (after == before).tolist(), strict=True) if not same
        ]
        everywhere = sorted({name for rank in self.ranks.gather_objects(moved) for name in rank})
        if everywhere:
            components = sorted({component_of(name, self.engine.paths) for name in everywhere})
            raise TrainabilityError(
                f"trainable: {len(everywhere)} frozen parameters of {', '.join(components)} moved "
                f"in the first optimizer step: {', '.join(everywhere[:MAX_NAMES])}"
                f"{' ...' if len(everywhere) > MAX_NAMES else ''}. Nothing was saved. This is a "
                f"bug in vlmpack, or a library beneath it; report it with the recipe"
            )


def _with_images(component: Component) -> str:
    return "with images " if component in SEES_IMAGES else ""


def count_seen_images(batches: Sequence[Batch]) -> int:
    """Image tokens with a label at or after them in their own sample, which alone pass gradients
    to tower and projector. On CPU."""
    return sum(_seen_in(batch) for batch in batches)


def _seen_in(batch: Batch) -> int:
    if batch.media is None or not batch.num_label_tokens:
        return 0
    if isinstance(batch, PackedBatch):
        ends = torch.tensor(batch.segment_lengths).cumsum(0)
    else:
        rows, width = batch.input_ids.shape
        ends = width * torch.arange(1, rows + 1)
    last = torch.full((len(ends),), -1)
    labels = batch.label_positions
    last.scatter_reduce_(0, torch.searchsorted(ends, labels, right=True), labels, "amax")
    if isinstance(batch, PackedBatch) and batch.forks is not None:  # branches see their path
        for place, parent in reversed([*enumerate(batch.forks.parents)]):
            if parent >= 0:
                last[parent] = torch.maximum(last[parent], last[place])
    places = batch.media_positions
    return int((last[torch.searchsorted(ends, places, right=True)] >= places).sum())
