"""Which model a run is trained from: hashed while it loads, compared and recorded.

A model's path does not identify its content. With a frozen tower or adapters, changed weights or
another `rms_norm_eps` would go unnoticed. So model.json keeps a digest of every tensor, and the
content of config, tokenizer and processor. Every launch and every export compares them, and
checkpoints hold their digests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vlmpack.backends.adapter_folder import WEIGHTS
from vlmpack.backends.finite import refuse_non_finite_weights
from vlmpack.backends.skeleton import folder_skeleton
from vlmpack.capabilities.folder import read_config
from vlmpack.distributed import Ranks
from vlmpack.errors import ModelError, RunDirError, RunIdentityError
from vlmpack.file_format import MODEL_RECORD
from vlmpack.model_folder.content import config_content, generation_content, processor_content
from vlmpack.model_folder.digests import RememberedDigests, WeightHashing, hashing_weights
from vlmpack.model_folder.finite import non_finite_words, read_through
from vlmpack.model_folder.load import IMAGE_BACKEND, transformers_version
from vlmpack.storage.access import default_cache_dir
from vlmpack.training.run_dir import RunDir
from vlmpack.whole_file import read_json, write_atomically
from vlmpack.words import indented

MAX_LINES = 12
"""Differences of one kind that are listed; the others are counted."""

_DECIDING = ("weights", "config", "processor", "adapter")
"""What may not change; the rest changes answers alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """The record of a model folder's contents.

    Args:
        weights: tensor -> dtype, shape and digest, in whichever file it lies.
        processor: content of the files of tokenizer, chat template and image processor.
        versions: of the packages that read these.
        adapter: digest of the adapters that training began with; empty without.
        files: digests of the processor's files; other files may have the same content.
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
        """The record of a folder as it is now.

        Args:
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
        """The record that `to_json` wrote. None if there is no such file.

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
        content = MODEL_RECORD.mark({"check": self._check(), **asdict(self)})
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    def _check(self) -> str:
        return _digest(asdict(self))

    def digests(self) -> dict[str, str]:
        """Digests of each part that must not change, adapters included, for checkpoints."""
        held = {name: getattr(self, name) for name in _DECIDING}
        return {name: _digest(it) for name, it in held.items() if it or name != "adapter"}

    def differences(self, now: ModelRecord, *parts: str) -> list[str]:
        """A line for each forbidden difference. A long list is shortened.

        Args:
            parts: the parts to compare. Without any, all that may not change.
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
    return json.dumps(values[key]) if key in values else "missing"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


logger = logging.getLogger("vlmpack")

_OF_THE_FOLDER = ("weights", "config", "processor")


@dataclass(slots=True)
class ModelWatch:
    """What a launch knows of its model folder.

    Args:
        adapter: file of the adapters that training begins with; None without.
    """

    folder: Path
    run_dir: RunDir
    ranks: Ranks
    hashing: WeightHashing
    adapter: Path | None = None
    _now: ModelRecord | None = None
    _start: float = field(default_factory=time.perf_counter)

    def leave_former(self) -> None:
        """Put aside results of a launch that saved nothing and used another model. Collective.

        The weights are waited for only if there was such a launch.

        Raises:
            ModelError: a file that cannot be read, or that changes.
        """
        record = self.run_dir.model
        if self.ranks.on_main(lambda: record.exists() and not self.run_dir.has_saved()):
            weights, adapter = self.hashing.finish(), self._adapter_digest()
            self.ranks.on_main(lambda: self._leave(weights, adapter))

    def compare_all(self) -> dict[str, str]:
        """Compare everything, once the weights are hashed. Collective.

        Returns:
            Digests of the parts, for checkpoints.

        Raises:
            RunIdentityError: the run was trained from others.
            ModelError: a file that cannot be read, or that changes.
        """
        weights, adapter = self.hashing.finish(), self._adapter_digest()
        seconds = time.perf_counter() - self._start
        if self.ranks.is_main and self.hashing.num_bytes:
            logger.info(
                "%-14s %d tensors, %.0f MB hashed within %.1f s, beside loading",
                "weights",
                len(weights),
                self.hashing.num_bytes / 1e6,
                seconds,
            )
        return self.ranks.on_main(lambda: self._compare(weights, adapter))

    def _adapter_digest(self) -> dict[str, str]:
        """The adapter file's digest on every rank; empty without one. Collective."""
        if self.adapter is None:
            return {}
        with self.ranks.raised_by_all(ModelError):
            try:
                mine, non_finite = read_through(self.adapter)
            except OSError as error:
                raise ModelError(
                    f"model.adapter: {self.adapter} cannot be read: {error}"
                ) from error
            if non_finite:
                raise ModelError(f"model.adapter: {self.adapter}: {non_finite_words(non_finite)}")
        digests = self.ranks.gather_objects(mine)
        if len({*digests}) > 1:
            raise ModelError(
                f"model.adapter: {self.adapter} is another file on another machine; expected the "
                "same adapters on all of them"
            )
        return {self.adapter.name: mine}

    def _compare(self, weights: Mapping[str, str], adapter: Mapping[str, str]) -> dict[str, str]:
        refuse_non_finite_weights(
            self.folder, self.hashing.non_finite, partial(folder_skeleton, self.folder)
        )
        recorded = _recorded(self.run_dir)
        self._now = now = ModelRecord.of_files(self.folder, weights, recorded, adapter)
        if recorded is not None:
            _refuse(self.run_dir, self.folder, recorded.differences(now))
            for line in recorded.notes(now):
                logger.warning("note: %s", line)
        elif self.run_dir.has_saved():
            logger.warning(
                "note: earlier launches of this run recorded no fingerprint of its model; that of "
                "%s as it is now is kept in %s",
                self.folder,
                self.run_dir.model.name,
            )
        return now.digests()

    def _leave(self, weights: Mapping[str, str], adapter: Mapping[str, str]) -> None:
        try:
            former = ModelRecord.read(self.run_dir.model) or ModelRecord()
            now = ModelRecord.of_files(self.folder, weights, former, adapter)
            lines = former.differences(now)
        except RunDirError as error:  # nothing to compare with
            lines = [str(error)]
        if lines and (names := self.run_dir.put_aside()):
            logger.warning(
                "run_dir: %s holds a run that saved nothing and began with another model than "
                "lies in %s now:\n%s\nWhat that run left is kept as %s",
                self.run_dir.path,
                self.folder,
                indented(lines),
                ", ".join(names),
            )

    def keep(self) -> None:
        """Record what `compare_all` found, after the checkpoint agrees with it. On the main
        rank."""
        assert self._now is not None
        write_atomically(self.run_dir.model, self._now.to_json())


