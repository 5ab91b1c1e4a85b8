"""`vlmpack inspect RUN` draws what the run trained, or refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.inspected import make_settings
from support.recipes import copy_samples
from support.shards import ROOT

from vlmpack.build.look import open_recipe
from vlmpack.data.pipeline import TrainData
from vlmpack.distributed import Ranks
from vlmpack.errors import VlmpackError
from vlmpack.proof.rows.opening import Wanted, open_row
from vlmpack.recipe import dump_recipe, load_recipe
from vlmpack.training.record import open_record
from vlmpack.training.run_dir import RunDir

ONE = Ranks()
STEPS = 4
CHANGED_AT = 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> tuple[RunDir, list[list[str]]]:
    """A run whose data grew after one step, and the keys of each of its rows, as it took them."""
    root = tmp_path_factory.mktemp("grown")
    settings = make_settings(root)
    settings["training"] |= {"global_batch_size": 1, "max_steps": STEPS}
    settings["data"]["train"] = str(root / "train-*.tar")
    settings["checkpoint"] = {"on_data_change": "new_era"}
    recipe = load_recipe(settings)
    run_dir = RunDir(Path(settings["run_dir"]))
    run_dir.prepare()
    run_dir.recipe.write_text(dump_recipe(recipe))
    rows: list[list[str]] = []
    state = None
    for stop in (CHANGED_AT, STEPS):
        train, _ = open_recipe(recipe)
        state = train.start() if state is None else train.admit(state)
        open_record(run_dir.samples, ONE, start=state.batches, state=state.to_json())
        for step in train.batches(state, rank=0, dp=1, max_steps=stop):
            rows.append([ref.key for ref in step.micro_batches[0].samples])
            state = step.state
        copy_samples(ROOT / "assets/digits/train-000001.tar", root / "train-000001.tar", 9)
    return run_dir, rows


def drawn(run_dir: RunDir, *overrides: str, **wanted: Any) -> list[str]:
    _, found, _ = open_row(run_dir.path, Wanted(**wanted), overrides=overrides)
    return [ref.key for ref in found.samples]


def planned_from_the_start(run_dir: RunDir) -> TrainData:
    return open_recipe(load_recipe(run_dir.recipe))[0]


@pytest.mark.slow
def test_a_row_of_a_run_is_the_one_that_it_trained(trained: Any) -> None:
    run_dir, rows = trained
    train = planned_from_the_start(run_dir)
    naive = [
        [train.ref(number).key for number in planned.bins[0]]
        for planned in train.planned(train.start(), STEPS)
    ]
    for batch in (CHANGED_AT, STEPS - 1):
        assert drawn(run_dir, batch=batch, row=0) == rows[batch] != naive[batch]


@pytest.mark.cases(quick="overrides5-*", slow=("*0-*", "*2-*"))
@pytest.mark.parametrize(
    ("overrides", "wanted", "message"),
    [
        ((), {"batch": 0, "row": 0}, r"--batch 0: from batch 0 on, .*from other data"),
        ((), {"batch": STEPS, "row": 0}, f"takes {STEPS} steps"),
        ((), {"row": 0}, r"from batch 0 on, .*from other data"),
        ((), {"row": 2}, r"row 2 of the first epoch.* is not what the run planned there"),
        (("training.seed=9",), {"batch": 2, "row": 0}, "data.seed: the run has 0, now 9"),
        (("training.seed=9",), {"row": 2}, "data.seed: the run has 0, now 9"),
    ],
)
def test_what_the_run_did_not_train_is_refused(
    trained: Any, overrides: tuple[str, ...], wanted: dict[str, int], message: str
) -> None:
    with pytest.raises(VlmpackError, match=message):
        drawn(trained[0], *overrides, **wanted)
