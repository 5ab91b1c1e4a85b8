"""One training run with a clock in it, for `against.py`: first step, samples/s, save time.

A process of its own, so that it imports the checkout that PYTHONPATH names:
`python benchmarks/timed_run.py OUT.json RECIPE key=value ...`. The clock starts with the
process, as a user's does; only two methods are wrapped, which earlier commits have under the same
names.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path


def _process_seconds() -> float:
    """Since this process was started, interpreter included."""
    ticks = float(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run, write the figures."""
    out, recipe, *overrides = sys.argv[1:]
    from vlmpack.api import resolve, run_recipe
    from vlmpack.training.checkpoint import Saver
    from vlmpack.training.metrics import MetricsLog

    steps: list[tuple[float, int]] = []
    saves: list[float] = []
    write, save = MetricsLog.write, Saver.save

    def timed_write(self: MetricsLog, row: dict[str, object]) -> None:
        write(self, row)
        if "num_samples" in row:
            steps.append((_process_seconds(), int(str(row["num_samples"]))))

    def timed_save(self: Saver, *arguments: object, **named: object) -> None:
        started = time.perf_counter()
        save(self, *arguments, **named)
        saves.append(time.perf_counter() - started)

    MetricsLog.write, Saver.save = timed_write, timed_save
    pairs = dict(pair.split("=", 1) for pair in overrides)
    run_recipe(resolve(recipe, {key: json.loads(value) for key, value in pairs.items()}))
    figures: dict[str, float] = {"first_step_seconds": steps[0][0]}
    if len(steps) > 10:
        # The first steps warm caches up; saves are taken out of the time between two rows.
        (begin, _), (end, _) = steps[4], steps[-1]
        samples = sum(count for _, count in steps[5:])
        figures["samples_per_second"] = samples / (end - begin - sum(saves[:-1]))
    if saves:
        figures["save_seconds"] = statistics.median(saves)
    Path(out).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
