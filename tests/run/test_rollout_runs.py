"""Runs over rollouts: records that a test or `vlmpack sample` has written train a policy."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recipes import run_settings, write_recipe
from support.rollout_records import drawn_answers, write_drawn
from support.rollouts import literal_log_p
from support.shards import SHARD, TINY_MODEL
from support.whole_runs import audited, finetune_in_ranks

import vlmpack
from vlmpack.api import resolve, run_recipe
from vlmpack.build.look import open_recipe
from vlmpack.encode import Encoder
from vlmpack.errors import DataError
from vlmpack.evaluation.generation import load_for_generation
from vlmpack.proof.verify.answers import check_answers, check_ids

POLICY = Encoder(TINY_MODEL).replace(rollouts=True)
SIZES = (4, 4, 4, 4)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers on 0 to 3 images with the log-probabilities of the model in float32, one at a
    time."""
    model, _ = load_for_generation(TINY_MODEL)
    answers = drawn_answers(POLICY.tokenizer, SIZES)
    with torch.no_grad():
        log_p = literal_log_p(model.float(), POLICY, [POLICY.encode(a.sample) for a in answers])
    drawn = [
        answer.changed(log_probs=own.clamp(max=0).tolist())
        for answer, own in zip(answers, log_p, strict=True)
    ]
    return write_drawn(tmp_path_factory.mktemp("rollouts") / "r.tar", drawn)


def settings(root: Path, train: Path | str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "data__train": str(train),
        "data__validation": None,
        "model__dtype": "float32",
        "objective__name": "policy",
        "objective__old": "sampler",
        "training__max_steps": 2,
        "training__global_batch_size": 8,
        "training__micro_batch_size": 4,
    }
    root.mkdir(exist_ok=True)
    return run_settings(root, **(values | changes))


def metrics_of(values: dict[str, Any]) -> list[dict[str, Any]]:
    lines = (Path(values["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_a_policy_trains_on_rollouts_with_images(
    shard: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = settings(tmp_path, shard)
    with caplog.at_level(logging.INFO, "vlmpack"):
        run_recipe(resolve(values, {}))
    first, second = metrics_of(values)
    assert first["ratio"] == pytest.approx(1, abs=1e-4), "the model is its own sampler"
    assert abs(second["ratio"] - 1) > 1e-3, "and then it moves"
    assert first["num_samples"] + second["num_samples"] == sum(SIZES)
    rewards = (first["reward"] + second["reward"]) / 2
    said = [answer.record["rollout"]["reward"] for answer in drawn_answers(POLICY.tokenizer, SIZES)]
    assert rewards == pytest.approx(sum(said) / len(said))
    assert audited(values["run_dir"]).problems == []
    counts = json.loads((Path(values["run_dir"]) / "data-summary.json").read_text())["rollouts"]
    assert (counts["num_answers"], counts["num_groups"]) == (16, 4)
    assert "16 answers in 4 groups" in caplog.text


@pytest.mark.slow
def test_the_same_rows_in_other_modes_train_the_same(shard: Path, tmp_path: Path) -> None:
    """All groups are one batch, in rows of other samples; loss and gradient are the batch's."""
    found = {}
    modes: dict[str, dict[str, Any]] = {
        "rows": {},
        "padded": {"packing__mode": "none"},
        "small": {"training__micro_batch_size": 2},
        "planned": {
            "packing__mode": "online",
            "packing__scope": "batch",
            "packing__max_tokens": 640,
            "training__micro_batch_size": 1,
        },
    }
    for name, changes in modes.items():
        whole = {"training__max_steps": 1, "training__global_batch_size": sum(SIZES)}
        values = settings(tmp_path / name, shard, **(whole | changes))
        run_recipe(resolve(values, {}))
        [step] = metrics_of(values)
        found[name] = (step["loss"], step["grad_norm"], step["reward"])
        assert step["num_samples"] == sum(SIZES)
    for name in modes:
        assert found[name] == pytest.approx(found["rows"], rel=1e-4, abs=1e-6)
    assert found["rows"][1] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"parallelism__context": 2}], ids=["data", "context"])
