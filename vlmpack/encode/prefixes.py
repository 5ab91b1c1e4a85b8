"""The prefixes of a sample that a row may hold once for several samples.

    <user> [image] What is it? <assistant> A cat.
    = = = = = = = |                                  1: ends behind the last image token
    = = = = = = = = = = = = = = = = = = = |          2: ends with the common turns of several
                                                     3: ends where the next answer's sample goes on

Prefixes follow from how a conversation is built, and no two samples are compared. A prefix has all
of the sample's images and no label. The token that predicts an answer's first token is not in it,
so the second prefix ends one token before the common turns do. The third is the second prefix of
the sample that continues, since both see the same question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import takewhile

import numpy as np

from vlmpack.encode.assemble import Tokens
from vlmpack.encode.sample import VLMSample, said
from vlmpack.errors import DataError
from vlmpack.families.base import ImageLayout
from vlmpack.packing.batch import Prefix

DIGEST_BYTES = 8
"""A prefix's digest has so many bytes; rows compare what they share besides, tokens and pixels."""


def image_digest(data: bytes) -> bytes:
    """The digest of an image file that prefixes are made of."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def probe_sample(sample: VLMSample) -> VLMSample | None:
    """Another sample with the turns that all samples of a record have in common, to find where
    these end.

    None for a record's only sample, and where an image comes after these turns, since a prefix has
    all images.
    """
    if not sample.num_common or sample.messages[sample.num_common].role == "tool":
        return None
    common, first = sample.messages[: sample.num_common], sample.messages[sample.num_common]
    # If both began alike, the common prefix would be longer than what the turns have in common.
    word = "!" if first.text.lstrip().startswith(".") else "."
    question = [said("user", word)] if first.role == "user" else []
    other = replace(sample, messages=(*common, *question, said("assistant", word)))
    return other if other.num_images == sample.num_images else None


def with_probe(
    sample: VLMSample, tokens: Sequence[Tokens], encode: Callable[[VLMSample], list[Tokens]]
) -> list[Tokens]:
    """The sequences of a sample, and of its probe sample where it has one that can be encoded."""
    other = probe_sample(sample)
    try:
        return [*tokens, *([] if other is None else encode(other))]
    except DataError:  # the template wants another answer there
        return [*tokens]


def prefixes_of(
    sequences: Sequence[Tokens],
    layouts: Sequence[ImageLayout],
    images: Sequence[bytes],
    sizes: Sequence[tuple[int, int]],
    is_continued: bool = False,
) -> tuple[Prefix, ...]:
    """The prefixes of a sample's sequences, at most three, the shortest first.

    They do not depend on pixels, so lengths and samples have the same prefixes.

    Args:
        sequences: one for a sample, several for a pair or for a record with several answers.
        images: `image_digest` of their files.
        sizes: (width, height) in pixels that each is encoded from.
        is_continued: whether another sample of the record continues after the first one's question.
    """
    first = sequences[0]
    least = min(_first_label(each) for each in sequences)
    places = [place for place, token in enumerate(first.ids) if first.is_placeholder(token)]
    behind_images = places[-1] + 1 if places else 0
    lengths = {behind_images} if layouts else set()
    if len(sequences) > 1:
        lengths.add(min(_common(sequences), least))
    lengths = {length for length in lengths if length <= least}
    if is_continued:
        lengths.add(_first_label(first))
    grown = sum(sum(layout.runs) - len(layout.runs) for layout in layouts)
    shown = [b"%d %d %s" % (*size, digest) for size, digest in zip(sizes, images, strict=True)]
    head = blake2b(b"|".join(shown), digest_size=32).digest()
    return tuple(
        Prefix(length + grown, _digest(head, first.ids[:length]))
        for length in sorted(lengths)
        if length and length >= behind_images
    )


def _first_label(tokens: Tokens) -> int:
    """The first position that has a target behind it, or the last one."""
    targets = tokens.supervised[1:]
    return sum(1 for _ in takewhile(lambda target: not target, targets))


def _common(sequences: Sequence[Tokens]) -> int:
    """Tokens that all sequences begin with."""
    together = zip(*(each.ids for each in sequences), strict=False)
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, together))


def _digest(head: bytes, ids: Sequence[int]) -> bytes:
    whole = head + np.asarray(ids, dtype=np.int64).tobytes()
    return blake2b(whole, digest_size=DIGEST_BYTES).digest()
