"""A digest of a micro-batch's row as all processes of a replica have it.

All fields of a row count, nested ones too, with their types, and so will fields that are added
later. Fields that differ by process are named here, each with its reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from vlmpack.packing.batch import Batch, ImageOwners, Media, PackedBatch

OWN: dict[type, dict[str, str]] = {
    PackedBatch: {
        "context": "the slice of one context-parallel rank",
        "media_part": "what one rank gets of the vision work",
    },
    Media: {
        "pixel_values": "of the images whose pixels this process makes",
        "tower": "made of the same images",
        "table": "there where these pixels are levels",
    },
    ImageOwners: {"rank": "this process itself"},
}
"""Fields of which each process has its own, with the reason."""


def digest_of(batch: Batch | tuple[tuple[str, Tensor], ...], seed: bytes = b"") -> bytes:
    """A digest that is equal for equal rows, apart from what differs by process (`OWN`).

    Args:
        batch: on CPU; or columns that are added to a batch, by name.
        seed: the digest of the batch that they are added to.

    Raises:
        TypeError: a field of a type that no digest is known of.
    """
    digest = hashlib.blake2b(seed, digest_size=8)
    for part in _bytes_of(batch, "batch"):
        digest.update(part)
    return digest.digest()


def _bytes_of(value: object, name: str) -> Iterator[bytes]:
    """A value, each part of which says its type and how long it is."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)};".encode()
        yield value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, tuple):
        yield f"{kind} {len(value)};".encode()
        for item in value:
            yield from _bytes_of(item, name)
    elif is_dataclass(value):
        yield f"{kind};".encode()
        own = _own(type(value))
        for field in fields(value):
            if field.name not in own:
                yield f"{field.name}=".encode()
                yield from _bytes_of(getattr(value, field.name), f"{name}.{field.name}")
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        text = repr(value).encode(errors="surrogatepass")
        yield f"{kind} {len(text)};".encode() + text
    else:
        raise TypeError(
            f"{name} is a {kind}. Expected a tensor, a tuple, a dataclass or a plain value. Say "
            "in vlmpack/packing/digest.py how it counts, or name it in OWN with a reason"
        )


def _own(kind: type) -> set[str]:
    """What of a type's fields each process has of its own."""
    return {name for each in kind.__mro__ for name in OWN.get(each, ())}
