"""Doors of the data layer: tars, samples, images, packs, records, states."""

from __future__ import annotations

import io
import json
import random
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from support.fuzz import Door, changed, damaged, json_bytes
from support.images import file_of, picture

from vlmpack.data.index.parts import part_for
from vlmpack.data.index.shard_index import IndexBuilder, index_rows, load_index
from vlmpack.data.loading.checked_lines import checked_line
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.loading.read import SkippedSample
from vlmpack.data.packs.manifest import DIGEST, Manifest, read_manifest
from vlmpack.data.packs.manifest import sealed as sealed_values
from vlmpack.data.plan.state import DataState
from vlmpack.data.shards.images import image_facts
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.data.shards.samples import cook_text, group_members, parse_span
from vlmpack.data.shards.tar import read_members
from vlmpack.encode.decode import decode_image
from vlmpack.packing.budget import RowBudget
from vlmpack.storage.fetch import LocalFetcher
from vlmpack.training.metrics import read_rows
from vlmpack.training.record import read_launches, read_steps, recorded_ranks

CAPS = SampleCaps(max_member_bytes=1 << 20, max_image_pixels=1 << 20)
Go = Callable[[random.Random], object]

CHATS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": "Be short."},
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": "0.png"},
                    {"type": "text", "text": "What is it?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "A cat."}], "weight": 1},
        ],
        "task": "naming",
        "id": 7,
    },
    {
        "conversations": [
            {"from": "human", "value": "<image>\nWhat is it?"},
            {"from": "gpt", "value": "A cat."},
        ],
        "image": ["0.png"],
        "system": "Be short.",
    },
]


def pictures() -> list[bytes]:
    """One of each format that is read, some with metadata."""
    found = []
    for kind in ("PNG", "JPEG", "WEBP"):
        found.append(file_of(picture(24, 16), kind))
        exif = Image.Exif()
        exif[0x0112] = 6
        found.append(file_of(picture(24, 16), kind, exif=exif))
    text = PngInfo()
    text.add_itxt("XML:com.adobe.xmp", "<x/>", zip=True)
    text.add_text("Comment", "a" * 100, zip=True)
    found.append(file_of(picture(24, 16), "PNG", pnginfo=text))
    return found


