"""Records that name containers of videos -> the same with their frames and the times of these.

    {"messages": [...], "videos": ["a.mp4"]}         <video> in a text, or a part without a name
    {"type": "video", "video": "a.mp4"}              a part; "path" and "url" name it as well
    {"conversations": [...], "video": "a.mp4"}       <video>, or <image> as LLaVA-Video writes it

A named video becomes a part with `frames`, which the reader of turns takes like any other. PyAV
reads a file twice. The packets give the time of each frame, so the frames to keep are chosen before
any is decoded. Then the file is decoded up to the last of them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
from PIL import Image

from vlmpack.data.columns.chat import named_file, only_name
from vlmpack.data.files.images import IN_RECORD, ImageRoot
from vlmpack.data.shards.naming import SampleCaps, is_missing, listed, refuse_unknown
from vlmpack.data.shards.turn_parts import VIDEO, VIDEO_KEYS
from vlmpack.data.shards.turns import (
    IMAGE_MARKER,
    TURN_FIELDS,
    VIDEO_MARKER,
    named_files,
    named_images,
)
from vlmpack.errors import CapabilityError, DataError, VlmpackError, decode_error, schema_error
from vlmpack.limits import LONGEST_SECONDS
from vlmpack.words import counted, kind_of

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
"""Readers of ffmpeg that may open a file. Others, such as playlists, follow references in it."""

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
    """The image files that are kept of a video, and increasing seconds after its first frame."""

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
    """The frames of a container to be stored, checked against the limit of pixels.

    Args:
        stream: the file, which can be sought in.
        keep: gets the bytes of each kept frame at once, and may refuse.

    Raises:
        DataError: class `decode`: no container that is read, no video in it, or a damaged one.
        CapabilityError: PyAV is not installed.
    """
    av = require_pyav()
    with _faults(av, name), _open(av, stream, name) as (container, video):
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
    with _faults(av, name), _open(av, stream, name) as (container, video):
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
    """Which frames are kept: at each tick of the rate, the first that is shown then or later. No
    frame is kept twice, so a slower video keeps all of its own. Above the maximum, ticks are spread
    evenly from the first frame to the last.

    Args:
        shown: when each frame is, in seconds, increasing.
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
    out, since a video of few frames may have one that is years later.

    Args:
        times: (n,) float64, increasing.
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
    duration = container.duration / 1e6
    seen = end - (container.start_time or 0) / 1e6
    if duration - seen > max(CUT_SECONDS, CUT_SHARE * duration):
        raise _damaged(name, f"it ends after {seen:.1f} of its {duration:.1f} seconds")


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
    """A frame as players show it. Phones store sideways pictures with a rotation."""
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
def _open(av: Any, stream: BinaryIO, name: str) -> Iterator[tuple[Any, Any]]:
    """(container, its video stream)"""
    options = {"format_whitelist": ",".join(CONTAINERS)}
    # A title may be in any encoding, and is not read.
    with av.open(stream, container_options=options, metadata_errors="replace") as container:
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
            name, f"{reason}; expected a whole {', '.join(CONTAINERS.values())}"
        ) from None


def _damaged(name: str, reason: str) -> DataError:
    return decode_error(f"the video {name} cannot be decoded: {reason}")


NAMING_KEYS = ("videos", VIDEO)
"""Keys of a record that name its videos."""

_NAMES = (VIDEO, "path", "url")
"""Keys of a part that name its container."""

_CONTAINER_KEYS = frozenset(("type", *_NAMES))
_MEMBER_BYTES = 1536
"""What a member of a tar takes on top of its bytes, and a frame's name and time in the JSON."""

Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class VideoReader:
    """Decodes the containers that records name, inside a root and within a sample's limits."""

    root: ImageRoot
    settings: VideoSettings

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        """A record with turns -> the same, its containers as frames.

        Raises:
            DataError: class `schema` for places and names that do not fit, or for too many frames.
                Class `integrity` for a path, `decode` for the file's content.
        """
        schemas = [name for name in TURN_FIELDS if isinstance(record.get(name), list)]
        if len(schemas) != 1:
            return record  # the reader of turns says so
        [schema] = schemas
        named = _named(record)
        decoder = _Decoder(self.root, self.settings)
        turns = _Turns(schema, [*record[schema]], decoder)
        if not named:
            return {**record, schema: turns.each_part(lambda part: [part])}
        others = {name: value for name, value in record.items() if name not in NAMING_KEYS}
        return {**others, schema: turns.with_named(named, shows_images=bool(named_images(record)))}


@dataclass(slots=True)
class _Decoder:
    """Decodes the videos of one record, and counts its frames and their bytes."""

    root: ImageRoot
    settings: VideoSettings
    frames: int = 0
    num_bytes: int = 0

    def part(self, value: object, where: str) -> Part:
        """The frames of a container as a part of a content."""
        stream, name = self._stream(value, where)
        with stream:
            stored = decode_video(stream, name, self.settings, self.root.caps, self._keep)
        return {"type": VIDEO, "frames": list(stored.frames), "times": list(stored.times)}

    def _keep(self, size: int) -> None:
        caps = self.root.caps
        self.frames += 1
        self.num_bytes += size + _MEMBER_BYTES
        if self.frames > caps.max_frames:
            raise schema_error(
                f"the videos of the record have more than {caps.max_frames} frames; lower --fps or "
                "--max-frames"
            )
        if self.num_bytes > caps.max_sample_bytes - caps.max_json_bytes:
            raise schema_error(
                f"the frames of the record's videos have more than {self.num_bytes >> 20} MiB, "
                f"which is too much with its other files (at most {caps.max_sample_bytes >> 20} "
                "MiB together). Lower --fps, --max-frames or --frame-quality"
            )

    def _stream(self, value: object, where: str) -> tuple[BinaryIO, str]:
        """A container that can be read, and what messages call it."""
        value = named_file(value, where)
        if isinstance(value, bytes):
            return io.BytesIO(value), IN_RECORD
        if isinstance(value, str) and value:
            return replace(self.root, noun="video").open(value), repr(value)
        instead = "; frames that are stored already are 'frames'" if isinstance(value, list) else ""
        raise schema_error(
            f"{where} is {kind_of(value)}; expected the path of a video, or an object with bytes "
            f"or path{instead}"
        )


