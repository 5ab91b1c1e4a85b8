"""The digits of assets/ in three layouts and kinds of file: the same samples, three sources."""

from __future__ import annotations

import json
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from support.shards import ROOT

DIGITS = ROOT / "assets" / "digits"
SIDES = {"user": "human", "assistant": "gpt"}

Record = dict[str, Any]


class Digits(NamedTuple):
    """One sample of a shard: its key, its JSON, and its images by name."""

    key: str
    document: Record
    images: dict[str, bytes]


def read_digits(pattern: str = "train-*.tar") -> list[Digits]:
    """The samples of the committed shards, read with tarfile alone."""
    found: dict[str, Digits] = {}
    for path in sorted(DIGITS.glob(pattern)):
        with tarfile.open(path) as tar:
            for entry in tar:
                key, _, name = entry.name.partition(".")
                sample = found.setdefault(key, Digits(key, {}, {}))
                data = tar.extractfile(entry).read()  # type: ignore[union-attr]
                if name == "json":
                    sample.document.update(json.loads(data))
                else:
                    sample.images[name] = data
    return list(found.values())


def write_layouts(folder: Path, samples: list[Digits]) -> dict[str, str]:
    """Layout -> path of its file or shard: one question as `vqa` in a parquet file with its images,
    of the others every second as `messages` in a JSONL file with paths, the rest as `llava` in a
    shard. Which sample went where is by its `id`, or the shard's key."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = [sample for sample in samples if len(_turns(sample)) == 2]
    longer = [sample for sample in samples if len(_turns(sample)) > 2]
    return {
        "vqa": _write_vqa(folder / "vqa.parquet", asked),
        "messages": _write_messages(folder / "messages.jsonl", longer[::2]),
        "llava": _write_llava(folder / "llava-000000.tar", longer[1::2]),
    }


def _write_vqa(path: Path, samples: list[Digits]) -> str:
    rows = []
    for sample in samples:
        turns = _turns(sample)
        images = [{"bytes": sample.images[name], "path": name} for name in _shown(sample)]
        rows.append({"question": turns[0][1], "answer": turns[1][1], "images": images})
        rows[-1] |= _beside(sample)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    return str(path)


def _write_messages(path: Path, samples: list[Digits]) -> str:
    pictures = path.parent / "pictures"
    pictures.mkdir()
    lines = []
    for sample in samples:
        names = [f"pictures/{sample.key}-{name}" for name in _shown(sample)]
        for name, file in zip(_shown(sample), names, strict=True):
            (path.parent / file).write_bytes(sample.images[name])
        turns = [{"role": role, "content": text} for role, text in _turns(sample)]
        lines.append(json.dumps({"messages": turns, "images": names, **_beside(sample)}))
    path.write_text("\n".join(lines))
    return str(path)


def _write_llava(path: Path, samples: list[Digits]) -> str:
    with tarfile.open(path, "w") as out:
        for sample in samples:
            turns = [{"from": SIDES[role], "value": text} for role, text in _turns(sample)]
            document = {"conversations": turns, "image": _shown(sample), **_beside(sample)}
            for name, data in (*sample.images.items(), ("json", json.dumps(document).encode())):
                entry = tarfile.TarInfo(f"{sample.key}.{name}")
                entry.size = len(data)
                out.addfile(entry, BytesIO(data))
    return str(path)


def _beside(sample: Digits) -> Record:
    return {"id": sample.key, "task": sample.document["task"]}


def _turns(sample: Digits) -> list[tuple[str, str]]:
    """Who says what, with `<image>` at the place of each image."""
    if "conversations" in sample.document:
        roles = {value: key for key, value in SIDES.items()}
        return [(roles[turn["from"]], turn["value"]) for turn in sample.document["conversations"]]
    return [
        (turn["role"], "".join(part.get("text", "<image>") for part in turn["content"]))
        for turn in sample.document["messages"]
    ]


def _shown(sample: Digits) -> list[str]:
    """Names of its images in the order in which its turns show them."""
    if "conversations" in sample.document:
        return list(sample.document["images"])
    parts = (part for turn in sample.document["messages"] for part in turn["content"])
    return [part["image"] for part in parts if part["type"] == "image"]
