"""The stock model's runs, the engine's run, and the checks that compare them.

The engine takes one optimizer step: trained components must have gradients, frozen ones stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import torch
from torch import Tensor

from vlmpack.backends.engine import Engine
from vlmpack.backends.hf.recurrence import recurrent_modules
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.data.protocols import Collator
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.families.base import ModulePaths
from vlmpack.packing import EncodedSample
from vlmpack.proof.measure import Check, GradientError, gradient_errors, ordinary_ids
from vlmpack.proof.verify.compare import (
    Compared,
    check_log_probabilities,
    check_logits,
    check_losses,
    check_outputs,
)
from vlmpack.proof.verify.gradients import (
    AdapterRun,
    check_adapters,
    check_gradients,
    part_of,
    with_missing,
)
from vlmpack.proof.verify.leak import check_gradient_leaks, check_leaks
from vlmpack.proof.verify.packed import Packed, PackedRun, plain_step
from vlmpack.proof.verify.pairs import PairFigures, PairStep, PairTargets, check_pairs
from vlmpack.proof.verify.recurrent import RECURRENT_PARTS, check_stateful, in_double
from vlmpack.proof.verify.samples import VerifiedRow, in_sequences
from vlmpack.proof.verify.unpacked import How, Point, StockModel, Unpacked, has_experts
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.recipe.trainable import Component, OptimSection
from vlmpack.training.step import SEES_IMAGES, count_seen_images
from vlmpack.words import some_of


@dataclass(frozen=True, slots=True)
class BeforeStep:
    """What is known of an engine before its optimizer step.

    Args:
        digests: of this rank's frozen parameters.
    """

    norms: Tensor
    digests: Tensor

    @classmethod
    def of(cls, engine: Engine) -> BeforeStep:
        """Measure between `finish_gradients` and `step`. Collective."""
        _, digests = engine.frozen_digests()
        return cls(engine.gradient_norms().cpu(), digests.clone())


def check_trained(
    engine: Engine, ranks: Ranks, before: BeforeStep, *, num_seen_images: int
) -> list[Check]:
    """Check the trained and frozen parameters after the step. Collective.

    Args:
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
            detail=f"{len(moved)} of {len(held)} moved in one step: {some_of(moved, 3)}",
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
            detail=f"no label comes after an image, so {some_of(unseen)} has nothing to learn "
            f"from ({modes})",
        )
    if still:
        return Check(
            name=name,
            status="fail",
            detail=f"no gradient at all in {some_of(still)} ({modes})",
            look_at="`trainable` of the recipe: what freezes these parameters",
        )
    return Check(name=name, status="pass", detail=modes)


