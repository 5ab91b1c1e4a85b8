"""One record -> the turns as our shards hold them, and the images they show, in order.

Two shapes are known. `messages`: role and content, where content is text or a list of parts
({"type": "text"}, {"type": "image", "image": ...}, {"type": "image_url", ...}). `conversations`:
from and value, LLaVA's. The images of a record are named by its parts, or by `image` or `images`;
in the second case `<image>` in the text marks the places, unless parts without a name do; in
`conversations` it always does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vlmpack.data.shards.json_text import parse_json
from vlmpack.data.shards.keys import is_absent, refuse_unknown, unknown_record_keys
from vlmpack.data.shards.schemas import (
    IMAGE_MARKER,
    OTHER_MEDIA,
    VIDEO_MARKER,
    check_place,
    kind_of,
    marks_video,
    named_images,
    other_media,
    turn_role,
)
from vlmpack.data.shards.turns import TURN_FIELDS, is_learnt, placed_turns
from vlmpack.encode.sample import Role
from vlmpack.errors import schema_error
from vlmpack.words import counted

ImageSource = str | bytes
"""A path relative to the image root, or the encoded file itself."""

_ROLES: Mapping[str, Mapping[str, Role]] = {
    "messages": {"system": "system", "user": "user", "assistant": "assistant"},
    "conversations": {
        "system": "system",
        "human": "user",
        "user": "user",
        "gpt": "assistant",
        "assistant": "assistant",
    },
}


_IMAGE_NAMES = ("image", "url", "path")
_FILE_KEYS = frozenset(("bytes", "path"))
_URL_KEYS = frozenset(("url",))
_PART_KEYS = {
    "text": frozenset(("type", "text")),
    "image": frozenset(("type", "index", *_IMAGE_NAMES)),
    "image_url": frozenset(("type", "image_url")),
}


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """A record without its image bytes.

    Args:
        turns: role, parts and whether it is learnt; an image part is None.
        images: where each image part's bytes are, in order.
        unknown_keys: those of the record that are not read.
    """

    turns: tuple[tuple[str, tuple[str | None, ...], bool], ...]
    images: tuple[ImageSource, ...]
    unknown_keys: tuple[str, ...] = ()

    def messages(self, names: tuple[str, ...]) -> list[dict[str, Any]]:
        """The `messages` of a shard's JSON, its images under these member names."""
        left = iter(names)
        messages: list[dict[str, Any]] = []
        for role, parts, learn in self.turns:
            flag = {} if learn else {"loss": False}
            if len(parts) == 1 and parts[0] is not None:
                messages.append({"role": role, "content": parts[0], **flag})
                continue
            content = [
                {"type": "image", "image": next(left)}
                if part is None
                else {"type": "text", "text": part}
                for part in parts
            ]
            messages.append({"role": role, "content": content, **flag})
        return messages


def chat_turns(record: dict[str, Any]) -> ChatTurns:
    """Turns and images of a record.

    Raises:
        DataError: class `schema`; says what was found and what was expected.
    """
    unknown = unknown_record_keys(record)
    schemas = [name for name in TURN_FIELDS if name in record]
    if len(schemas) != 1:
        found = ", ".join(repr(name) for name in sorted(record)[:8]) or "nothing"
        raise schema_error(f"expected exactly one of 'messages' and 'conversations', found {found}")
    schema = schemas[0]
    turns = record[schema]
    if isinstance(turns, str):  # a parquet column of JSON text
        try:
            turns = parse_json(turns)
        except (ValueError, RecursionError) as error:
            raise schema_error(f"{schema!r} is text that is no JSON: {error}") from None
    if not isinstance(turns, list) or not turns:
        raise schema_error(f"{schema!r} is {kind_of(turns)}; expected a list of turns")
    for name in OTHER_MEDIA:
        if not is_absent(record.get(name)):
            raise schema_error(f"the record has {name!r}; {other_media(name)}")
    named = _named_images(record)
    parts: list[list[str | ImagePlace]] = []
    heads = []
    for where, turn in placed_turns(record, schema, turns):
        role, content, learn = _turn(turn, schema, where)
        heads.append((where, role, learn))
        shown = sum(isinstance(part, ImagePlace) for row in parts for part in row)
        parts.append(list(_parts(content, where, shown)))
    places = [part for row in parts for part in row if isinstance(part, ImagePlace)]
    if schema == "conversations" or (named and not places):
        _refuse_video_markers([where for where, _, _ in heads], parts, schema)
    if schema == "conversations" or (named is not None and not places):
        parts = [list(_by_markers(row)) for row in parts]
        places = [part for row in parts for part in row if isinstance(part, ImagePlace)]
    images = _resolve(places, named)
    return ChatTurns(
        turns=tuple(
            (role, tuple(part if isinstance(part, str) else None for part in row) or ("",), learn)
            for (_, role, learn), row in zip(heads, parts, strict=True)
        ),
        images=images,
        unknown_keys=unknown,
    )


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """An image part; its source is None where the record names its images elsewhere."""

    source: ImageSource | None


