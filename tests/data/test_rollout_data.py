"""Rollouts over real shards: what each earned beside it, however it is packed, read or indexed."""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from support.recipes import run_settings, write_recipe
from support.rollout_records import Drawn, drawn_answers, write_drawn
from support.shard_fakes import open_data
from support.shards import SHARD, TINY_MODEL
from typer.testing import CliRunner

from vlmpack.cli.app import app
from vlmpack.data.index.rollouts import ROLLOUT_COLUMNS
from vlmpack.data.loading.loader import MicroBatch
from vlmpack.data.packs.write import PackOrder, PackSource, make_packs
from vlmpack.data.pipeline import TrainData
from vlmpack.encode import Encoder
from vlmpack.errors import DataError, PacksError, RecipeError
from vlmpack.recipe.data import OnErrorSection
from vlmpack.recipe.objective import ObjectiveSection

PLAIN = Encoder(TINY_MODEL)
POLICY = PLAIN.replace(rollouts=True)
SIZES = (5, 4, 1, 3, 2)
EPS = 1e-6


@pytest.fixture(scope="module")
def answers() -> list[Drawn]:
    """Groups whose members are neighbours in no shard, one alone and one of equal rewards."""
    made = drawn_answers(PLAIN.tokenizer, SIZES)
    equal = {"prompt 0-3"}
    made = [
        each.changed(reward=0.1) if each.record["rollout"]["group"] in equal else each
        for each in made
    ]
    return sorted(made, key=lambda each: each.prompt.key.rpartition("-")[2])


def write(folder: Path, answers: Sequence[Drawn]) -> str:
    for number in range(3):
        write_drawn(folder / f"s-{number}.tar", answers[number::3])
    return str(folder / "s-*.tar")


def opened(shards: str, index_dir: Path, **changes: Any) -> TrainData:
    knobs = {"name": "policy"} | changes.pop("knobs", {})
    settings: dict[str, Any] = {"encoder": POLICY, "global_batch_size": 4, "micro_batch_size": 2}
    return open_data(shards, index_dir, objective=ObjectiveSection(**knobs), **(settings | changes))


def expected(answers: Sequence[Drawn], scale: str = "std") -> dict[str, tuple[float, float]]:
    """Key -> (reward, advantage), from the records alone."""
    found = {}
    said = {each.prompt.key: each.record["rollout"] for each in answers}
    for key, own in said.items():
        rewards = [each["reward"] for each in said.values() if each["group"] == own["group"]]
        advantage = 0.0
        if len(set(rewards)) > 1:
            advantage = own["reward"] - statistics.fmean(rewards)
            advantage /= statistics.stdev(rewards) + EPS if scale == "std" else 1.0
        found[key] = (own["reward"], advantage)
    return found


def seen(batches: Sequence[MicroBatch]) -> list[tuple[str, float, float]]:
    """(key, reward, advantage) of each sample of some micro-batches."""
    found = []
    for micro in batches:
        if not micro.samples:
            continue
        rollouts = micro.batch.rollouts
        assert rollouts is not None
        assert rollouts.rewards is not None and rollouts.advantages is not None
        assert rollouts.advantages.dtype == torch.float64
        numbers = zip(rollouts.rewards.tolist(), rollouts.advantages.tolist(), strict=True)
        found += [(s.key, *each) for s, each in zip(micro.samples, numbers, strict=True)]
    return found


def an_epoch(data: TrainData, dp: int = 1) -> list[MicroBatch]:
    steps = data.steps_until(1, data.start())
    shares = [data.batches(data.start(), rank=rank, dp=dp, max_steps=steps) for rank in range(dp)]
    return [micro for share in shares for step in share for micro in step.micro_batches]


