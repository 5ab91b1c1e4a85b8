"""Drawn answers are kept: a sampling that breaks off ends with the file of one that did not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.recipes import run_settings, write_recipe
from support.shards import ROOT, SHARD, read_shard
from typer.testing import CliRunner

import vlmpack
from vlmpack.cli.app import app
from vlmpack.data.files.images import ImageRoot
from vlmpack.data.files.records import open_records
from vlmpack.encode import Encoder
from vlmpack.errors import DataError, ExtensionError, RunDirError, VlmpackError
from vlmpack.evaluation.generation import Asked, load_for_generation
from vlmpack.evaluation.predictions import Question
from vlmpack.evaluation.rollouts import earned, in_form, rewards_of
from vlmpack.evaluation.sampling import Drawn
from vlmpack.run.sample import (
    Drawing,
    Embedded,
    Prompt,
    SampleOrder,
    SampleResult,
    sample_into,
)

EACH = 3


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> tuple[Any, Encoder]:
    return load_for_generation(tiny_folder)


@pytest.fixture(scope="module")
def prompts(loaded: tuple[Any, Encoder]) -> list[Prompt]:
    asked = [Asked.of(Question.from_sample(s.cooked()), loaded[1]) for s in read_shard(SHARD)[:9]]
    return [Prompt(one, one.digest, range(EACH)) for one in asked]


def order_of(out: Path, **fields: Any) -> SampleOrder:
    # Parts of 2 prompts.
    drawing = Drawing(answers=EACH, max_new_tokens=4, batch_size=1, **fields)
    return SampleOrder(drawing=drawing, out=out, rewards=rewards_of(["exact"]))


def drawn(loaded: Any, prompts: list[Prompt], out: Path, **fields: Any) -> SampleResult:
    order = order_of(out, **fields)
    model, encoder = loaded
    sampler = Embedded(model=model, encoder=encoder, drawing=order.drawing, on_bad_prompt=_raised)
    assert sampler.prompts_together == 2
    return sample_into(order, sampler, prompts, {"model": "tiny"})


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _raised(error: DataError) -> None:
    raise error


@pytest.fixture(scope="module")
def whole(loaded, prompts, tmp_path_factory) -> Path:
    """A folder of an unbroken sampling."""
    out = tmp_path_factory.mktemp("whole")
    drawn(loaded, prompts, out)
    return out


def test_wherever_it_broke_off_it_ends_with_the_same_file(loaded, prompts, whole, tmp_path) -> None:
    expected = (whole / "rollouts.jsonl").read_bytes()
    lines = (whole / "drawn.jsonl").read_bytes()
    header = lines.index(b"\n") + 1
    starts = [at + 1 for at, byte in enumerate(lines[:-1]) if byte == 10]
    cuts = random.Random(0).sample(range(header, len(lines)), 2)
    for cut in [starts[2], starts[3] - 1, *cuts]:
        out = tmp_path / str(cut)
        shutil.copytree(whole / "images", out / "images")
        (out / "drawn.jsonl").write_bytes(lines[:cut])
        drawn(loaded, prompts, out)
        assert (out / "rollouts.jsonl").read_bytes() == expected, cut
        assert (out / "drawn.jsonl").read_bytes() == lines
    assert len(starts) == 5, "guard: several parts"


def test_the_records_say_what_was_drawn(loaded, prompts, whole) -> None:
    records = lines_of(whole / "rollouts.jsonl")
    assert len(records) == len(prompts) * EACH
    for at, record in enumerate(records):
        prompt, rollout = prompts[at // EACH], record["rollout"]
        assert rollout["prompt_token_ids"] == list(prompt.asked.token_ids)
        assert (rollout["group"], rollout["number"]) == (prompt.group, at % EACH)
        assert len(rollout["token_ids"]) == len(rollout["log_probs"])
        assert rollout["sampling"]["log_probs"] == "after_temperature"
        said = record["messages"][-1]["content"]
        assert rollout["reward"] == (said.strip() == prompt.asked.question.truth)
        kept = [(whole / name).read_bytes() for name in record.get("images", ())]
        assert kept == list(prompt.asked.question.images)
    assert {record["rollout"]["reward"] for record in records} == {0.0, 1.0}
    truncated = order_of(whole, top_k=5).drawing
    sampler = Embedded(model=None, encoder=loaded[1], drawing=truncated, on_bad_prompt=_raised)
    assert sampler.log_probs == "processed"


def test_a_record_asks_what_was_asked(loaded, prompts, whole) -> None:
    """Read again as data is, each record has the prompt's ids in front, and its pixels."""
    encoder, root = loaded[1], ImageRoot(str(whole))
    from vlmpack.cli.generate import questions_of

    count = 0
    for record in open_records(whole / "rollouts.jsonl", every_column=True):
        assert record.value is not None
        plain = {name: value for name, value in record.value.items() if name != "rollout"}
        [question] = questions_of(replace(record, value=plain), root, encoder)
        again = Asked.of(question, encoder)
        assert list(again.token_ids) == record.value["rollout"]["prompt_token_ids"]
        assert again.digest == record.value["rollout"]["group"]
        assert question.truth == record.value["messages"][-1]["content"]
        count += bool(question.images)
    assert count > 5


