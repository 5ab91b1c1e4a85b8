"""Columns that hold a record's images under other names than `image` and `images`.

    {"image_path": "0.png", "question": "Which digit?", "answer": "Seven."}
    {"file_name": "0.png", "text": "A handwritten seven."}

Such a column is read as `images`, unless the record has `images` already or its turns name some. Of
several columns, the first in the tables below is read. The module also says what looks like an
image, so that none is lost because of its column's name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from vlmpack.addresses import IMAGE_SUFFIXES
from vlmpack.data.columns.chat import starts_as_image, starts_as_inline
from vlmpack.data.shards.naming import is_missing, names_no_image, parse_json
from vlmpack.data.shards.turns import TURN_FIELDS

NAMES = ("image", "images")

IMAGE_COLUMNS = (
    *("img", "imgs", "picture", "pictures", "photo", "photos", "image_list", "img_list"),
    *("image_bytes", "img_bytes", "image_data", "jpg", "jpeg", "png", "webp"),
    *("image_path", "image_paths", "img_path", "img_paths", "image_file", "image_files"),
    *("image_file_path", "img_file", "image_file_name", "image_filename", "image_filenames"),
    *("image_base64", "image_b64", "image_url", "image_urls", "image_uri", "img_url", "img_urls"),
)
"""Names that are read as images, whatever text they hold."""

FILE_COLUMNS = (
    *("file_name", "file_names", "image_name", "image_names", "img_name", "img_names"),
    *("file_path", "file_paths", "file", "files", "path", "paths"),
)
"""Names that are read as images only if the value looks like one, since other data use them too."""

NEVER_IMAGES = frozenset({"url", "source", "id", "license", "__key__", "__url__"})
"""Names that say where a record is from, whatever they end in."""


def plain(name: str) -> str:
    """A name without what people write differently: `imagePath`, `Image Path`, `image_path`."""
    return re.sub(r"[-_ .]", "", name).lower()


_RANK = {plain(name): rank for rank, name in enumerate((*IMAGE_COLUMNS, *FILE_COLUMNS))}
_FILES = frozenset(map(plain, FILE_COLUMNS))
_LONGEST = 2 * max(map(len, _RANK))
_SUFFIXES = "|".join(sorted({*IMAGE_SUFFIXES, "heic", "avif", "jp2", "svg"}))
_PATH = re.compile(rf"[^\n\r\t]{{1,2048}}\.(?:{_SUFFIXES})(?:[?#][^\n\r\t ]*)?", re.IGNORECASE)
_URL = re.compile(r"https?://[^\s]+", re.IGNORECASE)
_OF_IMAGES = re.compile(r"image|img|photo|picture|thumbnail")
_IDENTIFIER = re.compile(r"(image|img|photo|picture)(ids?|keys?|names?|index|idx|hash)?")
_FILE_KEYS = frozenset({"bytes", "path", "url", "src", "type", "detail", "width", "height"})
_PART_KEYS = (*NAMES, "image_url", "url", "path")
_JSON_TEXT = ('["', "[{", '{"')
_MAX_JSON_TEXT = 1 << 16
_MAX_VALUES = 4096
"""The most values searched in one cell, so that a record with data as keys stays cheap."""


def is_image_column(name: str) -> bool:
    """Whether a column may be read as images by its name."""
    return len(name) <= _LONGEST and _is_ranked(name)


@lru_cache(maxsize=4096)
def _is_ranked(name: str) -> bool:
    return plain(name) in _RANK


def with_images(record: Mapping[str, Any], taken: Collection[str] = ()) -> Mapping[str, Any]:
    """The record with its images under `images`. Columns in `taken` play another part."""
    ranked = sorted((_RANK[plain(n)], n) for n in record if is_image_column(n) and n not in taken)
    if not ranked or not all(names_no_image(record.get(name)) for name in NAMES):
        return record
    names = (name for _, name in ranked if _names_images(name, record[name]))
    name = next(names, None)
    if name is None or any(True for _ in named_in_turns(record)):
        return record
    rest = {key: value for key, value in record.items() if key not in (name, *NAMES)}
    return {**rest, "images": record[name]}


def named_in_turns(record: Mapping[str, Any]) -> Iterator[Any]:
    """What the image parts of a record's turns name."""
    for schema in (*TURN_FIELDS, "prompt", "chosen"):
        turns = record.get(schema)
        for turn in turns if isinstance(turns, list) else ():
            for content in turn.values() if isinstance(turn, dict) else ():
                for part in content if isinstance(content, list) else ():
                    if isinstance(part, dict) and part.get("type") in ("image", "image_url"):
                        yield from (v for k in _PART_KEYS if not is_missing(v := part.get(k)))


def looks_like_images(name: str, value: object, shown: Collection[str] = ()) -> bool:
    """Whether a value looks like images that are not in `shown` (file names, as in
    `file_names`)."""
    names = set(_file_names(value, is_named=bool(_OF_IMAGES.search(plain(name)))))
    return bool(names) and not ("" not in names and names <= {*shown})


def file_names(values: Iterable[object]) -> set[str]:
    """The last parts of the paths and addresses of images."""
    return {name for value in values for name in _file_names(value, is_named=True)}


def identifies_an_image(name: str, value: object) -> bool:
    """Whether a column says which image a record is about, without being one: image_id."""
    is_said = isinstance(value, str | int) and not isinstance(value, bool)
    return is_said and value != "" and _IDENTIFIER.fullmatch(plain(name)) is not None


def _names_images(name: str, value: object) -> bool:
    if plain(name) in _FILES:
        return looks_like_images(name, value)
    return not names_no_image(value) and not isinstance(value, bool | int | float)


def _file_names(value: object, *, is_named: bool) -> Iterator[str]:
    """The file name of each image in a value; empty for bytes. With `is_named` any address is
    one."""
    pending, seen = [value], 0
    while pending and (seen := seen + 1) <= _MAX_VALUES:
        item = pending.pop()
        if isinstance(item, str):
            if item.startswith(_JSON_TEXT) and len(item) <= _MAX_JSON_TEXT:
                pending += _parsed(item)
            elif _PATH.fullmatch(item) or (is_named and _URL.fullmatch(item)):
                yield re.split(r"[?#]", item)[0].replace("\\", "/").rpartition("/")[2].lower()
            elif starts_as_inline(item):
                yield ""
        elif isinstance(item, bytes) and starts_as_image(item):
            yield ""
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, dict):
            is_file = item.keys() <= _FILE_KEYS
            pending += [each for key, each in item.items() if is_file or is_image_column(key)]


def _parsed(text: str) -> list[Any]:
    try:
        return [parse_json(text)]
    except (ValueError, RecursionError):
        return []
