"""The reference's runs, the engine's run, and the rows of the table that compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vlmpack.backends.engine import Engine
from vlmpack.distributed import Ranks
from vlmpack.families import Encoder
from vlmpack.packing import EncodedSample, PackCollator, PadCollator
from vlmpack.recipe.trainable import OptimSection
from vlmpack.training.verify.compare import (
    Compared,
    GradientError,
    check_gradients,
    check_log_probabilities,
    check_logits,
    check_losses,
    check_outputs,
    gradient_errors,
    part_of,
)
from vlmpack.training.verify.figures import Check
from vlmpack.training.verify.leak import Perturbation, check_leaks
from vlmpack.training.verify.outputs import Point, has_experts, recurrent_modules
from vlmpack.training.verify.packed import Packed, PackedRun
from vlmpack.training.verify.reference import How, Reference, Unpacked
from vlmpack.training.verify.row import Row, make_row
from vlmpack.training.verify.trained import BeforeStep, check_trained

TOKENS_TOGETHER = 8192
"""Slots of a padded batch of the unpacked model, so that its logits have room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRuns:
    """What the stock model said; the model itself is gone.

    Args:
        samples: by number.
        unpacked: float32, one by one.
        noise: another unpacked run, without its gradients.
        noise_gradients: the errors of its gradients.
        parts: of each parameter.
        positions, positions_of: of each sample, and what counted them.
        points, kept: whose outputs are compared, and at which slots.
        shared_matmuls: whether samples share the experts' matmuls.
        exact: whether the packed run computes in float32.
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
    exact: bool

    @classmethod
    def make(
        cls,
        encoder: Encoder,
        samples: Sequence[EncodedSample],
        device: torch.device,
        *,
        dtype: torch.dtype,
        half_weights: bool,
    ) -> ReferenceRuns:
        """Run the stock model.

        Args:
            encoder: the model folder's processor.
            samples: to run.
            device: where.
            dtype: of the packed run.
            half_weights: whether a bfloat16 run has bfloat16 weights too, not matmuls alone.
        """
        reference = Reference(encoder, samples, device)
        exact = dtype is torch.float32
        unpacked = reference.run()
        longest = max(sample.length for sample in samples)
        together = min(len(samples), max(2, TOKENS_TOGETHER // longest))
        how = How(together=together, reverse=True)
        if not exact:
            how = How(autocast=not half_weights)
            if half_weights:
                reference.model.to(torch.bfloat16)
        noise = reference.run(how)
        positions, source = reference.positions()
        paths = encoder.family.modules
        recurrent = [
            f"{paths.language}.{name}"
            for name in recurrent_modules(reference.model.get_submodule(paths.language))
        ]
        return cls(
            samples=tuple(samples),
            unpacked=unpacked,
            noise=replace(noise, gradients={}),
            noise_gradients=gradient_errors(unpacked.gradients, noise.gradients.items()),
            parts={name: part_of(name, paths, recurrent) for name in unpacked.gradients},
            positions=positions,
            positions_of=source,
            points=reference.points,
            kept=reference.kept,
            shared_matmuls=has_experts(reference.model.get_submodule(paths.language)),
            exact=exact,
        )

    def compared(self, rows: Sequence[Row]) -> Compared:
        """With the rows that hold the samples."""
        return Compared(self.samples, rows, self.unpacked, self.noise, self.exact)


def verify_rows(
    engine: Engine,
    ranks: Ranks,
    rows: Sequence[Row],
    *,
    collator: PackCollator | PadCollator,
    reference: ReferenceRuns | None,
    encoder: Encoder,
    optim: OptimSection,
) -> list[Check]:
    """Run the engine on the rows and compare. Collective; the engine's weights change.

    Args:
        engine: fresh.
        ranks: who this process is.
        rows: the micro-batches.
        collator: that made them.
        reference: on the main rank.
        encoder: the model folder's processor.
        optim: AdamW's settings.

    Returns:
        On every rank the same.
    """
    points, kept, shared = ranks.broadcast_object(
        (reference.points, reference.kept, reference.shared_matmuls) if reference else None
    )
    run = PackedRun(engine, ranks, points, kept)
    samples = [sample for row in rows for sample in row.samples]
    special = {*encoder.tokenizer.all_special_ids, encoder.placeholder_id}
    leak = check_leaks(
        run,
        collator,
        rows[:1],
        Perturbation.of(samples, sorted(special)),
        shared_matmuls=shared,
    )
    num_labels = sum(row.batch.num_label_tokens for row in rows)
    count = torch.tensor(float(num_labels * ranks.dp_size), device=engine.device)
    singles = _adapter_gradients(run, collator, rows, count)
    engine.zero_gradients()
    packed = run.run(rows, backward=True)
    logits = _logits(run, rows, packed)
    engine.finish_gradients(count, None)
    adapters = _held_gradients(run, singles)
    before = BeforeStep.of(engine)
    engine.step(optim.lr)
    # Collective: every rank walks through all of them, the main one compares.
    theirs = reference.unpacked.gradients if reference is not None else {}
    errors = gradient_errors(theirs, run.gradients(optim.betas[0]))
    trained = check_trained(engine, ranks, before)
    checks: list[Check] = []
    if reference is not None:
        checks = _numeric(reference, rows, packed, logits, errors)
        checks += _check_adapters(reference, rows, singles, adapters)
    return [*ranks.broadcast_object(checks), leak, *trained]


def _logits(run: PackedRun, rows: Sequence[Row], packed: Packed) -> dict[int, Tensor]:
    """(n, V) of the kept slots of each sample, with the weights as they are; empty where the
    engine's model is its own. Collective."""
    found: dict[int, Tensor] = {}
    for row, hidden in zip(rows, packed.hidden, strict=False):
        for number, start in zip(row.numbers, row.starts, strict=True):
            found[number] = run.logits(hidden[run.kept[number] + start])
    return found


