"""Pairs in rows against the stock model, one sequence at a time: log p, reference, loss, images.

stock    each sequence alone, with a tower run of its own: its losses, and gradients of
         sum_s c_s lp_s, with c_s = d loss / d lp_s of the papers' formulas
offsets  the distance of the policy from its reference, chosen so that no pair is at h = 0
row      the engine's objective on the packed pairs, whose reference is lp - offset
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vlmpack.backends.engine import ForwardStep
from vlmpack.data.loading.loader import MicroBatch, TrainedSample
from vlmpack.data.pipeline import with_kept
from vlmpack.packing import IGNORE_INDEX, Batch, EncodedSample
from vlmpack.proof.measure import LOSS_BOUND, Check, bounded, worst
from vlmpack.proof.verify.compare import Compared, where_worst
from vlmpack.proof.verify.packed import Look, Packed, PackedRun
from vlmpack.proof.verify.samples import VerifiedRow
from vlmpack.proof.verify.unpacked import Point
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training.objective import Objective, objective_of
from vlmpack.training.preference import sequence_log_probabilities
from vlmpack.training.reference import log_probabilities

MARGINS = (-0.8, 0.6, -0.3, 0.9, 0.2)
"""Margins h of the pairs in turn: each gets a weight of its own."""

SPLIT = 0.75
"""Share of a pair's margin that is its chosen answer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTargets:
    """Targets of the preference loss; `offsets` (2 N,) float64 are log p minus reference."""

    section: ObjectiveSection
    offsets: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, section: ObjectiveSection, sequences: Sequence[EncodedSample]) -> PairTargets:
        """For sequences of pairs, chosen and rejected in turn."""
        offsets = [
            share * MARGINS[pair % len(MARGINS)] / section.beta
            for pair in range(len(sequences) // 2)
            for share in (SPLIT, SPLIT - 1)
        ]
        tokens = [int((each.labels != IGNORE_INDEX).sum()) for each in sequences]
        return cls(
            section=section,
            offsets=torch.tensor(offsets, dtype=torch.float64),
            tokens=torch.tensor(tokens, dtype=torch.float64),
        )

    def loss(self, log_p: Tensor, reference: Tensor) -> Tensor:
        """0-d, the whole loss by the formulas of the papers, pair by pair (`training.preference`).

        Args:
            log_p, reference: (2 N,) float64.
        """
        knobs, terms = self.section, []
        for chosen in range(0, len(log_p), 2):
            away = log_p[chosen : chosen + 2] - reference[chosen : chosen + 2]
            margin = knobs.beta * (away[0] - away[1])
            if knobs.loss == "hinge":
                terms.append(torch.clamp(1 - margin, min=0))
            elif knobs.loss == "ipo":
                mean = away / self.tokens[chosen : chosen + 2]
                terms.append((mean[0] - mean[1] - 0.5 / knobs.beta) ** 2)
            else:
                e = knobs.label_smoothing
                terms.append((1 - e) * torch.log1p(torch.exp(-margin)))
                terms[-1] = terms[-1] + e * torch.log1p(torch.exp(margin))
        whole = torch.stack(terms).mean()
        if knobs.sft_weight:
            whole = whole - knobs.sft_weight * log_p[0::2].sum() / self.tokens[0::2].sum()
        return whole

    def weights(self) -> list[float]:
        """d loss / d (-lp) of each sequence, whose reference lies `offsets` below its log p."""
        log_p = self.offsets.clone().requires_grad_()
        self.loss(log_p, torch.zeros_like(log_p)).backward()
        assert log_p.grad is not None
        weights: list[float] = (-log_p.grad).tolist()
        return weights


def with_references(
    run: PackedRun, rows: Sequence[VerifiedRow], targets: PairTargets
) -> tuple[list[VerifiedRow], dict[int, float]]:
    """Rows whose references lie their offsets below log p, and log p by sequence. Collective."""
    ranks, mine = run.ranks, dict[int, float]()
    for row in rows:
        values = log_probabilities(run.engine, row.batch)
        mine |= dict(zip(row.numbers, values, strict=False))
    references: dict[int, float] = {}
    for part in ranks.gather_objects(mine if ranks.dp_rank == 0 else {}):
        references |= part
    table = np.array([references.get(n, math.nan) for n in range(len(targets.offsets))])
    table = (table - targets.offsets.numpy()).reshape(-1, 2)
    done = []
    for row in rows:
        micro = MicroBatch(
            batch=row.batch,
            samples=tuple(
                TrainedSample(number // 2, key, "")
                for number, key in zip(row.numbers[0::2], row.batch.keys, strict=True)
            ),
            skipped=(),
            num_images=0,
            read_seconds=0.0,
            encode_seconds=0.0,
        )
        batch = with_kept(micro, "reference", table, lambda numbers: numbers).batch
        done.append(replace(row, batch=batch))
    return done, references


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFigures:
    """The results of the rows of pairs, the same on every rank.

    Args:
        log_p: of each sequence in the training step.
        reference: of each sequence, what the row was given as its reference, the offset added.
        passed: log p of each sequence by the function of the reference pass.
        divisor: what its gradients are divided by, over the world.
    """

    targets: PairTargets
    log_p: Mapping[int, float]
    reference: Mapping[int, float]
    passed: Mapping[int, float]
    loss: float
    divisor: Tensor


class PairStep:
    """The recipe's objective on rows of pairs, as training sums it up.

    Args:
        rows: with references; see `with_references`.
    """

    def __init__(self, run: PackedRun, rows: Sequence[VerifiedRow], targets: PairTargets) -> None:
        self.run, self.targets = run, targets
        self.rows, self.passed = with_references(run, rows, targets)
        self.objective: Objective = objective_of(targets.section)
        batches = [row.batch for row in self.rows]
        divisors = {self.objective.divisor, *(by for by, _ in self.objective.terms.values())}
        counts = {name: sum(map(self.objective.counts[name], batches)) for name in divisors}
        device = run.engine.device
        self.counts = {
            name: torch.tensor(float(count * run.ranks.dp_size), device=device).double()
            for name, count in counts.items()
        }
        self._seen: list[list[float]] = []

    def forward_step(self, look: Look) -> ForwardStep:
        def both(losses: Tensor, batch: Batch) -> None:
            self._seen.append(sequence_log_probabilities(losses, batch).tolist())
            look(losses, batch)

        return self.objective.shown_to(both).step_with(self.counts)

    def figures(self, packed: Packed) -> PairFigures:
        """The figures, after the rows ran. Collective."""
        ranks = self.run.ranks
        sums = self.objective.add_up(packed.reports, self.run.engine.device)
        summed = ranks.sum_over_world(torch.stack([*sums.values()]))
        totals = dict(zip(sums, summed.tolist(), strict=True))
        totals |= {name: float(count) for name, count in self.counts.items()}
        mine: dict[int, float] = {}
        for row, values in zip(self.rows, self._seen, strict=False):
            mine |= dict(zip(row.numbers, values, strict=True))
        log_p: dict[int, float] = {}
        for part in ranks.gather_objects(mine if ranks.dp_rank == 0 else {}):
            log_p |= part
        given: dict[int, float] = {}
        for row in self.rows:
            assert row.batch.reference is not None
            given |= dict(zip(row.numbers, row.batch.reference.tolist(), strict=True))
        offsets = self.targets.offsets.tolist()
        loss = self.objective.loss(totals)
        return PairFigures(
            targets=self.targets,
            log_p=log_p,
            reference={number: value + offsets[number] for number, value in given.items()},
            passed=self.passed,
            loss=math.nan if loss is None else loss,
            divisor=self.counts[self.objective.divisor],
        )


def check_pairs(
    compared: Compared, figures: PairFigures, packed: Packed, points: Sequence[Point]
) -> list[Check]:
    stock = [-float(losses.double().sum()) for losses in compared.stock.losses]
    again = [-float(losses.double().sum()) for losses in compared.noise.losses]
    checks = [
        _check_log_p("log p of each answer", compared, figures, figures.log_p, stock, again),
        _check_log_p(
            "reference of each answer", compared, figures, figures.reference, stock, again
        ),
        _check_loss(compared, figures, stock, again),
    ]
    once = _check_once(compared, packed, points)
    return [*checks, *([once] if once is not None else [])]


def _check_log_p(
    name: str,
    compared: Compared,
    figures: PairFigures,
    ours: Mapping[int, float],
    stock: Sequence[float],
    again: Sequence[float],
) -> Check:
    """By sequence, as the error of its mean loss: a loss below one nat counts as one."""

    def error(value: float, number: int) -> float:
        tokens = float(figures.targets.tokens[number])
        return abs(value - stock[number]) / max(tokens, abs(stock[number]))

    errors = [error(ours.get(number, math.nan), number) for number in range(len(stock))]
    noise = worst(error(value, number) for number, value in enumerate(again))
    at = where_worst(errors)
    return bounded(
        name,
        worst(errors),
        compared.bound(LOSS_BOUND, noise),
        noise=noise,
        detail=f"{len(errors)} answers, worst {compared.samples[at].key}: "
        f"{ours.get(at, math.nan):.6g}, alone {stock[at]:.6g}",
        look_at="which label tokens are whose answer's, and which pair's numbers a row is given",
    )


def _check_loss(
    compared: Compared, figures: PairFigures, stock: Sequence[float], again: Sequence[float]
) -> Check:
    def of(values: Sequence[float]) -> float:
        log_p = torch.tensor(values, dtype=torch.float64)
        reference = torch.tensor(stock, dtype=torch.float64) - figures.targets.offsets
        return float(figures.targets.loss(log_p, reference))

    expected, noisy = of(stock), of(again)
    scale = max(1.0, abs(expected))
    noise = abs(noisy - expected) / scale
    section = figures.targets.section
    return bounded(
        "preference loss",
        abs(figures.loss - expected) / scale,
        compared.bound(LOSS_BOUND, noise),
        noise=noise,
        detail=f"{section.loss}, beta {section.beta:g}, {len(stock) // 2} pairs in "
        f"{len(compared.rows)} rows: {figures.loss:.6f}, alone {expected:.6f}",
        look_at="what pairs are averaged over: those of all rows together",
    )


def _check_once(compared: Compared, packed: Packed, points: Sequence[Point]) -> Check | None:
    """The tower's rows: those of each pair's images once. None where there is nothing to see."""
    name = "images of a pair are encoded once"
    tower = [point for point in points if point.kind == "tower"]
    if not packed.outputs or not tower:
        return None
    path, alone, ours, images = tower[-1].path, 0, 0, 0
    for row, outputs in zip(compared.rows, packed.outputs, strict=True):
        theirs = [compared.stock.outputs[n].get(path) for n in row.numbers[0::2]]
        counts = [len(value) for value in theirs if value is not None]
        if not counts or path not in outputs:
            continue  # without images the tower sees the blank one
        alone += sum(counts)
        ours += len(outputs[path])
        images += len([None for sample in row.alone[0::2] if sample.media is not None])
    if not alone:
        return Check(name=name, status="too few", detail="no pair has an image")
    detail = f"{ours:,} rows of {path} for the images of {images} pairs, {alone:,} of one run each"
    if ours == alone:
        return Check(name=name, status="pass", detail=detail)
    look_at = "how the collator joins the media of a pair"
    return Check(name=name, status="fail", detail=detail, look_at=look_at)