def test_other_forms_take_no_other_draws(loaded, prompts, whole, tmp_path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    broken = (None, loaded[1])  # a model that cannot draw
    best = drawn(broken, prompts, out, form="best")
    pairs = drawn(broken, prompts, out, form="pairs")
    assert (best.file.name, pairs.file.name) == ("best.jsonl", "pairs.jsonl")
    assert 0 < pairs.records < best.records <= best.prompts == len(prompts)
    for record in lines_of(pairs.file):
        assert record["chosen"] != record["rejected"] and "rollout" not in record
        assert record["messages"][-1]["role"] == "user"


def test_another_sampling_is_refused(loaded, prompts, whole) -> None:
    with pytest.raises(RunDirError, match=r"another sampling \(seed: 0 there, 1 now\)"):
        drawn(loaded, prompts, whole, seed=1)
    with pytest.raises(RunDirError, match=r"temperature: 1\.0 there, 0\.5 now"):
        drawn(loaded, prompts, whole, temperature=0.5)
    assert not (whole / "sample.lock").exists()


def test_a_folder_of_something_else_is_refused(loaded, prompts, tmp_path) -> None:
    (tmp_path / "drawn.jsonl").write_text("x\n")
    with pytest.raises(RunDirError, match="no file of drawn answers"):
        drawn(loaded, prompts, tmp_path)
    (tmp_path / "drawn.jsonl").write_text("{}\n")
    with pytest.raises(RunDirError, match="unreleased vlmpack"):
        drawn(loaded, prompts, tmp_path)


def record(reward: float, said: str, finish: str = "stop") -> dict[str, Any]:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    return {"messages": turns, "rollout": {"reward": reward, "finish": finish}}


def test_the_best_answer_and_the_pair() -> None:
    group = [record(0.5, "a"), record(1.0, "b"), record(0.2, "c"), record(1.0, "d"), record(9, "")]
    group.append(record(8, "cut", "length"))
    [best] = in_form(group, "best")
    assert best["messages"][-1]["content"] == "b" and "rollout" not in best
    [pair] = in_form(group, "pairs")
    assert (pair["chosen"], pair["rejected"]) == ("b", "c")
    assert pair["messages"] == [{"role": "user", "content": "?"}]
    assert in_form(group, "rollouts") == group
    equal = [record(1.0, "a"), record(1.0, "b")]
    assert in_form(equal, "pairs") == [] and len(in_form(equal, "best")) == 1
    assert in_form([record(1.0, " ")], "best") == []


def answer(text: str) -> Drawn:
    return Drawn(token_ids=(1,), log_probs=(-0.1,), finish="stop", text=text)


def test_rewards_are_metrics_or_functions(prompts) -> None:
    question = replace(prompts[0].asked.question, truth="seven", task="read")
    assert earned(question, answer(" seven\n"), rewards_of(["exact", "contains"])) == {
        "exact": 1.0,
        "contains": 1.0,
    }
    seen: list[Any] = []

    def length(prediction: Any) -> float:
        seen.append(prediction)
        return -len(prediction.answer)

    found = earned(
        question, answer(" abc "), rewards_of({"length": length, "none": lambda p: None})
    )
    assert found == {"length": -3.0}
    assert (seen[0].truth, seen[0].answer, seen[0].task) == ("seven", "abc", "read")
    with pytest.raises(DataError, match="box_iou: nothing to count"):
        earned(question, answer("x"), rewards_of(["box_iou"]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "no reward: expected one or more of exact,"),
        (["exat"], "reward 'exat': expected one of exact,"),
        ({"a": 3}, r"rewards\['a'\] is an int; expected a function"),
        ({"a": lambda: 1}, r"rewards\['a'\] takes \(\); expected one, a prediction"),
    ],
)
def test_what_is_no_reward_is_refused(given: Any, words: str) -> None:
    with pytest.raises(VlmpackError, match=words):
        rewards_of(given)


