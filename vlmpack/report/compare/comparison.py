"""What two runs have in common: their losses side by side, and how their settings differ.

Losses are compared by step where both runs trained the same samples, and by the number of samples
seen. What differs in the settings decides whether the losses may be compared at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from vlmpack.errors import UNREADABLE, RunDirError
from vlmpack.file_format import RUN
from vlmpack.recipe.yaml_nodes import parse_yaml
from vlmpack.report.run_files import RunFiles, read_run
from vlmpack.training.model_watch import ModelRecord
from vlmpack.training.record import read_launches, standing_batches
from vlmpack.whole_file import read_json, regular_text
from vlmpack.words import counted

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
    losses: dict[int, StepLoss] = {}
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
            losses[step] = StepLoss(step, float(loss), weight, samples, tokens, counts)
    return losses


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name, 0)
    return value if isinstance(value, int) else 0


def _batches(folder: Path) -> dict[int, Batch]:
    """Samples by step, of the launches that stand; incomplete steps are left out."""
    launches = read_launches(folder) if folder.is_dir() else []
    batches: dict[int, Batch] = {}
    for record in standing_batches(folder, launches) if launches else ():
        if not record.missing_ranks:
            names = ((name.shard.rpartition("/")[2], name.key) for name in record.trained)
            batches[record.batch + 1] = tuple(sorted(names))
    return batches


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
    values: dict[str, Any] | None = _json(path, dict)
    if values is not None:
        RUN.take(values, path, RunDirError)
    return values


def _shards(path: Path) -> frozenset[tuple[str, int]] | None:
    values = _json(path, dict)
    if values is None:
        return None
    RUN.take(values, path, RunDirError)
    try:
        return frozenset((str(one[0]).rpartition("/")[2], int(one[1])) for one in values["shards"])
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


NUM_WINDOWS = 10

NOISE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
"""Type of the computation -> relative difference of two losses of the same samples and weights,
where only the order of additions differs. These are some 80 roundings in float32, and 2 to 5 in the
16-bit types."""


@dataclass(frozen=True, slots=True)
class SameBatches:
    """Steps of both runs that trained the same samples.

    Args:
        first_other: the first step of both that trained other ones; None where there is none.
        is_recorded: known from the records of samples; otherwise from equal counts of samples,
            tokens and label tokens.
    """

    steps: tuple[int, ...]
    first_other: int | None
    is_recorded: bool


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far losses of the same samples lie apart.

    Args:
        noise: the largest relative difference that is taken for noise.
        first: the first step beyond it, with both losses; None where there is none.
        largest: the step that differs most, with both losses.
        within: the largest relative difference of the steps before the first.
    """

    noise: float
    first: tuple[int, float, float] | None
    largest: tuple[int, float, float]
    within: float


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of as many samples in both runs.

    Args:
        samples: seen at its end.
        tokens: real tokens that each run has seen there, as far as its steps end before it.
        losses: mean of each run over the steps that end in it; None where none does.
    """

    samples: int
    tokens: tuple[int, int]
    losses: tuple[float | None, float | None]


def same_batches(a: ComparedRun, b: ComparedRun) -> SameBatches:
    """The common steps that trained the same samples, or as many where samples are not recorded."""
    common = sorted(a.losses.keys() & b.losses.keys())
    is_recorded = all(step in a.batches and step in b.batches for step in common)
    same = [
        step
        for step in common
        if (
            a.batches[step] == b.batches[step]
            if is_recorded
            else a.losses[step].counts == b.losses[step].counts
        )
    ]
    others = [step for step in common if step not in set(same)]
    return SameBatches(tuple(same), min(others, default=None), is_recorded)


def noise_of(a: ComparedRun, b: ComparedRun) -> float:
    """The noise of the coarser type of the two."""
    return max(NOISE.get(run.dtype, NOISE["float32"]) for run in (a, b))


def divergence(
    a: ComparedRun, b: ComparedRun, steps: Iterable[int], noise: float
) -> Divergence | None:
    """Where losses part, over steps of the same samples; None without such a step."""
    rows = [(step, a.losses[step].loss, b.losses[step].loss) for step in steps]
    if not rows:
        return None
    first = next((row for row in rows if relative(*row[1:]) > noise), None)
    before = [relative(*row[1:]) for row in rows if first is None or row[0] < first[0]]
    return Divergence(
        noise, first, max(rows, key=lambda row: relative(*row[1:])), max(before, default=0.0)
    )


def relative(one: float, other: float) -> float:
    """The difference, relative to the larger of the two."""
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if largest else 0.0


def windows(a: ComparedRun, b: ComparedRun, count: int = NUM_WINDOWS) -> list[Window]:
    """Windows of about equal steps of the run that has fewer, up to the shorter run's end."""
    ends = [sorted({one.samples for one in run.losses.values()}) for run in (a, b)]
    end = min(one[-1] for one in ends)
    fewer = min(([samples for samples in one if samples <= end] for one in ends), key=len)
    count = min(count, len(fewer))
    edges = [0, *(fewer[round(len(fewer) * n / count) - 1] for n in range(1, count)), end]
    made = []
    for low, high in pairwise(edges):
        both = [[one for one in run.losses.values() if low < one.samples <= high] for run in (a, b)]
        if high > low:
            seen = (_tokens_until(a, high), _tokens_until(b, high))
            made.append(Window(high, seen, (mean_loss(both[0]), mean_loss(both[1]))))
    return made


