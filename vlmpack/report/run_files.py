"""What a report reads from a run folder.

    metrics.jsonl             a row a step, and rows of validations (vlmpack.training.metrics)
    result.json               figures of a finished run
    data-summary.json         lengths and micro-batches of the training split
    predictions-before.jsonl  answers to the test questions (vlmpack.evaluation.predictions)
    predictions-after.jsonl
    predictions-step-*.jsonl  answers on the way

Every file may be missing: an interrupted run has no result, a run without a test split has no
predictions. The report shows what is there.

data-summary.json:

    {
      "packing_mode": "in_batch",
      "length_histogram": {"17": 40, "18": 12},    tokens of a sample -> samples
      "padded_tokens_none": 5120,                  slots of an epoch's micro-batches in mode none
      "packed_tokens": 2048,                       slots of the same micro-batches, packed
      "real_tokens": 2000,                         tokens of their samples
      "example_micro_batches": [[17, 18, 40]],     tokens of each sample, some micro-batches
      "test_also_in": ["data.validation"]          splits with shards of the test split; null where
                                                   that is not known
    }

A length of 0 is a hole that a bad sample left; holes are not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmpack.errors import UNREADABLE, RunDirError
from vlmpack.evaluation.predictions import (
    PREDICTIONS_AFTER,
    PREDICTIONS_BEFORE,
    Prediction,
    given_on_the_way,
    read_predictions,
)
from vlmpack.file_format import FORMAT, RESULT, RUN, FileKind
from vlmpack.training.evaluations import LOWER_IS_BETTER, Best
from vlmpack.whole_file import parse_small_json, read_json, regular_bytes

MOST_TOKENS = 1 << 40
"""What no sample has, and no split: a number above it is damage."""

Series = tuple[list[int], list[float]]
"""(steps, values), by step; non-finite values are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """data-summary.json; see the module."""

    packing_mode: str
    lengths: dict[int, int]
    padded_tokens: int
    packed_tokens: int
    real_tokens: int
    micro_batches: tuple[tuple[int, ...], ...]
    test_also_in: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of one run.

    Args:
        steps: rows of metrics.jsonl by step; rows of one step are merged, the later wins.
        result: result.json, empty where it is missing.
    """

    name: str
    steps: dict[int, dict[str, Any]]
    result: Mapping[str, Any]
    data: DataSummary | None
    before: list[Prediction] | None
    after: list[Prediction] | None
    on_the_way: Mapping[int, list[Prediction]] = field(default_factory=dict)

    def series(self, field: str) -> Series:
        points = [
            (step, float(row[field]))
            for step, row in self.steps.items()
            if isinstance(row.get(field), int | float) and math.isfinite(row[field])
        ]
        return [step for step, _ in points], [value for _, value in points]

    def number(self, field: str) -> float | None:
        """A number of result.json; None where it is missing or null."""
        value = self.result.get(field)
        return None if isinstance(value, bool) or not isinstance(value, int | float) else value

    @property
    def best(self) -> Best | None:
        """The best step by the recipe's figure; None if it follows none, or before the end."""
        best = self.result.get("best")
        if not isinstance(best, Mapping) or best.get("value") is None:
            return None
        return Best(best["figure"], value=best["value"], step=best["step"])

    @property
    def seen(self) -> str | None:
        """Other uses of the test questions; "" if unseen, None if that is not known."""
        others = None if self.data is None else self.data.test_also_in
        best, used = self.best, []
        by_answers = best is not None and best.figure not in LOWER_IS_BETTER
        if best is not None and (by_answers or "data.validation" in (others or ())):
            if self.result.get("exported_step") == best.step:
                used.append("chose the best step")
            if self.result.get("stopped_early"):
                used.append("ended the run")
        if "data.train" in (others or ()):
            used.append("lie in shards of data.train")
        if used:
            return f"they also {' and '.join(used)}"
        return None if others is None else ""

    @property
    def unit(self) -> str:
        """What the loss is a mean over: label tokens, pairs, or an objective's own divisor.

        metrics.jsonl has that divisor's number, not its name.
        """
        if self.series("preference_loss")[0]:
            return "pair"
        return "unit of its divisor" if self.series("loss_divisor")[0] else "label token"


def read_run(run_dir: Path) -> RunFiles:
    """Read a run folder.

    Raises:
        RunDirError: no such folder, no file of a run in it, or a damaged file.
    """
    if not run_dir.is_dir():
        raise RunDirError(f"{run_dir} is not a folder; expected the run_dir of a finished run")
    before, after = run_dir / PREDICTIONS_BEFORE, run_dir / PREDICTIONS_AFTER
    for name, kind in (("identity.json", RUN), ("result.json", RESULT)):
        _refuse_unreleased(run_dir / name, kind)
    result = _read_json(run_dir / "result.json")
    files = RunFiles(
        name=run_dir.resolve().name,
        steps=_read_metrics(run_dir / "metrics.jsonl"),
        result=result or {},
        data=_read_summary(run_dir / "data-summary.json"),
        before=read_predictions(before) if before.is_file() else None,
        after=read_predictions(after) if after.is_file() else None,
        on_the_way={step: read_predictions(path) for step, path in given_on_the_way(run_dir)},
    )
    if not files.steps and result is None and files.data is None and files.after is None:
        raise RunDirError(
            f"{run_dir} has nothing to report: no metrics.jsonl, result.json, data-summary.json "
            f"or predictions-after.jsonl"
        )
    return files


def _read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """Rows by step. A last line that was cut by a kill is passed over."""
    if not path.is_file():
        return {}
    lines = [line for line in regular_bytes(path).split(b"\n") if line.strip()]
    steps: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_small_json(line)
            steps.setdefault(int(row["step"]), {}).update(row)
        except UNREADABLE as error:
            if number == len(lines):
                break
            raise RunDirError(f"{path}, line {number}: no row of metrics: {error!r}") from error
    return dict(sorted(steps.items()))


def _refuse_unreleased(path: Path, kind: FileKind) -> None:
    """Refuse a file of another format; a damaged one is left to its reader."""
    try:
        number = read_json(path).get(FORMAT)
    except (OSError, ValueError):
        return
    if refusal := kind.refusal(number, path):
        raise RunDirError(refusal)


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = read_json(path, object)
    except (OSError, ValueError) as error:
        raise RunDirError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RunDirError(f"{path}: found {type(value).__name__}, expected an object")
    return value


def _read_summary(path: Path) -> DataSummary | None:
    value = _read_json(path)
    if value is None:
        return None
    try:
        batches: Sequence[Sequence[int]] = value.get("example_micro_batches", [])
        histogram = value["length_histogram"].items()
        shared = value.get("test_also_in")
        lengths = {int(size): int(count) for size, count in histogram if int(size) > 0}
        if max([*lengths, *lengths.values()], default=0) > MOST_TOKENS:
            raise ValueError(f"a length or a count above {MOST_TOKENS:,}")
        batches = [[int(length) for length in batch if int(length) > 0] for batch in batches]
        return DataSummary(
            packing_mode=str(value.get("packing_mode", "in_batch")),
            lengths=dict(sorted(lengths.items())),
            padded_tokens=int(value["padded_tokens_none"]),
            packed_tokens=int(value["packed_tokens"]),
            real_tokens=int(value["real_tokens"]),
            micro_batches=tuple(tuple(batch) for batch in batches if batch),
            test_also_in=None if shared is None else tuple(map(str, shared)),
        )
    except UNREADABLE as error:
        raise RunDirError(f"{path}: missing or malformed field: {error!r}") from error
