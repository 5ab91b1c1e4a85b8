"""`make soak-faults`: random deaths over all settings, in parts that save their result and go on.

    PYTHONPATH=.:tests python -m faults.soak --minutes 25

Each line of the results is one death, or the end of a run that died several times. Started again it
goes on behind the last line. The unbroken runs are kept in the working folder and made once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from faults.deaths import BEYOND, COVERING, Outcome, Setting, run_chain

WANTED = 200
DEATHS_OF_A_RUN = 5
SETTINGS = (*BEYOND, *COVERING)
"""What was tried least comes first."""


def read(results: Path) -> list[Outcome]:
    """What is there; a line that was torn is left out."""
    found = []
    for line in results.read_text().splitlines() if results.is_file() else ():
        try:
            found.append(Outcome(**json.loads(line)))
        except ValueError:
            continue
    return found


def chain(work: Path, setting: Setting, number: int) -> Iterator[Outcome]:
    """One run that dies; that it cannot be resumed is an outcome too."""
    folder = work / str(setting)
    try:
        yield from run_chain(folder, setting, [None] * DEATHS_OF_A_RUN, seed=number)
    except Exception:
        words = traceback.format_exc()[-3000:]
        yield Outcome(str(setting), "", 0, 0, 0.0, [], problems=[words])
        return
    shutil.rmtree(folder / f"run-{number}", ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    """The number of outcomes with a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--results", type=Path, default=Path("runs/soak-faults/deaths.jsonl"))
    parser.add_argument("--work", type=Path, default=Path("runs/soak-faults/work"))
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * given.minutes
    given.results.parent.mkdir(parents=True, exist_ok=True)
    found = read(given.results)
    # A run that was cut off has no end, and its number is not used again.
    number = max((each.run for each in found), default=-1) + 1
    while time.monotonic() < deadline and sum(bool(each.death) for each in found) < WANTED:
        setting = SETTINGS[number % len(SETTINGS)]
        for outcome in chain(given.work, setting, number):
            outcome.run = number
            found.append(outcome)
            with given.results.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            print(outcome, flush=True)
        number += 1
    wrong = [outcome for outcome in found if outcome.problems]
    kinds = Counter(outcome.death for outcome in found if outcome.death)
    print(f"{sum(kinds.values())} deaths in {number} runs: {dict(kinds)}; {len(wrong)} wrong")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(bool(main()))
