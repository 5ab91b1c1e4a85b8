"""What training minimises, as one value: an `Objective`.

    a micro-batch -> forward step -> the term to differentiate, and sums by name
    sums and counts of all micro-batches, replicas and context-parallel ranks -> one small tensor
    gradients / its divisor -> the optimizer;  ratios of sums -> metrics.jsonl and validation

The model gives the cross entropy -log p of each label token. An objective that is a function of
those is a function and a value (Focal Loss, 1708.02002, averaged over samples):

    def focal(losses: Tensor, batch: Batch) -> dict[str, Tensor]:
        missed = 1 - (-losses).exp()
        return {"loss_sum": (missed**2 * losses).sum(), "plain_sum": losses.sum()}

    FOCAL = Objective(
        sums=focal,
        sum_names=("loss_sum", "plain_sum"),
        divisor="num_samples",
        report={"plain_loss": ("plain_sum", "num_label_tokens")},
    )

Its name goes into `recipe.objective.OBJECTIVES`, and the recipe says `objective: {name: focal}`.

Sums cover this rank's part of the micro-batch. They are never means, since the divisor is that of
the whole global batch. The label tokens of `losses` are `batch.label_positions`, and under context
parallelism this rank's part of them in `batch.context`. An objective that is no sum over tokens
adds its parts up by `batch.context.all_sum` first, and sets `of_rows`, as `training.preference`
does.

`forward_step(data_iterator, model)` follows Megatron's contract. It returns the model's output and
a function of that output, and an engine's schedule calls both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from vlmpack.backends.engine import ROUTER_REPORT, ROUTER_SUM, ForwardStep, LossFunction
from vlmpack.errors import ObjectiveError
from vlmpack.packing import Batch, move_batch
from vlmpack.recipe.objective import OBJECTIVES, ObjectiveSection
from vlmpack.words import twice, unfit_signature

TokenSums = Callable[[Tensor, Batch], Mapping[str, Tensor]]
"""(L,) float32 losses of the label tokens, and their batch on the same device -> 0-d sums by name;
`loss_sum` is differentiated."""


def cross_entropy(losses: Tensor, batch: Batch) -> Mapping[str, Tensor]:
    return {"loss_sum": losses.sum()}


def forward_step(
    data_iterator: Iterator[Batch],
    model: nn.Module,
    sums: TokenSums = cross_entropy,
    scales: Mapping[str, Tensor] = MappingProxyType({}),
    of_rows: bool = False,
) -> tuple[Tensor, LossFunction]:
    """Take one micro-batch, move it to the model's device, and run the model.

    Args:
        data_iterator: yields batches on CPU, pinned where the model is on a GPU.
        model: called as `model(batch, packed_seq_params)`.
        scales: 0-d factors of the other differentiated sums.
        of_rows: whether `sums` are of whole rows. Then context-parallel ranks of a row compute the
            same ones, and the first reports them.

    Returns:
        (L,) float32 losses of the label tokens, and the function that sums them.
    """
    device = next(model.parameters()).device
    batch = move_batch(next(data_iterator), device)
    losses = model(batch, batch.packed_seq_params())
    return losses, partial(_summed, sums=sums, batch=batch, scales=scales, of_rows=of_rows)


def _summed(
    losses: Tensor, *, sums: TokenSums, batch: Batch, scales: Mapping[str, Tensor], of_rows: bool
) -> tuple[Tensor, int, dict[str, Tensor]]:
    """The differentiable term, Megatron's count of tokens, and detached float64 sums."""
    named = sums(losses, batch)
    context = batch.context
    report: dict[str, Tensor] = {}
    if context is None or context.rank == 0 or not of_rows:
        report = {name: value.detach().double() for name, value in named.items()}
    whole = named["loss_sum"]
    for name, scale in scales.items():
        whole = whole + scale.to(whole.device, whole.dtype) * named[name]
    return whole, batch.num_label_tokens, report


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The counts of every step over all micro-batches, whatever its objective.

    Args:
        num_tokens: real tokens, as each sample has them alone.
        num_shared_tokens: those of them that were not computed again, where rows share prefixes.
        num_shared_patches: patches that the tower did not encode again.
        num_padded_slots: slots that the same micro-batches take in mode `none`.
        num_eager_rows: rows of too many samples for the captured graph.
        num_taught: label tokens that may have a gradient, and
        num_seen_images: image tokens that one of these comes after. Both are 0 once nobody asks.
        stop_votes: ranks that were asked to stop.
        num_writing: ranks that are still writing a checkpoint.
    """

    num_label_tokens: int = 0
    num_tokens: int = 0
    num_shared_tokens: int = 0
    num_shared_patches: int = 0
    num_slots: int = 0
    num_padded_slots: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    num_eager_rows: int = 0
    num_taught: int = 0
    num_seen_images: int = 0
    stop_votes: int = 0
    num_writing: int = 0

    @classmethod
    def of(cls, batches: Sequence[Batch], **more: int) -> Counts:
        return cls(
            num_label_tokens=sum(batch.num_label_tokens for batch in batches),
            num_tokens=sum(batch.num_tokens for batch in batches),
            num_shared_tokens=sum(batch.num_shared_tokens for batch in batches),
            num_shared_patches=sum(batch.num_shared_patches for batch in batches),
            num_slots=sum(batch.num_slots for batch in batches),
            num_padded_slots=sum(batch.num_padded_slots for batch in batches),
            num_samples=sum(len(batch.keys) for batch in batches),
            num_eager_rows=sum(batch.overflows for batch in batches),
            **more,
        )


VOTES = ("stop_votes", "num_writing")
"""Counts to which each process adds its own."""

_COLUMNS = {
    *("step", "epoch", "loss", "loss_divisor", "grad_norm", "learning_rate", "data_wait_share"),
    *ROUTER_REPORT,
}
"""Columns of metrics.jsonl that an objective's report would hide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """The log message for a count the first time that it is not 0.

    Args:
        one, many: the text after the number 1, and after others.
        which: places in a micro-batch of the samples that are counted.
    """

    one: str
    many: str
    which: Callable[[Batch], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss, how it is averaged, and what is reported.

    Args:
        sums: makes 0-d sums by name of the losses of a micro-batch's label tokens.
        sum_names: what `sums` returns: `loss_sum`, which is differentiated, and others.
        of_rows: whether `sums` are of whole rows, so that context-parallel ranks of a row compute
            the same ones.
        forward_step: replaces `sums` for an objective that needs more than losses. It runs the
            model on one micro-batch and reports the sums; see `backends.engine`.
        counts: name -> a function that counts in one whole micro-batch, on the host, even an empty
            row; called once a replica.
        divisor: the sum or count that gradients and `loss_sum` are divided by, once, over all
            micro-batches and ranks. Where it is 0 the step changes nothing.
        terms: further terms of the loss, each with its own divisor: sum -> (a count, the term's
            weight). `loss_sum` does not contain them. The forward step gets `scales`, the factors
            of these sums before they are differentiated.
        report: what is reported beside the loss: name -> (sum or count, what divides it).
        by_source: the same for each source of the data, as columns `NAME/SOURCE`, if the step has a
            sample of it.
        remarks: count -> the log message the first time that it is not 0.
        shown: names of the report that the log gives after each validation.

    Raises:
        ValueError: a name that stands for two things, or for nothing.
    """

    sums: TokenSums = cross_entropy
    sum_names: tuple[str, ...] = ("loss_sum",)
    of_rows: bool = False
    forward_step: ForwardStep | None = None
    counts: Mapping[str, Callable[[Batch], int]] = field(default_factory=dict)
    divisor: str = "num_label_tokens"
    terms: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    report: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    by_source: Mapping[str, Mapping[str, tuple[str, str]]] = field(default_factory=dict)
    remarks: Mapping[str, Remark] = field(default_factory=dict)
    shown: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [*self.sum_names, *self.counts, *(entry.name for entry in fields(Counts))]
        if shared := sorted(twice([*names, ROUTER_SUM])):
            raise ValueError(f"sums and counts of an objective share names: {', '.join(shared)}")
        if taken := sorted(self.report.keys() & _COLUMNS):
            raise ValueError(f"columns of metrics.jsonl by another meaning: {', '.join(taken)}")
        needed = {"loss_sum", self.divisor}.union(*self.report.values(), self.terms, self.remarks)
        needed |= {
            name for one in self.by_source.values() for pair in one.values() for name in pair
        }
        needed |= {divisor for divisor, _ in self.terms.values()}
        if unknown := sorted(needed - set(names)):
            raise ValueError(
                f"an objective asks for {', '.join(unknown)}; there are {', '.join(names)}"
            )
        if hidden := sorted(set(self.shown) - self.report.keys()):
            raise ValueError(
                f"an objective shows {', '.join(hidden)}; its report has "
                f"{', '.join(self.report) or 'nothing'}"
            )
        if summed := sorted(self.counted_before() & set(self.sum_names)):
            raise ValueError(
                f"what divides a term is counted before the step: {', '.join(summed)} is a sum"
            )

    def counted_before(self) -> set[str]:
        """Counts of the whole global batch that are needed before its first forward pass.

        They scale `terms`, whose divisors differ. Empty if `loss_sum` is all of the loss.
        """
        divisors = {divisor for divisor, _ in self.terms.values()}
        return divisors | {self.divisor} if divisors else set()

    @property
    def is_divided_by_counts(self) -> bool:
        """Whether `loss_sum` is divided by one of `Counts`, and so must not be a mean.

        A divisor of the objective's own may count anything.
        """
        return self.divisor in {entry.name for entry in fields(Counts)}

    def step_with(self, counts: Mapping[str, Tensor] = MappingProxyType({})) -> ForwardStep:
        """The forward step for a global batch.

        Args:
            counts: 0-d, of the whole global batch: what `counted_before` names.
        """
        step = self.forward_step or partial(forward_step, sums=self.sums, of_rows=self.of_rows)
        if not self.terms:
            return step
        scales = {
            name: weight * counts[self.divisor] / counts[divisor].clamp(min=1)
            for name, (divisor, weight) in self.terms.items()
        }
        return partial(cast(Any, step), scales=scales)

    def shown_to(self, look: Callable[[Tensor, Batch], None]) -> Objective:
        """The same objective, whose `sums` also show what they are made of.

        Args:
            look: called with the (L,) detached losses of each micro-batch, and the batch.
        """

        def sums(losses: Tensor, batch: Batch) -> Mapping[str, Tensor]:
            look(losses.detach(), batch)
            return self.sums(losses, batch)

        return replace(self, sums=sums)

    def add_up(
        self, reports: Sequence[Mapping[str, Tensor]], device: torch.device
    ) -> dict[str, Tensor]:
        """0-d float64 on the device: each sum over this rank's micro-batches.

        Args:
            reports: one a micro-batch; empty on a rank that computes no loss.

        Raises:
            ObjectiveError: other sums than it names.
        """
        for report in reports:
            if report and report.keys() != set(self.sum_names):
                raise ObjectiveError(
                    f"objective: its forward step reports {', '.join(report)}. Expected what its "
                    f"`sum_names` names: {', '.join(self.sum_names)}"
                )
        if not any(reports):
            return dict.fromkeys(
                self.sum_names, torch.zeros((), dtype=torch.float64, device=device)
            )
        return {name: torch.stack([r[name] for r in reports]).sum() for name in self.sum_names}

    def loss(self, totals: Mapping[str, float]) -> float | None:
        """The loss of global sums; None if the divisor is 0, as a loss of 0 looks perfect."""
        loss = _ratio(totals, "loss_sum", self.divisor)
        if loss is None:
            return None
        added = ((w, _ratio(totals, name, by)) for name, (by, w) in self.terms.items())
        return loss + sum(weight * (value or 0.0) for weight, value in added)

    def divided_by(self, totals: Mapping[str, float]) -> float | None:
        """The divisor of `loss_sum`; None for label tokens, which every step counts anyway."""
        return None if self.divisor == "num_label_tokens" else totals[self.divisor]

    def reported(self, totals: Mapping[str, float]) -> dict[str, float | None]:
        figures = ratios(totals, self.report)
        for source, report in self.by_source.items():
            own = ratios(totals, report)
            figures |= {f"{name}/{source}": x for name, x in own.items() if x is not None}
        return figures


