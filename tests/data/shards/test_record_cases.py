"""Whatever a record has is trained as documented or refused by name; nothing is lost in silence.

Every layout with every key (record_cases.py) goes through shards read directly, `lint` and
`convert`. What is trained is compared with the documented turns, encoded from messages made by
hand.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.record_cases import (
    LAYOUTS,
    Case,
    Outcome,
    Reader,
    cases,
    image_name,
    matches,
    mixed_cases,
)
from support.shard_fakes import image_bytes, write_shard

from vlmpack.convert import ConvertReport, ConvertSettings, convert, open_records
from vlmpack.convert.convert import sample_fields
from vlmpack.data.files.images import ImageRoot
from vlmpack.data.files.records import Record
from vlmpack.data.index.shard_index import IndexBuilder
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.data.shards.samples import cook, cook_text, group_members
from vlmpack.data.shards.tar import read_members
from vlmpack.data.tools.lint import LintOne, LintReport
from vlmpack.encode import Encoder, ImagePart, Message, TextPart, VLMSample
from vlmpack.encode.sample import SampleLength
from vlmpack.errors import DataError
from vlmpack.packing import IGNORE_INDEX, EncodedSample
from vlmpack.storage.fetch import LocalFetcher
from vlmpack.storage.sources import FoundShard

SIZES = [(28, 28), (56, 28), (84, 56)]
"""Of the images; each costs another number of tokens, so that their order shows."""
IMAGES = [image_bytes(*size, seed=n) for n, size in enumerate(SIZES)]
CAPS = SampleCaps()


class EachOnce:
    """An encoder that encodes equal conversations once: most of the cases are told as one."""

    def __init__(self, encoder: Encoder) -> None:
        self.tokenizer = encoder.tokenizer
        self.fingerprint = encoder.fingerprint
        self.each_answer = encoder.each_answer
        self.doubt = encoder.doubt
        self._encode, self._length = cache(encoder.encode), cache(encoder.length)

    def encode(self, sample: VLMSample, sizes: None = None) -> EncodedSample:
        return self._encode(replace(sample, key="", url="", task=None))

    def length(self, sample: VLMSample, sizes: Sequence[tuple[int, int]]) -> SampleLength:
        return self._length(replace(sample, key="", url="", task=None), tuple(sizes))


@pytest.fixture(scope="module")
def each_once(encoder: Encoder) -> EachOnce:
    return EachOnce(encoder)


@pytest.fixture(scope="module")
def every_case() -> list[Case]:
    found = list(cases(num_mixed=300))
    plain = Counter(case.layout.name for case in found)
    assert len(plain) == len(LAYOUTS) and min(plain.values()) > 100, plain
    return found


@dataclass
class Seen:
    """What a reader made of a record: the sample, or why it refused it; and the keys it named."""

    sample: VLMSample | None = None
    reason: str = ""
    unknown: tuple[str, ...] = ()


def samples_of(path: Path) -> dict[str, VLMSample]:
    """What training reads of a shard, but for the samples that the index calls bad."""
    fetcher = LocalFetcher()
    rows = {row.key: row for row in IndexBuilder(fetcher, CAPS).scan(fetcher.head(str(path)))}
    with path.open("rb") as stream:
        members = read_members(
            stream, path.stat().st_size, shard=str(path), max_member_bytes=CAPS.max_member_bytes
        )
        raws = list(group_members(members, shard=str(path), caps=CAPS))
        return {raw.key: cook(raw) for raw in raws if rows[raw.key].reason is None}


@pytest.fixture(scope="module")
def shard(every_case: list[Case], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("direct")
    return write_shard(
        folder / "s.tar",
        (
            (
                f"{number:05d}",
                {"json": json.dumps(case.record).encode()}
                | {image_name(member): IMAGES[member] for member in case.members},
            )
            for number, case in enumerate(every_case)
        ),
    )


@pytest.fixture(scope="module")
def direct(every_case: list[Case], shard: Path) -> list[Seen]:
    fetcher = LocalFetcher()
    rows = IndexBuilder(fetcher, CAPS).scan(fetcher.head(str(shard)))
    samples = samples_of(shard)
    assert [row.key for row in rows] == [f"{n:05d}" for n in range(len(every_case))]
    return [Seen(samples.get(row.key), row.reason or "", row.unknown_keys) for row in rows]


@pytest.fixture(scope="module")
def converted(every_case: list[Case], tmp_path_factory: pytest.TempPathFactory) -> ConvertReport:
    folder = tmp_path_factory.mktemp("convert")
    for number, data in enumerate(IMAGES):
        (folder / image_name(number)).write_bytes(data)
    source = folder / "records.jsonl"
    source.write_text("\n".join(json.dumps(case.record) for case in every_case))
    settings = ConvertSettings(
        folder=folder / "out", image_root=folder, index_dir=folder / "index", skip_bad=True
    )
    report = convert(open_records(source), settings)
    assert report.records == len(every_case) and len(report.shards) == 1
    report_folder[id(report)] = folder / "out" / report.shards[0].name
    return report


report_folder: dict[int, Path] = {}


@pytest.fixture(scope="module")
def from_convert(every_case: list[Case], converted: ConvertReport) -> list[Seen]:
    """By the record's number; a record that was left out is listed with its line."""
    samples = samples_of(report_folder[id(converted)])
    reasons = {
        int(re.search(r"line (\d+)$", item.place)[1]) - 1: item.reason  # type: ignore[index]
        for item in converted.skipped
    }
    return [
        Seen(samples.get(f"{number:09d}"), reasons.get(number, ""))
        for number in range(len(every_case))
    ]


