"""Containers of videos (mp4, webm, ...) -> frames as image files, by PyAV, before training.

A file is read twice: its packets say when each frame is shown, so those to keep are known before
any is decoded; then it is decoded up to the last of them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
from PIL import Image

from vlmpack.data.shards.naming import SampleCaps
from vlmpack.errors import CapabilityError, DataError, VlmpackError
from vlmpack.limits import LONGEST_SECONDS
from vlmpack.words import counted

CONTAINERS = {
    "mov": "MP4, MOV",
    "matroska": "WebM, Matroska",
    "avi": "AVI",
    "mpegts": "MPEG-TS",
    "mpeg": "MPEG",
    "flv": "FLV",
    "ogg": "Ogg",
    "asf": "ASF (wmv)",
}
"""Readers of ffmpeg's that may open a file. Others follow what stands in it: playlists do."""

EPSILON = 1e-3
"""Seconds: WebM keeps times in milliseconds."""

CUT_SHARE, CUT_SECONDS = 0.05, 1.0
"""A file that ends so much before its own duration was cut."""

FrameFormat = Literal["jpeg", "png"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSettings:
    """Which frames of a container are kept, and as what."""

    fps: float = 2.0
    """Frames a second, where the video has so many."""
    max_frames: int = 768
    """Most frames of a video; of a longer one they are spread over all of it."""
    form: FrameFormat = "jpeg"
    """What a frame is stored as."""
    quality: int = 95
    """How good a JPEG is, as Pillow counts it."""

    def __post_init__(self) -> None:
        if not 0 < self.fps <= 1000:
            raise VlmpackError(f"--fps is {self.fps!r}; expected more than 0, and 1000 at most")
        if self.max_frames < 1:
            raise VlmpackError(f"--max-frames is {self.max_frames}; expected 1 or more")
        if self.form not in get_args(FrameFormat):
            raise VlmpackError(f"--frame-format is {self.form!r}; expected jpeg or png")
        if not 1 <= self.quality <= 100:
            raise VlmpackError(f"--frame-quality is {self.quality}; expected 1 to 100")


@dataclass(frozen=True, slots=True)
class StoredFrames:
    """What is kept of a video.

    Args:
        frames: image files.
        times: of each, in seconds after the video's first frame, increasing.
    """

    frames: tuple[bytes, ...]
    times: tuple[float, ...]


def require_pyav() -> Any:
    """The module `av`.

    Raises:
        CapabilityError: it is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise CapabilityError(
            "--video decodes containers by PyAV, which is not installed; pip install 'av>=15.1' "
            "(the extra `video`)"
        ) from error
    return av


def decode_video(
    stream: BinaryIO,
    name: str,
    settings: VideoSettings,
    caps: SampleCaps,
    keep: Callable[[int], None] = lambda _: None,
) -> StoredFrames:
    """The frames to be stored of a container.

    Args:
        stream: the file, which can be sought in.
        name: of it, for messages.
        settings: which frames.
        caps: limit of a frame's pixels.
        keep: is told the bytes of each frame as soon as it is kept, and may refuse.

    Raises:
        DataError: class `decode`: no container that is read, no video in it, or a damaged one.
        CapabilityError: PyAV is not installed.
    """
    av = require_pyav()
    with _faults(av, name), _opened(av, stream, name) as (container, video):
        shown = _shown_at(container, video, name)
        if shown[-1] - shown[0] > LONGEST_SECONDS:
            raise _damaged(
                name,
                f"its last frame is at {shown[-1] - shown[0]:,.0f} seconds; expected times up to "
                f"{LONGEST_SECONDS:,.0f}",
            )
    chosen = chosen_times([time - shown[0] for time in shown], settings)
    stream.seek(0)
    frames: list[bytes] = []
    times: list[float] = []
    with _faults(av, name), _opened(av, stream, name) as (container, video):
        for time, picture in _pictures(container, video, shown, name, caps):
            if time < chosen[len(times)] - EPSILON:
                continue
            if time > chosen[len(times)] + EPSILON:
                break  # the frame that was chosen is not there
            frames.append(_encoded(picture(), settings))
            times.append(round(time, 6))
            keep(len(frames[-1]))
            if len(times) == len(chosen):
                return StoredFrames(tuple(frames), tuple(times))
    raise _damaged(name, f"its frame at {chosen[len(times)]:.3f} seconds cannot be decoded")


def chosen_times(shown: Sequence[float], settings: VideoSettings) -> list[float]:
    """Which frames are kept: at each tick of the rate the first that is shown at it or after; no
    frame twice, so a slower video keeps all of its own.

    Args:
        shown: when each frame is, in seconds, increasing.
        settings: the rate, and how many at most. Above it the ticks are spread evenly from the
            first frame to the last.
    """
    count = int((shown[-1] + EPSILON) * settings.fps) + 1
    step = 1 / settings.fps
    if min(count, len(shown)) > settings.max_frames:
        count = settings.max_frames
        step = shown[-1] / max(count - 1, 1)
    ticks = _ticks_up_to(np.asarray(shown), step, count)
    ticks[-1] = count
    return [time for time, new in zip(shown, np.diff(ticks, prepend=0), strict=True) if new]


def _ticks_up_to(times: Any, step: float, count: int) -> Any:
    """How many of the ticks 0, step, 2 step ... are at each time or before it. They are not written
    out: a video of few frames may have one that is years later.

    Args:
        times: (n,) float64, increasing.
        step: seconds between two ticks.
        count: of ticks.
    """
    near = np.floor((times + EPSILON) / step) + np.array([[-1.0], [0.0], [1.0]])
    fits = near * step - EPSILON <= times  # the quotient is rounded: the ticks themselves decide
    return np.clip(np.where(fits, near, -1.0).max(axis=0) + 1, 0, count)


def _shown_at(container: Any, video: Any, name: str) -> list[float]:
    """When each frame of a video is shown, in seconds, increasing, from its first key frame on."""
    shown: list[float | None] = []
    first: float | None = None
    end, is_first, packets = 0.0, True, 0
    for packet in container.demux():
        if not packet.size:
            continue
        at = packet.dts if packet.pts is None else packet.pts
        if at is not None:
            end = max(end, float((at + (packet.duration or 0)) * packet.time_base))
        if packet.stream_index != video.index:
            continue
        if packet.is_corrupt:
            raise _damaged(name, "a packet of it is cut or damaged")
        packets += 1
        if is_first and not packet.is_keyframe:
            continue  # nothing that it could be made from
        time = None if packet.pts is None else float(packet.pts * packet.time_base)
        if is_first:
            first, is_first = time, False
        if not packet.is_discard:
            shown.append(time)
    if not shown:
        raise _damaged(name, "it has no frame that can be decoded")
    _check_whole(container, end, name)
    known = sorted(time for time in shown if time is not None)
    if len(known) < len(shown):  # old containers: a rate is all that they have
        if not video.average_rate:
            raise _damaged(name, "it says neither the times of its frames nor their rate")
        return [number / float(video.average_rate) for number in range(len(shown))]
    return sorted({time for time in known if first is None or time >= first})


def _check_whole(container: Any, end: float, name: str) -> None:
    if container.duration is None:
        return
    told = container.duration / 1e6
    seen = end - (container.start_time or 0) / 1e6
    if told - seen > max(CUT_SECONDS, CUT_SHARE * told):
        raise _damaged(name, f"it ends after {seen:.1f} of its {told:.1f} seconds")


def _pictures(
    container: Any, video: Any, shown: Sequence[float], name: str, caps: SampleCaps
) -> Iterator[tuple[float, Callable[[], Image.Image]]]:
    """(seconds after the first, how to make the picture) of each frame."""
    size: tuple[int, int] | None = None
    for number, frame in enumerate(container.decode(video)):
        if frame.is_corrupt:
            raise _damaged(name, f"its frame {number} is damaged")
        if frame.width * frame.height > caps.max_image_pixels:
            raise _damaged(
                name,
                f"its frames have {frame.width} x {frame.height} pixels; the cap is "
                f"{caps.max_image_pixels}",
            )
        if size not in (None, (frame.width, frame.height)):
            raise _damaged(name, "its frames differ in size")
        size = frame.width, frame.height
        at = frame.time if frame.time is not None else shown[min(number, len(shown) - 1)]
        if at >= shown[0] - EPSILON / 2:
            yield at - shown[0], partial(_upright, frame)


def _upright(frame: Any) -> Image.Image:
    """A frame as players show it: phones store pictures lying, and how they are turned."""
    turns = round((frame.rotation or 0) / 90) % 4  # against the clock
    return Image.fromarray(np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), turns)))


def _encoded(picture: Image.Image, settings: VideoSettings) -> bytes:
    buffer = io.BytesIO()
    if settings.form == "png":
        picture.save(buffer, "PNG")
    else:
        picture.save(buffer, "JPEG", quality=settings.quality)
    return buffer.getvalue()


@contextmanager
def _opened(av: Any, stream: BinaryIO, name: str) -> Iterator[tuple[Any, Any]]:
    """(container, its video stream)"""
    options = {"format_whitelist": ",".join(CONTAINERS)}
    with av.open(stream, container_options=options) as container:
        video = container.streams.best("video")
        if video is None:
            kinds = counted(len(container.streams), "stream")
            raise _damaged(name, f"it has no video stream ({kinds} of other kinds)")
        video.thread_type = "AUTO"
        yield container, video


@contextmanager
def _faults(av: Any, name: str) -> Iterator[None]:
    """Say what PyAV says as a DataError (decode)."""
    try:
        yield
    except (av.error.FFmpegError, OSError) as error:
        reason = error.strerror or type(error).__name__
        raise _damaged(
            name,
            f"{reason}; expected a whole {', '.join(CONTAINERS.values())}",
        ) from None


def _damaged(name: str, reason: str) -> DataError:
    return DataError(f"the video {name} cannot be decoded: {reason}", error_class="decode")
