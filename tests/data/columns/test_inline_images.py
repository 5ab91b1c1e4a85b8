"""An image in a record is a path, bytes, or base64 that can be nothing else; nobody guesses."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from support.shard_fakes import image_bytes

from vlmpack.data.columns.chat import SHORTEST_BARE, chat_turns, inline_image, starts_as_inline
from vlmpack.data.files.images import ImageRoot
from vlmpack.encode import decode_image
from vlmpack.encode.decode import IMAGE_FORMATS
from vlmpack.errors import DataError

TURNS = [{"role": "user", "content": "<image>Q"}, {"role": "assistant", "content": "A"}]
PNG = image_bytes(20, 10)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("kind", IMAGE_FORMATS)
def test_each_format_alone_or_in_a_uri(kind: str, tmp_path: Path) -> None:
    data = image_bytes(20, 10, kind=kind)
    text = encoded(data)
    assert len(text) >= SHORTEST_BARE
    assert inline_image(text, "it") == data
    assert inline_image("\n".join([text[:76], text[76:], ""]), "it") == data
    uri = f"data:image/{kind.lower()};base64,{text}"
    assert inline_image(uri, "it") == data
    found = chat_turns({"messages": TURNS, "images": [uri]})
    assert found.images == (data,)
    loaded = ImageRoot(str(tmp_path)).load(found.images[0])
    assert decode_image(loaded.data, max_pixels=1000).size == (20, 10)


def test_every_place_of_an_image_takes_them() -> None:
    text, uri = encoded(PNG), f"data:image/png;base64,{encoded(PNG)}"
    asked = [
        [{"type": "image", "image": uri}],
        [{"type": "image", "image": {"path": uri}}],
        [{"type": "image_url", "image_url": {"url": uri}}],
        [{"type": "image_url", "image_url": text}],
    ]
    for parts in asked:
        turns = [{"role": "user", "content": parts}, TURNS[1]]
        assert chat_turns({"messages": turns}).images == (PNG,)
    for beside in ({"image": uri}, {"images": [text]}, {"images": json.dumps([text])}):
        assert chat_turns({"messages": TURNS, **beside}).images == (PNG,)


@pytest.mark.parametrize(
    "text",
    [
        "photos/a.png",
        "iVBORw0KGgo",
        encoded(PNG)[: SHORTEST_BARE - 1],
        encoded(PNG)[:300] + "x",
        encoded(b"no image " * 60),
        encoded(PNG)[:300] + ".png",
        encoded(b"RIFF" + bytes(300)),
        "/9j/" + "folder/" * 60 + "a.jpg",
        "database:image",
    ],
)
def test_what_may_be_a_path_is_one(text: str) -> None:
    assert inline_image(text, "it") is None


@pytest.mark.parametrize(
    "uri",
    [
        "data:image/png;base64",
        "data:image/png,%89PNG",
        "data:text/plain;base64,AAAA",
        "DATA:video/mp4;base64,AAAA",
        "data:image/png;base64,A.AA",
        "data:image/png;base64,AAA",
    ],
)
def test_a_data_uri_that_is_no_image_is_refused(uri: str) -> None:
    with pytest.raises(DataError, match="data URI") as caught:
        chat_turns({"messages": TURNS, "image": uri})
    assert caught.value.error_class == "schema" and len(caught.value.reason) < 200


def test_a_cut_image_is_a_bad_one(tmp_path: Path) -> None:
    [data] = chat_turns({"messages": TURNS, "image": encoded(PNG[:-40])}).images
    with pytest.raises(DataError) as caught:
        decode_image(ImageRoot(str(tmp_path)).load(data).data, max_pixels=1000)
    assert caught.value.error_class == "decode"


def test_how_a_text_begins_is_enough_to_look_like_an_image() -> None:
    for text in (encoded(PNG)[:300] + "?", "data:image/png,oops", "\n" + encoded(PNG)[:300]):
        assert starts_as_inline(text)
    for text in (encoded(b"no image " * 60), encoded(PNG)[: SHORTEST_BARE - 1], "a word " * 99):
        assert not starts_as_inline(text)
