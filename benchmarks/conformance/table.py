"""The table of docs/conformance.md, from benchmarks/results/conformance-*.json.

python benchmarks/conformance/table.py           # prints it
python benchmarks/conformance/table.py --write   # puts it into the page
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"
START, END = "<!-- table -->", "<!-- end of table -->"
ORDER = ("transformers", "trl", "llamafactory", "swift", "automodel", "veomni")
HEAD = (
    "| batches of | model | attention | found | gradient | loss |",
    "|---|---|---|---|---|---|",
)
SHOWN = {"qwen3": "Qwen3", "qwen2_5_vl": "Qwen2.5-VL", "flash": "stand-in", "sdpa": "sdpa"}


def figure(value):
    return "" if value is None else f"{float(value):.1e}"


def line(row, notes):
    found = row.get("not run")
    if found is None:
        found = ", ".join(row["faults"]) or "right"
    else:
        found = f"not run: {found}"
    mark = ""
    if row["note"]:
        if row["note"] not in notes:
            notes.append(row["note"])
        mark = f" ({notes.index(row['note']) + 1})"
    cells = (
        row["what"] + mark,
        SHOWN[row["model"]],
        SHOWN[row["attention"]],
        found,
        figure(row.get("gradient")),
        figure(row.get("loss")),
    )
    return f"| {' | '.join(cells)} |"


def table():
    lines, notes = [], []
    for name in ORDER:
        file = ROOT / "benchmarks" / "results" / f"conformance-{name}.json"
        result = json.loads(file.read_text(encoding="utf-8"))
        versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items() if k != "torch")
        lines += ["", f"**{versions}** ({result['measured']})", "", *HEAD]
        lines += [line(row, notes) for row in result["rows"]]
    lines += ["", *(f"({n}) {note}." for n, note in enumerate(notes, 1)), ""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    made = table()
    if not parser.parse_args().write:
        print(made)
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(f"{before}{START}\n{made}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