def mean_loss(steps: Iterable[StepLoss]) -> float | None:
    """The mean over what the losses are means of; None without any."""
    given = list(steps)
    weight = sum(one.weight for one in given)
    return sum(one.loss * one.weight for one in given) / weight if weight else None


def _tokens_until(run: ComparedRun, samples: int) -> int:
    return max((one.tokens for one in run.losses.values() if one.samples <= samples), default=0)


MAX_ROWS = 60
_OF_THE_FOLDER = ("run_dir", "logging.name")
"""Keys of a recipe that differ between any two runs."""
_READ_AS_TOKENS = ("tokenizer", "chat_template", "added_tokens", "special_tokens")
"""How the entries of model.json begin that say what a label token is."""


class Difference(NamedTuple):
    """A value that differs, as text; "" if a run has none."""

    name: str
    a: str
    b: str


def not_comparable(a: ComparedRun, b: ComparedRun) -> list[str]:
    """Why the losses cannot be compared; empty if they can."""
    reasons = []
    objective = [
        f"{name} {x} and {y}"
        for name, x, y in identity_differences(a, b)
        if name.startswith("objective.")
    ]
    units = tuple(run.files.unit for run in (a, b))
    # With both identities and no such difference a run of before lacks its divisor's column.
    if units[0] != units[1] and (objective or None in (a.identity, b.identity)):
        objective.append(f"the loss of A is per {units[0]}, that of B per {units[1]}")
    if objective:
        reasons.append(f"another objective: {'; '.join(objective)}")
    if _other_data(a, b):
        reasons.append(_other_data(a, b))
    if a.model is not None and b.model is not None:
        tokens = [
            one.name
            for one in _changed(a.model.processor, b.model.processor)
            if one.name.startswith(_READ_AS_TOKENS)
        ]
        if tokens:
            reasons.append(
                f"another tokenizer or chat template ({', '.join(tokens[:3])}): a label token is "
                "not the same thing in both"
            )
    return reasons


def cautions(a: ComparedRun, b: ComparedRun) -> list[str]:
    """Warnings for a reader of the figures, and what the folders lack."""
    lines = []
    for run in (a, b):
        lacks = [
            name
            for name, value in (
                ("identity.json", run.identity),
                ("recipe.yaml", run.recipe),
                ("model.json", run.model),
                ("shards.json", run.shards),
            )
            if value is None
        ]
        if lacks:
            lines.append(f"{run.label} has no {', '.join(lacks)}: not compared")
        if run.num_missing:
            missing = counted(run.num_missing, "step")
            lines.append(
                f"{run.label} has no row for {missing}: it has seen more samples than are counted"
            )
        if not run.files.result:
            lines.append(f"{run.label} has no result.json: it is not finished")
    if a.model is not None and b.model is not None and a.model.weights != b.model.weights:
        lines.append("the runs begin with other weights")
    return lines


