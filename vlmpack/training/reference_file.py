"""The reference model's log-probabilities on disk: two numbers a pair.

    reference/reference.json   what they were made from: weights, tokenizer, template, ...
    reference/*.part           rows (number of the pair, chosen, rejected), as they were made,
                               the digest of what they were made from, and a seal over both

A folder that was made from anything else is refused, with every difference, and so is a part, by
name: reference.json may be lost, or another's. A part that is damaged counts as not made.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlmpack.data.loading.pair_columns import Float64s
from vlmpack.errors import ReferenceCacheError
from vlmpack.file_format import REFERENCE
from vlmpack.whole_file import read_json, regular_bytes, write_atomically

logger = logging.getLogger("vlmpack")

FACTS_NAME = "reference.json"

_ELSEWHERE = (
    "have this run's made in another folder: objective.reference_dir, by default `reference` in "
    "run_dir"
)

_DIGEST = 16
_ROW = np.dtype([("number", "<i8"), ("chosen", "<f8"), ("rejected", "<f8")])

Row = tuple[int, float, float]
"""A pair's number, and the log-probabilities of its chosen and of its rejected answer."""

Rows = np.ndarray[tuple[int], np.dtype[np.void]]
"""Rows of dtype `_ROW`."""


@dataclass(frozen=True, slots=True)
class ReferenceFile:
    """A folder of log-probabilities.

    Args:
        folder: where it lies.
        facts: what they are made from, by name.
        num_samples: of the split.
    """

    folder: Path
    facts: Mapping[str, str]
    num_samples: int

    def read(self) -> Float64s:
        """(num_samples, 2) by number, NaN where nothing is known yet.

        Raises:
            ReferenceCacheError: the folder was made from something else.
        """
        found = np.full((self.num_samples, 2), np.nan)
        for path, rows in self._own_parts():
            if rows is None:
                logger.warning("%s is damaged; its pairs are computed again", path)
                continue
            found[rows["number"], 0] = rows["chosen"]
            found[rows["number"], 1] = rows["rejected"]
        return found

    def write(self, rows: Sequence[Row]) -> None:
        """Add some pairs.

        Raises:
            ReferenceCacheError: the folder cannot be written, or another run has begun it since.
        """
        if not rows:
            return
        data = np.array([tuple(row) for row in rows], dtype=_ROW).tobytes() + self._digest
        seal = _digest(data)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._record.exists():
                self._refuse_other_record()
            else:
                facts = REFERENCE.mark({"facts": dict(self.facts)})
                write_atomically(self._record, json.dumps(facts, indent=1) + "\n")
            name = f"{rows[0][0]:09d}-{seal.hex()[:8]}.part"
            write_atomically(self.folder / name, data + seal)
        except OSError as error:
            raise ReferenceCacheError(
                f"objective.reference_dir: {self.folder} cannot be written: "
                f"{error.strerror or error}; choose another folder"
            ) from error

    @property
    def is_there(self) -> bool:
        """Whether somebody began to make numbers there."""
        return self._record.exists() or any(self._parts)

    def refuse_other(self) -> None:
        """Compare what the folder's numbers were made from with what these would be. It may be
        another run's, so nobody is told to remove it.

        Raises:
            ReferenceCacheError: they differ, or the record is damaged or of another version.
        """
        for _ in self._own_parts():
            pass

    @property
    def _record(self) -> Path:
        return self.folder / FACTS_NAME

    @property
    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob("*.part"))

    @property
    def _digest(self) -> bytes:
        """The digest of the facts, as each part of this reference has it."""
        return _digest(json.dumps(REFERENCE.mark(self.facts), sort_keys=True).encode())

    def _own_parts(self) -> Iterator[tuple[Path, Rows | None]]:
        """Each part, and its rows; None where it is damaged."""
        if self._record.exists():
            self._refuse_other_record()
        for path in self._parts:
            content = regular_bytes(path)
            sealed, seal = content[:-_DIGEST], content[-_DIGEST:]
            data, made_from = sealed[:-_DIGEST], sealed[-_DIGEST:]
            if _digest(sealed) != seal:
                yield path, None
            elif made_from != self._digest:
                raise ReferenceCacheError(
                    f"{path} holds log-probabilities of another reference, whatever "
                    f"{FACTS_NAME} beside it says: it may be another run's; {_ELSEWHERE}"
                )
            else:
                yield path, np.frombuffer(data, dtype=_ROW)

    def _refuse_other_record(self) -> None:
        path = self._record
        try:
            content = read_json(path)
            REFERENCE.take(content, path, ReferenceCacheError)
            facts = dict(content["facts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ReferenceCacheError(
                f"{path} is damaged: {error}; put the file back, or {_ELSEWHERE}"
            ) from error
        lines = [
            f"  {name}: {facts.get(name, 'absent')} there, {self.facts.get(name, 'absent')} here"
            for name in sorted({*facts, *self.facts})
            if facts.get(name) != self.facts.get(name)
        ]
        if lines:
            listed = "\n".join(lines)
            raise ReferenceCacheError(
                f"{self.folder} holds log-probabilities of another reference:\n{listed}\nThey "
                "may be another run's. Train with the model and the recipe that they were made "
                f"from, or {_ELSEWHERE}"
            )


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()
