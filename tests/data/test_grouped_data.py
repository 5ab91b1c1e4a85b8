"""`data.group_by: image` over real shards: what stands together, on any ranks, from any step."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.packed_splits import BUDGET, SIZES, PackEncoder, pack
from support.recorded import count_steps, launch
from support.shard_fakes import chat_json, image_bytes, open_data, small_windows, write_shard

from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.errors import PacksError, RunIdentityError
from vlmpack.forecast.figures import silent
from vlmpack.forecast.modes import ModePlanner
from vlmpack.proof.audit import audit_run
from vlmpack.recipe.sources import Source
from vlmpack.training.run_dir import RunDir

__all__ = ["small_windows"]

QUESTIONS, PICTURES = 5, 12


def write_questions(folder: Path, *, name: str = "q", seed: int = 0) -> str:
    """PICTURES pictures with QUESTIONS questions each, dealt over shards so that no two records of
    one picture are neighbours; a few records without a picture."""
    records = []
    for question in range(QUESTIONS):
        for picture in range(PICTURES):
            data = image_bytes(24, 20, seed=seed + picture)
            text = chat_json(f"{name}{question} of {picture}", "yes" * (question + 1), 1)
            # Members are named alike, or not, whatever they show.
            records.append(
                (f"{name}-{picture}-{question}", {"json": text, f"{question % 2}.png": data})
            )
        records.append((f"{name}-none-{question}", {"json": chat_json("no picture", "ok")}))
    for shard in range(4):
        write_shard(folder / f"{name}-{shard}.tar", records[16 * shard : 16 * shard + 17 - 1])
    write_shard(folder / f"{name}-4.tar", records[64:])
    return str(folder / f"{name}-*.tar")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("questions")
    return write_questions(folder), folder / "index"


def opened(questions: tuple[str, Path], **changes: Any) -> TrainData:
    settings: dict[str, Any] = {"shuffle": "global", "group_by": "image", "global_batch_size": 10}
    return open_data(*questions, **(settings | changes))


def picture_of(key: str) -> str:
    """The picture of a record; one of its own where it has none."""
    name, picture, _ = key.split("-")
    return key if picture == "none" else f"{name}-{picture}"


def order_of(data: TrainData) -> list[list[str]]:
    """The keys of each window of the first epoch, in their order."""
    windows: dict[int, list[str]] = {}
    for batch in data.planned(data.start(), data.steps_until(1, data.start())):
        keys = [data.ref(number).key for samples in batch.bins for number in samples]
        windows.setdefault(batch.position.window, []).extend(keys)
    return list(windows.values())


def broken_groups(keys: list[str]) -> int:
    """Groups that do not stand together."""
    times = Counter(picture for picture, _ in groupby(map(picture_of, keys)))
    return sum(count > 1 for count in times.values())


def steps_of(data: TrainData, state: DataState, dp: int = 1) -> list[list[str]]:
    """The keys of each global batch from a state to the end of the second epoch."""
    steps = data.steps_until(2, data.start())
    ranks = [list(data.batches(state, rank=rank, dp=dp, max_steps=steps)) for rank in range(dp)]
    return [
        sorted(
            sample.key for step in share for micro in step.micro_batches for sample in micro.samples
        )
        for share in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_records_of_one_picture_stand_together(questions: tuple[str, Path], shuffle: str) -> None:
    [grouped] = order_of(opened(questions, shuffle=shuffle))
    [plain] = order_of(opened(questions, shuffle=shuffle, group_by="none"))
    assert sorted(grouped) == sorted(plain) and len(grouped) == QUESTIONS * (PICTURES + 1)
    assert broken_groups(grouped) == 0 and broken_groups(plain) > PICTURES // 2
    inside = [[key for key in grouped if picture_of(key) == f"q-{n}"] for n in range(PICTURES)]
    assert len({tuple(key[-1] for key in keys) for keys in inside}) > 1, "always in one order"


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_a_window_cuts_a_group_and_nothing_else_does(
    questions: tuple[str, Path], small_windows: None, shuffle: str
) -> None:
    windows = order_of(opened(questions, shuffle=shuffle))
    assert len(windows) > 2
    assert [broken_groups(keys) for keys in windows] == [0] * len(windows)


def test_a_picture_is_told_by_its_bytes_not_by_its_name(tmp_path: Path) -> None:
    one, other = image_bytes(24, 20, seed=1), image_bytes(24, 20, seed=2)
    pictures = {"a": (one,), "b": (other,), "c": (one,), "d": (one, other), "e": (other, one)}
    records = [
        (
            f"{name}-x-{copy}",
            {
                "json": chat_json("?", "yes", len(shown)),
                **{f"{n + copy}.png": data for n, data in enumerate(shown)},
            },
        )
        for copy in range(6)
        for name, shown in pictures.items()
    ]
    path = str(write_shard(tmp_path / "p.tar", records))
    [keys] = order_of(opened((path, tmp_path / "i")))
    shown = [key[0] for key in keys]
    runs = ["".join(run) for _, run in groupby(shown, lambda name: "ac" if name in "ac" else name)]
    assert sorted(map(len, runs)) == [6, 6, 6, 12]
    [mixed] = [run for run in runs if "a" in run]
    assert Counter(mixed) == {"a": 6, "c": 6} and mixed not in ("a" * 6 + "c" * 6,)


def test_no_group_spans_two_sources(tmp_path: Path) -> None:
    paths = [write_questions(tmp_path, name=name) for name in ("q", "r")]
    sources = tuple(Source(name=path[-7], path=path) for path in paths)
    for shuffle in ("global", "window"):
        data = opened(("", tmp_path / "i"), sources=sources, shuffle=shuffle)
        for keys in order_of(data):
            assert broken_groups(keys) == 0 and {key[0] for key in keys} == {"q", "r"}
            order = [key.split("-")[:2] for key in keys]
            kept = [name for name, picture in order if picture == "3"]
            assert kept in (["q"] * 5 + ["r"] * 5, ["r"] * 5 + ["q"] * 5)


@pytest.mark.cases(quick="scope_stream-window", slow="in_batch-window")
@pytest.mark.parametrize("shuffle", ["global", "window"])
@pytest.mark.parametrize(
    "mode",
    [
        {"micro_batch_size": 4},
        {"mode": "online", "micro_batch_size": 1, "scope": "batch", "seq_length": 64},
        {"mode": "online", "micro_batch_size": 1, "global_batch_size": 3, "seq_length": 64},
    ],
    ids=["in_batch", "scope_batch", "scope_stream"],
)
def test_global_batches_are_the_same_on_any_ranks_and_from_any_step(
    questions: tuple[str, Path], small_windows: None, shuffle: str, mode: dict[str, Any]
) -> None:
    data = opened(questions, shuffle=shuffle, **mode)
    steps = steps_of(data, data.start())
    assert len(steps) > 10
    assert Counter(key for step in steps for key in step).most_common()[-1][1] == 2
    assert steps_of(opened(questions, shuffle=shuffle, **mode), data.start(), 3) == steps
    total = data.steps_until(2, data.start())
    states = [step.state for step in data.batches(data.start(), rank=0, dp=1, max_steps=total)]
    again = opened(questions, shuffle=shuffle, **mode)
    for at, state in enumerate(states[:-1]):
        saved = DataState.from_json(state.to_json())
        [planned] = again.planned(again.admit(saved), saved.batches + 1)
        keys = [again.ref(number).key for samples in planned.bins for number in samples]
        assert sorted(keys) == steps[at + 1]
    again = opened(questions, shuffle=shuffle, **mode)
    assert steps_of(again, states[len(states) // 2]) == steps[len(states) // 2 + 1 :]


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_a_run_does_not_go_on_with_another_order(questions: tuple[str, Path], shuffle: str) -> None:
    grouped = opened(questions, shuffle=shuffle)
    plain = opened(questions, shuffle=shuffle, group_by="none")
    assert "data.group_by" not in plain.identity
    for data, other in ((grouped, plain), (plain, grouped)):
        with pytest.raises(RunIdentityError, match=r"data.group_by"):
            opened(
                questions,
                shuffle=shuffle,
                group_by=data.config.data.group_by,
                resume=other.start(),
                new_era=True,
            )


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_a_grouped_run_is_proven(questions: tuple[str, Path], tmp_path: Path, shuffle: str) -> None:
    run_dir = RunDir(tmp_path / "run")
    data = opened(questions, shuffle=shuffle, ledger=Ledger(run_dir.data_errors))
    launch(run_dir, data, data.start(), stop=5, dp=2)
    *_, last = data.batches(data.start(), rank=0, dp=1, max_steps=5)
    launch(run_dir, data, last.state, stop=13, dp=3)
    count_steps(run_dir)
    audit = audit_run(run_dir, opened(questions, shuffle=shuffle))
    assert audit.problems == [] and audit.batches == 13
    other = audit_run(run_dir, opened(questions, shuffle=shuffle, seed=8))
    assert other.problems != []


@pytest.mark.parametrize("kind", ["plan", "shards"])
def test_packs_keep_groups_and_say_that_they_do(
    questions: tuple[str, Path], tmp_path: Path, kind: Any
) -> None:
    order = {"mode": "online", "budget": BUDGET, "encoder": PackEncoder(), **SIZES}
    data = opened(questions, **order)
    pack(data, tmp_path / "packs", kind=kind)
    saved: dict[str, Any] = order | {"mode": "offline", "path": str(tmp_path / "packs")}
    saved |= {"max_tokens": 64}
    assert order_of(opened(questions, **saved)) == order_of(data)
    with pytest.raises(PacksError, match=r"data.group_by: image in the packs, none in the recipe"):
        opened(questions, group_by="none", **saved)
    pack(opened(questions, group_by="none", **order), tmp_path / "plain", kind=kind)
    with pytest.raises(PacksError, match=r"data.group_by: none in the packs, image in the recipe"):
        opened(questions, **(saved | {"path": str(tmp_path / "plain")}))


@pytest.mark.parametrize("kind", ["tokens", "shards"])
def test_packs_of_grouped_samples_are_planned_beside_other_modes(
    questions: tuple[str, Path], tmp_path: Path, kind: Any
) -> None:
    """Packs that hold the samples themselves do not say which of them show the same image."""
    order = {"mode": "online", "budget": BUDGET, "encoder": PackEncoder(), **SIZES}
    pack(opened(questions, **order), tmp_path / "packs", kind=kind)
    data = opened(
        questions,
        **(order | {"mode": "offline", "path": str(tmp_path / "packs"), "max_tokens": 64}),
    )
    planner = ModePlanner(config=data.config, fitted=data.fitted, budget=BUDGET, progress=silent)
    found = planner.other(planner.mode("online"))
    assert np.sort(found.layout.numbers).tolist() == list(range(QUESTIONS * (PICTURES + 1)))
