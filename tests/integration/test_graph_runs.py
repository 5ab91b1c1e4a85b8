"""Runs whose decoder is captured train the rows of those without, and go on with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.recipes import changed, rows, write_recipe
from support.whole_runs import assert_same_steps, audited, finetune_in_ranks, run_until

from vlmpack.api import resolve, run_recipe

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.distributed.*is deprecated:FutureWarning",  # in megatron-core
    r"ignore:The \.grad attribute of a Tensor that is not a leaf",
)

SAME = ("step", "epoch", "num_tokens", "num_label_tokens", "num_samples", "num_rows")
GRAPHS = {"training__cuda_graphs": "decoder"}
MEGATRON = pytest.mark.megatron


def run(settings: dict[str, Any], run_dir: Path, **changes: Any) -> Path:
    run_recipe(resolve(changed(settings, run_dir=str(run_dir), **changes), {}))
    return run_dir


def on_engine(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    if name == "mcore":
        pytest.importorskip("megatron.core")
    return changed(settings, model__backend=name)


def assert_same_training(ours: Path, theirs: Path) -> None:
    assert rows(ours, *SAME) == rows(theirs, *SAME)
    steps = zip(rows(ours, "loss", "grad_norm"), rows(theirs, "loss", "grad_norm"), strict=True)
    for number, (found, wanted) in enumerate(steps):
        assert found[0] == pytest.approx(wanted[0], rel=1e-6 if number == 0 else 1e-5)
        assert found[1] == pytest.approx(wanted[1], rel=1e-5)


@pytest.mark.cases(slow="hf-1-True")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "bound", "some_eager"),
    [
        ("hf", 1, True),
        ("hf", 8, False),
        ("hf", 32, False),
        pytest.param("mcore", 1, True, marks=MEGATRON),
    ],
)
def test_a_captured_run_trains_the_same(
    engine: str, bound: int, some_eager: bool, online: dict[str, Any], tmp_path: Path
) -> None:
    online = on_engine(engine, online)
    plain = run(online, tmp_path / "plain")
    captured = run(
        online, tmp_path / "captured", training__cuda_graph_max_sequences=bound, **GRAPHS
    )
    assert_same_training(captured, plain)
    eager = sum(n for (n,) in rows(captured, "num_eager_rows"))
    full = sum(n for (n,) in rows(captured, "num_rows")) - eager
    assert (eager > 0) is some_eager
    slots = sum(n for (n,) in rows(captured, "num_slots"))
    assert slots >= 256 * full and (some_eager or slots % 256 == 0)
    assert audited(captured).problems == []
    assert {n for (n,) in rows(plain, "num_eager_rows")} == {0}


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["hf", pytest.param("mcore", marks=MEGATRON)])
def test_a_run_goes_on_with_graphs_and_without(
    engine: str, online: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = changed(on_engine(engine, online), training__num_epochs=2)
    plain = run(online, tmp_path / "plain")
    total = len(rows(plain, "step"))
    broken = changed(online, run_dir=str(tmp_path / "broken"))
    run_until(broken, 1, monkeypatch, total=total)
    run_until(changed(broken, **GRAPHS), 3, monkeypatch, total=total)
    run_until(broken, None, monkeypatch)
    assert total > 4
    assert_same_training(tmp_path / "broken", plain)
    slots = [n for (n,) in rows(tmp_path / "broken", "num_slots")]
    assert slots[1] % 256 == 0 and slots != [n for (n,) in rows(plain, "num_slots")]


@pytest.mark.soak
def test_two_processes_capture_each_their_own(online: dict[str, Any], tmp_path: Path) -> None:
    one = run(online, tmp_path / "one", packing__balance="none")
    captured = changed(online, run_dir=str(tmp_path / "two"), **GRAPHS)
    result = finetune_in_ranks(write_recipe(tmp_path / "two.yaml", captured), processes=2)
    assert result.returncode == 0, result.stderr
    assert_same_steps(tmp_path / "two", one, len(rows(one, "step")))
