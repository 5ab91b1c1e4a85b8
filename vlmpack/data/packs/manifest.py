"""pack.json: what a folder of packs holds, what it was made from, and whether that fits a recipe.

It has the digests of the folder's small files, and these have the checksums of the large ones'
content. Its own `digest` covers all its other values. The file of arrays next to it says which
samples share a pack, and where the packs lie. Packs of kind `shards` need the original shards no
more, so a file has the samples of the split. Where packs do not fit, every difference is named.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vlmpack.data.config import DataConfig
from vlmpack.data.index.groups import SamplePrefixes
from vlmpack.data.index.lengths import CHOSEN, COUNTS
from vlmpack.data.index.table import Dropped, Fitted, Int64s, SampleTable, int64s
from vlmpack.data.plan.packs import PackArrays
from vlmpack.data.plan.state import Identity, IdentityValue
from vlmpack.data.splits.summary import share_name
from vlmpack.encode import Encoder
from vlmpack.errors import UNREADABLE, PacksError
from vlmpack.file_format import PACKS
from vlmpack.packing.budget import RowBudget
from vlmpack.storage.fetch import ShardStamp
from vlmpack.whole_file import read_json
from vlmpack.words import indented

MANIFEST = "pack.json"
UNFINISHED = "unfinished.json"
DIGEST = "digest"

Kind = Literal["plan", "tokens", "shards"]
"""What is saved. `plan` says which samples share a pack, `tokens` adds their tokens, and `shards`
adds their images."""

Planner = Literal["stream", "bfd"]
MediaForm = Literal["original", "resized"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """pack.json.

    Args:
        kind, planner, media: see `vlmpack pack`; `media` applies to kind `shards` alone.
        budget: what a pack holds at most, and the samples that it was chosen from at most.
        seed, shuffle: of the order that planner `stream` packed.
        packs_by_batch: whether packs are cut inside sets of `global_batch_size` samples, as the
            recipe says. Each set is one optimizer step (`packing.scope: batch`).
        global_batch_size: packs in a global batch of that order; samples with `packs_by_batch`.
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
    packs_by_batch: bool
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
    """How the packs of two launches differ. None if they are of the same plan."""
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
    """The arrays that `save_arrays` wrote.

    Raises:
        PacksError: not such a file.
    """
    try:
        columns: Mapping[str, Any] = load(data)
        arrays = PackArrays(**{name: columns[name] for name in PackArrays.__slots__})
        if "span_files" not in columns:
            return arrays, None
        return arrays, PackSpans(**{name: columns[f"span_{name}"] for name in PackSpans.__slots__})
    except (SafetensorError, KeyError) as error:
        raise PacksError(f"packing.path: {path} cannot be read: {error!r}") from error


logger = logging.getLogger("vlmpack")

Setting = tuple[str, object, object]
"""(key, its value in the packs, its value in the recipe)."""

_PARTS = {
    "rules": "how this version encodes",
    "tokenizer": "the tokenizer in model.path",
    "template": "the chat template in model.path",
    "processor": "the image processor in model.path",
    "images": "images",
    "date": "data.date",
    "learn": "data.learn",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "special_tokens": "data.special_tokens",
    "coordinates": "data.coordinates",
    "boxes_in_text": "data.boxes_in_text",
    "samples": "the form of samples (objective.name)",
}
_WITHOUT = {"samples": "conversations"}
"""What it means that a part is not there."""
_INDEX = ("lengths", "objects", "data.over_long", "data.epoch_size", "data.group_by")


def index_identity(identity: Identity, key: str) -> dict[str, IdentityValue]:
    """The parts of a split's identity that say which samples there are, and which stay together."""
    return {
        name: value
        for name, value in identity.items()
        if name in _INDEX or name == key or name.startswith(f"{key}.")
    }


def refuse_rollouts(encoder: Encoder, kind: Kind) -> None:
    """Raise PacksError for packs that hold tokens and not what samplers said of them."""
    if encoder.settings.rollouts and kind != "plan":
        raise PacksError(
            f"packs of kind {kind!r} hold tokens without the log-probabilities of rollouts; use "
            "`vlmpack pack --kind plan`, or packing.mode: online"
        )


def check_packs(manifest: Manifest, folder: Path, config: DataConfig, encoder: Encoder) -> None:
    """Refuses packs that were made for another model folder, length or budget.

    Raises:
        PacksError: with every difference.
    """
    settings = [*_budget_settings(manifest, config), *_source_settings(manifest, config)]
    if said := manifest.data.get("objects"):
        settings.append(("how boxes of objects are written", said, encoder.objects_said))
    lines = encoder_differences(manifest, encoder)
    lines += [
        f"{name}: {shown(before)} in the packs, {shown(now)} in the recipe"
        for name, before, now in settings
        if before != now
    ]
    lines += [*_other_sets(manifest, config), *_other_sharing(manifest, config)]
    alignment, multiple = manifest.budget.alignment, config.mode.multiples.sequence
    if alignment % multiple:
        lines.append(
            f"packing.alignment: {alignment} in the packs, but parallelism.context needs a "
            f"multiple of {multiple}"
        )
    _refuse(folder, lines)