def identity_differences(a: ComparedRun, b: ComparedRun) -> list[Difference]:
    """What decides which numbers are learned; [] where one has no identity.json."""
    if a.identity is None or b.identity is None:
        return []
    return _changed(a.identity, b.identity)


def recipe_differences(a: ComparedRun, b: ComparedRun) -> list[Difference]:
    if a.recipe is None or b.recipe is None:
        return []
    known = {one.name for one in identity_differences(a, b)}
    differences = _changed(a.recipe, b.recipe)
    return [one for one in differences if one.name not in known and one.name not in _OF_THE_FOLDER]


def model_differences(a: ComparedRun, b: ComparedRun) -> list[Difference]:
    """Config and processor of the model folders, and how many weights differ."""
    if a.model is None or b.model is None:
        return []
    weights = _changed(a.model.weights, b.model.weights)
    differences = [*_changed(a.model.config, b.model.config)]
    differences += _changed(a.model.processor, b.model.processor)
    if weights:
        tensors = counted(len(weights), "tensor")
        differences.insert(
            0, Difference(f"weights: {tensors} differ, {weights[0].name} first", *weights[0][1:])
        )
    return differences


def machine_differences(a: ComparedRun, b: ComparedRun) -> list[Difference]:
    """What computed: engine, kernels, versions."""
    parts: list[dict[str, Any]] = []
    for run in (a, b):
        flat: dict[str, Any] = {}
        for section in ("engine", "versions"):
            value = run.files.result.get(section)
            for name, inner in value.items() if isinstance(value, Mapping) else ():
                flat[f"{section}: {name}"] = inner
        parts.append(flat)
    return _changed(*parts) if all(parts) else []


def _other_data(a: ComparedRun, b: ComparedRun) -> str:
    """Which shards differ; without their lists, which paths of the identity do."""
    if a.shards is not None and b.shards is not None:
        only = (len(a.shards - b.shards), len(b.shards - a.shards))
        if not any(only):
            return ""
        return f"other training data: {only[0]} shards of A alone, {only[1]} of B alone"
    paths = [
        f"{one.name} {one.a} and {one.b}"
        for one in identity_differences(a, b)
        if one.name.startswith("data.train.") and one.name.endswith(".path")
    ]
    return f"other training data: {'; '.join(paths)}" if paths else ""


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    return [
        Difference(key, _text(a, key), _text(b, key))
        for key in [*a, *(key for key in b if key not in a)]
        if not (key in a and key in b and a[key] == b[key])
    ]


def _text(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return ""
    value = values[key]
    return json.dumps(value) if value is None or isinstance(value, bool | list) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs side by side.

    Args:
        reasons: why their losses cannot be compared; empty where they can.
        parted: how far their losses lie apart; None without such a step, or with a reason.
        windows: mean losses over stretches of as many samples.
    """

    a: ComparedRun
    b: ComparedRun
    reasons: tuple[str, ...]
    same: SameBatches
    parted: Divergence | None
    windows: tuple[Window, ...]


def compare_runs(a: Path, b: Path, *, noise: float | None = None) -> Comparison:
    """Read two run folders, and compare them.

    Args:
        noise: the largest relative difference of two losses that is taken for noise; None for that
            of the type which the runs computed in.

    Raises:
        RunDirError: one is no run folder, has no step with a loss, or has a damaged file.
    """
    one, other = read_compared("A", a), read_compared("B", b)
    reasons = tuple(not_comparable(one, other))
    same = same_batches(one, other)
    bound = noise_of(one, other) if noise is None else noise
    return Comparison(
        a=one,
        b=other,
        reasons=reasons,
        same=same,
        parted=None if reasons else divergence(one, other, same.steps, bound),
        windows=tuple(windows(one, other)),
    )
