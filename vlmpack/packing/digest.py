"""A digest of a micro-batch's row as all processes of a replica have it: of no pixels."""

from __future__ import annotations

import hashlib

from vlmpack.packing.batch import Batch

_TENSORS = (
    "input_ids",
    "labels",
    "position_ids",
    "cu_seqlens",
    "cu_seqlens_padded",
    "media_positions",
    "media_sources",
    "label_sequences",
)


def digest_of(batch: Batch) -> bytes:
    """The same where rows of tokens, labels, positions, boundaries and the images' grids and owners
    are the same.

    Args:
        batch: on CPU.
    """
    found = hashlib.blake2b(digest_size=8)
    for name in _TENSORS:
        tensor = getattr(batch, name, None)
        if tensor is not None:
            found.update(f"{name} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().numpy().tobytes())
    media = batch.media
    if media is not None:
        owners = None if media.owners is None else media.owners.ranks
        found.update(repr((media.grid_thw, media.num_tokens, owners)).encode())
    return found.digest()
