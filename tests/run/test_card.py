"""Model cards: what they say, what they leave out, and which run they name."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from support.carded import a_run
from support.recipes import MINIMAL, changed
from support.recorded import write_record

from vlmpack.data.loading.checked_lines import checked_line
from vlmpack.file_format import AUDIT, RUN, VERIFICATION
from vlmpack.proof.audit import Audit, EpochCount
from vlmpack.recipe import load_recipe
from vlmpack.recipe.show import PublicRecipe, dump_values
from vlmpack.run.card import RUN_KEY, card_of
from vlmpack.terminal import printable
from vlmpack.training.run_dir import RunDir


def test_a_card_names_its_run_and_no_other(tmp_path: Path) -> None:
    """Runs of one recipe, one model and shards of the same names are two; a run whose data or
    length became another is the same."""
    run, recipe = a_run(tmp_path, steps=40)

    def named(run: RunDir) -> str:
        card = card_of(run, *recipe, adapter=False, step=40)
        return str(yaml.safe_load(card.split("---")[1])[RUN_KEY])

    first = named(run)
    assert first == run.run_id() and len(first) == 32
    changed = {"training.max_steps": 9, "data.train.0.path": "b.tar"}
    run.identity.write_text(json.dumps(RUN.mark(changed)))
    assert named(run) == first
    again = RunDir(tmp_path / "again")
    again.path.mkdir()
    for path in (run.identity, run.recipe, run.result):
        (again.path / path.name).write_bytes(path.read_bytes())
    assert named(again) != first


def test_a_card_says_what_was_found_and_what_was_not(tmp_path: Path) -> None:
    run, recipe = a_run(
        tmp_path,
        steps=40,
        real_tokens=41720,
        metrics_before={"anls": 0.25},
        metrics_after={"anls": 0.587},
        versions={"vlmpack": "0.1.0"},
    )
    card = card_of(run, *recipe, adapter=False, step=40)
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "Tiny-VL" and front["library_name"] == "transformers"
    assert front["pipeline_tag"] == "image-text-to-text" and "vlmpack" in front["tags"]
    assert "| anls | 58.7% (before: 25.0%) |" in card and "| real tokens | 41,720 |" in card
    assert "Not verified with the run" in card
    assert str(tmp_path) not in card, "no path of this machine"
    assert "path: Tiny-VL" in card and "${env:PASSWORD}@host/a.tar" in card
    checks = [{"name": "loss", "status": "pass", "measured": 1e-7, "bound": 1e-6}]
    (run.path / "verify" / "verify.json").write_text(
        json.dumps(VERIFICATION.mark({"checks": checks}))
    )
    proven = card_of(run, *recipe, adapter=True, step=40)
    assert "| loss | pass | 1.0e-07 | 1.0e-06 |" in proven and "library_name: peft" in proven
    assert "--lora-modules" in proven and "lora" in yaml.safe_load(proven.split("---")[1])["tags"]


def test_a_card_has_the_figures_of_its_own_step_alone(tmp_path: Path) -> None:
    """Of six steps the third is the best and was evaluated, the fifth was not."""
    run, recipe = a_run(
        tmp_path,
        steps=6,
        real_tokens=600,
        best={"figure": "anls", "value": 0.9, "step": 3},
        exported_step=3,
        metrics_before={"anls": 0.25},
        metrics_after={"anls": 0.9},
        validation_after={"step": 6, "loss": 165.9},
    )
    counts = {"loss": 1.0, "num_samples": 4, "num_tokens": 100, "num_padded_slots": 150}
    rows = [{"step": step, "seconds": 2.0, **counts} for step in range(1, 7)]
    rows += [{"step": 3, "validation_loss": 27.4}, {"step": 6, "validation_loss": 165.9}]
    rows += [{"step": 1, "answers_anls": 0.3}, {"step": 3, "answers_anls": 0.9}]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reason = {"class": "unreadable", "key": "k", "shard": "s", "reason": "r", "batch": 4}
    run.data_errors.write_bytes(checked_line(reason))

    def card(step: int) -> str:
        return card_of(run, *recipe, adapter=False, step=step)

    third, fifth, last = card(3), card(5), card(6)
    assert "of step 3 of 6, the best one by `anls`." in third
    for line in ("| optimizer steps | 3 |", "| real tokens | 300 |", "| samples | 12 |"):
        assert line in third
    assert "| real tokens a second | 50.0 |" in third and "| validation loss | 27.4000 |" in third
    assert "| anls | 90.0% (before: 25.0%) |" in third
    assert "of step 5 of 6." in fifth and "This step was not evaluated" in fifth
    assert "anls |" not in fifth and "validation loss |" not in fifth and "| 500 |" in fifth
    assert "of step 6, its last one." in last and "| real tokens | 600 |" in last
    assert "| validation loss | 165.9000 |" in last and "anls |" not in last
    assert "| anls | 30.0% (before: 25.0%) |" in card(1)
    said = [f"left out: {count} lines" in text for count, text in ((0, third), (1, fifth))]
    assert said == [True, True]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows[2:]))
    assert "real tokens" not in card(3).split("## Proof")[0], "a sum over what is left is no count"


def test_a_card_has_the_audit_or_says_that_there_is_none(tmp_path: Path) -> None:
    run, recipe = a_run(tmp_path, steps=6)

    def card(step: int) -> str:
        return " ".join(card_of(run, *recipe, adapter=False, step=step).split())

    assert "Not audited (`vlmpack data audit RUN`, before the export)." in card(6)
    assert "The run has no record of samples." in card(6)
    write_record(run.samples, [["a", "b"], ["c", "d"], ["e", "f"]])
    assert "own record has 2 global batches up to this step, with 4 samples." in card(2)
    assert "own record has 3 global batches up to this step, with 6 samples." in card(6)
    audit = Audit(
        batches=3, launches=1, epochs=[EpochCount(0, planned=2787, trained=6, pending=2781)]
    )
    run.audit.write_text(json.dumps(AUDIT.mark(audit.as_json())))
    proven = card(3)
    assert "Not audited" not in proven
    assert "of the run's first 3 global batches: proven, every draw" in proven
    assert (
        "| epoch | planned | trained |" in proven and "| 0 | 2,787 | 6 | 0 | 2,781 | 0 |" in proven
    )
    assert "were not looked at" not in proven and "up to step 6 were not looked at" in card(6)
    audit.fault(f"{tmp_path}/data/train.tar: k was trained twice")
    run.audit.write_text(json.dumps(AUDIT.mark(audit.as_json())))
    said = "NOT PROVEN, 1 problem. The first: train.tar: k was trained twice"
    assert said in card(3) and str(tmp_path) not in card(3)
    (run.samples / "launches.jsonl").write_text("{}\n")
    run.audit.unlink()
    assert "record of samples cannot be read" in card(6) and str(tmp_path) not in card(6)


def test_a_run_that_is_not_at_its_end_says_so(tmp_path: Path) -> None:
    run, recipe = a_run(tmp_path)
    (run.path / "result.json").unlink()
    assert "it is not at its end" in card_of(run, *recipe, adapter=False, step=40)


def test_a_card_leaves_out_what_is_no_figure(tmp_path: Path) -> None:
    """Of files of another version, or of damaged ones; all else is there."""
    run, recipe = a_run(
        tmp_path,
        steps="6",
        best=["step", 2],
        versions=["0.1.0"],
        validation_after=[1.0],
        metrics_before=None,
    )
    (run.verify / "verify.json").write_text(
        json.dumps(VERIFICATION.mark({"checks": ["loss", {"name": "mean"}]}))
    )
    row = {"loss": 1.0, "num_samples": 4, "num_tokens": 100, "num_padded_slots": 150}
    rows = [{"step": 1, "seconds": 1.0, **row}, {"step": 2, **row}]
    rows += [{"step": 2, "validation_loss": "low", "answers_anls": "good"}]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = {"batches": 2, "num_problems": 0, "problems": []}
    epoch = {"epoch": 0, "planned": 9, "trained": 9, "skipped": 0, "pending": 0, "lost": 0}
    counts: list[Any] = [{**epoch, "lost": None}, {"epoch": 0}, "epoch 0", None]
    for audit in (
        *({**whole, "epochs": [each]} for each in counts),
        {"epochs": [epoch], "problems": []},
        {**whole, "epochs": [epoch], "num_problems": "none"},
    ):
        run.audit.write_text(json.dumps(AUDIT.mark(audit)))
        card = card_of(run, *recipe, adapter=False, step=2)
        assert "Not audited (its `audit.json` is damaged; `vlmpack" in card
        assert "real tokens" not in card.split("## Proof")[0], "no sum over rows without a column"
        assert "| optimizer steps | 2 |" in card and "This step was not evaluated" in card
        assert "| mean | None |" in card
    run.audit.write_text(json.dumps(AUDIT.mark({**whole, "epochs": [epoch]})))
    assert "| 0 | 9 | 9 | 0 | 0 | 0 |" in card_of(run, *recipe, adapter=False, step=2)


HOSTILE = (
    "a_b",
    "_a_ *b* **c** ~~d~~",
    "<img src=x onerror=alert(1)> &amp;",
    "[text](https://host) ![image](x.png)",
    "a | b || c",
    "`a` ``b``` c`",
    "# a ##",
    "$x$ $$y$$",
    "a\\*b\\",
    "line\n# another\n---\nlicense: mit",
    "- x",
    "---",
    "'a': \"b\" # c \U0001f600 \x85 \u2028 \ufffe",
    "steers \x1b[31m \u202e",
    "half \udcff",
    "1e10",
    "",
)


def as_text(text: str) -> str:
    """What a reader sees of a name: one line, and nothing that steers."""
    return printable(" ".join(text.split()))


@pytest.mark.parametrize("name", HOSTILE)
def test_names_in_a_card_are_text_and_nothing_else(tmp_path: Path, name: str) -> None:
    """Read by a parser of CommonMark with tables, and by one of YAML, that are not ours."""
    best = {"figure": name, "value": 0.5, "step": 3}
    run, (model, recipe) = a_run(
        tmp_path, steps=3, best=best, metrics_after={name: 0.5}, versions={"vlmpack": name}
    )
    checks = [{"name": name, "status": name, "measured": 1e-7, "bound": 1e-6}]
    (run.path / "verify" / "verify.json").write_text(
        json.dumps(VERIFICATION.mark({"checks": checks}))
    )
    epochs = [dict.fromkeys(("epoch", "planned", "trained", "skipped", "pending", "lost"), 1)]
    audit = {"batches": 3, "num_problems": 1, "problems": [name], "epochs": epochs}
    run.audit.write_text(json.dumps(AUDIT.mark(audit)))
    with suppress(ValueError, OSError):  # what a folder cannot be called
        if name.strip() and "/" not in name:
            run = RunDir(run.path.rename(tmp_path / name))
    recipe = replace(recipe, text=dump_values({"key": name}) + "```\n# out\n````\nlast: 1\n")
    card = card_of(run, model, recipe, adapter=False, step=3, base=name or None)
    card.encode()
    front, _, body = card.removeprefix("---\n").partition("\n---\n")
    read = yaml.safe_load(front)
    assert read["base_model"] == (printable(name) or model.name) and len(read) == 5
    assert re.fullmatch("[0-9a-f]{32}", read[RUN_KEY])
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(body)
    inline = [one for one in tokens if one.type == "inline"]
    parts = [part for one in inline for part in one.children or ()]
    assert {part.type for part in parts} <= {"text", "code_inline", "text_special", "softbreak"}
    assert not [one for one in tokens if one.type == "html_block"]
    texts = ["".join(part.content for part in one.children or ()) for one in inline]
    assert texts[0] == as_text(run.path.name) and texts[1].startswith("Finetuned from")
    headings = [texts[inline.index(tokens[place + 1])] for place, one in enumerate(tokens)
                if one.type == "heading_open"]  # fmt: skip
    assert headings[1:] == ["Figures", "Proof", "Use", "Recipe"]
    assert f", the best one by {as_text(name) or '``'}." in texts[1]
    for row in ([as_text(name), "50.0%"], [as_text(name)] * 2 + ["1.0e-07", "1.0e-06"]):
        assert any(texts[at : at + len(row)] == row for at in range(len(texts)))
    fences = [one.content for one in tokens if one.type == "fence"]
    assert [one.rstrip() for one in fences[1:]] == [recipe.text.rstrip()]


def test_a_card_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    """Not even one with a space in its name, in the recipe or in what an audit found."""
    _, (model, _) = a_run(tmp_path)
    run = tmp_path / "my runs" / "first"
    run.mkdir(parents=True)
    place = "/mnt/my data/train/x.tar"
    recipe = load_recipe(
        changed(MINIMAL, model__path=str(model), data__train=place, run_dir=str(run))
    )
    audit = Audit(batches=1, epochs=[EpochCount(0)])
    audit.fault(f"{place}: k was trained twice, and file://{place} is that of {run}/samples")
    (run / "audit.json").write_text(json.dumps(AUDIT.mark(audit.as_json())))
    public = PublicRecipe.of(recipe, run)
    card = card_of(RunDir(run), model, public, adapter=False, step=1)
    for hidden in ("/mnt", "my data", "my runs", str(tmp_path)):
        assert hidden not in card
    assert "x.tar: k was trained twice, and x.tar is that of samples" in card