def _turn(turn: object, schema: str, where: str) -> tuple[Role, object, bool]:
    role = turn_role(turn, schema, _ROLES[schema], where)
    assert isinstance(turn, dict)
    return role, turn.get(TURN_FIELDS[schema][1]), is_learnt(turn, role, where)


def _parts(content: object, where: str, shown: int) -> Iterator[str | ImagePlace]:
    """The parts of a turn, behind so many images of the record."""
    if isinstance(content, str):
        yield content
        return
    if not isinstance(content, list) or not content:
        raise schema_error(
            f"{where} has the content {kind_of(content)}; expected text or a list of parts"
        )
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _PART_KEYS:
            refuse_unknown(part, _PART_KEYS[kind], f"{where}[{number}]")
        if kind == "text" and isinstance(part.get("text"), str):
            yield part["text"]
        elif kind == "image":
            check_place(part, shown, f"{where}[{number}]")
            shown += 1
            yield _image_part(part, f"{where}[{number}]")
        elif kind == "image_url":
            url = part.get("image_url")
            if isinstance(url, dict):
                refuse_unknown({**url, "detail": _detail(url)}, _URL_KEYS, f"{where}[{number}]")
                url = url.get("url")
            shown += 1
            yield ImagePlace(_source(url, f"{where}[{number}]"))
        elif kind in OTHER_MEDIA:
            raise schema_error(f"{where}[{number}] has the type {kind!r}; {other_media(kind)}")
        else:
            raise schema_error(
                f"{where}[{number}] has the type {kind!r}; expected 'text' with a text, 'image' or "
                "'image_url'"
            )


def _image_part(part: dict[str, Any], where: str) -> ImagePlace:
    given = [name for name in _IMAGE_NAMES if not is_absent(part.get(name))]
    if len(given) > 1:
        raise schema_error(
            f"{where} names its image by {' and '.join(given)}; expected one of them"
        )
    return ImagePlace(_source(part[given[0]], where) if given else None)


def _detail(url: dict[str, Any]) -> object:
    """The resolution that OpenAI's files ask for, where they ask for one."""
    return None if url.get("detail") == "auto" else url.get("detail")


def _refuse_video_markers(
    places: list[str], parts: list[list[str | ImagePlace]], schema: str
) -> None:
    for where, row in zip(places, parts, strict=True):
        if any(isinstance(part, str) and VIDEO_MARKER in part for part in row):
            raise schema_error(f"{where} {marks_video(schema)}")


def _by_markers(parts: list[str | ImagePlace]) -> Iterator[str | ImagePlace]:
    for part in parts:
        if isinstance(part, ImagePlace):
            yield part
            continue
        for number, text in enumerate(part.split(IMAGE_MARKER)):
            if number:
                yield ImagePlace(None)
            if text:
                yield text


def _named_images(record: dict[str, Any]) -> list[ImageSource] | None:
    """The images that the record names beside its turns; None where it names none."""
    given = named_images(record)
    if given is None:
        return None
    items = given if isinstance(given, list) else [given]
    return [_source(item, f"image {place}") for place, item in enumerate(items)]


def _source(value: object, where: str) -> ImageSource:
    """A path, or the bytes of a Hugging Face image ({"bytes": ..., "path": ...})."""
    if isinstance(value, dict):
        data, path = value.get("bytes"), value.get("path")
        refuse_unknown(value, _FILE_KEYS, where)
        value = data if data is not None else path
    if (isinstance(value, str) and value) or isinstance(value, bytes):
        return value
    raise schema_error(
        f"{where} is {kind_of(value)}; expected a path, or an object with bytes or path"
    )


def _resolve(places: list[ImagePlace], named: list[ImageSource] | None) -> tuple[ImageSource, ...]:
    own = [place.source for place in places if place.source is not None]
    if named is None:
        if len(own) < len(places):
            raise schema_error(
                f"{counted(len(places) - len(own), 'place')} for images in the turns "
                f"({IMAGE_MARKER} or image parts) without a name, nor does the record name any "
                "('image' or 'images')"
            )
        return tuple(own)
    if own and own != named:
        raise schema_error("images are named by the parts and by the record, and not the same ones")
    if len(places) != len(named):
        raise schema_error(
            f"{counted(len(places), 'place')} for images in the turns ({IMAGE_MARKER} or image "
            f"parts), but {counted(len(named), 'image')} named"
        )
    return tuple(named)