MODES: dict[str, dict[str, Any]] = {
    "in_batch": {"mode": "in_batch"},
    "none": {"mode": "none"},
    "online": {"mode": "online", "scope": "batch", "micro_batch_size": 1},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_advantages_do_not_depend_on_rows_ranks_and_steps(
    answers: list[Drawn], tmp_path: Path, mode: str, dp: int, scale: str
) -> None:
    path = write(tmp_path, answers)
    for group_by in ("group", "none"):
        knobs = {"advantage_scale": scale}
        data = opened(path, tmp_path / "i", knobs=knobs, group_by=group_by, **MODES[mode])
        batches = an_epoch(data, dp)
        assert len(batches) > 3
        found = seen(batches)
        known = expected(answers, scale)
        assert sorted(key for key, *_ in found) == sorted(known)
        for key, reward, advantage in found:
            assert (reward, advantage) == pytest.approx(known[key], abs=1e-12)
            if known[key][1] == 0:
                assert advantage == 0.0
    assert sum(advantage == 0 for _, advantage in known.values()) >= 4


def test_log_probabilities_are_those_of_the_records(answers: list[Drawn], tmp_path: Path) -> None:
    by_key = {each.prompt.key: each for each in answers}
    for micro in an_epoch(opened(write(tmp_path, answers), tmp_path / "i")):
        batch = micro.batch
        assert batch.rollouts is not None and batch.label_sequences is not None
        for place, sample in enumerate(micro.samples):
            own = batch.label_sequences == place
            found = batch.rollouts.sampler[own].tolist()
            assert found == list(by_key[sample.key].log_probs)
            targets = batch.labels.flatten()[batch.label_positions][own]
            assert targets.tolist() == list(by_key[sample.key].ids)


def test_answers_of_a_group_stand_together_by_default(answers: list[Drawn], tmp_path: Path) -> None:
    path = write(tmp_path, answers)

    def runs(**changes: Any) -> int:
        data = opened(path, tmp_path / "i", **changes)
        keys = [
            micro.samples[place].key
            for micro in an_epoch(data)
            for place in range(2)
            if place < len(micro.samples)
        ]
        assert len(keys) == len(answers)
        return sum(1 for _ in groupby(key.rpartition("-")[0] for key in keys))

    assert runs() == runs(group_by="group") == len(SIZES)
    assert runs(group_by="none") > len(SIZES)
    assert opened(path, tmp_path / "i").identity["data.group_by"] == "group"


def damaged(answers: Sequence[Drawn], key: str) -> list[Drawn]:
    """One of them with an image that nobody can read."""
    return [
        each
        if each.prompt.key != key
        else replace(each, prompt=replace(each.prompt, images=(b"no image",)))
        for each in answers
    ]


SKIP = OnErrorSection(decode="skip", schema="skip", integrity="skip")


@pytest.mark.parametrize("first", ["policy", "plain"])
def test_a_hole_counts_with_its_reward(answers: list[Drawn], tmp_path: Path, first: str) -> None:
    """Whether the shards are indexed and measured at once, or were indexed for plain training."""
    path = write(tmp_path, damaged(answers, "0-0-1"))
    if first == "plain":
        open_data(path, tmp_path / "i", encoder=PLAIN, on_error=SKIP)
    data = opened(path, tmp_path / "i", on_error=SKIP)
    found = {key: (reward, advantage) for key, reward, advantage in seen(an_epoch(data))}
    known = expected(answers)
    assert {*known} - {*found} == {"0-0-1"}
    for key, values in found.items():
        assert values == pytest.approx(known[key], abs=1e-12)
    without = expected([each for each in answers if each.prompt.key != "0-0-1"])
    assert abs(without["0-0-0"][1] - known["0-0-0"][1]) > 1e-3, "it makes no difference"


def test_an_answer_that_is_refused_counts_too(answers: list[Drawn], tmp_path: Path) -> None:
    """Its prompt is another one, or an image file of a record is missing."""
    bad = [
        each.changed(prompt_token_ids=[3, 4]) if each.prompt.key == "0-0-1" else each
        for each in answers
    ]
    data = opened(write(tmp_path, bad), tmp_path / "i", on_error=SKIP)
    found = {key: advantage for key, _, advantage in seen(an_epoch(data))}
    assert found == pytest.approx(
        {key: a for key, (_, a) in expected(answers).items() if key != "0-0-1"}, abs=1e-12
    )
    with pytest.raises(DataError, match="another prompt than this encoder's"):
        opened(write(tmp_path, bad), tmp_path / "i")


@pytest.mark.parametrize("first", ["policy", "plain"])
def test_a_record_of_a_file_without_its_image_counts_too(
    answers: list[Drawn], tmp_path: Path, first: str
) -> None:
    """JSON lines name their images; one of them is not there."""
    lines = []
    for each in answers:
        names = [f"{each.prompt.key}-{n}.png" for n in range(len(each.prompt.images))]
        for name, data in zip(names, each.prompt.images, strict=True):
            if name != "0-0-1-0.png":
                (tmp_path / name).write_bytes(data)
        turns = json.loads(json.dumps(each.record["messages"]))
        for part in (part for turn in turns[:-1] for part in turn["content"]):
            part.pop("image", None)
        lines.append(json.dumps(each.record | {"messages": turns, "images": names}))
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(lines))
    if first == "plain":
        open_data(str(path), tmp_path / "i", encoder=PLAIN, on_error=SKIP)
    data = opened(str(path), tmp_path / "i", on_error=SKIP)
    assert data.outcomes is not None and data.outcomes.num_answers == len(answers)
    found = seen(an_epoch(data))
    assert len(found) == len(answers) - 1
    known = expected(answers)
    for key, reward, advantage in found:
        assert (reward, advantage) == pytest.approx(known[answers[int(key)].prompt.key], abs=1e-12)