def _other_sets(manifest: Manifest, config: DataConfig) -> list[str]:
    """Packs that are cut inside sets fit one size of set, since each is an optimizer step."""
    before, now = manifest.global_batch_size, config.training.global_batch_size
    if not manifest.packs_by_batch or before == now:
        return []
    what = "pairs" if manifest.holds_pairs else "samples"
    return [
        f"training.global_batch_size: {before} in the packs, which are cut inside sets of "
        f"{before} {what}, and {now} in the recipe. For sets of {now} pack again with "
        f"training.global_batch_size={now}"
    ]


def _other_sharing(manifest: Manifest, config: DataConfig) -> list[str]:
    """Packs depend on whether samples share prefixes in a row."""
    before, now = (
        str(shares).lower() for shares in (manifest.share_prefix, config.mode.packing.share_prefix)
    )
    if before == now:
        return []
    return [
        f"packing.share_prefix: {before} in the packs, {now} in the recipe; pack again with "
        f"packing.share_prefix={now}, or train with {before}"
    ]


def check_index(manifest: Manifest, folder: Path, identity: Identity, key: str) -> None:
    """Refuses packs whose samples are not those of the shards.

    Raises:
        PacksError: with every difference.
    """
    now = index_identity(identity, key)
    _refuse(folder, flat_differences(dict(manifest.data), now, was="in the packs"))


def encoder_differences(manifest: Manifest, encoder: Encoder) -> list[str]:
    """One line for each part of the processor that differs."""
    now = encoder.fingerprint_parts
    before = manifest.encoder
    return [
        f"{what}: {before.get(part, default)} in the packs, {now.get(part, default)} now"
        for part, what in _PARTS.items()
        for default in [_WITHOUT.get(part, "not set")]
        if before.get(part) != now.get(part)
    ]


def note_makers(manifest: Manifest, encoder: Encoder) -> None:
    """Say where another version of transformers than this one made the packs."""
    before, now = (said["made_with"] for said in (manifest.encoder, encoder.fingerprint_parts))
    if before != now:
        logger.warning(
            "note: packing.path: the packs were made with %s; it is %s now, whose pixels or tokens "
            "may differ",
            before,
            now,
        )


def _budget_settings(manifest: Manifest, config: DataConfig) -> Iterator[Setting]:
    """Lengths and bounds that the recipe may have otherwise."""
    yield "training.seq_length", manifest.seq_length, config.training.seq_length
    scopes = ("stream", "batch")
    now_in_sets = config.mode.packing.packs_by_batch
    yield "packing.scope", scopes[manifest.packs_by_batch], scopes[now_in_sets]
    for key, before in manifest.budget.knobs.items():
        now = getattr(config.mode.packing, key.removeprefix("packing."))
        # Left open, a knob is as the packs have it; but no bound on patches is a choice.
        if now not in (None, "auto") or key == "packing.max_vision_patches":
            yield key, before, now
    if manifest.planner == "stream" and config.data.shuffle != "auto":
        yield "data.shuffle", manifest.shuffle, config.data.shuffle


def _source_settings(manifest: Manifest, config: DataConfig) -> Iterator[Setting]:
    """Settings of the sources that packs depend on. Paths may change."""
    yield "data.over_long", manifest.data["data.over_long"], config.data.over_long
    yield "data.epoch_size", manifest.data["data.epoch_size"], config.epoch_size
    name = share_name(config.key)
    yield "data.validation", manifest.data.get(name), config.share
    yield "data.group_by", manifest.data.get("data.group_by", "none"), config.group_by
    yield f"sources of {config.key}", len(manifest.sources), len(config.sources)
    yield "data.weights", manifest.weights, config.weights
    if len(manifest.sources) == len(config.sources):
        for (_, weight), source in zip(manifest.sources, config.sources, strict=True):
            yield f"{config.key}.{source.name}.weight", weight, source.weight


def flat_differences(
    before: Mapping[str, Any], now: Mapping[str, Any], *, was: str = "started with"
) -> list[str]:
    """One readable line for each value of nested mappings that differs."""
    lines = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += [f"{name}.{line}" for line in flat_differences(old, new, was=was)]
        elif old != new and was == "started with":
            lines.append(f"{name}: {was} {shown(old)}, now {shown(new)}")
        elif old != new:
            lines.append(f"{name}: {shown(old)} {was}, {shown(new)} now")
    return lines


def shown(value: object) -> str:
    """A value in a message."""
    if value is None:
        return "missing"
    return repr(value) if isinstance(value, str) and "," in value else str(value)


def _refuse(folder: Path, lines: list[str]) -> None:
    if lines:
        raise PacksError(
            f"packing.path: the packs in {folder} were made from something else ({MANIFEST}):\n"
            f"{indented(lines)}\nRestore these, or pack again."
        )


