"""Which files of ours this version reads: each says its format under one key.

The formats of 0.1.0 are the first that were released, so every kind begins at 1. A file without the
key is older. It is refused by name, with the command that makes such a file again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmpack.errors import VlmpackError

FORMAT = "vlmpack_format"
"""The key, in JSON objects and in the metadata of tables."""


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file that vlmpack writes and reads again. Raise `number` when older files can no
    longer be read. `remake` is the command that makes the file."""

    name: str
    remake: str
    number: int = 1

    def mark(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """The content of a new file, with its format in front."""
        return {FORMAT: self.number, **content}

    def take(self, content: dict[str, Any], path: Path | str, error: type[VlmpackError]) -> None:
        """Take the format out of a file's content, or raise `error` where this version does not
        read it."""
        if refusal := self.refusal(content.pop(FORMAT, None), path):
            raise error(refusal)

    def refusal(self, number: object, path: Path | str) -> str | None:
        """Why this version does not read a file with this number (None without one); None where it
        does."""
        if number == self.number:
            return None
        if number is None:
            return f"{path} was written by an unreleased vlmpack; remake it with {self.remake}"
        return (
            f"{path} has {FORMAT} {number!r}, and this vlmpack reads {self.number}; use the "
            f"vlmpack that wrote it, or remake it with {self.remake}"
        )


_NEW_RUN = "`vlmpack finetune` and another run_dir"

AUDIT = FileKind("audit", "`vlmpack data audit`")
CHECKPOINT = FileKind("checkpoint", _NEW_RUN)
CONVERSION = FileKind("conversion", "`vlmpack data convert`")
DATA_STATE = FileKind("data state", _NEW_RUN)
DIGESTS = FileKind("digests of weights", "`vlmpack finetune`")
"""Raise it when the same tensors give other digests, or when more is checked."""
DUMP = FileKind("dump of a step", "`vlmpack finetune`, which writes one where a step is not finite")
EXPORT_NOTE = FileKind("note of an export", "`vlmpack export`")
INDEX = FileKind("index", "`vlmpack index`")
MODEL_RECORD = FileKind("model record", _NEW_RUN)
PACKS = FileKind("packs", "`vlmpack pack` into a new folder")
PLAN = FileKind("plan", "`vlmpack plan --json`")
REFERENCE = FileKind("reference cache", "`vlmpack finetune` and another objective.reference_dir")
RESULT = FileKind("result", _NEW_RUN)
ROLLOUTS = FileKind("file of drawn answers", "`vlmpack sample` into another folder")
RUN = FileKind("run", _NEW_RUN)
SAMPLE_RECORD = FileKind("record of samples", _NEW_RUN)
VERIFICATION = FileKind("verification", "`vlmpack verify`")