def ratios(
    totals: Mapping[str, float], report: Mapping[str, tuple[str, str]]
) -> dict[str, float | None]:
    """Name -> ratio of a sum and what divides it; None where that is 0."""
    return {name: _ratio(totals, *ratio) for name, ratio in report.items()}


def _ratio(totals: Mapping[str, float], numerator: str, divisor: str) -> float | None:
    return totals[numerator] / totals[divisor] if totals[divisor] else None


SFT = Objective()
"""Supervised finetuning: the cross entropy of the label tokens, averaged over all of them."""


def objective_of(
    section: ObjectiveSection, sources: Sequence[str] = (), own: Objective | None = None
) -> Objective:
    """The objective that a recipe names: a value, or what a function makes of its knobs.

    Args:
        sources: names that `by_source` reports may have.
        own: what `python:NAME` stands for.

    Raises:
        ObjectiveError: a function with another signature.
    """
    if own is not None:
        return own
    module, _, value = OBJECTIVES[section.name].partition(":")
    objective = getattr(import_module(module), value)
    if isinstance(objective, Objective):
        return objective
    if unfit := unfit_signature(objective, 2):
        raise ObjectiveError(
            f"objective.name '{section.name}': {module}.{value}{unfit}, but it is called as "
            f"{value}(section, sources)"
        )
    made: Objective = objective(section, sources)
    return made