SAMPLES = "samples.parquet"
_NUMBERS = ("offsets", "lengths", "crc32s", *COUNTS)
_PREFIXES = ("prefix_lengths", "prefix_digests")
_FACTS = b"vlmpack.split"


def save_samples(fitted: Fitted) -> bytes:
    """The file's content: a row a sample, in index order."""
    table, count = fitted.table, fitted.table.num_samples
    dropped = {item.number: item.reason for item in fitted.dropped}
    faults = [table.faults.get(number, (None, None)) for number in range(count)]
    columns: dict[str, Any] = {
        "key": pa.array(table.keys[:], pa.string()),
        **{name: getattr(table, name)[:] for name in _NUMBERS},
        **({} if table.num_chosen_tokens is None else {CHOSEN: table.num_chosen_tokens[:]}),
        **_prefix_columns(table.prefixes),
        "eligible": fitted.eligible,
        "error_class": pa.array([name for name, _ in faults], pa.string()),
        "reason": pa.array([reason for _, reason in faults], pa.string()),
        "dropped": pa.array([dropped.get(number) for number in range(count)], pa.string()),
        "sizes": pa.array(
            [table.shrunk.get(number) for number in range(count)], pa.list_(pa.list_(pa.int32()))
        ),
    }
    facts = {
        "shards": [[stamp.path, stamp.size, stamp.version, stamp.pin] for stamp in table.shards],
        "shard_starts": table.shard_starts.tolist(),
        "source_starts": table.source_starts.tolist(),
    }
    written = pa.table(columns).replace_schema_metadata({_FACTS: json.dumps(facts).encode()})
    sink = io.BytesIO()
    pq.write_table(written, sink, compression="zstd")
    return sink.getvalue()


@dataclass(frozen=True, slots=True)
class SavedKeys:
    """Keys of samples, in a pyarrow array. See Keys."""

    column: Any

    def __getitem__(self, rows: slice, /) -> list[str]:
        found: list[str] = self.column[rows].to_pylist()
        return found

    def find(self, text: str) -> list[int]:
        """See Keys."""
        found: list[int] = pc.indices_nonzero(pc.equal(self.column, text)).to_pylist()
        return found


def load_samples(path: Path, data: bytes) -> Fitted:
    """The samples that `save_samples` wrote.

    Raises:
        PacksError: not such a file.
    """
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read()
        return _fitted(table, json.loads(table.schema.metadata[_FACTS]))
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError) as error:
        raise PacksError(f"packing.path: {path} cannot be read: {error!r}") from error


def _fitted(found: Any, facts: dict[str, Any]) -> Fitted:
    classes, reasons = found.column("error_class").to_pylist(), found.column("reason").to_pylist()
    faults = {
        number: (name, reason)
        for number, (name, reason) in enumerate(zip(classes, reasons, strict=True))
        if name is not None
    }
    bad = np.zeros(found.num_rows, dtype=np.bool_)
    bad[list(faults)] = True
    sizes = enumerate(found.column("sizes").to_pylist())
    columns: dict[str, Any] = {name: int64s(found, name) for name in _NUMBERS}
    table = SampleTable(
        shards=tuple(ShardStamp(*shard) for shard in facts["shards"]),
        shard_starts=np.asarray(facts["shard_starts"], dtype=np.int64),
        source_starts=np.asarray(facts["source_starts"], dtype=np.int64),
        **columns,
        num_chosen_tokens=int64s(found, CHOSEN) if CHOSEN in found.column_names else None,
        prefixes=_prefixes(found),
        bad=bad,
        keys=SavedKeys(found.column("key")),
        faults=faults,
        shrunk={n: tuple((w, h) for w, h in each) for n, each in sizes if each is not None},
        unknown_keys={},  # named when the packs were made
    )
    dropped = enumerate(found.column("dropped").to_pylist())
    return Fitted(
        table,
        np.asarray(found.column("eligible").to_numpy(zero_copy_only=False), dtype=np.bool_),
        tuple(Dropped(number, reason) for number, reason in dropped if reason is not None),
    )


def _prefix_columns(prefixes: SamplePrefixes | None) -> dict[str, Any]:
    """Prefixes of the samples, as many places each; nothing where nobody asks."""
    if prefixes is None:
        return {}
    kind = pa.list_(pa.int64(), prefixes.lengths.shape[1])
    columns = (prefixes.lengths.tolist(), prefixes.digests.tolist())
    return {name: pa.array(column, kind) for name, column in zip(_PREFIXES, columns, strict=True)}


def _prefixes(table: Any) -> SamplePrefixes | None:
    if _PREFIXES[0] not in table.column_names:
        return None
    most = table.schema.field(_PREFIXES[0]).type.list_size
    columns = (table.column(name).to_pylist() for name in _PREFIXES)
    return SamplePrefixes(*(np.asarray(each, np.int64).reshape(-1, most) for each in columns))
