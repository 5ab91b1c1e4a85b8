"""A report shows what the run folder holds, whole, escaped, and again without the test shards."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image
from support.fake_runs import metrics_rows, write_run

from vlmpack.errors import CapabilityError, RunDirError
from vlmpack.evaluation.predictions import PREDICTIONS_AFTER, read_predictions, write_predictions
from vlmpack.file_format import RESULT
from vlmpack.report import write_report

PICTURES = {"loss.png", "lengths.png", "samples.png"}
HOSTILE = '<script>alert("x")</script> $\\frac{1}{$ \x00 \u4f60\u597d ' + "W" * 300


class Tags(HTMLParser):
    """Counts tags and collects the text of table cells."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.classes: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        self.classes += [value or "" for name, value in attrs if name == "class"]

    def handle_data(self, data: str) -> None:
        self.text.append(data.strip())


def parse(page: Path) -> Tags:
    tags = Tags()
    tags.feed(page.read_text(encoding="utf-8"))
    return tags


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        return image.convert("RGB").tobytes()


@pytest.mark.slow
def test_report_is_self_contained_and_can_be_made_again_without_the_questions(tmp_path) -> None:
    run = tmp_path / "demo"
    asked = write_run(run, num_steps=60, num_questions=40)
    folder = write_report(run, test_samples=asked)
    assert folder == run / "report"
    assert {path.name for path in folder.iterdir()} == PICTURES | {"index.html", "images"}
    for name in PICTURES:
        with Image.open(folder / name) as image:
            assert image.width == 1800
    page = parse(folder / "index.html")
    images = [source for source in page.sources if not source.startswith("#")]
    assert all(source.startswith("data:image/png;base64,") for source in images)
    assert len(images) >= page.classes.count("card") == 24
    assert page.tags.count("svg") == 4, "the loss twice, lengths, one batch"
    assert {"read", "count", "largest", "compare"} <= set(page.text)
    assert page.classes.count("good") + page.classes.count("bad") == 24
    first = pixels(folder / "samples.png")
    write_report(run)
    assert pixels(folder / "samples.png") == first
    (folder / "images" / "mine").mkdir()
    (folder / "images" / "mine.png").write_text("mine")
    write_report(run, asked)
    assert (folder / "images" / "mine.png").read_text() == "mine"
    (folder / "images" / "mine.png").unlink()
    (folder / "images" / "mine").rmdir()
    for kept in (folder / "images").iterdir():
        kept.unlink()
    write_report(run)
    assert pixels(folder / "samples.png") != first, "the sheet did not use the kept images"


@pytest.mark.slow
def test_text_of_the_data_cannot_become_markup_or_break_a_picture(tmp_path) -> None:
    run = tmp_path / "<b>run"
    asked = write_run(run, num_steps=1, num_questions=12)
    rows = read_predictions(run / PREDICTIONS_AFTER)
    rows = [
        replace(row, question=HOSTILE, answer=HOSTILE, truth=HOSTILE, task=HOSTILE) for row in rows
    ]
    write_predictions(run / PREDICTIONS_AFTER, rows)
    asked = [replace(question, images=(b"no image",)) for question in asked]
    folder = write_report(run, test_samples=asked)
    assert (folder / "samples.png").is_file()
    page = parse(folder / "index.html")
    assert "script" not in page.tags and "b" not in page.tags
    assert any("<script>" in text for text in page.text)
    assert "\x00" not in (folder / "index.html").read_text()
    assert page.text.count("(image not available)") == page.classes.count("card") == 11


def test_unfinished_run_has_a_report_of_what_is_there(tmp_path) -> None:
    rows = metrics_rows(3)
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "samples.png").write_bytes(b"of an earlier run")
    folder = write_report(tmp_path)
    assert {path.name for path in folder.iterdir()} == {"loss.png", "index.html"}
    assert "not finished" in (folder / "index.html").read_text()


