"""When the frames of a video were taken, as records say it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clip:
    """When the frames of a video were taken.

    Args:
        times: of each frame, in seconds.
        fps: frames a second, where the data gives a rate.
    """

    times: tuple[float, ...]
    fps: float | None = None
