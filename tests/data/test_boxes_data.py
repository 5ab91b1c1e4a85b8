"""Boxes of records come to the model alike from every form of data, and from packs of each kind."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from encode.test_objects import drawn, picture
from PIL import Image, ImageOps
from support.box_reader import far_off, smart_resize
from support.families import tiny_family_folder
from support.packed_splits import pack
from support.shard_fakes import open_data
from support.shards import ROOT

from vlmpack.convert import ConvertSettings, convert, open_records
from vlmpack.data.files.registered import Registered, RegisteredFetcher
from vlmpack.data.index.lengths import SampleText
from vlmpack.data.index.table import SampleLimits, scaled_sizes, shrink_to_fit
from vlmpack.data.pipeline import TrainData
from vlmpack.data.shards.samples import cook_text
from vlmpack.encode import Encoder
from vlmpack.encode.objects import Objects
from vlmpack.encode.sample import SampleLength, VLMSample
from vlmpack.encode.settings import EncoderSettings
from vlmpack.errors import DataError, PacksError, RunIdentityError
from vlmpack.packing.budget import RowBudget
from vlmpack.recipe.data import CoordinatesSection, ImagesSection, OnErrorSection
from vlmpack.recipe.sources import Source
from vlmpack.storage.fetch import LocalFetcher

MOST = 512
SETTINGS: dict[str, Any] = {
    "mode": "online",
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "seq_length": MOST,
    "budget": RowBudget(max_tokens=MOST, max_sequences=1, alignment=4),
}
BOXES = 4
"""Of a record."""


def records_in(folder: Path, count: int, seed: int = 7) -> list[dict[str, Any]]:
    """Records of one or two images, turned by EXIF, with their files."""
    rng, records = random.Random(seed), []
    for number in range(count):
        names = [f"{number}-{n}.png" for n in range(1 + number % 2)]
        sizes = [(rng.randint(30, 400), rng.randint(30, 400)) for _ in names]
        for name, size in zip(names, sizes, strict=True):
            (folder / name).write_bytes(picture(size, 1 + number % 8))
        on = [rng.randrange(len(names)) for _ in range(BOXES)]
        places = " ".join(f"{{{{box:{n}}}}}" for n in range(BOXES))
        turns = (("user", f"{'<image>' * len(names)}Where?"), ("assistant", f"{number}: {places}"))
        objects = {"bbox": [drawn(rng, sizes[image]) for image in on], "image_id": on}
        records.append(
            {
                "messages": [{"role": role, "content": text} for role, text in turns],
                "images": names,
                "objects": objects,
            }
        )
    return records


def opened(source: Path | str, index: Path, encoder: Encoder, **changes: Any) -> TrainData:
    sources = (Source(name="d", path=str(source)),)
    return open_data("", index, sources=sources, encoder=encoder, **(SETTINGS | changes))


def rows_of(data: TrainData) -> list[Any]:
    start = data.start()
    found = data.batches(start, rank=0, dp=1, max_steps=data.steps_until(1, start))
    rows = [micro.batch for step in found for micro in step.micro_batches]
    return sorted(rows, key=lambda row: row.input_ids.tolist())  # a sample each, in any order


def assert_alike(ours: list[Any], theirs: list[Any], what: str) -> None:
    assert len(ours) == len(theirs) > 1
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.input_ids, other.input_ids), what
        assert torch.equal(one.labels, other.labels), what
        assert torch.equal(one.media.pixel_values, other.media.pixel_values), what


FAMILIES = {
    "qwen2_5_vl": lambda tmp: ROOT / "assets/tiny-qwen2_5_vl",
    "qwen3_5": lambda tmp: ROOT / "assets/tiny-qwen3_5",
    "gemma4": lambda tmp: tiny_family_folder("gemma4", tmp / "model"),
}


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("qwen2_5_vl", 8),
        *(pytest.param(family, 50, marks=pytest.mark.slow) for family in FAMILIES),
    ],
)
def test_every_form_of_data_and_of_packs_has_the_same_ids(
    family: str, count: int, tmp_path: Path
) -> None:
    """As many rows, bit for bit, with the numbers that the publisher's rule has. A run compares the
    length of each sample with the planned one."""
    make: Callable[[Path], Path] = FAMILIES[family]
    encoder = Encoder(make(tmp_path), EncoderSettings())
    records = records_in(tmp_path, count)
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_text("".join(json.dumps(each) + "\n" for each in records))
    pq.write_table(pa.Table.from_pylist(records), table)
    shards = ConvertSettings(folder=tmp_path / "s", image_root=tmp_path, index_dir=tmp_path / "i")
    convert(open_records(lines), shards)
    wanted = rows_of(opened(lines, tmp_path / "i", encoder))
    read = {"parquet": table, "shards": tmp_path / "s/train-*.tar"}
    for form, path in read.items():
        assert_alike(rows_of(opened(path, tmp_path / "i", encoder)), wanted, form)
    named = tmp_path / "named.jsonl"
    renamed = [{**each, "marks": each["objects"], "objects": None} for each in records]
    named.write_text("".join(json.dumps(each) + "\n" for each in renamed))
    by_column = opened(named, tmp_path / "i", encoder, columns={"objects": "marks"})
    assert_alike(rows_of(by_column), wanted, "a column of another name")
    inline = [
        {**each, "images": [(tmp_path / n).read_bytes() for n in each["images"]]}
        for each in records
    ]
    handed = Registered({"mine": inline}, {}, {"mine": "a fingerprint"})
    fetcher = RegisteredFetcher(LocalFetcher(), handed)
    of_python = opened("python:mine", tmp_path / "i", encoder, fetcher=fetcher)
    assert_alike(rows_of(of_python), wanted, "a source of a program")
    for kind in ("plan", "tokens", "shards"):
        online = opened(read["shards"], tmp_path / "i", encoder)
        pack(online, tmp_path / kind, kind=kind)
        packed = {"mode": "offline", "max_sequences": 1, "path": str(tmp_path / kind)}
        packs = opened(read["shards"], tmp_path / "i", encoder, **packed)
        assert_alike(rows_of(packs), wanted, kind)
    text = "".join(encoder.tokenizer.decode(row.input_ids.flatten()) for row in wanted)
    answers = {
        int(match[1]): re.findall(r"\[.*?\]", match[2])
        for match in re.finditer(rf"(?<!\d)(\d+): ((?:\[[\d, ]+\] ?){{{BOXES}}})", text)
    }
    assert answers.keys() == {*range(count)}
    for number, record in enumerate(records):
        boxes, images = record["objects"]["bbox"], record["objects"]["image_id"]
        for box, image, written in zip(boxes, images, answers[number], strict=True):
            with Image.open(tmp_path / record["images"][image]) as file:
                size = ImageOps.exif_transpose(file).size
            shown = smart_resize(size, 784, 802816)
            assert far_off(family, box, written, size, shown) <= 1 + 1e-6


def with_rule(encoder: Encoder, **changes: Any) -> Encoder:
    """An encoder of the same folder whose family writes boxes otherwise."""
    other = encoder.replace()
    assert encoder.coordinates is not None
    vars(other)["coordinates"] = replace(encoder.coordinates, **changes)
    return other


def test_a_family_that_writes_otherwise_is_noticed_where_there_are_objects(tmp_path: Path) -> None:
    """Lengths are measured anew, and a run or packs of before are refused. The text is as long."""
    encoder = Encoder(FAMILIES["qwen3_5"](tmp_path))
    later = with_rule(encoder, box="<{x1}, {y1}, {x2}, {y2}>")
    assert later.fingerprint == encoder.fingerprint
    assert with_rule(encoder, source="another page").objects_said == encoder.objects_said
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records_in(tmp_path, 6)))
    index = tmp_path / "i"
    before = opened(path, index, encoder)
    parts = {part.name: part.stat().st_mtime_ns for part in index.glob("*.part")}
    assert before.identity["objects"] == encoder.objects_said
    for kind in ("plan", "tokens", "shards"):
        pack(opened(path, index, encoder), tmp_path / kind, kind=kind)
    now = opened(path, index, later)
    remade = [n for n, at in parts.items() if (found := find(index, n)) and found != at]
    assert len(remade) == 1, "the lengths, and not the index"
    assert not torch.equal(rows_of(now)[0].labels, rows_of(opened(path, index, encoder))[0].labels)
    with pytest.raises(RunIdentityError, match="objects: the run has"):
        opened(path, index, later, resume=before.start())
    for kind in ("plan", "tokens", "shards"):
        packed = {"mode": "offline", "max_sequences": 1, "path": str(tmp_path / kind)}
        assert rows_of(opened(path, index, encoder, **packed))
        with pytest.raises(PacksError, match="how boxes of objects are written: "):
            opened(path, index, later, **packed)


@pytest.mark.usefixtures("small_windows")
def test_a_streamed_run_notices_it_in_the_shard_that_it_stopped_in(tmp_path: Path) -> None:
    encoder = Encoder(FAMILIES["qwen3_5"](tmp_path))
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(each) + "\n" for each in records_in(tmp_path, 24)))
    shards = ConvertSettings(folder=tmp_path / "s", image_root=tmp_path, index_dir=tmp_path / "c")
    convert(open_records(lines), shards)
    streamed = {"mode": "none", "shuffle": "window", "seq_length": MOST, "global_batch_size": 3}
    source, index = tmp_path / "s/train-*.tar", tmp_path / "i"
    before = opened(source, index, encoder, **streamed)
    *_, step = before.batches(before.start(), rank=0, dp=1, max_steps=6)
    assert step.state.window == 1, "the shard is begun"
    later = with_rule(encoder, box="<{x1}, {y1}, {x2}, {y2}>")
    refusal = pytest.raises(RunIdentityError, match="now have other samples or lengths")
    for written, says in ((encoder, nullcontext()), (later, refusal)):
        data = opened(source, index, written, **streamed, resume=step.state)
        with says:
            list(data.batches(step.state, rank=0, dp=1, max_steps=8))


def find(index: Path, name: str) -> int | None:
    return next((part.stat().st_mtime_ns for part in index.glob(name)), None)


def test_without_objects_a_run_is_as_it_was(tmp_path: Path) -> None:
    encoder = Encoder(FAMILIES["qwen3_5"](tmp_path))
    path = tmp_path / "a.jsonl"
    plain = [{**each, "objects": None} for each in records_in(tmp_path, 6)]
    path.write_text("".join(json.dumps(each) + "\n" for each in plain))
    before = opened(path, tmp_path / "i", encoder)
    now = opened(path, tmp_path / "i", with_rule(encoder, grid=100), resume=before.start())
    assert now.identity == before.identity and "objects" not in now.identity


def test_hostile_objects_are_holes_or_stop_the_run(tmp_path: Path) -> None:
    """Each with the reason that it would be refused with."""
    encoder = Encoder(FAMILIES["qwen3_5"](tmp_path))
    records = records_in(tmp_path, 8)
    hostile = {
        1: ({"bbox": [[math.nan, 0, 1, 1]] * 4}, "has nan; expected numbers"),
        2: ({"bbox": [[9, 0, 1, 1]] * 4}, "expected x1 < x2"),
        3: ({"bbox": [[0, 0, 9999, 1]] * 4}, "has x 9999.0, outside 0 to"),
        5: ({"bbox": [[0, 0, 1, 1]] * 4, "image_id": [7] * 4}, "is on image 7, the sample has"),
        6: ({"bbox": [[0, 0, 1, 1]] * 2000}, "2,000 shapes; at most 1,000"),
    }
    for number, (objects, _) in hostile.items():
        records[number]["objects"] = objects
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    skipping = {"on_error": OnErrorSection(schema="skip")}
    data = opened(path, tmp_path / "i", encoder, **skipping)
    faults = data.fitted.table.faults
    assert faults.keys() == hostile.keys()
    for number, (kind, reason) in faults.items():
        assert kind == "schema" and hostile[number][1] in reason
    assert len(rows_of(data)) >= 3
    with pytest.raises(DataError, match=r"expected numbers|outside|shapes|on image|x1 < x2"):
        rows_of(opened(path, tmp_path / "i", encoder, on_error=OnErrorSection(schema="raise")))


@pytest.mark.parametrize("kind", ["tokens", "plan"])
def test_packs_of_boxes_refuse_other_bounds(kind: str, tmp_path: Path) -> None:
    encoder = Encoder(FAMILIES["qwen2_5_vl"](tmp_path))
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records_in(tmp_path, 6)))
    pack(opened(path, tmp_path / "i", encoder), tmp_path / "packs", kind=kind)
    packed = {"mode": "offline", "max_sequences": 1, "path": str(tmp_path / "packs")}
    smaller = encoder.replace(budget=ImagesSection(max_pixels=40_000))
    with pytest.raises(PacksError, match=r"images: not set in the packs, max_pixels 40000 now"):
        opened(path, tmp_path / "i", smaller, **packed)
    said = encoder.replace(coordinates=CoordinatesSection(space="pixels"))
    with pytest.raises(PacksError, match=r"data.coordinates: not set in the packs"):
        opened(path, tmp_path / "i", said, **packed)


def test_shrinking_takes_the_largest_factor_that_fits(tmp_path: Path) -> None:
    """Of all 255, by trying each."""
    encoder, size, rng = Encoder(FAMILIES["qwen2_5_vl"](tmp_path)), (2800, 120), random.Random(3)
    places = " ".join(f"{{{{box:{n}}}}}" for n in range(20))
    turns = [("user", [{"type": "image"}]), ("assistant", places)]
    given = {
        "messages": [{"role": role, "content": text} for role, text in turns],
        "objects": {"bbox": [drawn(rng, size) for _ in range(20)]},
    }
    sample = cook_text("a", "none", json.dumps(given).encode(), ("json", "0.png")).sample
    text = SampleText(sample, (size,), ())
    lengths = {
        step: encoder.length(sample, scaled_sizes((size,), step), (size,)).num_tokens
        for step in range(1, 256)
    }
    for most in sorted({*lengths.values()})[::9]:
        fitting = shrink_to_fit(text, encoder, SampleLimits(most))
        best = max(step for step, length in lengths.items() if length <= most)
        assert fitting is not None and fitting[0] == scaled_sizes((size,), best)


@dataclass(frozen=True)
class Uneven:
    """Lengths that fall now and then where the image grows, as texts of numbers may."""

    lengths: Mapping[int, int]

    def length(self, sample: VLMSample, sizes: Any, originals: Any = None) -> SampleLength:
        return SampleLength(self.lengths[sizes[0][0]], 0, 1, 1)


@pytest.mark.parametrize("objects", [Objects(), None])
def test_larger_factors_are_tried_until_two_in_a_row_fail(objects: Objects | None) -> None:
    """With objects alone; others are as they were. The loop ends."""
    rng = random.Random(5)
    sample = VLMSample(key="a", url="", messages=(), objects=objects)
    text, differs = SampleText(sample, ((256, 256),), ()), 0
    for _ in range(200):
        lengths = {n: n + rng.choice((0, 0, 3)) for n in range(1, 256)}
        most = rng.randint(20, 250)
        found = shrink_to_fit(text, Uneven(lengths), SampleLimits(most))  # type: ignore[arg-type]
        assert found is not None and lengths[found[0][0][0]] <= most
        step = found[0][0][0]
        two_fail = all(lengths[n] > most for n in (step + 1, step + 2) if n < 256)
        assert two_fail or objects is None
        differs += not two_fail
    assert (differs > 10) == (objects is None), "the case that is meant"