def test_two_processes_train_the_same(shard: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Ranks with rows of their own, or that share each row; groups lie over both."""
    one = settings(tmp_path / "one", shard)
    run_recipe(resolve(one, {}))
    two = settings(tmp_path / "two", shard, **layout)
    done = finetune_in_ranks(write_recipe(tmp_path / "r.yaml", two), processes=2)
    assert done.returncode == 0, done.stderr
    same = ("step", "num_tokens", "num_label_tokens", "num_samples", "reward", "without_advantage")
    for ours, theirs in zip(metrics_of(two), metrics_of(one), strict=True):
        assert [ours[name] for name in same] == [theirs[name] for name in same]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        # Advantages are of order 1 and cancel, so the loss is as exact as its largest terms.
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
        assert ours["ratio"] == pytest.approx(theirs["ratio"], rel=1e-5)


@pytest.mark.slow
def test_drawn_answers_train(tmp_path: Path) -> None:
    """What `vlmpack sample` writes is read, and the model is the policy that drew it."""
    plain = run_settings(
        tmp_path, data__train=str(SHARD), data__validation=None, model__dtype="float32"
    )
    drawing = vlmpack.Drawing(answers=4, max_prompts=6, max_new_tokens=6, temperature=0.7, seed=3)
    result = vlmpack.sample(plain, tmp_path / "drawn", rewards=["exact"], drawing=drawing)
    values = settings(tmp_path / "run", result.file, training__max_steps=1)
    run_recipe(resolve(values, {}))
    [step] = metrics_of(values)
    assert step["ratio"] == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_a_step_without_an_advantage_is_no_fault(tmp_path: Path) -> None:
    """Nothing has a gradient in it; what is trained is looked for in a later step."""
    equal = [answer.changed(reward=1.0) for answer in drawn_answers(POLICY.tokenizer, SIZES)]
    values = settings(tmp_path, write_drawn(tmp_path / "equal.tar", equal))
    run_recipe(resolve(values, {}))
    for step in metrics_of(values):
        assert (step["loss"], step["grad_norm"], step["without_advantage"]) == (0, 0, 1)


@pytest.mark.slow
def test_plain_training_learns_their_texts(shard: Path, tmp_path: Path) -> None:
    plain = {"objective__name": None, "objective__old": None, "training__max_steps": 1}
    values = settings(tmp_path, shard, **plain)
    values.pop("objective", None)
    run_recipe(resolve(values, {}))
    [step] = metrics_of(values)
    assert step["num_samples"] == 8 and "ratio" not in step


def test_a_record_without_tokens_stops_the_launch(shard: Path, tmp_path: Path) -> None:
    bare = [
        answer.changed(token_ids=None, log_probs=None, prompt_token_ids=None)
        for answer in drawn_answers(POLICY.tokenizer, (2, 2))
    ]
    path = write_drawn(tmp_path / "bare.tar", bare)
    with pytest.raises(DataError, match="rollout has no token_ids"):
        open_recipe(resolve(settings(tmp_path, path), {}))


def test_verify_finds_other_tokens_than_the_drawn_ones() -> None:
    cooked = [answer.sample for answer in drawn_answers(POLICY.tokenizer, (3, 2, 2))]
    encoded = [POLICY.encode(sample) for sample in cooked]
    passed = [check(POLICY, encoded, cooked) for check in (check_answers, check_ids)]
    assert [check.status for check in passed if check] == ["pass", "pass"]
    labels = encoded[1].labels.clone()
    labels[-2] += 1
    encoded[1].labels.copy_(labels)
    broken = check_answers(POLICY, encoded, cooked)
    assert broken is not None and broken.status == "fail"
    assert cooked[1].key in broken.detail
