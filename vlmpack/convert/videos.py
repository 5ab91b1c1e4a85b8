"""Records that name containers of videos -> the same with their frames and the times of these.

    {"messages": [...], "videos": ["a.mp4"]}         <video> in a text, or a part without a name
    {"type": "video", "video": "a.mp4"}              a part; "path" and "url" name it as well
    {"conversations": [...], "video": "a.mp4"}       <video>, or <image> as LLaVA-Video writes it

What a record names in its turns or beside them is decoded, and becomes a part with `frames`, which
the reader of turns takes like any other.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from vlmpack.convert.frames import VideoSettings, decode_video
from vlmpack.data.files.images import IN_RECORD, ImageRoot
from vlmpack.data.shards.keys import is_absent, parse_json, refuse_unknown
from vlmpack.data.shards.turns import IMAGE_MARKER, TURN_FIELDS, VIDEO_MARKER, named_images
from vlmpack.data.shards.videos import VIDEO, VIDEO_KEYS
from vlmpack.errors import schema_error
from vlmpack.words import counted, kind_of

BESIDE = ("videos", VIDEO)
"""Keys of a record that name its videos."""

_NAMES = (VIDEO, "path", "url")
"""Keys of a part that name its container."""

_CONTAINER_KEYS = frozenset(("type", *_NAMES))
_FILE_KEYS = frozenset(("bytes", "path"))
_MEMBER_BYTES = 1536
"""What a member of a tar takes beside its bytes, and a frame's name and time in the JSON."""

Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class VideoReader:
    """Decodes the containers that records name.

    Args:
        root: where they lie, and what a sample may cost.
        settings: which frames are kept.
    """

    root: ImageRoot
    settings: VideoSettings

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        """A record with turns -> the same, its containers as frames.

        Raises:
            DataError: class `schema` for places and names that do not fit, or too many frames;
                `integrity` for a path; `decode` for what is in the file.
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
        left = {name: value for name, value in record.items() if name not in BESIDE}
        return {**left, schema: turns.with_named(named, shows_images=bool(named_images(record)))}


@dataclass(slots=True)
class _Decoder:
    """Decodes the videos of one record.

    Args:
        root: where they lie.
        settings: which frames are kept.
        frames: kept so far.
        num_bytes: of them.
    """

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
                f"which is too much beside its other files (at most {caps.max_sample_bytes >> 20} "
                "MiB together); lower --fps, --max-frames or --frame-quality"
            )

    def _stream(self, value: object, where: str) -> tuple[BinaryIO, str]:
        """A container that can be read, and what messages call it."""
        if isinstance(value, dict):
            refuse_unknown(value, _FILE_KEYS, where)
            data, path = value.get("bytes"), value.get("path")
            value = data if data is not None else path
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
    """The turns of one record.

    Args:
        schema: a key of TURN_FIELDS.
        turns: as the record has them.
        decoder: of its videos.
    """

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
        """The turns with the videos that stand beside them, each at its place.

        Args:
            named: what names them.
            shows_images: whether the record names images, too.
        """
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
            placed = self._placed_first(len(named))
            if placed is not None:
                return placed.with_named(named, shows_images=shows_images)
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

    def _placed_first(self, count: int) -> _Turns | None:
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
        given = [name for name in _NAMES if not is_absent(part.get(name))]
        if len(given) > 1:
            raise schema_error(
                f"{where} names its video by {' and '.join(given)}; expected one of them"
            )
        refuse_unknown(part, _CONTAINER_KEYS, where)
        return self.decoder.part(part[given[0]], f"{where}.{given[0]}")


def _is_container(part: object) -> bool:
    return (
        isinstance(part, dict)
        and part.get("type") == VIDEO
        and any(not is_absent(part.get(name)) for name in _NAMES)
    )


def _is_unnamed(part: Mapping[str, Any]) -> bool:
    """Whether a part is the place of a video that is named elsewhere."""
    said = (VIDEO_KEYS | _CONTAINER_KEYS) - {"type"}
    return part.get("type") == VIDEO and all(is_absent(part.get(name)) for name in said)


def _named(record: Mapping[str, Any]) -> list[Any]:
    """What a record names beside its turns."""
    given = [_listed(record[name]) for name in BESIDE if not is_absent(record.get(name))]
    lists = [item if isinstance(item, list) else [item] for item in given]
    if len(given) == 2 and lists[0] != lists[1]:
        raise schema_error(
            "the record has 'videos' and 'video', and not the same ones; expected one of them"
        )
    return lists[0] if given else []


def _listed(value: object) -> object:
    """What names videos, in a list where a cell of a table holds it as JSON: no path begins so."""
    if not isinstance(value, str) or not value.startswith(('["', "[{")):
        return value
    try:
        return parse_json(value)
    except (ValueError, RecursionError) as error:
        raise schema_error(f"'videos' is text that is no JSON: {error}") from None
