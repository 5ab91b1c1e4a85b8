"""`vlmpack data lint`: every kind of fault is a line, sound shards have none."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.pairs import raw_pairs, write_pairs
from support.recipes import run_settings, write_recipe
from support.shard_fakes import (
    FakeEncoder,
    chat_json,
    image_bytes,
    key_of,
    sample_fields,
    write_shard,
)
from support.shards import TINY_MODEL
from typer.testing import CliRunner

from vlmpack.cli.app import app
from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.index.shard_index import IndexBuilder, open_index
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.data.tools.lint import LintOne, LintReport
from vlmpack.storage.fetch import LocalFetcher
from vlmpack.storage.sources import FoundShard


def lint(path: Path, encoder: Any = None) -> LintReport:
    return LintOne(LocalFetcher(), SampleCaps(), encoder)(FoundShard(str(path)))


def test_sound_shards_have_no_finding(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "s.tar", ((key_of(n), sample_fields(n)) for n in range(7)))
    report = lint(path, FakeEncoder())
    assert report.findings == ()
    assert (report.samples, report.images) == (7, sum(n % 3 for n in range(7)))


def _truncated(seed: int) -> bytes:
    data = image_bytes(40, 40, seed=seed, kind="JPEG")
    return data[: len(data) // 2]


FAULTS = {
    "cut": (
        {"json": chat_json("q", "a", 1), "0.jpg": _truncated(1)},
        "decode",
        "image 0 ('0.jpg') cannot",
    ),
    "header": ({"json": chat_json("q", "a", 1), "0.jpg": b"\xff\xd8no"}, "decode", "no readable"),
    "pickle": ({"json": chat_json("q", "a"), "pkl": b"x"}, "integrity", "may hold a pickle"),
    "nojson": ({"0.png": image_bytes(4, 4)}, "integrity", "no '.json' member"),
    "schema": ({"json": b'{"text": 1}'}, "schema", "expected exactly one of 'messages'"),
    "count": ({"json": chat_json("q", "a", 2), "0.png": image_bytes(4, 4)}, "schema", "2 image"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_sample_is_one_finding(tmp_path: Path, name: str) -> None:
    fields, kind, reason = FAULTS[name]
    samples = [("a", sample_fields(1)), ("bad", fields), ("z", sample_fields(2))]
    report = lint(write_shard(tmp_path / "s.tar", samples))
    (finding,) = report.findings
    assert (finding.key, finding.error_class, report.samples) == ("bad", kind, 3)
    assert reason in finding.reason and finding.offset and finding.offset % 512 == 0


def test_what_only_the_encoder_sees(tmp_path: Path) -> None:
    samples = [(key_of(n), sample_fields(n)) for n in range(6)]
    path = write_shard(tmp_path / "s.tar", samples)
    assert lint(path).findings == ()
    encoder = FakeEncoder(refuse=frozenset({"q2 "}), wrong=frozenset({"q5 "}))
    found = lint(path, encoder).findings
    assert [(item.key, item.error_class) for item in found] == [
        (key_of(2), "schema"),
        (key_of(5), "integrity"),
    ]


def test_repeated_keys_and_a_cut_shard(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    write_shard(path, [("a", sample_fields(0)), ("b", sample_fields(1)), ("a", sample_fields(3))])
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    data = path.read_bytes()
    assert [item.key for item in lint(path).findings] == ["a", "a"]
    path.write_bytes(data[: last.offset_data])
    found = lint(path).findings
    assert [item.key for item in found][-1] is None
    assert "the shard ends inside" in found[-1].reason


def test_the_command_prints_lines_or_json_and_fails(tmp_path: Path) -> None:
    good = write_shard(tmp_path / "a.tar", [("x", sample_fields(1))])
    bad = write_shard(tmp_path / "b.tar", [("y", FAULTS["cut"][0])])
    run = CliRunner().invoke
    clean = run(app, ["data", "lint", str(good), "--processes", "1"])
    assert clean.exit_code == 0 and "no fault" in clean.output
    shown = run(app, ["data", "lint", str(good), str(bad), "--processes", "1"])
    assert shown.exit_code == 1
    (line,) = shown.stdout.splitlines()
    assert line.startswith("1 decode: image 0 (") and line.endswith(f" ({bad}, key y, byte 0)")
    told = run(app, ["data", "lint", str(good), str(bad), "--processes", "1", "--json"])
    summary = json.loads(told.stdout)
    assert told.exit_code == 1 and summary["by_class"] == {"decode": 1}
    assert (summary["shards"], summary["samples"]) == (2, 2)
    assert summary["findings"][0]["key"] == "y"
    with Image.open(io.BytesIO(FAULTS["cut"][0]["0.jpg"])) as image:
        assert image.size == (40, 40), "the header alone would have passed"


def test_faults_of_one_reason_are_one_line_with_a_count_and_an_example(tmp_path: Path) -> None:
    def record(question: str, **keys: Any) -> str:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "a"}]
        return json.dumps({"messages": turns} | keys)

    lost = [record(f"<image>q{n}", images=[f"{['cat', 'dog'][n % 2]}{n}.png"]) for n in range(40)]
    odd = [record("q").replace("user", f"user{n}") for n in range(7)]
    alone = [record("q", messages=[{"role": "user", "content": "q"}])]
    sound = [record("q")] * 5
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    files[0].write_text("\n".join([*odd[:3], *lost[:20], *sound]))
    files[1].write_text("\n".join([*alone, *lost[20:], *odd[3:]]))
    args = ["data", "lint", *map(str, files), "--processes", "1"]
    lines = CliRunner().invoke(app, args).stdout.splitlines()
    heads = ["40 integrity: the image 'cat0.png'", "7 schema: messages[0] has the role 'user0'"]
    assert [line[: len(head)] for line, head in zip(lines, heads, strict=False)] == heads
    assert lines[0].endswith(
        f"(first: {files[0]}, key 000000003, byte {sum(map(len, odd[:3])) + 3})"
    )
    assert len(lines) == 3 and lines[2].startswith("1 schema: ")
    assert lines[2].endswith(f" ({files[1]}, key 000000000, byte 0)")
    told = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    assert len(told["findings"]) == 48, "JSON has each"


def index_made(path: Path, folder: Path) -> None:
    builder = IndexBuilder(LocalFetcher(), SampleCaps())
    open_index([str(path)], builder, BuildSettings(directory=folder))


def changed_in_place(path: Path, data: bytes) -> None:
    """Other bytes under the same size and time stamp."""
    before = path.stat()
    assert len(data) == before.st_size and data != path.read_bytes()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_bytes_that_changed_after_they_were_indexed_are_found(tmp_path: Path) -> None:
    """Training skips such a sample, and lint called its shard sound."""
    path = write_shard(tmp_path / "s.tar", ((key_of(n), sample_fields(n)) for n in range(6)))
    folder = tmp_path / "i"
    compared = LintOne(LocalFetcher(), SampleCaps(), index_dir=folder)
    assert compared(FoundShard(str(path))).findings == ()
    assert not folder.exists(), "an index was made"
    index_made(path, folder)
    assert compared(FoundShard(str(path))).findings == ()
    changed_in_place(path, path.read_bytes().replace(b"q2 ", b"Q2 "))
    assert lint(path).findings == (), "not a sound shard, or no change that only the index shows"
    (finding,) = compared(FoundShard(str(path))).findings
    assert (finding.key, finding.error_class) == (key_of(2), "integrity")
    assert "bytes changed after they were indexed; restore the shard, or touch" in finding.reason
    run = CliRunner().invoke
    options = ["data", "lint", str(path), "--processes", "1", "--index-dir"]
    assert run(app, [*options, str(folder)]).exit_code == 1
    assert run(app, [*options, str(tmp_path / "none")]).exit_code == 0
    os.utime(path)
    assert compared(FoundShard(str(path))).findings == (), "it is to be indexed anew"


def test_a_shard_of_other_samples_than_its_index_is_one_finding(tmp_path: Path) -> None:
    samples = [(key_of(n), sample_fields(n)) for n in range(6)]
    path = write_shard(tmp_path / "s.tar", samples)
    index_made(path, tmp_path / "i")
    other = write_shard(tmp_path / "t.tar", [*samples[:5], ("00007", samples[5][1])])
    changed_in_place(path, other.read_bytes())
    report = LintOne(LocalFetcher(), SampleCaps(), index_dir=tmp_path / "i")(FoundShard(str(path)))
    (finding,) = report.findings
    assert (finding.key, finding.error_class) == (None, "integrity")
    assert "6 samples are not the 6 of its index part" in finding.reason


@pytest.mark.parametrize("objective", [None, "dpo", "sft"])
def test_pairs_are_faults_of_a_recipe_that_trains_none(
    tmp_path: Path, objective: str | None
) -> None:
    shard = write_pairs(tmp_path / "p.tar", raw_pairs())
    args = ["--model", str(TINY_MODEL), str(shard)]
    if objective is not None:
        settings = run_settings(
            tmp_path, data__train=str(shard), data__validation=None, data__test=None
        )
        settings["objective"] = {"name": objective}
        args = ["--recipe", str(write_recipe(tmp_path / "r.yaml", settings))]
    done = CliRunner().invoke(app, ["data", "lint", *args, "--processes", "1", "--json"])
    found = json.loads(done.stdout)
    assert found["samples"] == len(raw_pairs())
    assert len(found["findings"]) == (len(raw_pairs()) if objective == "sft" else 0), found


def test_a_conversation_among_pairs_is_a_finding_and_among_test_questions_none(
    tmp_path: Path,
) -> None:
    """Which split a shard is of says what its records must be."""
    pairs = write_pairs(tmp_path / "pairs.tar", raw_pairs())
    plain, questions = (
        write_shard(tmp_path / f"{name}.tar", [(name, {"json": chat_json("q", "a")})])
        for name in ("plain", "questions")
    )
    settings = run_settings(
        tmp_path,
        data__train=[str(pairs), str(plain)],
        data__validation=None,
        data__test=str(questions),
        objective__name="dpo",
    )
    recipe = write_recipe(tmp_path / "r.yaml", settings)
    args = ["data", "lint", "--recipe", str(recipe), "--processes", "1", "--json"]
    found = json.loads(CliRunner().invoke(app, args).stdout)
    assert found["samples"] == len(raw_pairs()) + 2
    [finding] = found["findings"]
    assert (finding["key"], finding["error_class"]) == ("plain", "schema")
    assert "objective.name: dpo learns from pairs" in finding["reason"]


def command(*args: str) -> Any:
    return CliRunner().invoke(app, ["data", "lint", *args, "--processes", "1"])


@pytest.fixture
def both_forms(tmp_path: Path) -> tuple[str, str]:
    """A shard of pairs, and one with a conversation."""
    pairs = write_pairs(tmp_path / "pairs.tar", raw_pairs())
    plain = write_shard(tmp_path / "plain.tar", [("plain", {"json": chat_json("q", "a")})])
    return str(pairs), str(plain)


@pytest.mark.parametrize(
    "model", [(), pytest.param(("--model", str(TINY_MODEL)), marks=pytest.mark.slow)]
)
def test_shards_without_a_recipe_are_held_to_the_objective_that_is_named(
    both_forms: tuple[str, str], model: tuple[str, ...]
) -> None:
    """With a model or without; where nobody says what they are for, that is said."""
    pairs = len(raw_pairs())
    told = command(*both_forms, *model)
    assert told.exit_code == 0
    assert f"{pairs} of {pairs + 1} samples are pairs of answers (for DPO); --obj" in told.output
    assert "pairs" not in command(both_forms[1], *model).output, "there are none"
    told = command(*both_forms, *model, "--objective", "dpo", "--json")
    found = json.loads(told.stdout)
    assert told.exit_code == 1
    [finding] = found["findings"]
    assert (finding["key"], finding["error_class"]) == ("plain", "schema")
    assert "the record has no 'chosen' and no 'rejected' answer" in finding["reason"]
    assert found["pairs"] == pairs
    found = json.loads(command(*both_forms, *model, "--objective", "sft", "--json").stdout)
    assert len(found["findings"]) == pairs
    assert all("the record is a pair" in finding["reason"] for finding in found["findings"])
    assert found["pairs"] == 0
    told = command(both_forms[0], *model, "--objective", "dpo")
    assert told.exit_code == 0 and "refuses them" not in told.output


@pytest.mark.parametrize("over_long", ["error", "drop"])
def test_a_sample_too_long_for_the_recipe_is_a_fault_where_the_run_would_stop(
    tmp_path: Path, over_long: str
) -> None:
    shard = write_shard(
        tmp_path / "s.tar",
        [("short", {"json": chat_json("q", "a")}), ("long", {"json": chat_json("q " * 600, "a")})],
    )
    settings = run_settings(
        tmp_path,
        data__train=str(shard),
        data__validation=None,
        data__test=None,
        data__over_long=over_long,
    )
    told = command("--recipe", str(write_recipe(tmp_path / "r.yaml", settings)))
    if over_long == "error":
        assert told.exit_code == 1 and told.stdout.startswith("1 too_long: ")
        limit = "tokens; training.seq_length is 512 (data.over_long: error stops the run) ("
        assert limit in told.stdout
    else:
        assert told.exit_code == 0 and "1 sample too long for a run; data.over_long" in told.output
    assert command(str(shard), "--model", str(TINY_MODEL)).exit_code == 0, "no recipe, no limit"


def test_each_split_is_held_to_what_a_run_holds_it_to(tmp_path: Path) -> None:
    """Patches of what is trained, tokens of what is validated, nothing of what is not opened."""
    image = {"json": chat_json("q", "a", 1), "jpg": image_bytes(84, 84)}
    long = {"json": chat_json("q " * 600, "a")}
    shards = {
        name: str(write_shard(tmp_path / f"{name}.tar", samples))
        for name, samples in (("images", [("i", image)]), ("long", [("l", long)]))
    }
    bounds = {"packing__max_vision_patches": 4, "data__over_long": "error"}
    rows = bounds | {"packing__mode": "online", "training__micro_batch_size": 1}
    splits = {"data__train": shards["images"], "data__validation": shards["images"]}
    fixed = rows | splits | {"data__test": shards["long"], "evaluation__generate": False}

    def classes(**changed: Any) -> list[str]:
        settings = run_settings(tmp_path, **fixed | changed)
        recipe = write_recipe(tmp_path / "r.yaml", settings)
        found = json.loads(command("--recipe", str(recipe), "--json").stdout)
        return [f"{one['key']}: {one['error_class']}" for one in found["findings"]]

    assert classes() == ["i: too_long"]
    assert classes(evaluation__generate=True) == ["i: too_long", "l: too_long"]
    assert classes(data__train=shards["long"]) == ["l: too_long"], "trained in rows, validated not"


@pytest.mark.slow
def test_shards_named_beside_a_recipe_are_held_to_its_objective(
    tmp_path: Path, both_forms: tuple[str, str]
) -> None:
    """But for those that it only asks questions of."""
    pairs, plain = both_forms
    questions = write_shard(tmp_path / "test.tar", [("asked", {"json": chat_json("q", "a")})])
    settings = run_settings(
        tmp_path,
        data__train=pairs,
        data__validation=None,
        data__test=str(questions),
        objective__name="dpo",
    )
    recipe = ["--recipe", str(write_recipe(tmp_path / "r.yaml", settings))]
    found = json.loads(command(*recipe, pairs, plain, str(questions), "--json").stdout)
    assert [finding["key"] for finding in found["findings"]] == ["plain"]
    Path(questions).unlink()
    found = json.loads(command(*recipe, pairs, plain, "--json").stdout)
    assert [finding["key"] for finding in found["findings"]] == ["plain"]
    told = command(*recipe, pairs, "--objective", "sft")
    assert told.exit_code == 1
    assert "--recipe has an objective.name too" in str(told.exception)


def test_records_that_share_images_are_counted_over_all_shards(tmp_path: Path) -> None:
    picture = [image_bytes(8, 8, seed=seed) for seed in range(4)]
    shown = {"a": [0], "b": [0], "c": [1, 2], "d": [2, 1], "e": [3], "f": [], "g": []}
    records = [
        (
            key,
            {"json": chat_json("q", key, len(images))}
            | {f"{place}.png": picture[image] for place, image in enumerate(images)},
        )
        for key, images in shown.items()
    ]
    paths = [
        str(write_shard(tmp_path / f"{number}.tar", records[number::2])) for number in range(2)
    ]
    told = command(*paths)
    assert "4 records with an image that another one has too; 2 with the very" in told.output
    found = json.loads(command(*paths, "--json").stdout)
    assert (found["records_sharing_an_image"], found["records_sharing_all_images"]) == (4, 2)
    assert "another one has too" not in command(paths[0]).output, "a and b lie in two shards"
