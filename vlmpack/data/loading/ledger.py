"""The record of samples that were left out, and the limit on their number.

Workers report holes. The main process writes one JSON line for each and counts them. All ranks
append to one file. The caller sums the ranks' counts before `SkipLimiter.check`, so that all ranks
stop at the same step.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmpack.addresses import redacted
from vlmpack.data.loading.checked_lines import checked_line, ends_torn, parse_lines
from vlmpack.data.loading.read import SkippedSample
from vlmpack.errors import DataLimitError, RunDirError, writing
from vlmpack.whole_file import write_atomically

logger = logging.getLogger("vlmpack")

LEDGER_NAME = "data-errors.jsonl"
UNLEARNT = "skipped_step"
"""The class of samples that are whole, in a step that the optimizer skipped. No limit of bad
samples counts them."""
_TEXTS = ("class", "key", "shard", "reason")
WORST_SHOWN = 10


class Ledger:
    """Appends to `data-errors.jsonl`, or only counts without a path. Lines of several processes do
    not mix."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lines: list[dict[str, Any]] = []
        self._known: set[tuple[str, str]] | None = None

    def record(
        self, skipped: Iterable[SkippedSample], *, epoch: int | None, batch: int | None
    ) -> None:
        """Write one line per hole.

        Args:
            epoch: None while planning.
            batch: the run's global batch, counted from 0; None while planning or evaluating.

        Raises:
            RunDirError: the file cannot be written.
        """
        lines: list[bytes] = []
        for sample in skipped:
            if batch is None and not self._first_time(sample):
                continue
            line: dict[str, Any] = {
                "class": sample.error_class,
                "key": sample.key,
                "shard": sample.shard,
                "offset": sample.offset,
                "reason": redacted(sample.reason),
                "epoch": epoch,
                "batch": batch,
                "sample": sample.number,
            }
            if sample.file is not None:
                line["file"] = sample.file
            if self.path is None:
                self._lines.append(line)
            lines.append(checked_line(line))
        if lines and self.path is not None:
            _append(self.path, b"".join(lines))

    def record_unlearnt(
        self, names: Iterable[tuple[int, str, str]], *, reason: str, epoch: int, batch: int
    ) -> None:
        """Write one line for each sample of a step that the optimizer skipped.

        Args:
            names: number, key and shard of each.

        Raises:
            RunDirError: the file cannot be written.
        """
        lines = [
            {
                "class": UNLEARNT,
                "key": key,
                "shard": shard,
                "offset": None,
                "reason": reason,
                "epoch": epoch,
                "batch": batch,
                "sample": number,
            }
            for number, key, shard in names
        ]
        if self.path is None:
            self._lines += lines
        elif lines:
            _append(self.path, b"".join(map(checked_line, lines)))

    def _first_time(self, sample: SkippedSample) -> bool:
        """Whether a hole met outside training is new, since every launch and validation meets it
        again.

        The file may hold it from an earlier launch.
        """
        if self._known is None:
            self._known = {
                (line["shard"], line["key"]) for line in self.lines() if line["batch"] is None
            }
        name = (sample.shard, sample.key)
        is_new = name not in self._known
        self._known.add(name)
        return is_new

    def lines(self) -> list[dict[str, Any]]:
        """All ranks' intact lines of the file; without a file, what was recorded here."""
        if self.path is None:
            return list(self._lines)
        return [line for _, line in self._parsed() if isinstance(line, dict)]

    def damaged_lines(self) -> list[int]:
        """Numbers of the lines that `lines` leaves out, but for a last one without its end."""
        if self.path is None:
            return []
        return [number for number, line in self._parsed() if not isinstance(line, dict)]

    def _parsed(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """(number, line) of the file; None for what is no line of a ledger."""
        assert self.path is not None
        for number, line in parse_lines(self.path):
            is_ours = (
                isinstance(line, dict)
                and all(isinstance(line.get(name), str) for name in _TEXTS)
                and isinstance(line.get("batch", ""), int | None)
            )
            yield number, line if is_ours and isinstance(line, dict) else None

    def rewind(self, batches: int, *, skipped: int = 0) -> None:
        """Drop the lines of global batches from `batches` on, which a resumed run meets again.

        One process calls it, before any other writes. `skipped` is the checkpoint's count until
        then; fewer lines are reported.
        """
        lines = self.lines()
        lines_left = [line for line in lines if line["batch"] is None or line["batch"] < batches]
        if self.path is None:
            return
        if damaged := self.damaged_lines():
            logger.warning(
                "%s: %d of %d lines are cut or damaged and left out (the first is line %d). "
                "`vlmpack data audit` names the samples that they were about",
                self.path,
                len(damaged),
                len(damaged) + len(lines),
                damaged[0],
            )
        counted = sum(line["batch"] is not None for line in lines_left)
        if counted < skipped:
            logger.warning(
                "%s has %d samples skipped in training, the checkpoint counts %d: lines were lost, "
                "and the limit to skipped samples counts from what is left",
                self.path,
                counted,
                skipped,
            )
        if not damaged and len(lines_left) == len(lines) and not ends_torn(self.path):
            return
        write_atomically(self.path, b"".join(map(checked_line, lines_left)))

    def worst(self) -> Worst:
        """What most lines are about."""
        files, keys, damaged = Counter[str](), Counter[str](), Counter[tuple[str, bool, str]]()
        reasons: dict[tuple[str, bool, str], str] = {}
        for line in self.lines():
            if line["class"] == UNLEARNT:
                continue
            file = line.get("file", line["shard"])
            kind = (file, "file" in line, line["class"])
            files[file] += 1
            keys[f"{line['key']} ({line['shard']})"] += 1
            damaged[kind] += 1
            reasons.setdefault(kind, line["reason"])
        first = next((kind for kind, _ in damaged.most_common(1)), None)
        return Worst(
            files=tuple(files.most_common(WORST_SHOWN)),
            keys=tuple(keys.most_common(WORST_SHOWN)),
            reason="" if first is None else reasons[first],
            advice="" if first is None else _advice(of_pack=first[1], error_class=first[2]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Worst:
    """The ten damaged files (a shard, or a saved pack's tar) and the samples with most lines, and
    the reason of a line of the most frequent file and class."""

    files: tuple[tuple[str, int], ...]
    keys: tuple[tuple[str, int], ...]
    reason: str
    advice: str


def _advice(*, of_pack: bool, error_class: str) -> str:
    if of_pack:
        return "Copy the folder of packs again, or run `vlmpack pack` again into a new one."
    if error_class in ("integrity", "transport"):
        return "Copy the worst files again from where they are whole."
    return "Repair these samples, or take them out of the shards."


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipLimits:
    """How many samples a run may lose."""

    max_consecutive: int = 100
    """Skipped in a row, counted in whole global batches."""
    max_fraction: float = 0.001
    """Share of the latest `window_samples` samples."""
    min_skipped: int = 10
    """This many are allowed in a window, however small the share."""
    window_samples: int = 10_000
    """Samples that the share is taken of."""

    @property
    def max_in_window(self) -> int:
        """Skipped samples that a window may hold."""
        return max(self.min_skipped, int(self.max_fraction * self.window_samples))


@dataclass(eq=False)
class SkipLimiter:
    """Counts planned and skipped samples by step, and stops at a limit."""

    limits: SkipLimits
    ledger: Ledger

    def __post_init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque()
        self._samples = self._skipped = self._consecutive = 0

    def check(self, *, samples: int, skipped: int) -> None:
        """Count one global batch, over all ranks.

        Raises:
            DataLimitError: too many in a row, or in the window; names the worst files and samples.
        """
        self._consecutive = self._consecutive + skipped if skipped == samples else 0
        self._recent.append((samples, skipped))
        self._samples += samples
        self._skipped += skipped
        while self._samples - self._recent[0][0] >= self.limits.window_samples:
            old_samples, old_skipped = self._recent.popleft()
            self._samples -= old_samples
            self._skipped -= old_skipped
        if self._consecutive >= self.limits.max_consecutive:
            self._stop(f"{self._consecutive} samples in a row were skipped")
        if self._skipped > self.limits.max_in_window:
            self._stop(
                f"{self._skipped} of the last {self._samples} samples were skipped; at most "
                f"{self.limits.max_in_window} may be"
            )

    def replay(self, *, batches: int, samples_per_batch: int) -> None:
        """Count what the run lost before it was resumed, from the ledger's lines.

        Args:
            samples_per_batch: about; the last of an epoch may have had fewer.

        Raises:
            DataLimitError: the budget was spent already.
        """
        lines = self.ledger.lines()
        lost = Counter(line["batch"] for line in lines if line["class"] != UNLEARNT)
        in_window = self.limits.window_samples // samples_per_batch + 1
        for batch in range(max(0, batches - in_window), batches):
            self.check(samples=samples_per_batch, skipped=lost[batch])

    def _stop(self, reason: str) -> None:
        worst = self.ledger.worst()
        lines = [f"the run stops, its data is too damaged: {reason}.", "Worst files:"]
        lines += [f"  {count} in {file}" for file, count in worst.files]
        lines += ["Worst samples:"]
        lines += [f"  {count} times {key}" for key, count in worst.keys]
        if worst.reason:
            lines += [f"A typical reason: {worst.reason}", worst.advice]
        if self.ledger.path is not None:
            lines.append(f"All are listed in {self.ledger.path}.")
        raise DataLimitError("\n".join(lines))


def _append(path: Path, data: bytes) -> None:
    """Append whole lines in one write under a lock. A torn last line, from a kill or a full disk,
    is ended first."""
    with writing(path, RunDirError):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if ends_torn(path):
                data = b"\n" + data
            while data:
                data = data[os.write(descriptor, data) :]
        finally:
            os.close(descriptor)
