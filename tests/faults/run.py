"""`make faults`: the tests of each row of the matrix, and what they found, as JSON.

    PYTHONPATH=.:tests python -m faults.run --results benchmarks/results/faults.json

A test says by `record_property` how many faults it made (`injections`), how long each took to be
noticed (`seconds`) and how many steps were lost (`steps_lost`). A case that says nothing is one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from faults.matrix import MATRIX

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Found:
    """What the tests of one row found."""

    injections: int = 0
    detected: int = 0
    """Of them, those of tests that passed: noticed, refused or withstood as the row says."""
    silent: int = 0
    not_run: int = 0
    """Cases that skipped themselves; they count nowhere else."""
    seconds: list[float] = field(default_factory=list)
    steps_lost: list[int] = field(default_factory=list)

    def add(self, case: ElementTree.Element) -> None:
        """One case of pytest's report."""
        said = defaultdict(list)
        for each in case.iter("property"):
            said[each.get("name")].append(each.get("value", ""))
        if case.find("skipped") is not None:
            self.not_run += 1
            return
        count = int(said["injections"][0]) if said["injections"] else 1
        failed = case.find("failure") is not None or case.find("error") is not None
        self.injections += count
        self.silent += failed
        self.detected += count - failed
        self.seconds += [float(value) for value in said["seconds"]]
        self.steps_lost += [int(value) for value in said["steps_lost"]]

    def figures(self) -> dict[str, Any]:
        """For the table."""
        row = asdict(self)
        row["seconds"] = (
            [round(float(q), 2) for q in np.percentile(self.seconds, (50, 99))]
            if (self.seconds)
            else None
        )
        row["steps_lost"] = max(self.steps_lost, default=None)
        return row


def cases(report: Path) -> Iterator[tuple[str, ElementTree.Element]]:
    """(file::function, the case) of a report that pytest wrote."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        path = case.get("classname", "").replace(".", "/") + ".py"
        yield f"{path}::{case.get('name', '').partition('[')[0]}", case


def counted(found: Mapping[str, Sequence[ElementTree.Element]]) -> dict[str, dict[str, Any]]:
    """Each row's figures. A row without a case that ran fails the whole."""
    rows = {}
    for row in MATRIX:
        all_of = Found()
        for test in row.tests:
            for case in found.get(test, ()):
                all_of.add(case)
        rows[row.number] = all_of.figures()
    return rows


def main(arguments: list[str] | None = None) -> int:
    """0 if every row has faults that were made, and none was silent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="where the figures are written")
    parser.add_argument("--rows", nargs="*", help="these rows alone, such as R3 R10")
    given = parser.parse_args(arguments)
    chosen = [row for row in MATRIX if not given.rows or row.number in given.rows]
    tests = list(dict.fromkeys(test for row in chosen for test in row.tests))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal"]
        command += ["-m", "not soak", "--durations", "12", "-o", "junit_family=xunit1"]
        command += [f"--junitxml={report}", *tests]
        code = subprocess.run(command, cwd=ROOT, env=os.environ, check=False).returncode
        found = defaultdict(list)
        for test, case in cases(report):
            found[test].append(case)
    rows = {row.number: counted(found)[row.number] for row in chosen}
    empty = [number for number, row in rows.items() if not row["injections"]]
    for number, row in rows.items():
        print(number, json.dumps(row))
    if given.results is not None:
        made = {"date": time.strftime("%Y-%m-%d"), "machine": f"{os.cpu_count()} cores"}
        made |= {"seconds": round(time.monotonic() - begun), "python": platform.python_version()}
        given.results.write_text(json.dumps({**made, "rows": rows}, indent=1) + "\n")
    print(
        f"{sum(row['injections'] for row in rows.values())} faults, "
        f"{sum(row['silent'] for row in rows.values())} silent, "
        f"{time.monotonic() - begun:.0f} s; no fault was made in: {empty or 'no row'}"
    )
    return code or int(bool(empty))


if __name__ == "__main__":
    sys.exit(main())
