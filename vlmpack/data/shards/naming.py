"""WebDataset's naming rule, which names are refused, and how much a sample may hold.

The key of a member is its path up to the first dot of its base name, the field is the rest in lower
case: `a/007.Left.JPG` -> key `a/007`, field `left.jpg`. So `v1.5_img.jpg` has the key `v1`, which
is rarely what was meant; the messages of the schemas say so.

Names and caps hold before anything is decoded or kept in memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vlmpack.addresses import IMAGE_SUFFIXES
from vlmpack.encode.sample import Shown, VideoPart, num_files
from vlmpack.errors import schema_error
from vlmpack.limits import (
    MAX_FRAMES,
    MAX_IMAGE_PIXELS,
    MAX_IMAGES,
    MAX_JSON_BYTES,
    MAX_MEMBER_BYTES,
    MAX_MEMBERS,
    MAX_SAMPLE_BYTES,
)

_META = re.compile(r"__[^/]*__($|/)")

_PICKLES = frozenset({"pyd", "pkl", "pickle", "pck", "joblib", "dill", "pth", "pt", "ckpt", "npz"})
_OFTEN_BESIDE = frozenset({"gif", "bmp", "tif", "tiff"})
JSON_FIELD = "json"


class MemberName(NamedTuple):
    """A member's place in the data set."""

    key: str
    field: str


def split_name(name: str) -> MemberName | None:
    """Key and field, or None for names that webdataset passes over: names without a dot, names that
    begin with one (`.DS_Store`, `._1.jpg`), and its own `__meta__` members."""
    if name.startswith("__") and _META.match(name):
        return None
    dot = name.find(".", name.rfind("/") + 1)
    if dot < 1 or name[dot - 1] == "/":
        return None
    return MemberName(name[:dot], name[dot + 1 :].lower())


def is_image(field: str) -> bool:
    """Whether a field holds an image, by its last suffix."""
    return field.rpartition(".")[2] in IMAGE_SUFFIXES


def may_stand_aside(field: str) -> bool:
    """Whether an image that no turn shows may serve another purpose, as previews and masks do."""
    return field.rpartition(".")[2] in _OFTEN_BESIDE


def refusal(field: str, data: bytes) -> str | None:
    """Why a member is refused unread: pickles run code when they are opened.

    Nothing here unpickles. Shards with pickles are refused so that no later tool opens them
    unnoticed.
    """
    suffix = field.rpartition(".")[2]
    if suffix in _PICKLES:
        return f"a '.{suffix}' member may hold a pickle, which runs code when it is opened"
    if suffix == "npy" and b"|O" in data[:256]:
        return "the '.npy' member holds Python objects (a pickle)"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCaps:
    """Limits of one sample. A sample above them is an error, never a crash."""

    max_member_bytes: int = MAX_MEMBER_BYTES
    """One file of a sample, in bytes."""
    max_image_pixels: int = MAX_IMAGE_PIXELS
    """Width times height of one image, from its header."""
    max_images: int = MAX_IMAGES
    """Images of one sample, frames of videos not counted."""
    max_frames: int = MAX_FRAMES
    """Frames of the videos of one sample."""
    max_json_bytes: int = MAX_JSON_BYTES
    """The conversation; parsed, it takes up to 27 times the memory."""
    max_members: int = MAX_MEMBERS
    """Files of one sample."""
    max_sample_bytes: int = MAX_SAMPLE_BYTES
    """All of them, headers included."""

    def check_images(self, shown: Sequence[Shown]) -> None:
        """Raise DataError (schema) for a sample with too many images or frames."""
        frames = num_files([part for part in shown if isinstance(part, VideoPart)])
        stills = num_files(shown) - frames
        for count, what, most in (
            (stills, "images", self.max_images),
            (frames, "frames of videos", self.max_frames),
        ):
            if count > most:
                raise schema_error(f"{count} {what}; at most {most} are allowed")
