"""Steps whose loss or gradient norm is not finite: what is written of them, and what follows.

    the step -> not finite -> run again in place -> runs/demo/dumps/step-00000012.json
    training.on_non_finite: stop -> the run ends; skip -> the next step, up to a budget

A skipped step uses up its samples, its number and its learning rate. Nothing else changes: buffers
and random generators are put back, and the optimizer is not called. Multiplying by 0 would not do,
since 0 x NaN is NaN.
"""

from __future__ import annotations

import json
import logging
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.loading.loader import GlobalStep
from vlmpack.distributed import Ranks
from vlmpack.errors import UNREADABLE, CheckpointError, NonFiniteError, RunDirError, writing
from vlmpack.file_format import DUMP
from vlmpack.packing.digest import digest_of
from vlmpack.training.listener import Listener
from vlmpack.training.step import NonFiniteStep, StepSums
from vlmpack.version import __version__
from vlmpack.whole_file import write_atomically

logger = logging.getLogger("vlmpack")

WINDOW = 1000
"""Steps in which `training.max_skipped_steps` may be skipped."""
MOST_IN_A_ROW = 10
"""As many skipped steps in a row end a run, whatever its budget."""
MOST_SPARED = 5
"""Dumps, the newest ones, whose checkpoints are kept."""


@dataclass(slots=True, kw_only=True)
class BadSteps(Listener):
    """Writes what is known of a step that is not finite, and skips it or ends the run.

    Args:
        ledger: where the samples of a skipped step are listed.
        folder: of the dumps.
        skips: whether the run goes on (`training.on_non_finite: skip`).
        most: skipped steps in any WINDOW; `training.max_skipped_steps`.
        seed: the run's.
        pixels: whether the rows' token ids and pixels are written too.
        steps: numbers of the steps that were skipped, the latest WINDOW steps alone.
    """

    ledger: Ledger
    ranks: Ranks
    folder: Path
    skips: bool
    most: int
    seed: int
    pixels: bool = False
    steps: list[int] = field(default_factory=list)

    def judge(self, found: NonFiniteStep, data: GlobalStep, step: int) -> StepSums:
        """Write the dump of a step, and return the sums of a skipped one. Collective.

        Args:
            step: its number, counted from 1.

        Raises:
            NonFiniteError: on all ranks alike, where the run does not skip it.
        """
        path, stops = self.folder / f"step-{step:08d}.json", ""
        reason = f"{found}. `vlmpack replay {path}` looks for the cause"
        try:
            self._write(path, found, data, step)
        except RunDirError as error:
            reason, stops = str(found), f"Its dump could not be written: {error}"
        recent = [one for one in self.steps if one > step - WINDOW]
        in_a_row = next(n for n in range(1, WINDOW + 2) if step - n not in recent)
        if not self.skips:
            stops = stops or "training.on_non_finite: skip goes on without this step"
        elif in_a_row >= MOST_IN_A_ROW:
            stops = f"{in_a_row} steps in a row were not finite; at most {MOST_IN_A_ROW - 1} may be"
        elif len(recent) >= self.most:
            stops = (
                f"training.max_skipped_steps is {self.most} in any {WINDOW:,} steps; skipped "
                f"before this one: {len(recent)} ({', '.join(map(str, recent[-3:]))})"
            )
        if stops:
            raise NonFiniteError(
                f"{reason}. Stopped before the optimizer step, no weight has changed. {stops}. "
                "Look at these samples and at an objective of your own, lower optim.lr, or set "
                "optim.max_grad_norm"
            ) from None
        self.steps = [*recent, step]
        if self.ranks.is_lead:
            names = (
                (sample.number, sample.key, sample.shard)
                for micro_batch in data.micro_batches
                for sample in micro_batch.samples
            )
            why = f"step {step} was not finite and was skipped; see dumps/{path.name}"
            self.ledger.record_unlearnt(names, reason=why, epoch=data.epoch, batch=data.batch)
        if self.ranks.is_main:
            logger.warning("%-14s %s", "skipped", reason)
        return _of_skipped(found.first.sums)

    def _write(self, path: Path, found: NonFiniteStep, data: GlobalStep, step: int) -> None:
        rows = [row for rank in self.ranks.gather_objects(self._rows(found, data)) for row in rank]

        def write() -> None:
            content = {
                "vlmpack": __version__,
                "step": step,
                "batch": data.batch,
                "epoch": data.epoch,
                "seed": self.seed,
                "world_size": self.ranks.world_size,
                "device": _device_name(self.ranks.device),
                "repeats": found.repeats,
                "first": _figures(found.first.sums),
                "again": _figures(found.again.sums),
                "micro_batches": rows,
            }
            with writing(path, RunDirError):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, json.dumps(DUMP.mark(content), indent=1) + "\n")

        self.ranks.on_main(write)
        if self.pixels:
            with self.ranks.raised_by_all(RunDirError):
                self._write_pixels(path.with_suffix(f".rank-{self.ranks.rank}.safetensors"), data)

    def _write_pixels(self, path: Path, data: GlobalStep) -> None:
        """The rows of this rank: `0.input_ids`, and `0.pixel_values` of the images that it makes,
        as the tower gets them or as levels (`Media.table`)."""
        tensors = {}
        for place, one in enumerate(data.micro_batches):
            tensors[f"{place}.input_ids"] = one.batch.input_ids
            if one.batch.media is not None:
                tensors[f"{place}.pixel_values"] = one.batch.media.pixel_values
        with writing(path, RunDirError):
            whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
            write_atomically(path, save(whole, metadata={"step": path.name[5:13]}))

    def _rows(self, found: NonFiniteStep, data: GlobalStep) -> list[dict[str, Any]]:
        """What a dump has of this rank's micro-batches: those that it computes the loss of."""
        losses = zip(data.micro_batches, found.first.losses, found.again.losses, strict=True)
        return [
            {
                "rank": self.ranks.rank,
                "micro_batch": place,
                "samples": [[sample.shard, sample.key] for sample in one.samples],
                "digest": digest_of(one.batch).hex(),
                "loss_sum": _shown(first),
                "loss_sum_again": _shown(again),
            }
            for place, (one, first, again) in enumerate(losses)
            if first is not None
        ]

    def dumped(self) -> list[int]:
        """Numbers of the steps with a dump, in order; the newest MOST_SPARED."""
        pattern = f"step-{'[0-9]' * 8}.json"  # and nothing that a user puts there
        names = sorted(path.stem for path in self.folder.glob(pattern))[-MOST_SPARED:]
        return [int(name.removeprefix("step-")) for name in names]

    def state(self) -> Mapping[str, Any]:
        return {"skipped_steps": self.steps}

    def resume(self, state: Mapping[str, Any]) -> None:
        try:
            self.steps = [int(one) for one in state["skipped_steps"]]
        except UNREADABLE as error:
            raise CheckpointError(f"the skipped steps cannot be read: {error!r}") from error


def _of_skipped(sums: StepSums) -> StepSums:
    """What a skipped step counts: slots were computed, and no token was learnt."""
    nothing: dict[str, Any] = dict.fromkeys(
        ("num_tokens", "num_shared_tokens", "num_shared_patches", "num_label_tokens"), 0
    )
    return replace(
        sums,
        **nothing,
        num_samples=0,
        num_skipped=sums.num_skipped + sums.num_samples,
        num_unlearnt=sums.num_samples,
        loss=None,
        grad_norm=None,
        is_skipped=True,
    )


def _figures(sums: StepSums) -> dict[str, str | float | None]:
    return {"loss_sum": _shown(sums.totals["loss_sum"]), "grad_norm": _shown(sums.grad_norm)}


def _shown(value: float | None) -> str | float | None:
    """A number for JSON, which has no NaN and no infinity."""
    return value if value is None or math.isfinite(value) else str(value)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
