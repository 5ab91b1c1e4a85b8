"""Where a conversion reads and writes, and what it allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vlmpack.convert.frames import VideoSettings
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.encode import Encoder
from vlmpack.storage.access import default_cache_dir


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertSettings:
    """Where a conversion reads and writes."""

    folder: Path
    """Where the shards go."""
    image_root: Path
    """Every image path must end inside it."""
    layout: Mapping[str, str] | str | None = None
    """The layout of the records, by name or role by role; None: the one that fits."""
    ignored: tuple[str, ...] = ()
    """Columns that are left out."""
    prefix: str = "train"
    """Shards are named PREFIX-000000.tar and so on."""
    max_shard_bytes: int = 256 << 20
    """A shard is closed when it holds so much."""
    max_shard_samples: int = 100_000
    """Or so many samples."""
    skip_bad: bool = False
    """Leave bad records out instead of stopping at the first."""
    overwrite: bool = False
    """Replace shards of the same prefix."""
    index_dir: Path = field(default_factory=default_cache_dir)
    """Where the index goes."""
    caps: SampleCaps = field(default_factory=SampleCaps)
    """Limits of one sample."""
    encoder: Encoder | None = None
    """Measures each sample for a model: what training would refuse is a bad record."""
    videos: VideoSettings | None = None
    """Decode containers of videos to frames; None: records that name one are refused."""
