"""What the first sample teaches, as text: every token once, the learnt ones marked."""

from __future__ import annotations

import re

import pytest
from support.images import conversation, file_of, picture

from vlmpack.packing import PackCollator, PadCollator
from vlmpack.proof.rows import view as first_sample_module
from vlmpack.proof.rows.view import MAX_LINES, show_first_sample, view_samples


@pytest.fixture(scope="module")
def batches(encoder):
    """Two samples, packed and padded."""
    made = [
        encoder.encode(
            conversation(
                ("user", [None, "What\x1b[31m\nis it?"]),
                ("assistant", [answer]),
                images=(file_of(picture(200, 160)),),
            )
        )
        for answer in ("Seven.", "Some other answer.")
    ]
    axes = encoder.num_position_axes
    pack = PackCollator(pad_token_id=encoder.pad_token_id, num_position_axes=axes)
    pad = PadCollator(pad_token_id=encoder.pad_token_id, num_position_axes=axes)
    return {"packed": pack(made), "padded": pad(made), "empty": pack([])}


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_every_token_is_shown_once_by_its_kind(encoder, batches, kind):
    sample = next(view_samples(batches[kind], encoder))
    assert [run.kind for run in sample.runs] == [
        "given",
        "image",
        "given",
        "learnt",
        "given",
    ]
    given, image, question, answer, end = (run.text for run in sample.runs)
    assert given.endswith("<|im_start|>user\n<|vision_start|>")
    tokens = encoder.image_rule.layout(200, 160).num_tokens
    assert image.startswith(f"{tokens} tokens, grid 1 x ")
    assert question.startswith("<|vision_end|>What\x1b[31m\nis it?<|im_end|>")
    assert (answer, end) == ("Seven.<|im_end|>", "\n")
    assert sample.num_tokens == batches[kind].lengths[0]
    learnt = encoder.tokenizer("Seven.<|im_end|>")["input_ids"]
    assert sample.num_labels == len(learnt)
    assert sample.learnt.startswith(f"{len(learnt)} of {sample.num_tokens} tokens (")


def test_piped_lines_have_brackets_and_no_control_characters(encoder, batches, tmp_path, capsys):
    assert show_first_sample([batches["empty"], batches["packed"]], encoder, tmp_path)
    shown = capsys.readouterr().err
    assert "[[Seven.<|im_end|>]]" in shown
    assert "What\\x1b[31m\\n\n" in shown
    assert "other answer" not in shown, "the second sample"
    assert "\x1b" not in shown
    assert re.search(r"learnt \d+ of \d+ tokens \(\d+\.\d%\), in \[\[ \]\]\n", shown)
    file = (tmp_path / "first-sample.txt").read_text(encoding="utf-8")
    assert "[[Seven.<|im_end|>]]" in file
    assert "\x1b" not in file


def test_a_terminal_has_colours_and_no_brackets(encoder, batches, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    show_first_sample([batches["packed"]], encoder, tmp_path)
    shown = capsys.readouterr().err
    assert "\x1b[1;32mSeven.<|im_end|>" in shown
    assert "[[" not in shown
    assert "\\x1b" in shown, "the sample's own control characters are spelt out"


def test_a_long_sample_is_abridged_in_the_middle(encoder, tmp_path, capsys):
    turns = [("user", ["word " * 400]), ("assistant", ["line\n" * 300])] * 4
    encoded = encoder.encode(conversation(*turns))
    pack = PackCollator(
        pad_token_id=encoder.pad_token_id, num_position_axes=encoder.num_position_axes
    )
    show_first_sample([pack([encoded])], encoder, tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert lines.pop(0).startswith("first sample   made-up: learnt ")
    assert 10 < len(lines) <= MAX_LINES
    assert "lines ..." in lines[len(lines) // 2]
    assert "user" in lines[0]
    assert "<|im_end|>" in lines[-1]
    whole = (tmp_path / "first-sample.txt").read_text(encoding="utf-8")
    assert whole.count("line\\n") == 1200


def test_the_file_stays_that_of_the_first_launch(encoder, batches, tmp_path, capsys):
    (tmp_path / "first-sample.txt").write_text("begun", encoding="utf-8")
    assert show_first_sample([batches["packed"]], encoder, tmp_path, quiet=True)
    assert (tmp_path / "first-sample.txt").read_text(encoding="utf-8") == "begun"
    assert capsys.readouterr().err == ""


def test_batches_of_holes_are_waited_out(encoder, batches, tmp_path):
    assert not show_first_sample([batches["empty"]], encoder, tmp_path)
    assert not (tmp_path / "first-sample.txt").exists()


def test_what_fails_here_stops_no_run(encoder, batches, tmp_path, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(first_sample_module, "write_atomically", fail)
    assert show_first_sample([batches["packed"]], encoder, tmp_path)
    assert "cannot be shown: disk full" in caplog.text
