"""A folder of packs, checked against the recipe and opened as a split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vlmpack.data.config import DataConfig
from vlmpack.data.index.lengths import ShardBuilder
from vlmpack.data.index.overlong import Fitted
from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.packs.compare import check_index, check_packs, note_makers
from vlmpack.data.packs.manifest import (
    ARRAYS,
    MANIFEST,
    Manifest,
    digest,
    load_arrays,
    read_manifest,
)
from vlmpack.data.packs.parts import tar_name
from vlmpack.data.packs.samples import SAMPLES, load_samples
from vlmpack.data.packs.split import PackedSplit
from vlmpack.data.packs.write import HOLES
from vlmpack.data.plan.batches import PlanSource
from vlmpack.data.plan.packers import BudgetPacker
from vlmpack.data.plan.packs import PACK_RULE, PackArrays, PackPlan
from vlmpack.data.plan.state import DataState, Identity
from vlmpack.data.splits.checks import dropped_samples
from vlmpack.data.splits.indexed import prepare_split
from vlmpack.data.splits.split import OnDropped
from vlmpack.data.splits.summary import short_digest
from vlmpack.data.splits.survey import Survey, list_shards, survey_split
from vlmpack.encode import Encoder
from vlmpack.errors import UNREADABLE, PacksError
from vlmpack.storage.fetch import Fetcher, ShardStamp
from vlmpack.whole_file import parse_small_json, regular_bytes
from vlmpack.words import indented


def survey_data(
    config: DataConfig, encoder: Encoder, fetcher: Fetcher, resume: DataState | None = None
) -> Survey:
    """The shards of a split in any mode. Packs of kind `shards` need none of them.

    Raises:
        RecipeError, DataError: as survey_split.
        PacksError: there are no finished packs.
    """
    if not config.mode.facts.reads_packs:
        return survey_split(config, encoder, fetcher, resume)
    if read_manifest(_folder(config)).kind == "shards":
        return Survey((), "none")
    return Survey(list_shards(config, fetcher), "global")


def _folder(config: DataConfig) -> Path:
    path = config.mode.packing.path
    assert path is not None  # the recipe's rules see to it
    return Path(path)


def open_packed(
    config: DataConfig,
    survey: Survey,
    builder: ShardBuilder,
    settings: BuildSettings,
    on_dropped: OnDropped,
) -> PackedSplit:
    """Opens saved packs.

    Raises:
        PacksError: they are unfinished or damaged, or do not fit the recipe or its shards.
        DataError, EmptyDataError: as prepare_split, for kinds that need the original shards.
    """
    folder = _folder(config)
    manifest = read_manifest(folder)
    check_packs(manifest, folder, config, builder.lengths.encoder)
    note_makers(manifest, builder.lengths.encoder)
    tars, small = check_files(manifest, folder)
    arrays, spans = load_arrays(folder / ARRAYS, small[ARRAYS])
    if arrays.fingerprint != manifest.plan:
        raise _not_as_written(folder, [f"{ARRAYS}: other packs than fingerprints.plan says"])
    if manifest.in_sets:
        _check_sets(manifest, folder, arrays)
    if manifest.kind == "shards":
        fitted = load_samples(folder / SAMPLES, small[SAMPLES])
    else:
        prepared = prepare_split(config, survey, builder, settings)
        check_index(manifest, folder, prepared.identity, config.key)
        fitted = prepared.fitted
    on_dropped(dropped_samples(fitted))
    plan = PackPlan(
        arrays,
        sources=_sources(config, fitted, arrays),
        seed=config.training.seed,
        packer=BudgetPacker(
            budget=manifest.budget,
            global_batch_size=config.training.global_batch_size,
            scope="batch" if manifest.in_sets else "stream",
            sizes=fitted.table.sizes,
            fullest=int(arrays.sizes.max(initial=0)),
        ),
        keeps_order=(manifest.planner == "stream" or manifest.in_sets)
        and (manifest.seed, manifest.global_batch_size)
        == (config.training.seed, config.training.global_batch_size),
    )
    return PackedSplit(
        config=config,
        manifest=manifest,
        fitted=fitted,
        identity=_identity(config, manifest),
        plan=plan,
        spans=spans,
        files=tars,
        holes=_read_holes(folder, small[HOLES]) if manifest.kind != "plan" else {},
    )


def _check_sets(manifest: Manifest, folder: Path, arrays: PackArrays) -> None:
    """Refuses packs that do not stay inside their sets, each of which is an optimizer step.

    Raises:
        PacksError: a set of more samples than it is said to have.
    """
    sizes, most = arrays.set_sizes, manifest.global_batch_size
    if not sizes.size or int(sizes.max()) > most:
        place = int(sizes.argmax()) if sizes.size else 0
        found = f"set {place} has {int(sizes[place])} samples" if sizes.size else "no set"
        raise _not_as_written(folder, [f"{ARRAYS}: {found}, global_batch_size is {most}"])


_SETTLED = ("packing.alignment", "packing.max_sequences")
"""What a plan of packs has of their budget beside the packs themselves."""


def _identity(config: DataConfig, manifest: Manifest) -> Identity:
    """What decides the order. The samples are those of the packs: that was compared."""
    return {
        "plan": PACK_RULE,
        "data.seed": config.training.seed,
        "data.shuffle": manifest.shuffle,
        "packing.mode": config.mode.name,
        "packing.packs": manifest.plan,
        **({"packing.scope": "batch"} if manifest.in_sets else {}),
        **({"packing.share_prefix": True} if manifest.shares else {}),
        **{name: manifest.budget.knobs[name] for name in _SETTLED},
        "training.seq_length": config.training.seq_length,
        "training.global_batch_size": config.training.global_batch_size,
        "encoder": short_digest(repr(sorted(manifest.encoder.items()))),
        **manifest.data,
    }


def _sources(config: DataConfig, fitted: Fitted, arrays: PackArrays) -> list[PlanSource]:
    """The split's sources with the draws that the packs hold of each."""
    starts = fitted.table.source_starts
    owner = np.searchsorted(starts[1:], arrays.numbers, side="right")
    draws = np.bincount(owner, minlength=len(starts) - 1)
    return [
        PlanSource(
            source.name,
            np.flatnonzero(fitted.eligible[starts[d] : starts[d + 1]]).astype(np.int64) + starts[d],
            int(draws[d]),
        )
        for d, source in enumerate(config.sources)
    ]