@dataclass(frozen=True, slots=True)
class _Turns:
    """The turns of one record."""

    schema: str
    turns: list[Any]
    decoder: _Decoder

    @property
    def content(self) -> str:
        """The key of a turn's content."""
        return TURN_FIELDS[self.schema][1]

    def each_part(self, changed: Callable[[Part], list[Part]]) -> list[Any]:
        """The turns with containers that parts name as frames, and other parts changed."""
        turns = []
        for number, turn in enumerate(self.turns):
            said = turn.get(self.content) if isinstance(turn, dict) else None
            where = f"{self.schema}[{number}].{self.content}"
            parts: list[Any] | None = None
            if isinstance(said, list):
                parts = []
                for place, part in enumerate(said):
                    if _is_container(part):
                        parts.append(self._own(part, f"{where}[{place}]"))
                    else:
                        parts += changed(part) if isinstance(part, dict) else [part]
            elif isinstance(said, str):
                found = changed({"type": "text", "text": said})
                parts = found if found != [{"type": "text", "text": said}] else None
            turns.append(turn if parts is None else {**turn, self.content: parts})
        return turns

    def with_named(self, named: list[object], *, shows_images: bool) -> list[Any]:
        """The turns with the videos that the record names outside them, each at its place."""
        parts = [part for turn in self.turns for part in self._parts(turn)]
        if any(map(_is_container, parts)):
            raise schema_error("videos are named by the parts and by the record; expected one")
        unnamed = sum(map(_is_unnamed, parts))
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        marker = VIDEO_MARKER
        if not unnamed and not shows_images and self.schema == "conversations":
            marks = [sum(text.count(each) for text in texts) for each in (marker, IMAGE_MARKER)]
            marker = IMAGE_MARKER if marks[0] == 0 and marks[1] == len(named) else marker
        places = unnamed or sum(text.count(marker) for text in texts)
        if not places and self.schema == "messages":
            with_places = self._with_places_first(len(named))
            if with_places is not None:
                return with_places.with_named(named, shows_images=shows_images)
        if places != len(named):
            kind = "part without a name" if unnamed else f"{marker} marker"
            raise schema_error(
                f"{counted(places, kind)} in the conversation, but "
                f"{counted(len(named), 'video')} named beside the turns"
            )
        rest = iter(enumerate(named))

        def next_part() -> Part:
            number, value = next(rest)
            return self.decoder.part(value, f"video {number} beside the turns")

        def changed(part: Part) -> list[Part]:
            if unnamed:
                return [next_part()] if _is_unnamed(part) else [part]
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                return [part]
            shown: list[Part] = []
            for number, piece in enumerate(part["text"].split(marker)):
                shown += [next_part()] if number else []
                shown += [{"type": "text", "text": piece}] if piece else []
            return shown or [part]

        return self.each_part(changed)

    def _with_places_first(self, count: int) -> _Turns | None:
        """With places before the first text of the user, where images without one go as well."""
        for number, turn in enumerate(self.turns):
            if isinstance(turn, dict) and turn.get("role") == "user":
                parts = [{"type": VIDEO}] * count + self._parts(turn)
                turns = [*self.turns[:number], {**turn, self.content: parts}]
                return replace(self, turns=turns + self.turns[number + 1 :])
        return None

    def _parts(self, turn: object) -> list[Part]:
        said = turn.get(self.content) if isinstance(turn, dict) else None
        if isinstance(said, str):
            return [{"type": "text", "text": said}]
        return [part for part in said if isinstance(part, dict)] if isinstance(said, list) else []

    def _own(self, part: Part, where: str) -> Part:
        name = only_name(part, _NAMES, where, "video")
        assert name is not None, "it is a container"
        refuse_unknown(part, _CONTAINER_KEYS, where)
        return self.decoder.part(part[name], f"{where}.{name}")


def _is_container(part: object) -> bool:
    return (
        isinstance(part, dict)
        and part.get("type") == VIDEO
        and any(not is_missing(part.get(name)) for name in _NAMES)
    )


def _is_unnamed(part: Mapping[str, Any]) -> bool:
    """Whether a part is the place of a video that is named elsewhere."""
    said = (VIDEO_KEYS | _CONTAINER_KEYS) - {"type"}
    return part.get("type") == VIDEO and all(is_missing(part.get(name)) for name in said)


def _named(record: Mapping[str, Any]) -> list[Any]:
    """What a record names outside its turns."""
    lists = {name: listed(record.get(name), "'videos'") for name in NAMING_KEYS}
    return named_files(lists, NAMING_KEYS, is_missing)
