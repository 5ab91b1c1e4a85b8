"""Limits that hold before anything is decoded or kept in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCaps:
    """What one sample may cost at most; above it the sample is an error, never a crash."""

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
        """Raise DataError (schema) for a sample with too many images or frames.

        Args:
            shown: by its messages.
        """
        frames = num_files([part for part in shown if isinstance(part, VideoPart)])
        stills = num_files(shown) - frames
        for count, what, most in (
            (stills, "images", self.max_images),
            (frames, "frames of videos", self.max_frames),
        ):
            if count > most:
                raise schema_error(f"{count} {what}; at most {most} are allowed")
