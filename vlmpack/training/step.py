"""One optimizer step: micro-batches in, updated weights and one small report out.

All that the host needs to know of a step is one float64 tensor. It is summed over the world and
read once, before the optimizer step.

At the start of every launch, every trained component must have a gradient, and no frozen weight may
move. Steps are checked until each trained component has had a gradient, and frozen weights were
compared over one step with a learning rate above 0. Usually that is the first step. Later steps
read nothing more from the device. The learning rate is a pure function of the step.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.activity import ACTIVITY
from vlmpack.backends.engine import ROUTER_REPORT, Engine, ForwardStep
from vlmpack.backends.policy import component_of
from vlmpack.distributed import Ranks
from vlmpack.errors import NonFiniteError, TrainabilityError
from vlmpack.model_folder.finite import non_finite_tensors, non_finite_words
from vlmpack.packing import Batch, PackedBatch
from vlmpack.recipe.trainable import Component, OptimSection
from vlmpack.training.checkpoint.index import random_state, restore_random_state
from vlmpack.training.objective import VOTES, Counts, Objective, ratios
from vlmpack.training.reference import StartCheck
from vlmpack.training.sentinel import Sentinel


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums(Counts):
    """Sums over all micro-batches of all replicas in one optimizer step.

    Args:
        totals: the objective's sums, the routers' where there are any, and all counts, by name.
        loss: the objective's; None where its divisor is 0.
        grad_norm: global norm before clipping; 0 without a backward pass, None in a skipped step.
        is_skipped: whether the optimizer left the step out, as it was not finite.
        num_unlearnt: samples of a skipped step, which `num_skipped` counts too.
    """

    totals: Mapping[str, float]
    loss: float | None
    grad_norm: float | None = 0.0
    is_skipped: bool = False
    num_unlearnt: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are numbers."""
        assert self.grad_norm is not None
        return math.isfinite(self.totals["loss_sum"]) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of a step's micro-batches, up to its global sums.

    Args:
        reports: this rank's sums of each micro-batch; empty where it computes no loss.
    """

    sums: StepSums
    reports: Sequence[Mapping[str, Tensor]]

    @property
    def losses(self) -> list[float | None]:
        """This rank's loss sum of each micro-batch, read from the device."""
        return [report["loss_sum"].item() if report else None for report in self.reports]


class NonFiniteStep(NonFiniteError):
    """Loss or gradient norm of a step are not finite. Raised on all ranks alike, before the
    optimizer step.

    Args:
        first: the step as it was met.
        again: the same micro-batches, run once more in the same place.
        seconds: spent in both.
    """

    def __init__(self, message: str, *, first: Pass, again: Pass, seconds: float) -> None:
        super().__init__(message)
        self.first, self.again, self.seconds = first, again, seconds

    @property
    def repeats(self) -> bool:
        """Whether the second run was not finite either."""
        return not self.again.sums.is_finite