def test_lint_and_stats_read_them(answers: list[Drawn], tmp_path: Path) -> None:
    """As a policy's run does; a plain test split beside them is asked as ever."""
    path = write(tmp_path / "d", answers)
    bad = [answers[0].changed(prompt_token_ids=[1, 2]), *answers[1:]]
    other = write(tmp_path / "bad", bad)
    values = run_settings(tmp_path, data__train=path, data__test=str(SHARD))
    values |= {"objective": {"name": "policy"}}
    recipe = write_recipe(tmp_path / "r.yaml", values)
    model = ("--model", str(TINY_MODEL))
    for arguments, code, said in (
        (("lint", "--recipe", str(recipe)), 0, "no fault"),
        (("lint", other, *model), 1, "another prompt than this encoder's"),
        (("lint", other, *model, "--objective", "sft"), 0, "no fault"),
        (("lint", str(SHARD), *model), 0, "no fault"),
        (("lint", str(SHARD), *model, "--objective", "policy"), 1, "has no 'rollout'"),
        (("stats", path, *model, "--objective", "policy"), 0, f"{len(answers)}, 0 of them refused"),
        (("stats", str(SHARD), *model, "--objective", "policy"), 1, "has no 'rollout'"),
    ):
        result = CliRunner().invoke(app, ["data", *arguments, "--index-dir", str(tmp_path / "i")])
        assert result.exit_code == code, (arguments, result.output)
        assert said in " ".join(result.output.split()), (arguments, result.output)


def test_the_same_name_twice_is_refused(answers: list[Drawn], tmp_path: Path) -> None:
    first = next(each for each in answers if each.prompt.key == "0-0-1")
    twin = replace(first, prompt=replace(first.prompt, key="twin"))
    with pytest.raises(DataError, match="same policy_version, group and number") as caught:
        opened(write(tmp_path / "a", [*answers, twin]), tmp_path / "i")
    said = str(caught.value)
    assert "'twin'" in said and "'0-0-1'" in said and "s-" in said
    again = twin.changed(number=99)
    data = opened(write(tmp_path / "b", [*answers, again]), tmp_path / "i")
    assert len(seen(an_epoch(data))) == len(answers) + 1, "the same answer twice"
    later = twin.changed(policy_version=4)
    opened(write(tmp_path / "c", [*answers, later]), tmp_path / "i")
    epochs = opened(write(tmp_path / "d", answers), tmp_path / "i")
    steps = [*epochs.batches(epochs.start(), rank=0, dp=1, max_steps=9)]
    assert steps[-1].epoch == 2, "several epochs are no repeats"


def test_another_reward_is_other_data(answers: list[Drawn], tmp_path: Path) -> None:
    one = opened(write(tmp_path / "a", answers), tmp_path / "i").identity
    same = opened(write(tmp_path / "b", answers), tmp_path / "i").identity
    changed = [answers[0].changed(reward=answers[0].record["rollout"]["reward"] + 1), *answers[1:]]
    other = opened(write(tmp_path / "c", changed), tmp_path / "i").identity
    assert one == same
    assert {name for name in one if one[name] != other[name]} == {"data.train.one"}