def tars() -> list[bytes]:
    """Shards of every layout."""
    found = []
    for layout in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=layout) as archive:
            for number, chat in enumerate(CHATS):
                folder = "" if layout == tarfile.USTAR_FORMAT else "d" * 120 + "/"
                files = {"json": json_bytes(chat), "0.png": pictures()[0]}
                for name, data in files.items():
                    info = tarfile.TarInfo(f"{folder}\u00e9{number}.{name}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
        found.append(stream.getvalue())
    return found


def sealed(data: bytes, draw: random.Random) -> bytes:
    """The tar with headers whose checksums fit, most often: else nothing behind them is reached."""
    if draw.random() < 0.2:
        return data
    whole = bytearray(data)
    for at in range(0, len(whole) - 511, 512):
        if whole[at + 257 : at + 262] == b"ustar":
            whole[at + 148 : at + 156] = b" " * 8
            whole[at + 148 : at + 156] = b"%06o\0 " % sum(whole[at : at + 512])
    return bytes(whole)


def _tar(_: Path) -> Go:
    good = tars()

    def go(draw: random.Random) -> None:
        data = sealed(damaged(draw.choice(good), draw, good), draw)
        members = read_members(
            io.BytesIO(data), len(data), shard="s.tar", max_member_bytes=CAPS.max_member_bytes
        )
        for raw in group_members(members, shard="s.tar", caps=CAPS):
            index_rows(raw, CAPS)

    return go


def _span(_: Path) -> Go:
    good = []
    for data in tars():
        members = read_members(
            io.BytesIO(data), len(data), shard="s.tar", max_member_bytes=CAPS.max_member_bytes
        )
        first = next(group_members(members, shard="s.tar", caps=CAPS))
        good.append(data[: first.length])

    def go(draw: random.Random) -> None:
        data = sealed(damaged(draw.choice(good), draw, good), draw)
        verified = zlib.crc32(data) if draw.random() < 0.5 else None
        parse_span(data, shard="s.tar", offset=512, caps=CAPS, verified=verified)

    return go


def _record(_: Path) -> Go:
    good = [json_bytes(chat) for chat in CHATS]
    fields = ("json", "0.png", "1.png", "9" * 5000 + ".png", "\u00b2.png", "x.txt")

    def go(draw: random.Random) -> None:
        if draw.random() < 0.5:
            data = damaged(draw.choice(good), draw, good)
        else:
            data = json_bytes(changed(draw.choice(CHATS), draw))
        some = ("json", "0.png") if draw.random() < 0.5 else draw.sample(fields, 3)
        cook_text("k", "s.tar", data, some)

    return go


def _image(_: Path) -> Go:
    good = pictures()

    def go(draw: random.Random) -> None:
        data = damaged(draw.choice(good), draw, good)
        image_facts(data, "0.png", CAPS)
        if draw.random() < 0.3:
            decode_image(data, max_pixels=CAPS.max_image_pixels)

    return go


def _index(folder: Path) -> Go:
    shard = folder / "x.tar"
    shard.write_bytes(tars()[0])
    builder = IndexBuilder(LocalFetcher(), CAPS)
    part = part_for(folder, builder.fetcher.head(str(shard)), builder.rule)
    Path(part.path).parent.mkdir(parents=True, exist_ok=True)
    builder(part)
    good = Path(part.path).read_bytes()
    expected = load_index(part, builder).table

    def go(draw: random.Random) -> None:
        Path(part.path).write_bytes(damaged(good, draw, [good]))
        assert load_index(part, builder).table.equals(expected), "other rows were taken"

    return go


MANIFEST = Manifest(
    kind="plan",
    planner="bfd",
    media=None,
    budget=RowBudget(max_tokens=64),
    seq_length=64,
    seed=0,
    shuffle="global",
    global_batch_size=2,
    num_samples=9,
    num_packs=3,
    num_tokens=100,
    encoder=dict.fromkeys(("template", "tokenizer", "processor"), "00"),
    data={"content": "00"},
    sources=(("a", None),),
    weights="samples",
    packs_by_batch=False,
    plan="00",
    files={"packs.npy": "00"},
)


def _pack_json(folder: Path) -> Go:
    good = MANIFEST.to_json().encode()
    values = {key: value for key, value in json.loads(good).items() if key != DIGEST}

    def go(draw: random.Random) -> None:
        if draw.random() < 0.5:
            data = damaged(good, draw, [good])
        else:
            value = changed(values, draw)
            data = json_bytes(sealed_values(value) if isinstance(value, dict) else value)
        (folder / "pack.json").write_bytes(data)
        read_manifest(folder)

    return go


STATE: dict[str, Any] = {
    "vlmpack_format": 1,
    "epoch": 0,
    "window": 0,
    "batch": 3,
    "batches": 3,
    "cursors": [0, 1],
    "shards": None,
    "eras": [{"start_batch": 0, "identity": {"seed": 1}}],
}


def _state(_: Path) -> Go:
    texts = [json.dumps(STATE)]

    def go(draw: random.Random) -> None:
        if draw.random() < 0.3:
            data = damaged(texts[0].encode(), draw, [texts[0].encode()])
            DataState.from_json(data.decode("utf-8", "replace"))
        else:
            DataState.from_json(json.dumps(changed(STATE, draw)))

    return go


def _lines(folder: Path) -> Go:
    ledger = Ledger(folder / "data-errors.jsonl")
    hole = SkippedSample(1, "k", "s.tar", 0, "decode", "cut")
    ledger.record([hole, hole], epoch=0, batch=1)
    assert ledger.path is not None
    step = {"launch": 1, "batch": 0, "epoch": 0, "shards": {"0": "a.tar"}, "bins": [["0/k1"]]}
    launch = {"launch": 1, "start": 0, "dp": 1, "state": {}}
    row = {"step": 1, "loss": 0.5}
    good = [ledger.path.read_bytes(), *map(checked_line, (step, launch, row))]

    def go(draw: random.Random) -> None:
        if draw.random() < 0.5:
            value: Any = changed(draw.choice((step, launch, row)), draw)
            data = checked_line(value) if isinstance(value, dict) and value else json_bytes(value)
            data += b"\n"
        else:
            data = damaged(draw.choice(good), draw, good)
        for name in ("data-errors.jsonl", "launches.jsonl", "rank-0000.jsonl", "metrics.jsonl"):
            (folder / name).write_bytes(data)
        recorded_ranks(folder)
        read_rows(folder / "metrics.jsonl")
        ledger.worst()
        ledger.damaged_lines()
        if draw.random() < 0.5:
            read_launches(folder)
        list(read_steps(folder, 0))

    return go


DOORS = [
    Door("tar", 12, _tar),
    Door("span", 10, _span),
    Door("record", 14, _record),
    Door("image", 10, _image),
    Door("index part", 0.4, _index),
    Door("pack.json", 3, _pack_json),
    Door("data state", 5, _state),
    Door("lines", 1, _lines),
]
