"""Keys of records that are not read and mean nothing that we know: counted, named, or refused."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.shard_fakes import chat_json, key_of, open_data, write_shard
from typer.testing import CliRunner

from vlmpack.cli.app import app
from vlmpack.data.columns.chat import chat_turns
from vlmpack.data.files.records import open_records
from vlmpack.data.index.parts import read_part, write_part
from vlmpack.data.shards.naming import MAX_KEYS, OTHER_KEYS, count_keys, describe_keys
from vlmpack.data.shards.samples import cook_text
from vlmpack.data.splits.summary import name_unknown_keys
from vlmpack.errors import DataError
from vlmpack.recipe.schema import PackingSection
from vlmpack.run.splits import log_data

COUNT, PER_SHARD = 24, 4
LATE_SEED = 3
"""An order that comes to the last shard last."""


def extra_keys(number: int) -> dict[str, Any]:
    """What a record has beside its turns; one key comes late, one is never there."""
    found: dict[str, Any] = {"source": "web", "empty": None}
    if number % 3 == 0:
        found["tasks"] = "S"
    if number >= COUNT - PER_SHARD:
        found["late\u202e\x1b"] = number
    return found


def record(number: int) -> dict[str, Any]:
    return json.loads(chat_json(f"q{number}", f"a{number}")) | extra_keys(number)


EXPECTED = Counter(
    key for n in range(COUNT) for key, value in extra_keys(n).items() if value is not None
)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    assert set(EXPECTED) == {"source", "tasks", "late\u202e\x1b"}, "the reference counts too little"
    for shard in range(COUNT // PER_SHARD):
        numbers = range(shard * PER_SHARD, (shard + 1) * PER_SHARD)
        samples = ((key_of(n), {"json": json.dumps(record(n)).encode()}) for n in numbers)
        write_shard(tmp_path / f"s-{shard:04d}.tar", samples)
    return tmp_path


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "unknown keys" in text]


def launch_lines(summary: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    facts = PackingSection(mode="none").facts
    config: Any = SimpleNamespace(
        mode=SimpleNamespace(name="none", facts=facts),
        training=SimpleNamespace(global_batch_size=1),
    )
    with caplog.at_level(logging.INFO, "vlmpack"):
        log_data(config, summary)
        name_unknown_keys(dict.fromkeys(("data.train", "data.test"), summary.unknown_keys))
    return logged(caplog)


def test_a_launch_names_them_once_with_their_counts(
    shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # the second from the index
        data = open_data(str(shards / "s-*.tar"), shards / "i")
        assert data.summary().unknown_keys == EXPECTED
        caplog.clear()
        [line] = launch_lines(data.summary(), caplog)
        assert " in data.train and data.test: " in line
        assert "'source' (24 records), 'tasks' (8 records; did you mean 'task'?), " in line
        assert r"'late\u202e\x1b' (4 records)" in line and line.isprintable()


@pytest.mark.usefixtures("small_windows")
def test_keys_of_later_shards_are_named_when_they_come(
    shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = open_data(str(shards / "s-*.tar"), shards / "i", shuffle="window", seed=LATE_SEED)
    first = launch_lines(data.summary(), caplog)
    assert "late" not in str(first), "the late key came with the first window: another seed"
    assert len(first) == 1 and "'source'" in first[0]
    caplog.clear()
    with caplog.at_level(logging.INFO, "vlmpack"):
        list(data.batches(data.start(), rank=0, dp=1, max_steps=6))
    [line] = logged(caplog)
    assert "first met in" in line and "'late" in line and "'source'" not in line
    assert data.fitted.table.unknown_keys == EXPECTED


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_refusing_stops_before_anything_is_trained(shards: Path, shuffle: str) -> None:
    with pytest.raises(DataError, match=r"keys that are not read: 'source' \(\d+ rec.*report"):
        open_data(str(shards / "s-*.tar"), shards / "i", shuffle=shuffle, unknown_keys="refuse")


def test_an_index_part_without_counts_is_made_again(shards: Path) -> None:
    pattern = str(shards / "s-0000.tar")
    open_data(pattern, shards / "i")
    [part] = (shards / "i").glob("*.index.part")
    table = read_part(str(part))
    assert table is not None
    kept = {k: v for k, v in table.schema.metadata.items() if k != b"vlmpack.unknown_keys"}
    assert len(kept) < len(table.schema.metadata)
    write_part(str(part), table, kept)
    assert open_data(pattern, shards / "i").summary().unknown_keys == {"source": 4, "tasks": 2}


def test_index_and_lint_name_them(shards: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments, "--processes", "1"])

    pattern = str(shards / "s-*.tar")
    indexed = run("index", pattern, "--index-dir", str(shards / "i"))
    assert indexed.exit_code == 0
    assert "'source' (24 records), 'tasks'" in " ".join(indexed.output.split())
    linted = run("data", "lint", pattern)
    assert linted.exit_code == 0 and "no fault" in linted.output
    assert "keys of records that are not read: 'source' (24 records), 'tasks' (8" in linted.output
    as_json = json.loads(run("data", "lint", pattern, "--json").stdout)
    assert as_json["unknown_keys"] == EXPECTED and as_json["findings"] == []


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_convert_names_them(tmp_path: Path, form: str) -> None:
    """A table's other columns are counted by rows: they are not looked at."""
    source = tmp_path / f"chat.{form}"
    records = [record(n) | {"column": [n]} for n in range(COUNT)]
    if form == "jsonl":
        source.write_text("\n".join(map(json.dumps, records)))
    else:
        for row in records:
            row["messages"] = [{"role": m["role"], "content": "Q"} for m in row["messages"]]
        names = list(records[-1] | records[0])
        table = pa.table({name: [row.get(name) for row in records] for name in names})
        pq.write_table(table, source)
    out = tmp_path / "out" / "train"
    options = ["data", "convert", str(source), str(out), "--index-dir", str(tmp_path / "i")]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert "keys of records that were not read: 'column' (24 records)" in result.output
    found = json.loads(out.with_name("train-manifest.json").read_text())["unknown_keys"]
    if form == "jsonl":
        assert found == EXPECTED | {"column": COUNT}
    else:
        assert found == dict.fromkeys(("column", "empty", "source", *EXPECTED), COUNT)


