"""Steps whose Python is counted and timed, in a process of their own.

    python -P host_step.py CHECKOUT '{"shape": ...}'      (fields of `operator_step.Asked`)

`host_calls.py` starts it, under the guard of tests/fake_cuda. It takes everything else, vlmpack
included, from the checkout, so that two commits can be compared. It answers each line on stdin with
one line of JSON:

    count -> {"aten": calls into ATen, "python": {package: Python functions entered}}
    time  -> seconds of the processor that a step takes outside of the fake GPU

What the fake GPU does inside of a call into ATen is not counted and not timed.
"""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

CHECKOUT = Path(sys.argv[1] if __name__ == "__main__" else ".").resolve()
sys.path[:0] = [str(CHECKOUT / part) for part in ("benchmarks", "tests", "")]

import operator_step  # noqa: E402
from fake_cuda.device import FakeCuda, FakeCudaTensor  # noqa: E402
from fake_cuda.meta import MetaCuda  # noqa: E402
from support.engines import make_stepper  # noqa: E402

from vlmpack.packing import pin_batch  # noqa: E402

OURS = str(CHECKOUT / "vlmpack")
LEFT_OUT = (str(CHECKOUT), str(Path(__file__).parent), "torch/_library/simple_registry.py")
"""Files of the fake GPU, and how torch finds one."""


class Watch:
    """Counts what a step calls. In place of `operator_step.Stream`, which names each call."""

    def __init__(self) -> None:
        self.costs: dict[Any, Any] = {}
        self.peaks: dict[str, float] = {}
        self.aten, self.python, self.seconds = 0, Counter[str](), 0.0
        self.names = Counter[str]()
        self.inside = threading.local()
        self.profile: Callable[..., None] | None = None

    def __call__(self, _: Any) -> None:
        self.aten += 1

    def watch(self, *_: Any) -> None:
        """Modules need no hooks here."""

    def dispatched(self, dispatch: Callable[..., Any]) -> Callable[..., Any]:
        """A call into ATen on the fake GPU."""

        def run(*args: Any, **options: Any) -> Any:
            if getattr(self.inside, "on", False):
                return dispatch(*args, **options)
            sys.setprofile(None)
            self.inside.on, began = True, process_time()
            try:
                return dispatch(*args, **options)
            finally:
                self.seconds += process_time() - began
                self.inside.on = False
                sys.setprofile(self.profile)  # the backward pass has a thread of its own

        return run

    def entered(self, frame: Any, event: str, _: Any) -> None:
        """What `sys.setprofile` calls."""
        if event != "call":
            return
        code = frame.f_code
        path, _, inner = code.co_filename.rpartition("site-packages/")
        if code.co_filename.startswith(OURS):
            package, inner = "vlmpack", code.co_filename[len(str(CHECKOUT)) + 1 :]
        elif (inner if path else code.co_filename).startswith(LEFT_OUT):
            return
        else:
            package = inner.partition("/")[0] if path else "python"
            inner = inner if path else code.co_filename.rpartition("/")[2]
        self.python[package] += 1
        self.names[f"{inner}:{code.co_firstlineno} {code.co_qualname}"] += 1


def answer(engine: Any, objective: Any, batches: Any, watch: Watch) -> None:
    """Steps on the same micro-batches, in place of `operator_step._step`."""
    stepper = make_stepper(engine, objective=objective)
    pinned, taken = [pin_batch(batch) for batch in batches], 0

    def step() -> None:
        nonlocal taken
        stepper.train(taken, pinned, num_skipped=0, stop=False)
        taken += 1

    of_mode, of_tensor = FakeCuda.__torch_dispatch__, vars(FakeCudaTensor)["__torch_dispatch__"]
    with (
        patch.object(FakeCuda, "__torch_dispatch__", watch.dispatched(of_mode)),
        patch.object(
            FakeCudaTensor,
            "__torch_dispatch__",
            classmethod(watch.dispatched(of_tensor.__func__)),
        ),
        patch.object(MetaCuda, "hold", lambda *_: None, create=True),  # memory is not asked for
    ):
        step()  # the first, which differs
        for line in sys.stdin:
            if line.strip() == "time":
                watch.seconds, began = 0.0, process_time()
                step()
                print(json.dumps(process_time() - began - watch.seconds), flush=True)
                continue
            watch.aten, watch.profile = 0, watch.entered
            watch.python.clear(), watch.names.clear()
            sys.setprofile(watch.profile)
            step()
            watch.profile = None
            sys.setprofile(None)
            top = watch.names.most_common()
            found = {"aten": watch.aten, "python": watch.python, "functions": top}
            print(json.dumps(found), flush=True)


def main() -> None:
    """Answer until stdin ends."""
    warnings.simplefilter("ignore")
    asked = operator_step.Asked(**json.loads(sys.argv[2]))
    with (
        patch.object(operator_step, "Stream", Watch),
        patch.object(operator_step, "_step", answer),
    ):
        operator_step.record(asked)


if __name__ == "__main__":
    main()
