"""pack.json: what a folder of packs holds, and what it was made from.

It has the digests of the folder's small files, and these have the checksums of the large ones'
content. Its own `digest` covers all its other values. The file of arrays next to it says which
samples share a pack, and where the packs lie.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vlmpack.data.index.table import Int64s
from vlmpack.data.plan.packs import PackArrays
from vlmpack.data.plan.state import IdentityValue
from vlmpack.errors import UNREADABLE, PacksError
from vlmpack.file_format import PACKS
from vlmpack.packing.budget import RowBudget
from vlmpack.whole_file import read_json

MANIFEST = "pack.json"
UNFINISHED = "unfinished.json"
DIGEST = "digest"

Kind = Literal["plan", "tokens", "shards"]
"""What is saved: which samples share a pack; their tokens too; their images too."""

Planner = Literal["stream", "bfd"]
MediaForm = Literal["original", "resized"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """pack.json.

    Args:
        kind, planner, media: see `vlmpack pack`; `media` applies to kind `shards` alone.
        budget: what a pack holds at most, and the samples that it was chosen from at most.
        seed, shuffle: of the order that planner `stream` packed.
        in_sets: whether packs are cut inside sets of `global_batch_size` samples, each of which is
            one optimizer step (`packing.scope: batch`).
        global_batch_size: packs in a global batch of that order; samples with `in_sets`.
        num_samples: draws in an epoch, holes included.
        num_packs: in an epoch.
        num_tokens: of the samples, without alignment; shared prefixes count once.
        num_holes: samples that could not be encoded when the packs were made.
        num_kept_original: under `resized`, samples that keep their original images, since a saved
            copy would not give the same pixels.
        encoder: part -> fingerprint of what makes tokens and pixels.
        data: what the samples are: shard contents, lengths, the policy for over-long ones.
        files: name -> blake2b of the folder's small files; bytes of the large ones.
    """

    kind: Kind
    planner: Planner
    media: MediaForm | None
    budget: RowBudget
    seq_length: int
    seed: int
    shuffle: str
    global_batch_size: int
    num_samples: int
    num_packs: int
    num_tokens: int
    num_holes: int = 0
    num_kept_original: int = 0
    encoder: Mapping[str, str]
    data: Mapping[str, IdentityValue]
    sources: tuple[tuple[str, float | None], ...]
    weights: Literal["samples", "tokens"]
    in_sets: bool
    share_prefix: bool = False
    plan: str
    files: Mapping[str, str | int]

    @property
    def fill(self) -> float:
        """Tokens of samples over slots of full packs."""
        return self.budget.fill(self.num_tokens, self.num_packs)

    @property
    def holds_pairs(self) -> bool:
        """Whether samples are pairs of answers."""
        return self.encoder.get("samples") == "pairs"

    def to_json(self) -> str:
        """The text of the manifest's file."""
        value = {
            **asdict(self),
            "fill": round(self.fill, 6),
            "fingerprints": {
                "index": digest(json.dumps(dict(self.data), sort_keys=True).encode()),
                **{part: self.encoder[part] for part in ("tokenizer", "template", "processor")},
                "plan": self.plan,
            },
        }
        return json.dumps(sealed(PACKS.mark(value)), indent=2, sort_keys=True) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder.

    Raises:
        PacksError: there is none, it is of another version, or it cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        why = "no such folder; `vlmpack pack` makes it"
        if folder.is_dir():
            why = f"it has no {MANIFEST}; copy it again, or run `vlmpack pack` into a new folder"
        if (folder / UNFINISHED).is_file():
            why = (
                "packing was stopped before its end; run the same `vlmpack pack` again: it goes on"
            )
        raise PacksError(f"packing.path: {folder} holds no finished packs: {why}")
    try:
        value = read_json(path)
        is_whole = take_seal(value)
        PACKS.take(value, f"packing.path: {path}", PacksError)
        if not is_whole:
            raise ValueError("its values are not those that were written")
        return _from_json(value)
    except UNREADABLE as error:
        raise PacksError(
            f"packing.path: {path} cannot be read: {error!r}. Copy the folder again, or run "
            "`vlmpack pack` into a new one"
        ) from error


def _from_json(value: dict[str, Any]) -> Manifest:
    for derived in ("fill", "fingerprints"):
        del value[derived]
    budget = RowBudget(**value.pop("budget"))
    sources = tuple((str(name), weight) for name, weight in value.pop("sources"))
    return Manifest(**value, budget=budget, sources=sources)


def digest(data: bytes) -> str:
    """The digest that manifests hold, 32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with the digest of its values."""
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return {**plain, DIGEST: _values_digest(plain)}


def take_seal(value: dict[str, Any]) -> bool:
    """Take the digest out of an object, and return whether it matches the values."""
    seal = value.pop(DIGEST, None)
    return bool(seal == _values_digest(value))


def _values_digest(value: Mapping[str, Any]) -> str:
    return digest(json.dumps(value, sort_keys=True).encode())


def other_packs(before: Path, now: Path) -> str | None:
    """What tells the packs of two launches apart; None where they are of the same plan."""
    if before == now:
        return None
    old, new = _there(before), _there(now)
    if old is not None and new is not None and old.plan == new.plan:
        return None
    return (
        f"the run's latest launch had {_described(before, old)}, the recipe has "
        f"{_described(now, new)}"
    )


def _there(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except PacksError:
        return None


def _described(folder: Path, manifest: Manifest | None) -> str:
    if manifest is None:
        return f"{folder} (no packs there)"
    return f"{folder} (kind {manifest.kind}, planner {manifest.planner})"


ARRAYS = "packs.safetensors"


@dataclass(frozen=True, slots=True)
class PackSpans:
    """The file and span of each of P packs, in (P,) columns."""

    files: Int64s
    offsets: Int64s
    lengths: Int64s
    crc32s: Int64s

    def to_mapping(self) -> dict[str, Int64s]:
        """The arrays by the names of their fields."""
        return {f"span_{name}": getattr(self, name) for name in self.__slots__}


def save_arrays(arrays: PackArrays, spans: PackSpans | None) -> bytes:
    """The content of the file of arrays."""
    columns = {**arrays.to_mapping(), **(spans.to_mapping() if spans is not None else {})}
    content: bytes = save({name: np.ascontiguousarray(a) for name, a in columns.items()})
    return content


def load_arrays(path: Path, data: bytes) -> tuple[PackArrays, PackSpans | None]:
    """What `save_arrays` wrote.

    Raises:
        PacksError: not such a file.
    """
    try:
        found: Mapping[str, Any] = load(data)
        arrays = PackArrays(**{name: found[name] for name in PackArrays.__slots__})
        if "span_files" not in found:
            return arrays, None
        return arrays, PackSpans(**{name: found[f"span_{name}"] for name in PackSpans.__slots__})
    except (SafetensorError, KeyError) as error:
        raise PacksError(f"packing.path: {path} cannot be read: {error!r}") from error