def made_by_hand(outcome: Outcome) -> VLMSample:
    """The documented turns."""
    numbers = [piece for turn in outcome.turns for piece in turn.pieces if isinstance(piece, int)]
    places = iter(range(len(numbers)))
    messages = tuple(
        Message(
            turn.role,  # type: ignore[arg-type]
            tuple(
                TextPart(piece) if isinstance(piece, str) else ImagePart(next(places))
                for piece in turn.pieces
            ),
            turn.learn,
        )
        for turn in outcome.turns
    )
    images = tuple(IMAGES[number] for number in numbers)
    return VLMSample(key="by hand", url="", messages=messages, images=images)


def difference(encoder: EachOnce, seen: Seen, outcome: Outcome) -> str:
    """What is wrong with what a reader made of a record; nothing where it is as documented."""
    if outcome.refused:
        if seen.sample is not None:
            return f"was trained; expected a refusal with {outcome.refused}"
        return "" if matches(outcome, seen.reason) else f"refused by {seen.reason!r}"
    if seen.sample is None:
        return f"was refused by {seen.reason!r}; expected to be trained"
    wanted, found = encoder.encode(made_by_hand(outcome)), encoder.encode(seen.sample)
    same = [
        torch.equal(getattr(found, name), getattr(wanted, name))
        for name in ("input_ids", "labels", "position_ids", "media_positions")
    ]
    if (found.media is None) != (wanted.media is None):
        return "images are lost"
    if found.media is not None and wanted.media is not None:
        same.append(torch.equal(found.media.pixel_values, wanted.media.pixel_values))
    if not all(same):
        return f"ids, labels, positions, images: {same}"
    answers = [
        f"{turn.pieces[0]}<|im_end|>"
        for turn in outcome.turns
        if turn.role == "assistant" and turn.learn
    ]
    learnt = encoder.tokenizer.decode(found.labels[found.labels != IGNORE_INDEX])
    return "" if learnt == "".join(answers) else f"learnt {learnt!r}"


def check(
    encoder: EachOnce, every_case: list[Case], seen: list[Seen], reader: Reader
) -> tuple[int, int]:
    """Records trained and refused, all as documented."""
    wrong, refused = [], 0
    for case, one in zip(every_case, seen, strict=True):
        outcome = case.outcomes[reader]
        refused += bool(outcome.refused)
        if why := difference(encoder, one, outcome):
            wrong.append(f"{case.name}: {why}")
    assert not wrong, f"{len(wrong)} of {len(seen)}: " + "\n".join(wrong[:10])
    return len(seen) - refused, refused


@pytest.mark.slow
def test_shards_read_directly(
    each_once: EachOnce, every_case: list[Case], direct: list[Seen]
) -> None:
    trained, refused = check(each_once, every_case, direct, "direct")
    assert trained > 500 and refused > 500
    for case, seen in zip(every_case, direct, strict=True):
        if seen.sample is not None:
            assert list(seen.unknown) == sorted(case.outcomes["direct"].unknown), case.name


