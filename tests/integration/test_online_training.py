"""Runs in mode online: what they learn is what the unpacked run learns, stopped or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.recipes import changed, rows, write_recipe
from support.whole_runs import assert_same_steps, audited, finetune_in_ranks, run_until

from vlmpack.api import resolve, run_recipe

SAME = ("step", "epoch", "num_tokens", "num_label_tokens", "num_samples")


@pytest.fixture
def online(online: dict[str, Any]) -> dict[str, Any]:
    """Three epochs of it."""
    return changed(online, training__num_epochs=3)


def run(settings: dict[str, Any], run_dir: Path, **changes: Any) -> Path:
    run_recipe(resolve(changed(settings, run_dir=str(run_dir), **changes), {}))
    return run_dir


@pytest.mark.soak
def test_scope_batch_learns_what_padded_rows_learn(online: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"training__global_batch_size": 8}
    packed = run(online, tmp_path / "packed", packing__scope="batch", **sizes)
    padded = run(
        online, tmp_path / "padded", packing__mode="none", training__micro_batch_size=4, **sizes
    )
    assert rows(packed, *SAME) == rows(padded, *SAME)
    assert len(rows(packed, "step")) == 9
    assert sum(n for (n,) in rows(packed, "num_slots")) < sum(
        n for (n,) in rows(padded, "num_slots")
    )
    assert max(n for (n,) in rows(packed, "num_samples")) > max(
        n for (n,) in rows(packed, "num_rows")
    )
    pairs = zip(rows(packed, "loss", "grad_norm"), rows(padded, "loss", "grad_norm"), strict=True)
    for ours, theirs in pairs:
        assert ours == pytest.approx(theirs, rel=1e-5)
    first = {"training__num_epochs": None, "training__max_steps": 1}
    other = run(online, tmp_path / "stream", training__global_batch_size=3, **first)
    assert rows(other, *SAME)[0] != rows(padded, *SAME)[0], "any rows would have passed"


@pytest.mark.soak
def test_a_stopped_run_goes_on_bit_for_bit(
    online: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = run(online, tmp_path / "unbroken")
    total = len(rows(unbroken, "step"))
    assert {epoch for (epoch,) in rows(unbroken, "epoch")} == {0, 1, 2}
    broken = changed(online, run_dir=str(tmp_path / "broken"))
    for stop_after in (2, total // 2):
        run_until(broken, stop_after, monkeypatch, total=total)
    run_until(broken, None, monkeypatch)
    columns = (*SAME, "loss", "grad_norm", "num_rows")
    assert rows(tmp_path / "broken", *columns) == rows(unbroken, *columns)
    for run_dir in (unbroken, tmp_path / "broken"):
        assert audited(run_dir).problems == []


@pytest.mark.soak
def test_two_processes_share_the_rows_of_one(online: dict[str, Any], tmp_path: Path) -> None:
    one = run(online, tmp_path / "one", packing__balance="none")
    balanced = changed(online, run_dir=str(tmp_path / "two"))
    result = finetune_in_ranks(write_recipe(tmp_path / "two.yaml", balanced), processes=2)
    assert result.returncode == 0, result.stderr
    assert_same_steps(tmp_path / "two", one, len(rows(one, "step")))
    imbalance = [value for (value,) in rows(tmp_path / "two", "imbalance")]
    assert max(imbalance) > 1.0, "nothing was measured"
    assert {value for (value,) in rows(one, "imbalance")} == {1.0}
    assert audited(tmp_path / "two").problems == []
