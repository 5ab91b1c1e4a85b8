"""`vlmpack data stats`: what a source holds, and what a run would refuse, by a run's readers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.record_data import COUNT, KINDS, record, write_records, write_same_shards
from support.shard_fakes import open_data
from support.token_losses import TINY_MODEL
from typer.testing import CliRunner

from vlmpack.cli.app import app
from vlmpack.encode import Encoder
from vlmpack.recipe.sources import Share, Source


def stats(path: str, index_dir: Path, *more: str, code: int = 0) -> dict:
    command = ["data", "stats", path, "--json", "--index-dir", str(index_dir), *more]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == code, told.output
    return json.loads(told.stdout)


@pytest.mark.cases(quick=0.4, slow="*")
@pytest.mark.parametrize("kind", [*KINDS, "tar"])
def test_the_figures_are_those_of_the_records(tmp_path: Path, kind: str) -> None:
    numbers = range(COUNT)
    write = write_same_shards if kind == "tar" else lambda folder, n: write_records(folder, kind, n)
    found = stats(write(tmp_path, numbers), tmp_path / "i")
    counts = [len(record(number)["images"]) for number in numbers]
    assert found["samples"] == COUNT and found["refused"] == {}
    assert found["images"] == {str(n): counts.count(n) for n in sorted(set(counts))}
    assert found["keys"]["messages"] == found["keys"]["id"] == COUNT
    assert (found["image_height"]["0"], found["image_height"]["100"]) == (20, 20)
    assert found["read_as"] == ["tar"] or "messages" in found["read_as"][0]


def test_what_is_refused_is_what_a_run_refuses_in_its_words(tmp_path: Path) -> None:
    path = Path(write_records(tmp_path, "jsonl", range(COUNT)))
    (tmp_path / "pictures" / "4-0.png").unlink()
    (tmp_path / "pictures" / "7-0.png").write_bytes(b"no image")
    with path.open("a") as stream:
        stream.write("{oops}\n" + json.dumps({"messages": [], "score": 1}) + "\n")
    found = stats(str(path), tmp_path / "i")["refused"]
    policy = dict.fromkeys(("integrity", "decode", "schema"), "skip")
    table = open_data(
        "", tmp_path / "i", sources=(Source(name="d", path=str(path)),), on_error=policy
    ).fitted.table
    ours = {kind: each["samples"] for kind, each in found.items()}
    theirs = [kind for kind, _ in table.faults.values()]
    assert ours == {kind: theirs.count(kind) for kind in set(theirs)}
    assert set(ours) == {"integrity", "decode", "schema"} and ours["schema"] == 2
    told = {reason for each in found.values() for reason in each["reasons"]}
    assert told == {reason for _, reason in table.faults.values()}


def test_the_table_names_the_layout_and_what_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "a", "score": 1}) + "\n")
    for source, layout in (
        (path, "JSONL, read as vqa (VQA)"),
        (write_same_shards(tmp_path, [0]), "tar, read as turns"),
    ):
        command = ["data", "stats", str(source), "--index-dir", str(tmp_path / "i")]
        told = CliRunner().invoke(app, command).output
        assert re.search(rf"^layout +{re.escape(layout)}", told, re.MULTILINE), told
    told = CliRunner().invoke(app, ["data", "stats", str(path)]).output
    assert re.search(r"^not read +'score' \(1 record\)", told, re.MULTILINE), told


def test_faults_that_differ_in_names_alone_are_told_once(tmp_path: Path) -> None:
    path = Path(write_records(tmp_path, "jsonl", range(COUNT)))
    for picture in (tmp_path / "pictures").iterdir():
        picture.unlink()
    [refused] = stats(str(path), tmp_path / "i")["refused"].values()
    assert refused["samples"] == sum(bool(record(n)["images"]) for n in range(COUNT))
    assert [count for count, _ in refused["reasons"].values()] == [refused["samples"]]


def test_a_source_without_a_usable_sample_ends_with_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hm"}]}\n')
    found = stats(str(path), tmp_path / "i", code=1)
    assert found["refused"]["schema"]["samples"] == found["samples"] == 1


@pytest.mark.parametrize("model", [None, TINY_MODEL])
def test_records_of_the_form_that_an_objective_refuses_are_counted(
    tmp_path: Path, model: Path | None
) -> None:
    """The same with a model and without, in the encoder's words; another objective, the others."""
    turns = [{"role": "user", "content": "how many?"}]
    pair = {"messages": turns, "chosen": "two", "rejected": "three"}
    single = {"messages": [*turns, {"role": "assistant", "content": "two"}]}
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (pair, single, pair, single, pair)))
    more = () if model is None else ("--model", str(model))
    for objective, count, said in (
        ("sft", 3, "the record is a pair"),
        ("dpo", 2, "has no 'chosen'"),
    ):
        found = stats(str(path), tmp_path / "i", "--objective", objective, *more)["refused"]
        assert found["schema"]["samples"] == count and found.keys() == {"schema"}
        assert [said in reason for reason in found["schema"]["reasons"]] == [True]
    assert stats(str(path), tmp_path / "i", *more)["refused"]["schema"]["samples"] == 3
    path.write_text(json.dumps(pair) + "\n")
    assert stats(str(path), tmp_path / "i", *more, code=1)["samples"] == 1


