"""What two runs are compared by, from the files of their folders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmpack.errors import UNREADABLE, RunDirError
from vlmpack.file_format import RUN
from vlmpack.recipe.yaml_nodes import parse_yaml
from vlmpack.report.run_files import RunFiles, read_run
from vlmpack.training.model_watch import ModelRecord
from vlmpack.training.record import read_launches, standing_batches
from vlmpack.whole_file import read_json, regular_text

Batch = tuple[tuple[str, str], ...]
"""(shard's file name, key) of every sample of a step, sorted: the same samples are the same value,
however they were shared out over rows and ranks, and wherever the shards lay."""


@dataclass(frozen=True, slots=True)
class StepLoss:
    """A step of a run.

    Args:
        step: counted from 1.
        loss: as metrics.jsonl has it.
        weight: what the loss is a mean over: label tokens, pairs, or what an objective of its own
            divides by.
        samples: trained up to the step's end, itself included.
        counts: samples, real tokens and label tokens of the step.
    """

    step: int
    loss: float
    weight: float
    samples: int
    tokens: int
    counts: tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run folder.

    Args:
        losses: of the steps that have one, by step.
        num_missing: steps before the last one without a row; their samples are not counted.
        batches: what each step trained, by step; empty where the run left no record.
        identity: identity.json; None where there is none.
        recipe: recipe.yaml by dotted key; None where there is none.
        model: model.json; None where there is none.
        shards: (file name, bytes) of shards.json; None where there is none.
    """

    label: str
    path: Path
    files: RunFiles
    losses: dict[int, StepLoss]
    num_missing: int
    batches: dict[int, Batch]
    identity: Mapping[str, Any] | None
    recipe: Mapping[str, Any] | None
    model: ModelRecord | None
    shards: frozenset[tuple[str, int]] | None

    @property
    def dtype(self) -> str:
        """The compute dtype; "" if the result lacks it."""
        engine = self.files.result.get("engine")
        return str(engine.get("compute dtype", "")) if isinstance(engine, Mapping) else ""


def read_compared(label: str, path: Path) -> ComparedRun:
    """Read a run folder.

    Raises:
        RunDirError: no run folder, no step with a loss in it, or a damaged file.
    """
    files = read_run(path)
    losses = _losses(files)
    if not losses:
        raise RunDirError(
            f"{path}: no step with a loss in metrics.jsonl; expected a run that trained a step"
        )
    trained = [step for step, row in files.steps.items() if "loss" in row]
    return ComparedRun(
        label=label,
        path=path,
        files=files,
        losses=losses,
        num_missing=max(trained) - len(trained),
        batches=_batches(path / "samples"),
        identity=_identity(path / "identity.json"),
        recipe=_recipe(path / "recipe.yaml"),
        model=ModelRecord.read(path / "model.json"),
        shards=_shards(path / "shards.json"),
    )


def _losses(files: RunFiles) -> dict[int, StepLoss]:
    found: dict[int, StepLoss] = {}
    samples = tokens = 0
    usual = 0 if files.unit == "pair" else 2  # of runs without a divisor of their own
    for step, row in files.steps.items():
        if "loss" not in row:
            continue
        counts = (
            _count(row, "num_samples"),
            _count(row, "num_tokens"),
            _count(row, "num_label_tokens"),
        )
        samples, tokens = samples + counts[0], tokens + counts[1]
        loss = row["loss"]
        if isinstance(loss, int | float) and math.isfinite(loss):
            weight = float(row.get("loss_divisor", counts[usual]))
            found[step] = StepLoss(step, float(loss), weight, samples, tokens, counts)
    return found


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name, 0)
    return value if isinstance(value, int) else 0


def _batches(folder: Path) -> dict[int, Batch]:
    """Samples by step, of the launches that stand; incomplete steps are left out."""
    launches = read_launches(folder) if folder.is_dir() else []
    found: dict[int, Batch] = {}
    for record in standing_batches(folder, launches) if launches else ():
        if not record.missing_ranks:
            names = ((name.shard.rpartition("/")[2], name.key) for name in record.trained)
            found[record.batch + 1] = tuple(sorted(names))
    return found


def _json(path: Path, kind: type) -> Any:
    if not path.is_file():
        return None
    try:
        value = read_json(path, object)
    except (OSError, ValueError) as error:
        raise RunDirError(f"{path} is damaged: {error}") from error
    if not isinstance(value, kind):
        raise RunDirError(
            f"{path} is damaged: found {type(value).__name__}, expected {kind.__name__}"
        )
    return value


def _identity(path: Path) -> dict[str, Any] | None:
    found: dict[str, Any] | None = _json(path, dict)
    if found is not None:
        RUN.take(found, path, RunDirError)
    return found


def _shards(path: Path) -> frozenset[tuple[str, int]] | None:
    found = _json(path, dict)
    if found is None:
        return None
    RUN.take(found, path, RunDirError)
    try:
        return frozenset((str(one[0]).rpartition("/")[2], int(one[1])) for one in found["shards"])
    except UNREADABLE as error:
        raise RunDirError(f"{path} is damaged: {error!r}") from error


def _recipe(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        read = parse_yaml(regular_text(path), path.name)
    except UnicodeDecodeError as error:
        raise RunDirError(f"{path} is damaged: {error}") from error
    for problem in read.problems:
        raise RunDirError(f"{path} is damaged: {problem.place}: {problem.message}")
    value = read.root
    if not isinstance(value, dict):
        raise RunDirError(f"{path} is damaged: found {type(value).__name__}, expected sections")
    flat: dict[str, Any] = {}
    _flatten("", value, flat)
    return flat


def _flatten(prefix: str, value: object, flat: dict[str, Any]) -> None:
    items = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(items, dict) or not items:
        flat[prefix] = value
        return
    for name, inner in items.items():
        _flatten(f"{prefix}.{name}" if prefix else str(name), inner, flat)
