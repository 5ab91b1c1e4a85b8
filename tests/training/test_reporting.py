"""A remark names the first sample that it is about, whichever rank trained it, once a launch."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import single_rank
from support.listeners import listeners_of

from vlmpack.data.loading.loader import GlobalStep
from vlmpack.data.plan.state import DataState
from vlmpack.distributed.ranks import CollectiveTimeouts
from vlmpack.recipe.schema import CheckpointSection
from vlmpack.training.listener import Boundary
from vlmpack.training.objective import Remark
from vlmpack.training.run_dir import RunDir
from vlmpack.training.step import StepSums
from vlmpack.training.stop import StopFlag
from vlmpack.training.trainer import Trainer

ODD = Remark(one="sample is odd", many="samples are odd", which=lambda batch: batch)


class _TwoRanks:
    """This process, and another one whose samples are asked for like this one's."""

    def __init__(self, *others: str) -> None:
        self.others, self.calls = list(others), 0
        self.one = single_rank()

    def gather_objects(self, value: list[str]) -> list[list[str]]:
        self.calls += 1
        assert len(value) <= 1  # a name travels, not all of them
        return [value, self.others[:1]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.one, name)


@pytest.mark.parametrize(
    ("own", "others", "said"),
    [
        ([[], [1]], [], "1 sample is odd, d (s.tar)"),
        ([[1], [0, 1]], ["z (t.tar)"], "4 samples are odd, first b (s.tar)"),
        ([[], []], ["y (t.tar)", "z (t.tar)"], "2 samples are odd, first y (t.tar)"),
    ],
)
def test_a_remark_names_its_first_sample(tmp_path: Path, caplog, own, others, said):
    """The middle case counts its 3 and another rank's 1."""
    ranks = _TwoRanks(*others)
    count = sum(map(len, own)) + len(others)
    kinds = iter([0, count, count])  # the first step has none, the third is not told again
    stepper: Any = SimpleNamespace(
        ranks=ranks,
        objective=SimpleNamespace(remarks={"num_odd": ODD}),
        train=lambda *_, **__: (StepSums(totals={"num_odd": next(kinds)}, loss=None), {}),
    )
    saver: Any = SimpleNamespace(is_writing=False, wait_for_copy=None)
    trainer = Trainer(
        stepper=stepper,
        total_steps=3,
        checkpoint=CheckpointSection(),
        saver=saver,
        timeouts=CollectiveTimeouts(first=60, later=60),
        stop=StopFlag(),
        listeners=listeners_of(stepper, RunDir(tmp_path), saver=saver),
    )
    rows = [[SimpleNamespace(shard="s.tar", key=key) for key in keys] for keys in ("ab", "cd")]
    micro_batches: Any = tuple(
        SimpleNamespace(batch=odd, samples=row, skipped=())
        for odd, row in zip(own, rows, strict=True)
    )
    step = GlobalStep(
        epoch=0, batch=0, num_samples=4, num_rows=2, imbalance=1.0, micro_batches=micro_batches,
        state=DataState(0, 0, 0, 0, (), ()),
    )  # fmt: skip
    for _ in range(3):
        trainer.listeners.remarks.on_step(trainer._train(iter([step])))
    assert caplog.messages == [f"note: step 2: {said}"]
    assert ranks.calls == 1


def test_what_is_closed_twice_waits_for_its_trackers_once(tmp_path: Path) -> None:
    """A launch closes its session behind the steps, and again when it leaves the block."""
    stepper: Any = SimpleNamespace(objective=SimpleNamespace(remarks={}), ranks=single_rank())
    reporting = listeners_of(stepper, RunDir(tmp_path), reports=True).reporting
    reporting.on_start(Boundary(step=0))
    assert reporting._outlets is not None
    calls: list[str] = []
    closes: Any = SimpleNamespace(close=lambda: calls.append("close"))
    reporting._outlets = reporting._outlets._replace(trackers=closes)
    for _ in range(2):
        reporting.close()
    reporting.evaluated(1, {"loss": 1.0})
    assert calls == ["close"]


def test_sources_have_lines_of_their_own(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="vlmpack")
    by_source = {"web": {"plain_loss": ("a", "b")}, "mine": {"plain_loss": ("c", "d")}}
    objective = SimpleNamespace(by_source=by_source, remarks={})
    stepper: Any = SimpleNamespace(objective=objective, ranks=single_rank())
    totals = {"a": 1.0, "b": 2.0, "c": 1.0, "d": 0.0}
    reporting = listeners_of(stepper, RunDir(tmp_path)).reporting
    reporting._say_sources(3, totals, "validation of ")
    assert caplog.messages == ["step 3: validation of web  plain loss 0.5000"]