@pytest.mark.usefixtures("unpainted")
@pytest.mark.cases(quick=0.3, slow="*")
@pytest.mark.parametrize(
    ("figures", "also_in", "said"),
    [
        ({}, [], ""),
        ({}, ["data.validation"], ""),
        ({}, ["data.train"], "they also lie in shards of data.train"),
        ({}, None, None),
        ({"best": "validation_loss", "exported_step": 2, "stopped_early": True}, [], ""),
        ({"best": "validation_loss", "exported_step": 2, "stopped_early": True}, None, None),
        ({"best": "validation_loss", "exported_step": 2, "stopped_early": True},
         ["data.validation"], "they also chose the best step and ended the run"),
        ({"best": "exact_match", "exported_step": 3, "stopped_early": False}, [], ""),
        ({"best": "exact_match", "exported_step": 2, "stopped_early": False}, None,
         "they also chose the best step"),
        ({"best": "exact_match", "exported_step": 3, "stopped_early": True}, [],
         "they also ended the run"),
        ({"best": "exact_match", "exported_step": 2, "stopped_early": True}, ["data.train"],
         "they also chose the best step and ended the run and lie in shards of data.train"),
    ],
)  # fmt: skip
def test_questions_that_decided_something_are_not_called_unseen(
    tmp_path, monkeypatch, figures: dict[str, Any], also_in: list[str] | None, said: str | None
) -> None:
    """In the page and in both pictures; nor those of which nobody knows."""
    write_run(tmp_path, num_steps=3, num_questions=3)
    result = json.loads((tmp_path / "result.json").read_text())
    best = {"figure": figures.get("best"), "value": 0.4, "step": 2, "waited": 1}
    result |= {**figures, "best": best} if figures else {}
    (tmp_path / "result.json").write_text(json.dumps(result))
    summary = json.loads((tmp_path / "data-summary.json").read_text())
    summary["test_also_in"] = also_in
    (tmp_path / "data-summary.json").write_text(json.dumps(summary))
    drawn: list[str] = []
    text = Figure.text

    def noted(self: Figure, x: float, y: float, s: str, **how: Any) -> Any:
        drawn.append(s)
        return text(self, x, y, s, **how)

    monkeypatch.setattr(Figure, "text", noted)
    page = parse(write_report(tmp_path) / "index.html")
    title = f"{'Unseen test' if said == '' else 'Test'} questions after training"
    assert (f"{title}; {said}" if said else title) in page.text
    assert title in drawn and [line for line in drawn if "they also" in line] == [said] * bool(said)
    [line] = [line for line in drawn if line.startswith("exact match on ")]
    assert line.startswith(f"exact match on {'unseen' if said == '' else 'test'} questions: ")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Tags:
    """The page of a run whose name is a word."""
    return parse(
        write_report(finished(tmp_path_factory.mktemp("a") / "plain", "plain")) / "index.html"
    )


@pytest.mark.cases(quick="<img*", slow="*")
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("<img src=x onerror=alert(1)> &amp;", "<img src=x onerror=alert(1)> &amp;"),
        ('$x$ "q"', '$x$ "q"'),
        ("half \udcff", "half \\udcff"),
    ],
)
def test_names_in_a_report_are_text(tmp_path, plain: Tags, name: str, shown: str) -> None:
    """The folder's, a figure's and what the result says of the model."""
    page = parse(write_report(finished(tmp_path / name, name)) / "index.html")
    assert page.tags == plain.tags and "img" not in page.tags
    assert page.text.count(shown) == plain.text.count("plain") >= 2


def finished(folder: Path, name: str) -> Path:
    """A run that is called so, and has nothing but figures of that name."""
    write_run(folder, num_steps=3, num_questions=3)
    result = json.loads((folder / "result.json").read_text())
    result |= {"model": name, "engine": {"engine": name}, "versions": {"vlmpack": name}}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", '{"loss": 1}\n{"step": 2, "loss": 1}\n', "line 1"),
        ("result.json", "{", "not valid JSON"),
        ("result.json", "[]", "expected an object"),
        ("data-summary.json", '{"length_histogram": {"a": 1}}', "malformed"),
    ],
)
def test_damaged_files_are_named(tmp_path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(RunDirError, match=f"{name}.*{message}"):
        write_report(tmp_path)


def test_folder_without_a_run_is_refused(tmp_path) -> None:
    with pytest.raises(RunDirError, match="nothing to report"):
        write_report(tmp_path)
    with pytest.raises(RunDirError, match="not a folder"):
        write_report(tmp_path / "gone")
    (tmp_path / "report").write_text("in the way")
    (tmp_path / "result.json").write_text(json.dumps(RESULT.mark({})))
    with pytest.raises(RunDirError, match="cannot be written"):
        write_report(tmp_path)


def test_missing_matplotlib_names_the_extra(tmp_path, monkeypatch) -> None:
    write_run(tmp_path / "run", num_steps=2, num_questions=2)
    real = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(CapabilityError, match=r"pip install .matplotlib"):
        write_report(tmp_path / "run")
