"""metrics.jsonl and the live progress line.

Rows of training steps:

    step, epoch
    loss                 null where every sample became a hole
    loss_divisor         where the objective divides its loss by something else than label tokens
    grad_norm, learning_rate
    num_tokens           real tokens, as each sample has them alone
    num_shared_tokens    those of them that stand in their row once for several samples
    num_shared_patches   of images that the tower encoded once for several samples
    num_slots            computed slots, with padding
    num_padded_slots     the slots that mode none computes for the same samples
    num_label_tokens, num_samples, num_skipped
    skipped              true where the step was not finite and the optimizer left it out. Its
                         loss, grad_norm and reported figures are null then, and num_skipped counts
                         its samples
    num_rows             micro-batches that hold a sample
    num_eager_rows       those that have too many samples for the captured graph
    imbalance            the largest planned cost of a replica over the mean cost. The cost is in
                         FLOPs, but in tokens with packing.balance: none
    fill, padding        of the slots, together 1
    seconds, data_wait_seconds, data_wait_share
    read_seconds, encode_seconds    in the loader, during the training
    forward_backward_seconds, optimizer_seconds
    tokens_per_second    real tokens, never padding

In front of these stand the figures that the objective reports besides the loss. With
model.router_aux_loss_coef there is also router_loss, the experts' load-balancing loss without that
weight. It is a mean over layers and real tokens, and 1 if all experts are chosen equally often.

A row of a validation has step, validation_loss, the objective's other figures with the same prefix,
and validation_label_tokens. A run of pairs has one before its first step, with step 0. A row of
answers during the run has step, and answers_ with the name of each metric.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from vlmpack.terminal import open_console
from vlmpack.whole_file import parse_small_json, regular_bytes, write_atomically
from vlmpack.words import counted

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

logger = logging.getLogger("vlmpack")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One optimizer step. Token counts are sums over all ranks; seconds are the main rank's."""

    step: int
    epoch: int
    loss: float | None
    loss_divisor: float | None = None
    grad_norm: float | None
    learning_rate: float
    num_tokens: int
    num_shared_tokens: int = 0
    num_shared_patches: int = 0
    num_slots: int
    num_padded_slots: int
    num_label_tokens: int
    num_samples: int
    num_skipped: int
    num_rows: int
    num_eager_rows: int = 0
    imbalance: float
    seconds: float
    data_wait_seconds: float
    read_seconds: float
    encode_seconds: float
    forward_backward_seconds: float
    optimizer_seconds: float
    skipped: bool = False
    reported: Mapping[str, float | None] = field(default_factory=dict)
    """What is reported beside the loss; columns of their own."""

    @property
    def fill(self) -> float:
        """Real tokens per computed slot, a shared one counted once."""
        return (self.num_tokens - self.num_shared_tokens) / max(1, self.num_slots)

    @property
    def data_wait_share(self) -> float:
        """Share of the step that the main rank waited for its data."""
        return self.data_wait_seconds / max(1e-9, self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second, as each sample has them alone."""
        return self.num_tokens / max(1e-9, self.seconds)

    def as_row(self) -> dict[str, Any]:
        row = asdict(self)
        if self.loss_divisor is None:
            del row["loss_divisor"]
        if not self.skipped:
            del row["skipped"]
        return {
            **row.pop("reported"),
            **row,
            "imbalance": round(self.imbalance, 6),
            "fill": round(self.fill, 6),
            "padding": round(1 - self.fill, 6),
            "data_wait_share": round(self.data_wait_share, 6),
            "tokens_per_second": round(self.tokens_per_second, 1),
        }


TRACKED = (
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "fill",
    "num_samples",
    "imbalance",
    "data_wait_share",
)
"""What experiment trackers are sent of a row."""

MOST_GAPS = 4
"""Gaps of a metrics.jsonl that a warning names."""


class MetricsLog:
    """Appends rows; on resume, rows after the resumed step are dropped first.

    The resumed step itself may have been evaluated after its checkpoint. If it is evaluated again,
    the new row replaces the old one. A warning names earlier steps without a row.

    Args:
        resume_step: steps taken so far; later rows belong to work that was lost.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        drop_rows_after(path, resume_step)
        if lost := _lost_steps(read_rows(path), resume_step):
            logger.warning(
                "%s has no rows of %s, which were trained before this launch. The file was lost, "
                "cut or changed. Training goes on and needs none of them. Reports, comparisons and "
                "a model card show the run without them",
                path,
                lost,
            )
        self._path, self._resume_step = path, resume_step
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; it is on disk for other readers when this returns."""
        if row["step"] == self._resume_step:
            self._drop_former(row)
        self._file.write(json.dumps(row) + "\n")

    def _drop_former(self, row: Mapping[str, Any]) -> None:
        rows = read_rows(self._path)
        others = [one for one in rows if one["step"] != row["step"] or one.keys() != row.keys()]
        if len(others) < len(rows):
            self._file.close()
            write_atomically(self._path, "".join(json.dumps(one) + "\n" for one in others))
            self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def close(self) -> None:
        self._file.close()


def drop_rows_after(path: Path, step: int) -> None:
    """Drop the rows of later steps from a metrics.jsonl; made if it is not there."""
    rows = [row for row in read_rows(path) if row["step"] <= step]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def _lost_steps(rows: Sequence[Mapping[str, Any]], step: int) -> str:
    """The steps up to one that have no row, in words; "" where each has one."""
    trained = {row["step"] for row in rows if "loss" in row}
    there = sorted({0, *(one for one in trained if 0 < one <= step), step + 1})
    gaps = [(a + 1, b - 1) for a, b in pairwise(there) if b - a > 1]
    if not gaps:
        return ""
    num_steps = sum(last - first + 1 for first, last in gaps)
    named = [str(a) if a == b else f"{a} to {b}" for a, b in gaps[:MOST_GAPS]]
    more = [f"{len(gaps) - MOST_GAPS} more gaps"] if len(gaps) > MOST_GAPS else []
    return f"{counted(num_steps, 'step')} ({', '.join([*named, *more])})"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl; lines that are none are left out."""
    rows: list[dict[str, Any]] = []
    if not path.is_file():
        return rows
    for line in regular_bytes(path).split(b"\n"):
        try:
            row = parse_small_json(line)
        except ValueError:
            continue
        if isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def validations(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of validations by step. Their figures have no prefix `validation_`."""
    return [
        {"step": row["step"]}
        | {
            name.removeprefix("validation_"): value
            for name, value in row.items()
            if name.startswith("validation_")
        }
        for row in sorted(rows, key=lambda row: int(row["step"]))
        if "validation_loss" in row
    ]


def answered(row: Mapping[str, Any]) -> dict[str, int | float]:
    """Metrics of a step's answers, by name. Values that are no numbers are left out."""
    return {
        name.removeprefix("answers_"): value
        for name, value in row.items()
        if name.startswith("answers_")
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


ProgressKind = Literal["auto", "rich", "plain", "none"]


class Progress:
    """The live line: bar, step and ETA, then loss, real tokens per second, fill and the rest.

    Where a terminal is narrow, whole columns are left out from the right.

    Args:
        kind: auto is rich on a terminal and plain otherwise; plain prints every
            `interval_steps` steps.
        interval_steps: steps between two plain lines.
    """

    def __init__(self, kind: ProgressKind, *, total_steps: int, interval_steps: int) -> None:

        self._console = open_console(stderr=True)
        if kind == "auto":
            kind = "rich" if self._console.is_terminal else "plain"
        self.kind = kind
        self.total_steps = total_steps
        self.interval_steps = interval_steps
        self._smooth: dict[str, float] = {}
        self._bar: Any = None
        self._task: Any = None

    def start(self, step: int) -> None:
        if self.kind != "rich":
            return
        from rich.progress import BarColumn, ProgressColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        class WholeColumns(ProgressColumn):
            def render(self, task: Any) -> _WholeColumns:
                return _WholeColumns(task.fields["columns"])

        self._bar = Bar(
            BarColumn(bar_width=16, table_column=Column(no_wrap=True)),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("ETA {task.fields[left]}"),
            WholeColumns(),  # the one column that may be narrower than its text
            console=self._console,
        )
        self._task = self._bar.add_task(
            "train", total=self.total_steps, completed=step, left="-", columns=()
        )
        self._bar.start()

    def update(self, row: StepRow) -> None:
        columns, remaining = self.columns(row), self._left(row)
        if self._bar is not None:
            self._bar.update(self._task, completed=row.step, left=remaining, columns=columns)
        elif self.kind == "plain" and (
            row.step % self.interval_steps == 0 or row.step in (1, self.total_steps)
        ):
            line = "  ".join((f"step {row.step}/{self.total_steps}", *columns, f"ETA {remaining}"))
            self._console.print(line, highlight=False, soft_wrap=True)

    def columns(self, row: StepRow) -> tuple[str, ...]:
        """The texts after step and ETA, most important first; rates are smoothed over 20 steps."""
        values = {
            "rate": row.tokens_per_second,
            "wait": row.data_wait_share,
            "seconds": row.seconds,
        }
        for name, value in values.items():
            old = self._smooth.get(name, value)
            self._smooth[name] = old + (value - old) * 0.05 if name in self._smooth else value
        share = row.num_shared_tokens / max(1, row.num_tokens)
        columns = (
            "skipped: not finite" if row.skipped else _loss_text(row.loss),
            *(
                f"{name.replace('_', ' ')} {value:.4f}"
                for name, value in row.reported.items()
                if value not in (None, row.loss) and "/" not in name  # of one source
            ),
            f"{self._smooth['rate']:,.0f} real tokens/s",
            f"fill {row.fill:.0%}",
            f"shared {share:.0%}" if share else "",
            f"{row.num_samples} samples",
            f"eager {row.num_eager_rows} of {row.num_rows} rows" if row.num_eager_rows else "",
            f"imbalance {row.imbalance:.2f}" if row.imbalance > 1 else "",
            f"data wait {self._smooth['wait']:.0%}",
        )
        return tuple(filter(None, columns))

    def _left(self, row: StepRow) -> str:
        return _clock((self.total_steps - row.step) * self._smooth["seconds"])

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _loss_text(loss: float | None) -> str:
    return "no sample left" if loss is None else f"loss {loss:.4f}"


@dataclass(frozen=True, slots=True)
class _WholeColumns:
    """As many whole columns as fit, from the left; rich asks for their width."""

    columns: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        columns = list(self.columns)
        while len("  ".join(columns)) > options.max_width:
            columns.pop()
        yield Text("  ".join(columns), no_wrap=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
