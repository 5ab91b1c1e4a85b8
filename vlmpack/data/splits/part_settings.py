"""From a DataConfig to what makes the parts of its shards, and where they lie."""

from __future__ import annotations

from pathlib import Path

from vlmpack.data.config import DataConfig
from vlmpack.data.index.lengths import LengthsBuilder, ShardBuilder
from vlmpack.data.index.parts import BuildSettings, Progress
from vlmpack.data.index.shard_index import IndexBuilder
from vlmpack.encode import Encoder
from vlmpack.storage.access import default_cache_dir
from vlmpack.storage.fetch import Fetcher


def make_builder(config: DataConfig, encoder: Encoder, fetcher: Fetcher) -> ShardBuilder:
    """What indexes and measures the split's shards."""
    index = IndexBuilder(fetcher, config.caps, encoder.each_answer)
    return ShardBuilder.of(LengthsBuilder(index, index_folder(config), encoder))


def index_folder(config: DataConfig) -> Path:
    """Where the split's parts lie."""
    folder = config.data.index_dir
    return default_cache_dir() if folder is None else Path(folder)


def build_settings(config: DataConfig, progress: Progress | None) -> BuildSettings:
    """How the split's parts are made."""
    return BuildSettings(
        directory=index_folder(config),
        preload=config.workers.preload,
        progress=progress,
    )
