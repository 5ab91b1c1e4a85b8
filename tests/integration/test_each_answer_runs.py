"""Runs with `data.learn: each_answer`, from a file of conversations: every mode, both engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.answers import asks, dropping_folder, replies
from support.recipes import changed, rows, run_settings
from support.shards import TINY_MODEL
from support.whole_runs import audited

from vlmpack.api import resolve, run_recipe
from vlmpack.data.packs.write import PackOrder
from vlmpack.errors import RecipeError
from vlmpack.evaluation.predictions import PREDICTIONS_AFTER, read_predictions
from vlmpack.recipe import load_recipe
from vlmpack.run.packs import pack_recipe

ANSWERS = (3, 1, 4, 2, 3, 1, 2)
SAME = ("step", "epoch", "num_samples", "num_label_tokens", "num_tokens")
RECORDS = len(ANSWERS)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("each-answer")
    lines = []
    for record, count in enumerate(ANSWERS):
        turns = []
        for number in range(count):
            turns.append(asks(f"what of {record} is {number}"))
            turns.append(replies(f"{record} is a number", f"the answer {number}"))
        lines.append(json.dumps({"messages": turns}) + "\n")
    path = root / "talks.jsonl"
    path.write_text("".join(lines))
    return run_settings(
        root,
        model__path=str(dropping_folder(TINY_MODEL, root / "model")),
        data__train=str(path),
        data__validation=str(path),
        data__test=str(path),
        data__learn="each_answer",
        training__global_batch_size=8,
        training__max_steps=None,
        training__num_epochs=1,
        evaluation={"generate": False, "batch_size": 4, "interval_steps": 2},
    )


def run(settings: dict[str, Any], root: Path, name: str, **changes: Any) -> Path:
    run_dir = root / name
    run_recipe(resolve(changed(settings, run_dir=str(run_dir), **changes), {}))
    return run_dir


def losses(run_dir: Path) -> list[float]:
    return [loss for (loss,) in rows(run_dir, "loss")]


ONLINE = {
    "packing__mode": "online",
    "packing__scope": "batch",
    "packing__max_tokens": 512,
    "training__micro_batch_size": 1,
}


@pytest.mark.slow
def test_every_mode_trains_the_same_answers(settings: dict[str, Any], tmp_path: Path) -> None:
    questions = {"evaluation__generate": True, "evaluation__max_new_tokens": 2}
    in_batch = run(settings, tmp_path, "in_batch", **questions)
    assert [n for (n,) in rows(in_batch, "num_samples")] == [8, 8]
    assert sum(ANSWERS) == 16 and len(losses(in_batch)) == 2
    assert len(read_predictions(in_batch / PREDICTIONS_AFTER)) == RECORDS, "one question a record"
    online = changed(settings, **ONLINE)
    pack_recipe(load_recipe(online), tmp_path / "packs", PackOrder(kind="tokens"))
    runs = {
        "none": run(settings, tmp_path, "none", packing__mode="none"),
        "online": run(online, tmp_path, "online"),
        "offline": run(
            online,
            tmp_path,
            "offline",
            packing__mode="offline",
            packing__path=str(tmp_path / "packs"),
        ),
        "shared": run(online, tmp_path, "shared", packing__share_prefix=True),
        "shared in_batch": run(settings, tmp_path, "both", packing__share_prefix=True),
    }
    for name, run_dir in runs.items():
        assert rows(run_dir, *SAME) == rows(in_batch, *SAME), name
        assert losses(run_dir) == pytest.approx(losses(in_batch), rel=1e-5), name
        assert audited(run_dir).problems == [], name
    assert losses(runs["offline"]) == losses(runs["online"])
    for name in ("shared", "shared in_batch"):
        assert all(shared for (shared,) in rows(runs[name], "num_shared_tokens"))


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning")
def test_megatron_trains_the_same_rows(settings: dict[str, Any], tmp_path: Path) -> None:
    hf = run(settings, tmp_path, "hf")
    mcore = run(settings, tmp_path, "mcore", model__backend="mcore")
    assert rows(mcore, *SAME) == rows(hf, *SAME)
    assert losses(mcore) == pytest.approx(losses(hf), rel=1e-4)
    with pytest.raises(RecipeError, match="'mcore' shares no prefixes"):
        resolve(changed(settings, model__backend="mcore", packing__share_prefix=True), {})
