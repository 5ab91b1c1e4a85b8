"""Which model a run is trained from: what its folder holds, recorded with the run.

The path of a model is not its content: with a frozen tower, or with adapters, other weights or
another `rms_norm_eps` under the same path would go on in silence. So model.json keeps a digest of
every tensor and what config, tokenizer and processor say; every launch compares, and so does every
export, which takes the frozen weights from the folder. Checkpoints hold digests of all that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vlmpack.capabilities.folder import read_config
from vlmpack.errors import RunDirError
from vlmpack.file_format import MODEL_RECORD
from vlmpack.model_folder.content import config_content, generation_content, processor_content
from vlmpack.model_folder.load import IMAGE_BACKEND, transformers_version
from vlmpack.whole_file import read_json

MAX_LINES = 12
"""Differences of one kind that are listed; the others are counted."""

_DECIDING = ("weights", "config", "processor", "adapter")
"""What may not change; the rest changes answers alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """What a model folder holds.

    Args:
        weights: tensor -> dtype, shape and digest. Files do not count: a tensor may move from one
            to another.
        config: what config.json says, key by key.
        processor: what the files of tokenizer, chat template and image processor say.
        generation: what generation_config.json says.
        versions: of what reads all that.
        adapter: digest of the adapters that training began with; empty without.
        files: digests of the processor's files; others may say the same.
    """

    weights: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    adapter: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_files(
        cls,
        folder: Path,
        weights: Mapping[str, str],
        before: ModelRecord | None = None,
        adapter: Mapping[str, str] | None = None,
    ) -> ModelRecord:
        """That of a folder as it is now.

        Args:
            folder: model folder.
            weights: its digests; empty where they are still being made.
            before: an earlier one, which spares work where files are still the same.
            adapter: digest of the adapters that training begins with, if there are some.

        Raises:
            ModelError: it has no config.json.
        """
        read_config(folder)  # a folder that is gone is named as such
        before = before or cls()
        processor, files = processor_content(folder, before.processor, before.files)
        return cls(
            weights=weights,
            adapter=adapter or {},
            files=files,
            config=config_content(folder),
            processor=processor | {"image processor's backend": IMAGE_BACKEND},
            generation=generation_content(folder),
            versions={"transformers": transformers_version()},
        )

    @classmethod
    def read(cls, path: Path) -> ModelRecord | None:
        """What `to_json` wrote; None where there is no such file.

        Raises:
            RunDirError: it is damaged, or of another version.
        """
        if not path.exists():
            return None
        try:
            content = read_json(path, any_number=True)
            MODEL_RECORD.take(content, f"run_dir: {path}", RunDirError)
            check = content.pop("check")
            record = cls(**content)
            if check != record._check():
                raise ValueError("its content does not match its digest")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunDirError(f"run_dir: {path} is damaged: {error}") from error
        return record

    def to_json(self) -> str:
        """The text of model.json."""
        content = MODEL_RECORD.mark({"check": self._check(), **asdict(self)})
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    def _check(self) -> str:
        return _digest(asdict(self))

    def digests(self) -> dict[str, str]:
        """Digests of each part that may not change, for checkpoints; of adapters where there are
        some."""
        held = {name: getattr(self, name) for name in _DECIDING}
        return {name: _digest(it) for name, it in held.items() if it or name != "adapter"}

    def differences(self, now: ModelRecord, *parts: str) -> list[str]:
        """A line for each that may not be; some are left out of a long list.

        Args:
            now: the folder as it is.
            parts: to compare; none for all that may not change.
        """
        return [
            line
            for part in parts or _DECIDING
            for line in _changes(
                "weight " if part == "weights" else "", getattr(self, part), getattr(now, part)
            )
        ]

    def notes(self, now: ModelRecord) -> list[str]:
        """A line for each difference that is allowed, with what it means."""
        answers = _changes("", self.generation, now.generation)
        numbers = _changes("", self.versions, now.versions)
        return [
            *(f"{line}; answers may change with it, training does not" for line in answers),
            *(
                f"{line}; lengths are made anew, and pixels or losses may differ in a last digit"
                for line in numbers
            ),
        ]


def _changes(prefix: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    keys = [key for key in sorted({*old, *new}) if _said(old, key) != _said(new, key)]
    lines = [
        f"{prefix}{key}: {_said(old, key)} in the run, {_said(new, key)} now"
        for key in keys[:MAX_LINES]
    ]
    if len(keys) > MAX_LINES:
        lines.append(f"{prefix or 'entries '}... and {len(keys) - MAX_LINES} more of {len(new)}")
    return lines


def _said(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "absent"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
