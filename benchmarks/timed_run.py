"""One training run with a clock in it, for `bench_safety.py`: samples/s and seconds of a save.

A process of its own, so that it imports the checkout that PYTHONPATH names:
`python benchmarks/timed_run.py OUT.json RECIPE key=value ...`. Only two methods are wrapped, which
earlier commits have under the same names.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

WARM_UP = 5
"""First steps that are left out."""


def main() -> None:
    """Run, write the figures."""
    out, recipe, *overrides = sys.argv[1:]
    from vlmpack.api import resolve, run_recipe
    from vlmpack.training.checkpoint import Saver
    from vlmpack.training.metrics import MetricsLog

    steps: list[tuple[float, int, float]] = []
    saves: list[float] = []
    write, save = MetricsLog.write, Saver.save

    def timed_write(self: MetricsLog, row: dict[str, object]) -> None:
        write(self, row)
        if "num_samples" in row:
            steps.append((time.perf_counter(), int(str(row["num_samples"])), sum(saves)))

    def timed_save(self: Saver, *arguments: object, **named: object) -> None:
        started = time.perf_counter()
        save(self, *arguments, **named)
        saves.append(time.perf_counter() - started)

    MetricsLog.write, Saver.save = timed_write, timed_save
    pairs = dict(pair.split("=", 1) for pair in overrides)
    run_recipe(resolve(recipe, {key: json.loads(value) for key, value in pairs.items()}))
    (start, _, saved), (end, _, saved_then) = steps[WARM_UP - 1], steps[-1]
    seconds = end - start - (saved_then - saved)
    figures = {
        "samples per second": sum(count for _, count, _ in steps[WARM_UP:]) / seconds,
        "save, seconds": statistics.median(saves),
    }
    Path(out).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