TOKENS_TOGETHER = 8192
"""Slots of a padded batch of the unpacked model, so that its logits have room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockRuns:
    """Results of the stock model, which is freed.

    Args:
        unpacked: float32, one by one.
        noise: another unpacked run, without its gradients.
        points, kept: whose outputs are compared, and at which slots.
        shared_matmuls: whether samples share the experts' matmuls.
        exact: whether the packed run computes in float32.
        recurrent: paths of the modules that carry a state.
        targets: for the preference loss; None if samples are no pairs.
        own_rule: errors of the stock model's own gradients of recurrent layers, if `unpacked` has
            them in float64; see `recurrences_alone`.
    """

    samples: tuple[EncodedSample, ...]
    unpacked: Unpacked
    noise: Unpacked
    noise_gradients: dict[str, GradientError]
    parts: dict[str, str]
    positions: list[Tensor]
    positions_of: str
    points: list[Point]
    kept: list[Tensor]
    shared_matmuls: bool
    description: str
    exact: bool
    recurrent: tuple[str, ...] = ()
    own_rule: Mapping[str, GradientError] = field(default_factory=dict)
    targets: PairTargets | None = None

    @classmethod
    def make(
        cls,
        encoder: Encoder,
        samples: Sequence[EncodedSample],
        device: torch.device,
        *,
        dtype: torch.dtype,
        half_weights: bool,
        objective: ObjectiveSection | None = None,
    ) -> StockRuns:
        """Run the stock model.

        Args:
            dtype: of the packed run.
            half_weights: whether a bfloat16 run has bfloat16 weights too, not matmuls alone.
            objective: the recipe's, where samples are pairs.
        """
        samples = in_sequences(samples)
        pairs = objective is not None and objective.learns_pairs
        targets = PairTargets.of(objective, samples) if objective and pairs else None
        weights = None if targets is None else targets.weights()
        stock = StockModel(encoder, samples, device, weights)
        exact = dtype is torch.float32
        unpacked = stock.run()
        longest = max(sample.length for sample in samples)
        together = min(len(samples), max(2, TOKENS_TOGETHER // longest))
        how = How(together=together, reverse=True)
        if not exact:
            how = How(autocast=not half_weights)
            if half_weights:
                stock.model.to(torch.bfloat16)
        noise = stock.run(how)
        positions, source = stock.positions()
        paths = encoder.family.modules
        attention = stock.model.config._attn_implementation
        recurrent = tuple(
            f"{paths.language}.{name}"
            for name in recurrent_modules(stock.model.get_submodule(paths.language))
        )
        parts = {name: part_of(name, paths, recurrent) for name in unpacked.gradients}
        own = gradient_errors(unpacked.gradients, noise.gradients.items())
        own_rule: dict[str, GradientError] = {}
        if recurrent and exact:
            names = [name for name, part in parts.items() if part in RECURRENT_PARTS]
            better, own_errors, own_rule = in_double(stock, unpacked.gradients, names)
            unpacked = replace(unpacked, gradients=unpacked.gradients | better)
            own |= own_errors
        return cls(
            samples=tuple(samples),
            unpacked=unpacked,
            noise=replace(noise, gradients={}),
            noise_gradients=own,
            parts=parts,
            recurrent=recurrent,
            own_rule=own_rule,
            targets=targets,
            positions=positions,
            positions_of=source,
            points=stock.points,
            kept=stock.kept,
            shared_matmuls=has_experts(stock.model.get_submodule(paths.language)),
            description=f"{type(stock.model).__name__} ({attention})",
            exact=exact,
        )

    def noise_of(self, rows: Sequence[VerifiedRow]) -> dict[str, GradientError]:
        """Noise of unpacked gradients; for padded rows, of transformers' own recurrences."""
        own = self.noise_gradients
        if not all(row.is_padded for row in rows):
            return own
        return own | {
            name: max(own[name], error, key=lambda each: each.relative)
            for name, error in self.own_rule.items()
        }

    def compared(self, rows: Sequence[VerifiedRow]) -> Compared:
        return Compared(self.samples, rows, self.unpacked, self.noise, self.exact)


