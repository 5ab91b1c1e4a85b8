"""Whether predicted lengths are those of encoding: a launch encodes a few samples and compares."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from vlmpack.data.config import DataConfig
from vlmpack.data.index.overlong import Fitted
from vlmpack.data.index.table import SampleRef
from vlmpack.data.loading.read import SampleReader
from vlmpack.encode import Encoder
from vlmpack.errors import DataError

PROBE_SECONDS = 3.0
MIN_PROBED = 16


def probed_samples(fitted: Fitted, count: int) -> list[SampleRef]:
    """A few good samples, spread over the split, and some of those that the plan shrank."""
    usable = np.flatnonzero(fitted.eligible & ~fitted.table.bad)
    places = np.linspace(0, usable.size - 1, num=min(count, usable.size)).astype(np.int64)
    spread = usable[places].tolist()
    return [fitted.table.ref(n) for n in sorted({*spread, *list(fitted.table.shrunk)[:count]})]


def probe_lengths(
    config: DataConfig, refs: Sequence[SampleRef], reader: SampleReader, encoder: Encoder
) -> int:
    """Encodes some samples and compares with the predicted lengths.

    It ends after PROBE_SECONDS, having compared at least MIN_PROBED: large images take long, and
    the loader compares every sample again when it is used.

    Args:
        refs: spread over the split.

    Returns:
        How many were compared (bad ones that the policy skips do not count).

    Raises:
        DataError: the first sample whose encoded length is not the predicted one; or one that is
            bad, where its class is not skipped.
    """
    compared, deadline = 0, time.monotonic() + PROBE_SECONDS
    stride = -(-len(refs) // MIN_PROBED) or 1
    for ref in (ref for start in range(stride) for ref in refs[start::stride]):
        if compared >= MIN_PROBED and time.monotonic() > deadline:
            break
        try:
            encoded = encoder.encode(reader.read(ref), ref.sizes)
        except DataError as error:
            if config.data.on_error.skips(error.error_class):
                continue
            raise error.located(key=ref.key, shard=ref.shard, offset=ref.offset) from None
        compared += 1
        if encoded.length != ref.num_tokens:
            raise DataError(
                f"the length probe predicted {ref.num_tokens} tokens, encoding gave "
                f"{encoded.length}; the model family's length rule does not fit this processor",
                error_class="integrity",
                key=ref.key,
                shard=ref.shard,
                offset=ref.offset,
            )
    return compared