class StepMemory:
    """What a forward pass may change besides gradients, as it was before: buffers and generators.

    Values are put back into the same tensors, so that recorded graphs and views stay valid.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [(one, name) for one in module.modules() for name in one._buffers]
        self._held: list[Tensor | None] = []
        self._copies: list[Tensor] = []
        self._random: Mapping[str, Tensor] = {}

    def keep(self) -> None:
        """Copy what there is now. Nothing is read on the host."""
        self._held = [one._buffers[name] for one, name in self._places]
        tensors = self._tensors()
        if [one.shape for one in tensors] != [one.shape for one in self._copies]:
            self._copies = [torch.empty_like(one) for one in tensors]
        _copy_all(tensors, self._copies)
        self._random = random_state()

    def put_back(self) -> None:
        """Put back what `keep` has copied."""
        for (one, name), held in zip(self._places, self._held, strict=True):
            one._buffers[name] = held
        _copy_all(self._copies, self._tensors())
        restore_random_state(self._random)

    def _tensors(self) -> list[Tensor]:
        return [one for one in self._held if one is not None]


@torch.no_grad()
def _copy_all(source: list[Tensor], into: list[Tensor]) -> None:
    if source:
        torch._foreach_copy_(into, source)


def _watched(
    batches: Sequence[Batch],
    names: Sequence[Sequence[str]] | None,
    phase: str = "forward and backward",
) -> Iterator[Batch]:
    """The micro-batches, each reported to the watchdog."""
    for number, batch in enumerate(batches):
        ACTIVITY.samples = batch.keys if names is None else names[number]
        ACTIVITY.enter(phase)
        yield batch


def seed_of_step(seed: int, step: int, place: int) -> int:
    """A seed by step and place: a resumed run draws the same numbers.

    Args:
        place: that of a rank among all that draw. Replicas draw different numbers, and so do the
            ranks of a row, which have different tokens of it.
    """
    text = f"{seed} {step} {place}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


@dataclass(slots=True, kw_only=True)
class Stepper:
    """Runs optimizer steps.

    Args:
        max_grad_norm: global norm to clip to; None for no clipping.
        check: looks at the first steps of a launch; None for no look.
        dropout_seed: of what layers draw; None where they draw nothing.
        reference: gives batches of pairs their reference in each step; None where they come with
            it, or need none.
        start: looks at the first step of a run of pairs; None for no look.
        sentinel: compares a sample with itself alone every some steps; None for never.
    """

    engine: Engine
    objective: Objective
    schedule: Schedule
    max_grad_norm: float | None
    ranks: Ranks
    check: TrainabilityCheck | None = None
    dropout_seed: int | None = None
    reference: Callable[[Engine, Sequence[Batch]], list[Batch]] | None = None
    start: StartCheck | None = None
    sentinel: Sentinel | None = None
    before_update: Callable[[], None] = lambda: None
    """Called before weights or moments change; a save may still be copying them."""
    memory: StepMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = StepMemory(self.engine.module)

    def train(
        self,
        step: int,
        batches: Sequence[Batch],
        *,
        num_skipped: int,
        stop: bool,
        writing: bool = False,
        names: Sequence[Sequence[str]] | None = None,
    ) -> tuple[StepSums, dict[str, float]]:
        """One optimizer step. `check` looks at steps until it has seen all that it checks.

        Args:
            step: steps taken before this one.
            batches: this rank's micro-batches, on CPU; the same number on every rank.
            num_skipped: samples of this rank that became holes.
            names: the samples of each micro-batch, for messages; None for the batches' keys.

        Returns:
            Global sums, and the seconds spent in each phase.

        Raises:
            NonFiniteStep: loss or gradient norm is not finite. Weights, moments, buffers and
                generators are as they were before.
            NonFiniteError: the same, and weights or moments are not finite themselves.
            TrainabilityError: what is trained is not what the recipe says.
            ReferenceCacheError: the first step's policy is not its reference.
            SentinelError: a sample has other losses in its row than alone.
        """
        started = time.perf_counter()
        self.memory.keep()
        check = self.check if self.check is not None and self.check.pending else None
        if self.reference is not None:
            batches = self.reference(self.engine, batches)
        # At the weights that the reference is of, which a skipped step leaves as they were.
        start = self.start if self.engine.optimizer_steps == 0 else None
        objective = self.objective if start is None else start.watched(self.objective)
        counts = Counts.of(
            batches,
            num_skipped=num_skipped,
            num_taught=sum(map(_num_taught, batches)) if check is not None else 0,
            num_seen_images=count_seen_images(batches) if check is not None else 0,
            stop_votes=int(stop),
            num_writing=int(writing),
        )
        names = names or [batch.keys for batch in batches]
        sentinel = self.sentinel if self.sentinel and self.sentinel.is_due(step) else None
        if sentinel is not None:
            objective = sentinel.watched(objective)
        made = self.compute(step, objective, batches, names, counts)
        result, computed = made.sums, time.perf_counter()
        if not result.is_finite:
            self._refuse_weights(step)
            self.memory.put_back()
            again = self.compute(step, self.objective, batches, names, counts)
            self.engine.zero_gradients()
            self.memory.put_back()
            message = self._non_finite_words(step, names, made, again)
            seconds = time.perf_counter() - started
            raise NonFiniteStep(message, first=made, again=again, seconds=seconds)
        if start is not None:
            start.judge(batches)
        if sentinel is not None:
            self.memory.keep()
            sentinel.compare(step, batches, self.objective)
            self.memory.put_back()
        if result.loss is not None:  # a global batch of holes teaches nothing, on every rank alike
            self._update(step, result, check)
        return result, {
            "forward_backward_seconds": computed - started,
            "optimizer_seconds": time.perf_counter() - computed,
        }

    def compute(
        self,
        step: int,
        objective: Objective,
        batches: Sequence[Batch],
        names: Sequence[Sequence[str]],
        counts: Counts,
    ) -> Pass:
        """Gradients of the mean loss, clipped, and the global sums. Reads the host once.

        Args:
            names: the samples of each micro-batch, for messages.
            counts: of the global batch, this rank's part.
        """
        if self.dropout_seed is not None:
            place = self.ranks.dp_rank + self.ranks.dp_size * self.ranks.replica_rank
            torch.manual_seed(seed_of_step(self.dropout_seed, step, place))
        self.engine.zero_gradients()
        reports = self.engine.forward_backward(
            self._forward_step(batches, objective),
            _watched(batches, names),
            num_microbatches=len(batches),
        )
        ACTIVITY.enter("sums over all ranks")
        routers = self.engine.router_sum
        more = {} if routers is None else routers.take(self.engine.device)
        sums = self._sum_up(reports, batches, counts, more)
        norm = self.engine.finish_gradients(sums[self.objective.divisor], self.max_grad_norm)
        if self.ranks.world_size > 1:  # NaN on all where it is no number on one
            norm = norm + self.ranks.sum_over_world(norm * 0)
        read = torch.stack([*sums.values(), norm.double()]).tolist()  # the step's one host read
        result = self._named(dict(zip(sums, read, strict=False)), grad_norm=read[-1])
        return Pass(result, reports)

    def evaluate(self, batches: Sequence[Batch]) -> StepSums:
        """Sums of some micro-batches, without gradients."""
        if self.reference is not None:
            batches = self.reference(self.engine, batches)
        reports = self.engine.forward_backward(
            self._forward_step(batches, self.objective),
            _watched(batches, None, "validation"),
            num_microbatches=len(batches),
            forward_only=True,
        )
        sums = self._sum_up(reports, batches, Counts.of(batches))
        return self._named(dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)))

    def _sum_up(
        self,
        reports: Sequence[Mapping[str, Tensor]],
        batches: Sequence[Batch],
        counts: Counts,
        more: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """0-d float64 on the device, in one fixed order: all sums and counts over the world."""
        device = self.engine.device
        mine = {**self.objective.add_up(reports, device), **(more or {})}
        counted = self._counted(batches, counts)
        if not self.ranks.is_lead:  # the processes of a replica hold the same batches; all vote
            counted = {name: counted[name] if name in VOTES else 0 for name in counted}
        host = torch.tensor([*counted.values()], dtype=torch.float64).to(device, non_blocking=True)
        summed = self.ranks.sum_over_world(torch.cat([torch.stack([*mine.values()]), host]))
        return dict(zip([*mine, *counted], summed.unbind(), strict=True))

    def _counted(self, batches: Sequence[Batch], counts: Counts) -> dict[str, int]:
        counted = {entry.name: getattr(counts, entry.name) for entry in fields(Counts)}
        for name, count in self.objective.counts.items():
            counted[name] = sum(count(batch) for batch in batches)
        return counted

    def _forward_step(self, batches: Sequence[Batch], objective: Objective) -> ForwardStep:
        """The objective's forward step.

        If terms of its loss have divisors of their own, the global batch is counted first, over all
        ranks. Nothing is read on the host.
        """
        names = sorted(objective.counted_before())
        if not names:
            return objective.step_with()
        counted = self._counted(batches, Counts.of(batches))
        mine = [counted[name] if self.ranks.is_lead else 0 for name in names]
        host = torch.tensor(mine, dtype=torch.float64).to(self.engine.device, non_blocking=True)
        summed = self.ranks.sum_over_world(host)
        return objective.step_with(dict(zip(names, summed.unbind(), strict=True)))

    def _named(self, totals: Mapping[str, float], grad_norm: float = 0.0) -> StepSums:
        counts: dict[str, Any] = {entry.name: int(totals[entry.name]) for entry in fields(Counts)}
        return StepSums(
            **counts,
            totals=totals,
            loss=self.objective.loss(totals),
            grad_norm=grad_norm,
        )

    def reported(self, sums: StepSums) -> dict[str, float | None]:
        """The figures of a step besides its loss, from the objective and the routers."""
        figures = self.objective.reported(sums.totals)
        if self.engine.router_sum is not None:
            figures |= ratios(sums.totals, ROUTER_REPORT)
        return dict.fromkeys(figures) if sums.is_skipped else figures

    def _update(self, step: int, result: StepSums, check: TrainabilityCheck | None) -> None:
        lr = self.schedule(step)
        if check is not None:
            check.before_step(
                lr=lr, num_taught=result.num_taught, num_seen_images=result.num_seen_images
            )
        self.before_update()
        ACTIVITY.enter("optimizer")
        self.engine.step(lr)
        if check is not None:
            check.after_step()

    def _refuse_weights(self, step: int) -> None:
        """End a run whose weights or moments are no numbers, on all ranks alike: no skip helps.

        Frozen weights and each rank's own copies are looked at too. Buffers may be infinite by
        design.
        """
        buffers = {id(buffer) for _, buffer in self.engine.module.named_buffers()}
        held = ((n, value) for n, value in self.engine.held_parts() if id(value) not in buffers)
        non_finite = dict(
            chain.from_iterable(self.ranks.gather_objects([*non_finite_tensors(held).items()]))
        )
        if non_finite:
            self.engine.zero_gradients()
            raise NonFiniteError(
                f"step {step + 1}: {non_finite_words(non_finite)}, since an earlier step. Go on "
                "from the last checkpoint with a lower optim.lr, or set optim.max_grad_norm. If it "
                "happens again, exclude the device"
            )

    def _non_finite_words(
        self, step: int, names: Sequence[Sequence[str]], made: Pass, again: Pass
    ) -> str:
        """The samples of a step that is not finite, on all ranks alike. Collective."""
        pairs = zip(names, made.losses, strict=True)
        mine = [keys for keys, loss in pairs if loss is not None and not math.isfinite(loss)]
        named = [keys for rank in self.ranks.gather_objects(mine) for keys in rank]
        if not named:  # the gradient alone overflowed: any sample of the step may be the cause
            everyone = self.ranks.gather_objects(names)
            named = [keys for rank in everyone for keys in rank]
        # Each once: the processes of a replica name the same micro-batches.
        listed = [*dict.fromkeys(", ".join(keys) for keys in named)]
        left = len(listed) - MOST_ROWS
        more = f" and those of {left} more, which the dump has" if left > 0 else ""
        second = again.sums
        repeats = "is finite" if second.is_finite else "is not finite either"
        return (
            f"step {step + 1}: loss sum {made.sums.totals['loss_sum']}, "
            f"gradient norm {made.sums.grad_norm}. The same step, run again in place, {repeats}: "
            f"{second.totals['loss_sum']}, {second.grad_norm}. Samples of the micro-batches "
            f"concerned: {'; '.join(listed[:MOST_ROWS])}{more}"
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warm-up, then decay to a floor."""

    optim: OptimSection
    total_steps: int

    def __call__(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        optim, peak = self.optim, self.optim.lr
        if step < optim.warmup_steps:
            return peak * (step + 1) / optim.warmup_steps
        if optim.schedule == "constant":
            return peak
        floor = peak * optim.min_lr_ratio
        span = max(1, self.total_steps - optim.warmup_steps)
        progress = min(1.0, (step - optim.warmup_steps) / span)
        is_linear = optim.schedule == "linear"
        left = 1 - progress if is_linear else 0.5 * (1 + math.cos(math.pi * progress))
        return floor + (peak - floor) * left


logger = logging.getLogger("vlmpack")

SEES_IMAGES: tuple[Component, ...] = ("vision", "projector")
"""Components whose gradients come from images alone."""

MAX_NAMES = 3

MOST_ROWS = 8
"""Micro-batches whose samples a message names."""


class TrainabilityCheck:
    """Checks that what the recipe trains is trained, and nothing else.

    It looks at steps until each trained component has had a gradient, and frozen weights were
    compared over one step with a learning rate above 0. Every rank makes the same calls in the same
    order.
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
        return bool(self._waiting) or self._frozen_unseen

    @property
    def without_gradient(self) -> list[Component]:
        """Trained components that still wait for a label after an image."""
        return sorted(self._waiting.intersection(SEES_IMAGES))

    def name_untrained(self) -> None:
        """Warn of untrained components, at the end of a launch that has taken steps."""
        if self.without_gradient:
            logger.warning(
                "%s: without a gradient, since in no step of this launch a label came after an "
                "image. Weight decay, if any, shrank them. Freeze them (trainable), or look at "
                "the data",
                ", ".join(self.without_gradient),
            )

    def before_step(self, *, lr: float, num_taught: int, num_seen_images: int) -> None:
        """Look at the gradients, and keep digests of what is frozen.

        Args:
            lr: learning rate of the step; at 0 nothing can move.
            num_taught, num_seen_images: of the global batch; see `Counts`.

        Raises:
            TrainabilityError: on every rank, for a component without a gradient.
        """
        due = {c for c in self._waiting if (num_seen_images if c in SEES_IMAGES else num_taught)}
        if due:
            norms = self.engine.gradient_norms().tolist()
            for count, norm in zip(self.engine.components, norms, strict=True):
                if count.component in due and norm == 0.0:
                    raise TrainabilityError(
                        f"trainable.{count.component} is {count.mode}, but after the first "
                        f"backward pass {_with_images(count.component)}all its {count.trained:,} "
                        f"trained parameters have a gradient of zero and would not be trained. "
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
                f"bug in vlmpack, or a library beneath it. Report it with the recipe"
            )


def _with_images(component: Component) -> str:
    return "with images " if component in SEES_IMAGES else ""


def count_seen_images(batches: Sequence[Batch]) -> int:
    """Image tokens with a later label in their sample, which alone pass gradients. On CPU."""
    return sum(_seen_in(batch) for batch in batches)


def _taught(batch: Batch) -> Tensor:
    """(l,) positions of the label tokens that may have a gradient: an answer without an advantage
    has none."""
    advantages = None if batch.rollouts is None else batch.rollouts.advantages
    if advantages is None:
        return batch.label_positions
    return batch.label_positions[advantages[batch.label_sequences] != 0]


def _num_taught(batch: Batch) -> int:
    return len(_taught(batch))


def _seen_in(batch: Batch) -> int:
    labels = _taught(batch)
    if batch.media is None or not len(labels):
        return 0
    if isinstance(batch, PackedBatch):
        ends = torch.tensor(batch.segment_lengths).cumsum(0)
    else:
        rows, width = batch.input_ids.shape
        ends = width * torch.arange(1, rows + 1)
    last = torch.full((len(ends),), -1)
    last.scatter_reduce_(0, torch.searchsorted(ends, labels, right=True), labels, "amax")
    if isinstance(batch, PackedBatch) and batch.prefix_tree is not None:  # branches see their path
        for place, parent in reversed([*enumerate(batch.prefix_tree.parents)]):
            if parent >= 0:
                last[parent] = torch.maximum(last[parent], last[place])
    places = batch.media_positions
    return int((last[torch.searchsorted(ends, places, right=True)] >= places).sum())