def check_small_files(folder: Path, ranks: Ranks, run_dir: RunDir) -> None:
    """Compare a folder's small files with those of earlier launches. Collective.

    Raises:
        RunIdentityError: the run was trained from another config, tokenizer or processor.
        ModelError: a folder without config.json.
    """

    def compare() -> None:
        recorded = _recorded(run_dir)
        if recorded is not None:
            now = ModelRecord.of_files(folder, {}, recorded)
            _refuse(run_dir, folder, recorded.differences(now, "config", "processor"))

    ranks.on_main(compare)


def _recorded(run_dir: RunDir) -> ModelRecord | None:
    return ModelRecord.read(run_dir.model) if run_dir.has_saved() else None


@contextmanager
def watched_model(
    folder: Path, ranks: Ranks, run_dir: RunDir, adapter: str | None = None
) -> Iterator[ModelWatch]:
    """Begin to hash the weights. Collective.

    Args:
        adapter: folder of the adapters that training begins with; None without.

    Raises:
        ModelError: a folder without weights.
    """
    with hashing_weights(folder, ranks, _remembered()) as hashing:
        file = None if adapter is None else Path(adapter, WEIGHTS)
        yield ModelWatch(folder, run_dir, ranks, hashing, file)


def check_model_again(folder: Path, run_dir: RunDir) -> dict[str, str]:
    """Check that a model folder is still the one a run was trained from. One process.

    Returns:
        Digests of its parts, to compare with a checkpoint's. A run that recorded no model has
        nothing else to compare with, and the log says so.

    Raises:
        RunIdentityError: it is another model.
        ModelError: it cannot be read.
    """
    recorded = ModelRecord.read(run_dir.model)
    with hashing_weights(folder, Ranks(), _remembered()) as hashing:
        now = ModelRecord.of_files(folder, hashing.finish(), recorded)
        refuse_non_finite_weights(folder, hashing.non_finite, partial(folder_skeleton, folder))
    if recorded is not None:
        # What was trained on from adapters lies in checkpoints whole: their folder may be gone.
        _refuse(run_dir, folder, recorded.differences(now, *_OF_THE_FOLDER))
    else:
        logger.warning(
            "note: %s recorded no fingerprint of its model; its frozen weights are taken from %s "
            "as it is now",
            run_dir.path,
            folder,
        )
    return now.digests()


def check_trained_from(checkpoint: Path, saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """See that a checkpoint was trained from the model of this launch.

    Raises:
        RunIdentityError: it was not.
    """
    parts = [name for name, digest in now.items() if saved.get(name) != digest]
    if parts:
        raise RunIdentityError(
            f"{checkpoint} was trained from another model than model.json of its run says now: "
            f"{' and '.join(parts)} differ. Put back the run folder's own model.json and the model "
            f"that it names, or choose another run_dir"
        )


def _refuse(run_dir: RunDir, folder: Path, lines: Sequence[str]) -> None:
    if lines:
        listed = "\n".join(f"  {line}" for line in lines)
        raise RunIdentityError(
            f"run_dir: {run_dir.path} was trained from another model than lies in {folder} now:\n"
            f"{listed}\nPut back what the run began with, or choose another run_dir"
        )


def _remembered() -> RememberedDigests:
    return RememberedDigests(default_cache_dir().parent / "weights")
