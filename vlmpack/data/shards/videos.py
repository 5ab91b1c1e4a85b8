"""A video of a record: a list of frames, and when each was taken.

    {"type": "video", "frames": ["f0.jpg", "f1.jpg", "f2.jpg"], "fps": 2.0}
    {"type": "video", "frames": ["f0.jpg", "f1.jpg", "f2.jpg"], "times": [0.0, 0.5, 1.5]}

Frames are image files, named as images are. Nothing is decoded from a container in training, and
no frame is left out: what is stored is the sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from vlmpack.data.shards.keys import is_absent, refuse_unknown
from vlmpack.encode.sample import Message, VideoPart
from vlmpack.errors import schema_error
from vlmpack.limits import LONGEST_SECONDS
from vlmpack.words import counted, kind_of

VIDEO = "video"
VIDEO_KEYS = frozenset(("type", "frames", "fps", "times"))

CONTAINERS = (
    "this version trains on images, frames of videos and text: a video is its frames, "
    "{'type': 'video', 'frames': [...], 'fps': ...} in a list of parts, which vlmpack data convert "
    "--video makes of a container"
)


@dataclass(frozen=True, slots=True)
class FrameList:
    """What a part says of a video.

    Args:
        frames: what names each of its image files.
        times: of each, in seconds.
        fps: the rate, where the part has one.
    """

    frames: tuple[Any, ...]
    times: tuple[float, ...]
    fps: float | None

    def part(self, index: int) -> VideoPart:
        """Its place in a message; `index` is that of its first frame among the record's images."""
        return VideoPart(index, self.times, self.fps)


def frame_list(part: Mapping[str, Any], where: str) -> FrameList:
    """The frames of a part of type `video`.

    Args:
        part: with its keys.
        where: its place, for messages.

    Raises:
        DataError: (schema) no frames, or not a time for each.
    """
    if not is_absent(part.get(VIDEO)):
        raise schema_error(f"{where} names a video ({str(part[VIDEO])[:60]!r}); {CONTAINERS}")
    refuse_unknown(part, VIDEO_KEYS, where)
    frames = part.get("frames")
    if not isinstance(frames, list) or not frames:
        raise schema_error(f"{where}.frames is {kind_of(frames)}; expected a list of image files")
    given = [name for name in ("fps", "times") if part.get(name) not in (None, [])]
    if len(given) != 1:
        found = "both" if given else "neither"
        raise schema_error(
            f"{where} is a video with {found} of 'fps' and 'times'; expected one of them, the "
            "frames a second or the time of each frame in seconds: models are told when frames "
            "were taken"
        )
    if given == ["fps"]:
        fps = _number(part["fps"], f"{where}.fps")
        if fps <= 0:
            raise schema_error(f"{where}.fps is {part['fps']!r}; expected more than 0")
        times = tuple(n / fps for n in range(len(frames)))
        if not times[-1] <= LONGEST_SECONDS:
            raise schema_error(
                f"{where}.fps is {part['fps']!r}, so that its last frame is at {times[-1]:,.0f} "
                f"seconds; expected times up to {LONGEST_SECONDS:,.0f}"
            )
        return FrameList(tuple(frames), times, fps)
    return FrameList(tuple(frames), _times(part["times"], len(frames), f"{where}.times"), None)


def _times(values: object, count: int, where: str) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != count:
        found = counted(len(values), "number") if isinstance(values, list) else kind_of(values)
        raise schema_error(f"{where} is {found}; expected {count}, one for each frame")
    times = tuple(_number(value, f"{where}[{place}]") for place, value in enumerate(values))
    for place in range(1, count):
        if times[place] <= times[place - 1]:
            raise schema_error(
                f"{where}[{place}] is {times[place]!r}, after {times[place - 1]!r}; expected times "
                "that increase"
            )
    return times


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise schema_error(f"{where} is {kind_of(value)}; expected a number")
    if not isfinite(value) or not 0 <= value <= LONGEST_SECONDS:
        raise schema_error(f"{where} is {value!r}; expected 0 to {LONGEST_SECONDS:,.0f}")
    return float(value)


def refuse_beside_user(message: Message, where: str) -> None:
    """Raise DataError (schema) where another's turn than the user's shows a video."""
    if message.role != "user" and any(isinstance(part, VideoPart) for part in message.parts):
        raise schema_error(
            f"{where} is the {message.role}'s and shows a video; expected videos in a user's turn"
        )
