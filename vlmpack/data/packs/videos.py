"""Saved packs hold still images only. Videos are refused before any work."""

from __future__ import annotations

from vlmpack.data.index.overlong import Fitted
from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.index.shard_index import IndexBuilder
from vlmpack.data.index.videos import first_video
from vlmpack.errors import DataError, schema_error


def no_videos() -> DataError:
    """Why a sample with a video is not saved."""
    return schema_error(
        "the sample has a video, and packs of kinds tokens and shards keep still images alone yet: "
        "vlmpack pack --kind plan takes videos, and so do packing.mode online and in_batch; or "
        "leave such samples out (data.on_error.schema: skip)"
    )


def refuse_videos(fitted: Fitted, index: IndexBuilder, settings: BuildSettings) -> None:
    """Raise at the first video before anything is encoded. Reads texts of samples with images, no
    image.

    Raises:
        DataError: (schema) the first sample with a video; as `first_video`.
    """
    found = first_video(fitted, index, settings)
    if found is not None:
        raise found.located(no_videos())