def test_only_a_policys_index_has_the_columns(answers: list[Drawn], tmp_path: Path) -> None:
    path = write(tmp_path, answers)
    open_data(path, tmp_path / "plain", encoder=PLAIN)
    opened(path, tmp_path / "policy")
    found = {}
    for name in ("plain", "policy"):
        parts = sorted((tmp_path / name).glob("*.part"))
        assert len(parts) == 6
        for part in parts:
            columns = {*_columns(part)}
            found[name, ".lengths." in part.name] = columns & {*ROLLOUT_COLUMNS}
    assert found == {
        ("plain", False): set(),
        ("plain", True): set(),
        ("policy", False): set(),
        ("policy", True): {*ROLLOUT_COLUMNS},
    }


def _columns(part: Path) -> list[str]:
    return list(pq.ParquetFile(io.BytesIO(part.read_bytes()[:-16])).schema_arrow.names)


def test_a_window_needs_an_index_first(answers: list[Drawn], tmp_path: Path) -> None:
    path = write(tmp_path, answers)
    with pytest.raises(RecipeError, match=r"vlmpack index --recipe") as caught:
        opened(path, tmp_path / "i", shuffle="window")
    assert "data.shuffle: window" in str(caught.value)
    opened(path, tmp_path / "i", shuffle="global")
    data = opened(path, tmp_path / "i", shuffle="window")
    found = seen(an_epoch(data))
    known = expected(answers)
    assert len(found) == len(known)
    for key, reward, advantage in found:
        assert (reward, advantage) == pytest.approx(known[key], abs=1e-12)


DRAWN = {
    "raw": ({"temperature": 0.7}, {"old": "sampler"}, "SGLang: its default"),
    "raw, corrected": ({"temperature": 0.7}, {"correction": "masked"}, "SGLang: its default"),
    "truncated": (
        {"top_p": 0.9, "log_probs": "processed"},
        {},
        r"Draw without them, or use objective\.correction",
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_what_an_objective_cannot_learn_from_is_refused(
    answers: list[Drawn], tmp_path: Path, name: str
) -> None:
    drawn, knobs, message = DRAWN[name]
    path = write(tmp_path, [*answers[:3], answers[3].changed(drawn), *answers[4:]])
    with pytest.raises(DataError, match=message) as caught:
        opened(path, tmp_path / "i", knobs=knobs)
    assert caught.value.key == answers[3].prompt.key
    assert f"(1 of {len(answers)} samples)" in caught.value.reason
    served = {"correction": "truncated"} if name == "truncated" else {}
    opened(path, tmp_path / "i", knobs=served)


def test_validation_and_packs(answers: list[Drawn], tmp_path: Path) -> None:
    path = write(tmp_path, answers)
    data = opened(path, tmp_path / "i", **MODES["online"])
    found = seen([*data.eval_batches(rank=0, dp=1)])
    assert {key: a for key, _, a in found} == pytest.approx(
        {key: a for key, (_, a) in expected(answers).items()}, abs=1e-12
    )
    source = PackSource(data.config, data.split, data.dataset)
    make_packs(source, tmp_path / "plan", PackOrder(kind="plan"))
    packed = opened(
        path,
        tmp_path / "i",
        mode="offline",
        path=str(tmp_path / "plan"),
        scope="batch",
        micro_batch_size=1,
    )
    assert sorted(seen(an_epoch(packed))) == sorted(seen(an_epoch(data)))
    for kind in ("tokens", "shards"):
        with pytest.raises(PacksError, match="without the log-probabilities of rollouts"):
            make_packs(source, tmp_path / kind, PackOrder(kind=kind))


def test_what_earns_nothing_is_counted(answers: list[Drawn], tmp_path: Path) -> None:
    data = opened(write(tmp_path, answers), tmp_path / "i")
    assert data.outcomes is not None
    counts = data.outcomes.counts
    assert (counts["num_answers"], counts["num_groups"]) == (len(answers), len(SIZES))
    idle = sum(advantage == 0 for _, advantage in expected(answers).values())
    assert counts["num_alone"] == 1 and counts["num_equal"] == idle - 1 >= 3
    assert 0 < counts["num_otherwise"] < len(answers)
