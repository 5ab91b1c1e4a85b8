"""Saved packs hold still images only. Videos are refused before any work.

The index does not tell frames from images, so the texts of samples with images are read.
"""

from __future__ import annotations

import numpy as np

from vlmpack.data.index.lengths import read_documents, text_of
from vlmpack.data.index.overlong import Fitted
from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.index.shard_index import IndexBuilder, open_index
from vlmpack.data.index.table import SampleRef
from vlmpack.encode.sample import shows_video
from vlmpack.errors import DataError, schema_error

_SIGN = b'"frames"'
"""Stands in the JSON of every record with a video."""


def first_video(fitted: Fitted, index: IndexBuilder, settings: BuildSettings) -> SampleRef | None:
    """The first usable sample with a video. Reads the texts of all samples with images, but no
    image.

    Raises:
        DataError: as `read_documents`.
    """
    table = fitted.table
    wanted = fitted.eligible & ~table.bad & (table.num_image_tokens > 0)
    for place, stamp in enumerate(table.shards):
        first, stop = table.shard_starts[place : place + 2]
        rows = np.flatnonzero(wanted[first:stop])
        if not rows.size:
            continue
        [shard] = open_index([stamp], index, settings)
        listed = shard.table.take(rows).to_pylist()
        documents = read_documents(index, stamp, listed)
        for number, row, document in zip(rows + first, listed, documents, strict=True):
            if isinstance(document, DataError) or _SIGN not in document:
                continue
            if shows_video(text_of(index, stamp, row, document).sample.shown):
                return table.ref(int(number))
    return None


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