def _numeric(
    reference: ReferenceRuns,
    rows: Sequence[Row],
    packed: Packed,
    logits: dict[int, Tensor],
    errors: dict[str, GradientError],
) -> list[Check]:
    """What only the main rank can compare."""
    compared = reference.compared(rows)
    checks: list[Check] = []
    if packed.outputs:
        checks += check_outputs(compared, packed, reference.points, reference.kept)
    if not reference.exact:
        checks.append(check_log_probabilities(compared, packed.losses))
    checks.append(check_losses(compared, packed.losses))
    if logits:
        checks.append(check_logits(compared, logits))
    own = reference.noise_gradients
    return [*checks, *check_gradients(compared, errors, own, reference.parts)]


def _adapter_names(run: PackedRun) -> list[str]:
    """Trained parameters that the stock model does not have."""
    from vlmpack.backends.policy import is_adapter

    model: Any = run.model
    if model is None:
        return []
    return [n for n, p in model.named_parameters() if p.requires_grad and is_adapter(n)]


def _adapter_gradients(
    run: PackedRun,
    collator: PackCollator | PadCollator,
    rows: Sequence[Row],
    count: Tensor,
) -> dict[str, Tensor]:
    """Gradients of adapters from rows of one sample each: the stock model has no adapters."""
    names = _adapter_names(run)
    if not names:
        return {}
    alone = [
        make_row(collator, [sample], [number])
        for row in rows
        for sample, number in zip(row.samples, row.numbers, strict=True)
    ]
    run.engine.zero_gradients()
    run.run(alone, backward=True)
    run.engine.finish_gradients(count, None)
    return _held_gradients(run, dict.fromkeys(names, torch.empty(0)))


def _held_gradients(run: PackedRun, names: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on CPU of the gradients of some parameters; zeros where there is none."""
    if not names:
        return {}
    model: Any = run.model
    found = {}
    for name, parameter in model.named_parameters():
        if name not in names:
            continue
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name] = whole.detach().to("cpu", torch.float32, copy=True)
    return found


def _check_adapters(
    reference: ReferenceRuns,
    rows: Sequence[Row],
    singles: dict[str, Tensor],
    packed: dict[str, Tensor],
) -> list[Check]:
    if not singles:
        return []
    errors = gradient_errors(singles, packed.items())
    none = {name: GradientError(0.0, error.scale) for name, error in errors.items()}
    parts = dict.fromkeys(singles, "adapters")
    return check_gradients(reference.compared(rows), errors, none, parts)