def check_files(
    manifest: Manifest, folder: Path
) -> tuple[tuple[ShardStamp, ...], dict[str, bytes]]:
    """The folder's tars, whose bytes are checked when they are read, pack by pack; and the content
    of its small files.

    Raises:
        PacksError: a file is missing or has another size, or a small one other content.
    """
    faults, tars, small = [], {}, {}
    names = {ARRAYS, *([] if manifest.kind == "plan" else [HOLES])}
    names |= {SAMPLES} if manifest.kind == "shards" else set()
    faults += [f"{name}: not listed" for name in sorted(names - manifest.files.keys())]
    for name, expected in sorted(manifest.files.items()):
        path = folder / name
        if not path.is_file():
            faults.append(f"{name}: missing")
        elif isinstance(expected, int):
            found = path.stat().st_size
            if found != expected:
                faults.append(f"{name}: {found} bytes, {expected} were written")
            tars[name] = ShardStamp(str(path), expected, "")
        else:
            small[name] = regular_bytes(path)
            if digest(small[name]) != expected:
                faults.append(f"{name}: not what was written")
    if faults:
        raise _not_as_written(folder, faults)
    return tuple(tars[tar_name(number)] for number in range(len(tars))), small


def _not_as_written(folder: Path, faults: Sequence[str]) -> PacksError:
    return PacksError(
        f"packing.path: {folder} is not as {MANIFEST} describes it:\n{indented(faults)}\n"
        "Copy it again, or pack again."
    )


def _read_holes(folder: Path, data: bytes) -> dict[int, tuple[str, str]]:
    try:
        found = parse_small_json(data).items()
        return {int(number): (name, reason) for number, (name, reason) in found}
    except UNREADABLE as error:
        raise _not_as_written(folder, [f"{HOLES}: {error}"]) from error
