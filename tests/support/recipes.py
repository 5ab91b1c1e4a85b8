"""Small shards and recipes for runs that end in seconds."""

from __future__ import annotations

import json
import tarfile
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from support.shards import ROOT, TINY_MODEL

SMALL = 22
"""Samples in the small training shard: with 4 a step, 5.5 steps an epoch, so epochs end short."""


MINIMAL: dict[str, Any] = {
    "model": {"path": "models/tiny"},
    "data": {"train": "data/train-*.tar"},
    "training": {
        "micro_batch_size": 4,
        "global_batch_size": 16,
        "seq_length": 512,
        "max_steps": 100,
    },
    "optim": {"lr": 1e-3},
    "run_dir": "runs/test",
}
"""A small correct recipe; nothing that it names exists."""


def copy_samples(source: Path, target: Path, count: int, *, skip: int = 0) -> None:
    """Write `count` whole samples of a shard to another one."""
    target.write_bytes(_samples_of(source, source.stat().st_mtime_ns, count, skip))


@cache
def _samples_of(source: Path, changed_at: int, count: int, skip: int) -> bytes:
    """The bytes of a shard of these samples: many tests ask for the same ones."""
    keys: set[str] = set()
    made = BytesIO()
    with tarfile.open(source) as tar, tarfile.open(fileobj=made, mode="w") as out:
        for entry in tar:
            keys.add(entry.name.partition(".")[0])
            if len(keys) > skip + count:
                break
            if len(keys) > skip:
                out.addfile(entry, tar.extractfile(entry))
    return made.getvalue()


def small_settings(root: Path, **changes: Any) -> dict[str, Any]:
    """A recipe over the small training shard, which is written; everything lies in `root`.

    Args:
        changes: see `changed`.
    """
    shard = root / "train-000000.tar"
    copy_samples(ROOT / "assets/digits/train-000000.tar", shard, SMALL)
    settings = {
        "model": {"path": str(TINY_MODEL)},
        "data": {"train": str(shard), "num_workers": 0, "index_dir": str(root / "index")},
        "packing": {"mode": "in_batch"},
        "training": {
            "micro_batch_size": 4,
            "global_batch_size": 4,
            "seq_length": 512,
            "max_steps": 3,
        },
        "optim": {"lr": 2e-4},
        "run_dir": str(root / "run"),
    }
    return changed(settings, **changes)


def run_settings(root: Path, **changes: Any) -> dict[str, Any]:
    """The small recipe for runs: 4 samples a step, every checkpoint kept, nothing around them."""
    return small_settings(
        root,
        training__seed=3,
        optim__warmup_steps=2,
        checkpoint__keep=100,
        logging__trackers=[],
        logging__progress="none",
        export__enabled=False,
        **changes,
    )


def rewrite(path: Path, change: Any) -> None:
    """Pass every member of a shard through `change(name, data) -> data`, or None to drop it."""
    with tarfile.open(path) as tar:
        members = [(entry.name, tar.extractfile(entry).read()) for entry in tar]
    with tarfile.open(path, "w") as out:
        for name, data in members:
            new = change(name, data)
            if new is not None:
                entry = tarfile.TarInfo(name)
                entry.size = len(new)
                out.addfile(entry, BytesIO(new))


def changed(settings: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A copy with dotted fields changed (`training__max_steps=20`); None removes a field."""
    copy = json.loads(json.dumps(settings))
    for name, value in values.items():
        *sections, key = name.split("__")
        place = copy
        for section in sections:
            place = place.setdefault(section, {})
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
    return copy


def write_recipe(path: Path, settings: dict[str, Any]) -> Path:
    """The mapping as a file; JSON is YAML."""
    path.write_text(json.dumps(settings, indent=2))
    return path


def rows(run_dir: str | Path, *names: str) -> list[tuple[Any, ...]]:
    """Columns of the training rows of metrics.jsonl."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "loss" in row]
    return [tuple(row[name] for name in names) for row in steps]
