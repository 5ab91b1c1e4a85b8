"""A record's sample is not parsed again from the JSON just written of it, and is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.record_cases import cases, image_name
from support.shard_fakes import image_bytes
from support.shards import ROOT

from vlmpack.data.columns.form import RecordForm, find_form
from vlmpack.data.files.images import ImageRoot
from vlmpack.data.files.record import Place, Record
from vlmpack.data.files.samples import raw_sample
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.data.shards.samples import RawSample, cook
from vlmpack.encode import VLMSample
from vlmpack.errors import DataError
from vlmpack.storage.fetch import LocalFetcher, ShardStamp

EXAMPLES = sorted((ROOT / "docs/examples/data").glob("*.jsonl"))
STAMP = ShardStamp("records.jsonl", 1, "1")


def raw_of(value: dict[str, Any], form: RecordForm, folder: Path) -> RawSample:
    images = ImageRoot(str(folder), SampleCaps(), LocalFetcher())
    return raw_sample(Record(Place(0, 0, 1, 0), value), STAMP, form, images)


def cooked(raw: RawSample) -> VLMSample | str:
    try:
        return cook(raw)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_of_every_layout(path: Path) -> None:
    values = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    form = find_form(values, None, path.name)
    raws = [raw_of(value, form, path.parent) for value in values]
    assert all(raw.fault is None for raw in raws)
    assert all((raw.said is None) == (path.stem == "preference") for raw in raws)
    assert [cook(raw) for raw in raws] == [cook(replace(raw, said=None)) for raw in raws]


def _records() -> Iterator[dict[str, Any]]:
    for case in cases(num_mixed=300):
        yield case.record


@pytest.mark.slow
def test_every_key_of_a_record(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / image_name(number)).write_bytes(image_bytes(28, 28, seed=number))
    form = RecordForm("messages")
    raws = [raw_of(value, form, tmp_path) for value in _records()]
    said = [raw for raw in raws if raw.said is not None]
    assert len(said) > len(raws) / 4 > 50
    for raw in said:
        assert cooked(raw) == cooked(replace(raw, said=None))
    assert any(isinstance(cooked(raw), VLMSample) for raw in said)
    changed = replace(said[0], said=replace(said[0].said, messages=said[0].said.messages[:-1]))
    assert cooked(changed) != cooked(said[0]), "what was said is not looked at"