def test_a_share_for_validation_is_counted(tmp_path: Path) -> None:
    path = write_records(tmp_path, "jsonl", range(COUNT))
    found = stats(path, tmp_path / "i", "--validation", "30%")["validation"]
    share: dict[str, Any] = {"validation": Share("30%"), "key": "data.validation"}
    sources = (Source(name="d", path=path),)
    assert found == open_data("", tmp_path / "i", sources=sources, **share).fitted.eligible.sum()
    assert 0 < found < COUNT
    shown = CliRunner().invoke(app, ["data", "stats", path, "--validation", "30 %"]).output
    assert f"{found} of {COUNT} held back" in shown
    told = CliRunner().invoke(app, ["data", "stats", path, "--validation", "0.3"])
    assert "--validation: expected a share of data.train" in str(told.exception)


@pytest.mark.slow
def test_a_model_measures_the_samples(tmp_path: Path) -> None:
    path = write_records(tmp_path, "jsonl", range(COUNT))
    found = stats(path, tmp_path / "i", "--model", "assets/tiny-qwen2_5_vl")
    assert found["num_tokens"]["0"] > found["num_label_tokens"]["0"] > 0
    assert found["num_image_tokens"]["0"] == 0 < found["num_image_tokens"]["100"]


@pytest.mark.slow
def test_each_answer_is_measured_as_a_sample(tmp_path: Path) -> None:
    turns = [{"role": role, "content": f"{role} says"} for role in ("user", "assistant")]
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": turns * 3}) + "\n")
    given = ("--model", "assets/tiny-qwen2_5_vl")
    whole = stats(str(path), tmp_path / "i", *given)
    each = stats(str(path), tmp_path / "i", *given, "--learn", "each_answer")
    assert (whole["samples"], each["samples"]) == (1, 3)
    assert whole["num_label_tokens"]["100"] == 3 * each["num_label_tokens"]["100"]
    assert each["num_tokens"]["100"] == whole["num_tokens"]["100"] > each["num_tokens"]["0"]
    command = ["data", "stats", str(path), "--learn", "each_answer"]
    told = CliRunner().invoke(app, command)
    assert "--learn each_answer: needs --model" in str(told.exception)


def test_boxes_that_the_model_does_not_see_there_are_counted_everywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By stats, lint and the launch, in the same words."""
    Image.new("RGB", (1400, 1000)).save(tmp_path / "0.png")
    given = ["At [100, 200, 1395, 999].", "A cat.", "At [100, 200, 1395, 998].", "At <bbox>."]
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "<image>Where?"},
                    {"role": "assistant", "content": answer},
                ],
                "images": ["0.png"],
            }
        )
        for answer in given
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(lines) + "\n")
    boxes, places = (
        "2 of 4 samples have a box in an answer whose numbers may not be those of the model, such "
        "as [100, 200, 1395, 999] (",
        "1 of 4 samples have a place of an object, such as <bbox> (",
    )
    model = ("--model", str(TINY_MODEL))
    notes = stats(str(path), tmp_path / "i", *model)["notes"]
    assert [note for note in notes if boxes in note] and [note for note in notes if places in note]
    linted = CliRunner().invoke(app, ["data", "lint", str(path), *model, "--processes", "1"])
    assert linted.exit_code == 0 and boxes in linted.output and places in linted.output
    encoder = Encoder(TINY_MODEL)
    sources = (Source(name="d", path=str(path)),)
    open_data("", tmp_path / "i", sources=sources, encoder=encoder, num_probed=4)
    assert boxes in caplog.text and places in caplog.text
    caplog.clear()
    path.write_text(lines[1] + "\n")
    open_data("", tmp_path / "j", sources=sources, encoder=encoder, num_probed=4)
    assert "box" not in caplog.text, "a control"