@pytest.mark.slow
def test_convert(
    each_once: EachOnce,
    every_case: list[Case],
    from_convert: list[Seen],
    converted: ConvertReport,
) -> None:
    trained, refused = check(each_once, every_case, from_convert, "convert")
    assert trained > 500 and refused > 500
    named = Counter(
        key
        for case, seen in zip(every_case, from_convert, strict=True)
        if seen.sample is not None
        for key in case.outcomes["convert"].unknown
    )
    assert named and converted.unknown_keys == named


@pytest.mark.slow
def test_rows_of_a_table_are_records(
    each_once: EachOnce, every_case: list[Case], tmp_path: Path
) -> None:
    """Arrow gives each turn the keys of all, with nulls: these are no keys."""
    for number, data in enumerate(IMAGES):
        (tmp_path / image_name(number)).write_bytes(data)
    chosen = [case for case in every_case if case.layout.part is None][::7]
    seen, kept, filled = [], [], 0
    for number, case in enumerate(chosen):
        try:
            table = pa.Table.from_pylist([case.record])
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            continue  # a column of two types
        [row] = table.to_pylist()
        filled += row[case.layout.schema] != case.record[case.layout.schema]
        source = tmp_path / f"{number}.parquet"
        pq.write_table(table, source)
        [record] = open_records(source)
        try:
            fields, _ = sample_fields(record, 0, ImageRoot(str(tmp_path), CAPS))
        except DataError as error:
            one = Seen(None, error.reason)
        else:
            one = seen_of(fields.pop("json"), fields)
        seen.append(one)
        kept.append(case)
    trained, refused = check(each_once, kept, seen, "convert")
    assert min(trained, refused, filled) > 30


@pytest.mark.soak
def test_many_keys_at_once(each_once: EachOnce, tmp_path: Path) -> None:
    for number, data in enumerate(IMAGES):
        (tmp_path / image_name(number)).write_bytes(data)
    chosen = list(mixed_cases(20_000, most=6, seed=1))
    root, direct, from_convert = ImageRoot(str(tmp_path), CAPS), [], []
    for case in chosen:
        members = {image_name(member): IMAGES[member] for member in case.members}
        direct.append(seen_of(json.dumps(case.record).encode(), members))
        try:
            fields, _ = sample_fields(Record("here", case.record), 0, root)
        except DataError as error:
            from_convert.append(Seen(None, error.reason))
        else:
            from_convert.append(seen_of(fields.pop("json"), fields))
    for found in (
        check(each_once, chosen, direct, "direct"),
        check(each_once, chosen, from_convert, "convert"),
    ):
        assert min(found) > 2000, "trained, refused"


def seen_of(document: bytes, members: dict[str, bytes]) -> Seen:
    """What training makes of a sample's members."""
    try:
        text = cook_text("k", "s", document, ("json", *members))
    except DataError as error:
        return Seen(None, error.reason)
    images = tuple(members[name] for name in text.image_fields)
    return Seen(replace(text.sample, images=images))


@pytest.mark.slow
def test_lint_finds_what_is_refused_and_nothing_else(
    each_once: EachOnce, every_case: list[Case], direct: list[Seen], shard: Path
) -> None:
    report: LintReport = LintOne(LocalFetcher(), CAPS, each_once)(FoundShard(str(shard)))
    found = {str(item.key): item.reason for item in report.findings}
    expected = {f"{n:05d}": seen.reason for n, seen in enumerate(direct) if seen.sample is None}
    assert found == expected and report.samples == len(every_case)
    assert set(report.unknown_keys) >= {"source", "label", "Notes", "meta"}


@pytest.mark.cases(quick="order", slow="record")
@pytest.mark.parametrize("broken", ["turn", "part", "record", "flag", "order"])
def test_a_reader_that_leaves_something_out_is_caught(
    each_once: EachOnce, every_case: list[Case], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative controls of this suite."""
    module = "vlmpack.data.shards.turns"
    replacements: dict[str, tuple[str, Any]] = {
        "turn": ("refuse_foreign", lambda turn, schema, where: None),
        "part": ("refuse_unknown", lambda item, known, where: None),
        "record": ("unknown_record_keys", lambda record: ()),
        "flag": ("is_learnt", lambda turn, role, where: True),
        "order": ("named_images", lambda record: []),
    }
    name, substitute = replacements[broken]
    monkeypatch.setattr(f"{module}.{name}", substitute)
    wrong = 0
    for case in every_case:
        members = {image_name(member): IMAGES[member] for member in case.members}
        seen = seen_of(json.dumps(case.record).encode(), members)
        wrong += bool(difference(each_once, seen, case.outcomes["direct"]))
    assert wrong > 5
