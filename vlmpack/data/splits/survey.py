"""What a split consists of before anything is indexed: its shards, its shuffle, and the makers of
their parts.

One rank makes the survey and sends it to the others, so a store is listed once and all ranks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmpack.addresses import is_remote, record_kind
from vlmpack.data.config import DataConfig
from vlmpack.data.files.form import FormOptions
from vlmpack.data.files.source_form import find_forms
from vlmpack.data.index.lengths import LengthsBuilder, ShardBuilder
from vlmpack.data.index.parts import BuildSettings, Progress, part_for
from vlmpack.data.index.shard_index import IndexBuilder
from vlmpack.data.plan.batches import Shuffle
from vlmpack.data.plan.state import DataState
from vlmpack.encode import Encoder
from vlmpack.storage.access import default_cache_dir
from vlmpack.storage.fetch import Fetcher, ShardStamp
from vlmpack.storage.sources import stamped_shards


def make_builder(config: DataConfig, encoder: Encoder, fetcher: Fetcher) -> ShardBuilder:
    """The builder that indexes and measures the split's shards."""
    processes = config.data.cores if config.data.workers else 1  # 0: no process is to be started
    index = IndexBuilder(fetcher, config.caps, encoder.each_answer, processes)
    return ShardBuilder.of(LengthsBuilder(index, index_folder(config), encoder))


def index_folder(config: DataConfig) -> Path:
    """Where the split's parts lie."""
    folder = config.data.index_dir
    return default_cache_dir() if folder is None else Path(folder)


def build_settings(config: DataConfig, progress: Progress | None) -> BuildSettings:
    """How the split's parts are made."""
    return BuildSettings(
        directory=index_folder(config),
        max_processes=config.data.cores,
        preload=config.workers.preload,
        progress=progress,
    )


INDEX_FIRST_BYTES = 32 << 30
"""Under `data.shuffle: auto`, the most local bytes that are indexed before the first batch. Above
it the shuffle is by window."""

BY_GROUPS = ("parquet", "arrow")
"""Files that are decoded by groups of rows. Under `window` samples come from few of them."""


@dataclass(frozen=True, slots=True)
class Survey:
    """One split's shards by source and in order, and its shuffle, which is never `auto`."""

    sources: tuple[tuple[ShardStamp, ...], ...]
    shuffle: Shuffle


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLaunch:
    """What a launch knows of a split before it is opened.

    Args:
        survey: its shards, where another rank has listed them.
        resume: where the run goes on. It decides `shuffle: auto`, and its window is indexed first.
        rank, world_size: which part of the indexing this process begins with.
    """

    survey: Survey | None = None
    resume: DataState | None = None
    rank: int = 0
    world_size: int = 1


def survey_split(
    config: DataConfig, encoder: Encoder, fetcher: Fetcher, resume: DataState | None = None
) -> Survey:
    """List the shards of a split and decide its shuffle, which all later code takes from the
    survey. Evaluation reads in order.

    Raises:
        RecipeError: a pattern that matches nothing.
        DataError: a shard that is out of reach.
    """
    sources = list_shards(config, fetcher)
    shuffle = config.data.shuffle if config.key == "data.train" else "none"
    if shuffle == "auto" and config.objective.learns_rollouts:
        shuffle = "global"  # the rewards of all samples are read before the first step
    if shuffle == "auto":
        stamps = [stamp for shards in sources for stamp in shards]
        shuffle = _recorded_shuffle(resume) or resolve_shuffle(
            stamps,
            rule=make_builder(config, encoder, fetcher).rule,
            directory=index_folder(config),
            max_bytes=INDEX_FIRST_BYTES,
        )
    return Survey(sources, shuffle)


def list_shards(config: DataConfig, fetcher: Fetcher) -> tuple[tuple[ShardStamp, ...], ...]:
    """The shards of each source of a split, in order.

    Raises:
        RecipeError, DataError: as survey_split.
    """
    sources = []
    for source in config.sources:
        key = config.key if len(config.sources) == 1 else f"{config.key}.{source.name}"
        stamps = stamped_shards([source.path], key=key, fetcher=fetcher)
        options = FormOptions.of(config.data, source, key)
        sources.append(find_forms(stamps, options, fetcher, config.caps))
    return tuple(sources)


def _recorded_shuffle(resume: DataState | None) -> Shuffle | None:
    match recorded := None if resume is None else resume.identity.get("data.shuffle"):
        case "global" | "window":
            return recorded
    return None


def resolve_shuffle(
    stamps: Sequence[ShardStamp], *, rule: str, directory: Path, max_bytes: int
) -> Shuffle:
    """What `auto` means for a new run: `window` where indexing first would take long. That is where
    a shard is remote, a file is read by groups of rows, or local shards without an index part hold
    more than `max_bytes`."""
    if any(is_remote(stamp.path) or record_kind(stamp.path) in BY_GROUPS for stamp in stamps):
        return "window"
    new = [s.size for s in stamps if not Path(part_for(directory, s, rule).path).exists()]
    return "window" if sum(new) > max_bytes else "global"
