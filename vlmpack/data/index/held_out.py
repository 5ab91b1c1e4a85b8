"""Which samples of `data.train` are held back for validation, where the recipe asks for a share.

A record is held back by what it asks: its images, or without images its words up to the first
answer. So duplicates, the branches or answers of one record, and pairs of one prompt fall on one
side. No seed, epoch, rank, file or order matters. What 2% holds back, 5% does too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmpack.data.index.columns_file import runs
from vlmpack.encode.sample import VLMSample

OPENING = "opening"
"""Column of the index: a digest of what the record asks; null for a bad record."""

NEVER = 2**63 - 1
"""In place of a null: a bad record has no opening, and stays with the others."""

_RANGE = 2.0**63


def opening_digest(sample: VLMSample, images: Sequence[int]) -> int:
    """A digest of what a record asks, uniform over 63 bits.

    Args:
        sample: the record's first sample; its words count where the record shows no image.
    """
    digest = hashlib.blake2b(digest_size=8, person=b"vlmpack.held-out")
    for image in images:
        digest.update(image.to_bytes(8, "little", signed=True))
    if not images:
        roles = [message.role for message in sample.messages]
        first = roles.index("assistant") if "assistant" in roles[1:] else len(roles)
        for message in sample.messages[:first]:
            digest.update(f"{message.role}\0{message.text}\0".encode())
    return int.from_bytes(digest.digest(), "little") >> 1


def held_out(openings: Any, fraction: float) -> npt.NDArray[np.bool_]:
    """(N,) bool: the samples that validation holds back, on average `fraction` of them.

    Args:
        openings: (N,) int64, or a column of a table's file.
    """
    least = int(fraction * _RANGE)
    held = (openings[run] < least for run in runs(0, openings.shape[0]))
    return np.concatenate([np.zeros(0, np.bool_), *held])
