"""What a training step waits for, and what is none of its time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.engines import single_rank

from vlmpack.data.loading.global_step import GlobalStep
from vlmpack.data.plan.state import DataState
from vlmpack.distributed.timeouts import CollectiveTimeouts
from vlmpack.recipe.checkpoint import CheckpointSection
from vlmpack.training.objective import SFT
from vlmpack.training.run_dir import RunDir
from vlmpack.training.step import StepSums
from vlmpack.training.stop import StopFlag
from vlmpack.training.trainer import Trainer

STEPS = 4


events: list[str] = []


class _Steps(CollectiveTimeouts):
    """Knows whether a step's timeout holds."""

    @contextmanager
    def of_step(self, *, is_first: bool) -> Iterator[None]:
        events.append("first step" if is_first else "step")
        yield
        events.append("behind it")


class _Saver:
    is_writing = False

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: events.append(name)


def test_a_checkpoint_is_published_outside_of_the_steps_timeout(tmp_path: Path) -> None:
    """The main rank looks at the files and removes old ones while the others wait for it, for as
    long as any save may take: a later step's time is shorter."""
    events.clear()
    sums = StepSums(totals={}, loss=None)
    stepper: Any = SimpleNamespace(
        ranks=single_rank(),
        objective=SFT,
        train=lambda *_, **__: (sums, {}),
        engine=SimpleNamespace(parameter_shapes=dict, optimizer_steps=0, owned_slices=None),
    )
    trainer = Trainer(
        stepper=stepper,
        total_steps=STEPS,
        checkpoint=CheckpointSection(interval_steps=2, keep=1, asynchronous=True),
        validation_interval=None,
        log_interval=1,
        timeouts=_Steps(first=60, later=60),
        run_dir=RunDir(tmp_path),
        stop=StopFlag(),
    )
    saver: Any = _Saver()
    trainer._saver = saver
    step = GlobalStep(
        epoch=0, batch=0, num_samples=0, num_rows=0, imbalance=1.0, micro_batches=(),
        state=DataState(0, 0, 0, 0, (), ()),
    )  # fmt: skip
    trainer.run(iter([step] * STEPS), None)
    whole = ["behind it", "finish"]
    assert events == [
        *("first step", *whole, "step", *whole, "save_in_background"),
        *("step", *whole, "step", *whole, "save", "abandon"),
    ]