def test_a_thousand_names_are_counted_and_a_few_are_shown() -> None:
    tables = [{f"k{n}": 1, "often": 1} for n in range(1000)] + [{"x" * 1000: 1}]
    found = count_keys([count_keys(tables[:500]), count_keys(tables[500:])])
    assert sum(found.values()) == 2001 and found["often"] == 1000
    assert len(found) <= MAX_KEYS + 1 and next(iter(found)) == "often" and OTHER_KEYS in found
    assert all(len(key) <= 60 for key in found)
    text = describe_keys(found)
    assert text.startswith("'often' (1,000 records), ") and text.endswith(" more")
    assert len(text) < 600


def refused_by_both(document: dict[str, Any], *members: str) -> set[str]:
    """Why shards read directly and `convert` refuse a record."""
    with pytest.raises(DataError) as direct:
        cook_text("k", "s", json.dumps(document).encode(), ("json", *members))
    with pytest.raises(DataError) as converted:
        chat_turns(document)
    assert {direct.value.error_class, converted.value.error_class} == {"schema"}
    return {direct.value.reason, converted.value.reason}


CHAT = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
LLAVA = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]


def renamed(turns: list[dict[str, str]], old: str, new: str) -> list[dict[str, str]]:
    """With a key of the last turn under another name."""
    last = {new if key == old else key: value for key, value in turns[-1].items()}
    return [*turns[:-1], last]


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (
            {"messages": renamed(CHAT, "role", "rol")},
            "messages[1] has the key 'rol', which would be lost: did you mean 'role'?",
        ),
        (
            {"conversations": renamed(LLAVA, "from", "form")},
            "conversations[1] has the key 'form', which would be lost: did you mean 'from'?",
        ),
        (
            {"messages": renamed(CHAT, "content", "contents")},
            "messages[1] has the key 'contents', which would be lost: did you mean 'content'?",
        ),
        (
            {"messages": LLAVA},
            "messages[0] has the keys 'from' and 'value': these are turns of 'conversations'; "
            "rename the record's key 'messages'",
        ),
        (
            {"conversations": [turn | {"from": None, "value": None} for turn in CHAT]},
            "conversations[0] has the keys 'role' and 'content': these are turns of 'messages'; "
            "rename the record's key 'conversations'",
        ),
        (
            {"messages": [{"content": "Q"}]},
            "messages[0] has no key 'role'; found 'content'",
        ),
        ({"messages": [{}]}, "messages[0] has no key 'role'; found nothing"),
    ],
)
def test_the_keys_of_a_turn_are_looked_at_before_its_role(
    document: dict[str, Any], reason: str
) -> None:
    assert refused_by_both(document) == {reason}