def verify_rows(
    engine: Engine,
    ranks: Ranks,
    rows: Sequence[VerifiedRow],
    collator: Collator,
    stock: StockRuns | None,
    *,
    encoder: Encoder,
    optim: OptimSection,
) -> list[Check]:
    """Run the engine on the rows and compare. Collective; the engine's weights change.

    Args:
        engine: fresh.
        stock: on the main rank.

    Returns:
        On every rank the same.
    """
    values_of = attrgetter("points", "kept", "shared_matmuls", "exact", "recurrent", "targets")
    points, kept, shared, exact, recurrent, targets = ranks.broadcast_object(
        values_of(stock) if stock is not None else None
    )
    run = PackedRun(engine, ranks, points, kept)
    samples = [sample for row in rows for sample in row.alone]
    special = {*encoder.tokenizer.all_special_ids, *encoder.placeholder_ids}
    shared_rows = [row for row in rows if len(row.alone) > 1]
    leak = check_leaks(
        run,
        collator,
        shared_rows if exact else shared_rows[:1],  # bfloat16 has many
        ordinary_ids((sample.input_ids for sample in samples), special),
        shared_matmuls=shared,
        exact=exact,
    )
    stateful = check_stateful(run, rows, recurrent, exact=exact) if recurrent else []
    if targets is not None and not stateful and run.model is not None:
        stateful = [check_gradient_leaks(run, rows[:1])]
    stepped = _one_step(run, rows, stock, optim, targets)
    seen = count_seen_images([row.batch for row in rows])
    trained = check_trained(engine, ranks, stepped.before, num_seen_images=seen)

    def numeric() -> list[Check]:
        assert stock is not None
        return stepped.compared_with(stock, rows, engine.policy, encoder.family.modules)

    return [*ranks.on_main(numeric), *stateful, leak, *trained]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stepped:
    """Results of an optimizer step.

    Args:
        logits: of the kept slots of each sample, before the step.
        errors: of gradients that the stock model has too; empty except on the main rank.
    """

    packed: Packed
    logits: dict[int, Tensor]
    errors: dict[str, GradientError]
    adapters: AdapterRun
    before: BeforeStep
    pairs: PairFigures | None = None

    def compared_with(
        self,
        stock: StockRuns,
        rows: Sequence[VerifiedRow],
        policy: TrainingPolicy,
        paths: ModulePaths,
    ) -> list[Check]:
        compared, own = stock.compared(rows), stock.noise_of(rows)
        theirs = stock.unpacked.gradients
        checks: list[Check] = []
        if self.packed.outputs:
            checks += check_outputs(compared, self.packed, stock.points, stock.kept)
        if not stock.exact:
            checks.append(check_log_probabilities(compared, self.packed.losses))
        checks.append(check_losses(compared, self.packed.losses))
        if self.logits:
            checks.append(check_logits(compared, self.logits))
        if self.pairs is not None:
            checks += check_pairs(compared, self.pairs, self.packed, stock.points)
        expected = [n for n, g in theirs.items() if policy.trains_parameter(n, paths)]
        errors = with_missing(self.errors, theirs, expected)
        checks += check_gradients(compared, errors, own, stock.parts, stock.own_rule)
        return [*checks, *check_adapters(compared, self.adapters, policy.lora, own)]


def _one_step(
    run: PackedRun,
    rows: Sequence[VerifiedRow],
    stock: StockRuns | None,
    optim: OptimSection,
    targets: PairTargets | None,
) -> _Stepped:
    engine = run.engine
    num_labels = sum(row.batch.num_label_tokens for row in rows)
    count = torch.tensor(float(num_labels * run.ranks.dp_size), device=engine.device)
    figures, make_step = None, plain_step
    if targets is not None:
        pairs = PairStep(run, rows, targets)
        rows, make_step = pairs.rows, pairs.forward_step
    engine.zero_gradients()
    packed = run.run(rows, backward=True, make_step=make_step)
    if targets is not None:
        figures = pairs.figures(packed)
        count = figures.divisor
    logits = _logits(run, rows, packed)
    engine.finish_gradients(count, None)
    adapters = AdapterRun.of(run.model, engine.policy.lora)
    before = BeforeStep.of(engine)
    engine.step(optim.lr)
    # Every rank walks through all gradients, the main one compares.
    theirs = stock.unpacked.gradients if stock is not None else {}
    return _Stepped(
        packed=packed,
        logits=logits,
        errors=gradient_errors(theirs, run.gradients(optim.betas[0])),
        adapters=adapters,
        before=before,
        pairs=figures,
    )


def _logits(run: PackedRun, rows: Sequence[VerifiedRow], packed: Packed) -> dict[int, Tensor]:
    """(n, V) logits of each sample's kept slots; empty for an engine's own model. Collective."""
    logits: dict[int, Tensor] = {}
    for row, hidden in zip(rows, packed.hidden, strict=False):
        for number, start in zip(row.numbers, row.starts, strict=True):
            logits[number] = run.logits(hidden[run.kept[number] + start])
    return logits
