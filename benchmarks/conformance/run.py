"""Judge one trainer's batches.

    .conformance/NAME/bin/python benchmarks/conformance/run.py NAME

Writes benchmarks/results/conformance-NAME.json; `table.py` makes the page's table of all.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import vlmpack  # noqa: E402
from benchmarks.conformance import subject  # noqa: E402


def gradient_of(found):
    """The largest relative L2 error of the gradients, over the parts of the model."""
    parts = [
        c["measured"]
        for c in found.to_dict()["checks"]
        if c["name"].startswith("gradients: ") and c["measured"] is not None
    ]
    return max(parts, default=None)


def measure(case):
    """One case: what judge found, or why there is nothing."""
    row = {"what": case.what, "model": case.model, "attention": case.attention, "note": case.note}
    samples = case.samples if case.samples is not None else subject.samples(case.model)
    model = subject.model(case.model, case.attention)
    try:
        found = vlmpack.judge(model, case.collate, samples, **case.given)
    except Exception as error:
        traceback.print_exc()
        return row | {"not run": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    print(case.what, case.model, case.attention, found, sep="\n", end="\n\n")
    losses = [
        c["measured"] for c in found.to_dict()["checks"] if c["name"] == "loss of each sample"
    ]
    return row | {
        "faults": list(found.faults),
        "loss": losses[0] if losses else None,
        "gradient": gradient_of(found),
        "judgement": found.to_dict(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainer")
    name = parser.parse_args().trainer
    torch.set_num_threads(1)
    module = import_module(f"benchmarks.conformance.of_{name}")
    rows = [measure(case) for case in module.cases()]
    packages = ("torch", "transformers", *(p for p in module.PACKAGES if p != "transformers"))
    result = {
        "trainer": name,
        "measured": datetime.now(UTC).date().isoformat(),
        "versions": {package: version(package) for package in packages},
        "rows": rows,
    }
    out = ROOT / "benchmarks" / "results" / f"conformance-{name}.json"
    out.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    for row in rows:
        said = row.get("not run") or ", ".join(row["faults"]) or "right"
        print(f"{row['what']:60} {row['model']:11} {row['attention']:6}", said, row.get("gradient"))


if __name__ == "__main__":
    main()