def test_a_reward_that_fails_is_named(prompts) -> None:
    def broken(prediction: Any) -> float:
        raise KeyError("x")

    question = prompts[0].asked.question
    with pytest.raises(ExtensionError, match="reward mine raised KeyError"):
        earned(question, answer("x"), rewards_of({"mine": broken}))
    with pytest.raises(ExtensionError, match="reward mine returned nan; expected a finite number"):
        earned(question, answer("x"), rewards_of({"mine": lambda p: float("nan")}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"answers": 0}, "answers is 0; expected at least 1"),
        ({"split": "dev"}, "split is 'dev'; expected train, validation, test"),
        ({"form": "all"}, "form is 'all'; expected rollouts, best, pairs"),
        ({"temperature": 0}, "temperature is 0; expected above 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(VlmpackError, match=words):
        Drawing(**fields)


@pytest.fixture
def questions(tmp_path, whole) -> Path:
    """A recipe whose training data is three questions, the first of them twice."""
    lines = lines_of(whole / "rollouts.jsonl")[::EACH]
    for line in lines:
        del line["rollout"]
    lines = [lines[0], lines[1], lines[0], lines[2]]
    (tmp_path / "data").mkdir()
    shutil.copytree(whole / "images", tmp_path / "data/images")
    data = tmp_path / "data/train.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = run_settings(tmp_path, data__train=str(data), data__validation=None)
    return write_recipe(tmp_path / "recipe.yaml", settings)


def test_the_command_asks_the_prompts_of_a_recipe(questions, tmp_path) -> None:
    out = tmp_path / "out"
    words = ["sample", str(questions), "-o", str(out), "--reward", "exact", "-n", "2"]
    ended = CliRunner().invoke(app, [*words, "--max-new-tokens", "3"])
    assert ended.exit_code == 0, (ended.exception, ended.output)
    assert "8 answers to 4 prompts" in ended.output
    rollouts = [each["rollout"] for each in lines_of(out / "rollouts.jsonl")]
    groups = [each["group"] for each in rollouts]
    names = {(each["group"], each["number"]) for each in rollouts}
    assert len(names) == 8 and groups[4] == f"{groups[0]}-1"
    assert [each["number"] for each in rollouts] == [0, 1, 0, 1, 2, 3, 0, 1]
    result = vlmpack.sample(
        questions,
        tmp_path / "again",
        rewards={"mine": lambda prediction: 0.5},
        drawing=vlmpack.Drawing(answers=2, max_new_tokens=3),
    )
    assert (result.records, result.reward, result.equal) == (8, 0.5, 4)
    again = [each["rollout"] for each in lines_of(result.file)]
    assert [x["token_ids"] for x in again] == [x["token_ids"] for x in rollouts]


def test_the_command_refuses_two_forms(questions, tmp_path) -> None:
    words = ["sample", str(questions), "-o", str(tmp_path / "o"), "--best-of", "3", "--pairs"]
    assert "expected neither" in str(CliRunner().invoke(app, words).exception)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rollouts", "best", "pairs"])
def test_a_run_trains_on_what_was_drawn(loaded, prompts, whole, tmp_path, form) -> None:
    """In the first step the model has the sampler's log-probabilities, so every ratio is 1."""
    out = tmp_path / "drawn"
    shutil.copytree(whole, out)
    file = drawn(loaded, prompts, out, form=form).file
    of_form = {
        "rollouts": {"objective__name": "policy", "objective__old": "sampler"},
        "best": {},
        "pairs": {"objective__name": "dpo"},
    }[form]
    settings = run_settings(
        tmp_path, data__train=str(file), data__validation=None, training__max_steps=1
    )
    result = vlmpack.finetune(settings, evaluation__interval_steps=None, **of_form)
    row = lines_of(result.run_dir / "metrics.jsonl")[0]
    if form == "rollouts":
        assert abs(row["ratio"] - 1) < 1e-5 and row["num_samples"] == 4
    assert result.steps == 1


@pytest.mark.slow
def test_a_killed_process_goes_on(questions, tmp_path) -> None:
    def command(out: Path) -> list[str]:
        given = ["-o", str(out), "--reward", "exact", "--batch-size", "1", "-n", "5"]
        return [sys.executable, "-m", "vlmpack", "sample", str(questions), *given]

    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command(tmp_path / "whole"), check=True, env=env, capture_output=True)
    broken = subprocess.Popen(
        command(tmp_path / "broken"), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    kept = tmp_path / "broken/drawn.jsonl"
    end = time.monotonic() + 60
    while not kept.exists() or kept.read_bytes().count(b"\n") < 2:
        assert time.monotonic() < end and broken.poll() is None
        time.sleep(0.002)
    broken.send_signal(signal.SIGKILL)
    broken.wait()
    assert not (tmp_path / "broken/rollouts.jsonl").exists(), "guard: killed in the middle"
    subprocess.run(command(tmp_path / "broken"), check=True, env=env, capture_output=True)
    expected, found = (tmp_path / n / "rollouts.jsonl" for n in ("whole", "broken"))
    assert found.read_bytes() == expected.read_bytes()