MISSPELT = {
    "image": ("imgae", "iamge", "imge", "imag", "Image", "image_"),
    "images": ("imgaes", "imges", "IMAGES"),
    "messages": ("mesages", "message", "messagse"),
    "conversations": ("conversation", "converations", "Conversations"),
    "system": ("systm", "sytem", "systems"),
    "tools": ("tool", "Tools", "tolls"),
    "chat_template_kwargs": ("chat_template_kwarg", "chat_templte_kwargs"),
}
HARMLESS = (
    *("image_id", "image_size", "image_path", "imageid", "image_w", "img_width", "img_height"),
    *("num_images", "n_images", "imagery", "manage", "page", "message_id", "message_count"),
    *("conversation_id", "system_id", "source", "usage", "stage", "items", "x" * 1000),
)


@pytest.mark.parametrize("schema", ["messages", "conversations"])
def test_a_slip_in_a_key_that_holds_the_sample_is_refused(schema: str) -> None:
    """It was counted, and what it holds was left out: an image's record trained its text alone."""
    turns = {"messages": CHAT, "conversations": LLAVA}[schema]
    for meant, keys in MISSPELT.items():
        for key in keys:
            for document in ({schema: turns, key: "0.jpg"}, {key: turns}):
                [reason] = refused_by_both(document)
                expected = f"the record has the key '{key}', which would be lost: did you mean "
                assert reason.startswith(f"{expected}'{meant}'?")


@pytest.mark.parametrize("value", ["0.jpg", None])
def test_a_column_with_a_slip_in_its_name_is_looked_at(tmp_path: Path, value: str | None) -> None:
    """A table's other columns are not; nulls in such a one are none."""
    source = tmp_path / "chat.parquet"
    pq.write_table(pa.table({"messages": [CHAT], "imgae": [value], "image_id": ["7"]}), source)
    [record] = open_records(source)
    assert record.value is not None and record.unused == ("image_id",)
    if value is None:
        assert chat_turns(record.value).unknown_keys == ()
        return
    with pytest.raises(DataError, match=r"the key 'imgae', .* did you mean 'image'\?"):
        chat_turns(record.value)


def test_keys_that_are_merely_alike_are_counted() -> None:
    document = {"messages": CHAT, "id": "1", "imgae": None} | dict.fromkeys(HARMLESS, "v")
    expected = tuple(sorted(HARMLESS))
    encoded = json.dumps(document).encode()
    assert cook_text("k", "s", encoded, ("json",)).unknown_keys == expected
    assert chat_turns(document).unknown_keys == expected
    assert "did you mean" not in describe_keys(dict.fromkeys(HARMLESS, 1))
