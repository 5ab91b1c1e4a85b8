"""The reference model's log-probabilities on disk: two numbers a pair.

    reference/reference.json   what they were made from: weights, tokenizer, template, ...
    reference/*.part           rows (number of the pair, chosen, rejected), as they were made

A folder that was made from anything else is refused, with every difference. A part is sealed by a
digest; one that is damaged counts as not made.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlmpack.data.loading.reference import Float64s
from vlmpack.errors import ReferenceCacheError
from vlmpack.whole_file import write_atomically

logger = logging.getLogger("vlmpack")

VERSION = 1

FACTS_NAME = "reference.json"

_ELSEWHERE = (
    "have this run's made in another folder: objective.reference_dir, by default `reference` in "
    "run_dir"
)

_SEAL = 16
_ROW = np.dtype([("number", "<i8"), ("chosen", "<f8"), ("rejected", "<f8")])

Row = tuple[int, float, float]
"""A pair's number, and the log-probabilities of its chosen and of its rejected answer."""


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
        path = self.folder / FACTS_NAME
        if not path.exists():
            return found
        self.refuse_other()
        for part in sorted(self.folder.glob("*.part")):
            rows = _rows_of(part)
            if rows is None:
                logger.warning("%s is damaged; its pairs are computed again", part)
                continue
            found[rows["number"], 0] = rows["chosen"]
            found[rows["number"], 1] = rows["rejected"]
        return found

    def write(self, rows: Sequence[Row]) -> None:
        """Add some pairs.

        Raises:
            ReferenceCacheError: the folder cannot be written.
        """
        if not rows:
            return
        data = np.array([tuple(row) for row in rows], dtype=_ROW).tobytes()
        seal = hashlib.blake2b(data, digest_size=_SEAL)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            facts = {"version": VERSION, "facts": dict(self.facts)}
            if not (self.folder / FACTS_NAME).exists():
                write_atomically(self.folder / FACTS_NAME, json.dumps(facts, indent=1) + "\n")
            name = f"{rows[0][0]:09d}-{seal.hexdigest()[:8]}.part"
            write_atomically(self.folder / name, data + seal.digest())
        except OSError as error:
            raise ReferenceCacheError(
                f"objective.reference_dir: {self.folder} cannot be written: "
                f"{error.strerror or error}; choose another folder"
            ) from error

    @property
    def is_there(self) -> bool:
        """Whether somebody began to make numbers there."""
        return (self.folder / FACTS_NAME).exists()

    def refuse_other(self) -> None:
        """Compare what the folder's numbers were made from with what these would be. It may be
        another run's, so nobody is told to remove it.

        Raises:
            ReferenceCacheError: they differ, or the record is damaged or of another version.
        """
        path = self.folder / FACTS_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version, facts = content["version"], dict(content["facts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ReferenceCacheError(
                f"{path} is damaged: {error}; put the file back, or {_ELSEWHERE}"
            ) from error
        if version != VERSION:
            raise ReferenceCacheError(
                f"{path} has version {version}, this version of vlmpack reads {VERSION}: "
                f"it may be another run's; {_ELSEWHERE}"
            )
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


def _rows_of(path: Path) -> np.ndarray[tuple[int], np.dtype[np.void]] | None:
    """The rows of a part; None where it is damaged."""
    content = path.read_bytes()
    data, seal = content[:-_SEAL], content[-_SEAL:]
    if hashlib.blake2b(data, digest_size=_SEAL).digest() != seal or len(data) % _ROW.itemsize:
        return None
    return np.frombuffer(data, dtype=_ROW)
