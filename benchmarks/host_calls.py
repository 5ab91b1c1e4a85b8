"""What a step costs the host: calls into ATen, Python functions entered, and their time.

    python benchmarks/host_calls.py                      # LoRA `in_batch` at the shape of 3B
    python benchmarks/host_calls.py --beside ../before   # and another checkout, in turn
    python benchmarks/host_calls.py --top 40             # and the functions that are entered most

The step is that of `operators.py`, on tensors without numbers (`host_step.py`). The time is that of
the processor outside of the fake GPU. It has Python and torch's own dispatch, no kernel and no
launch. Functions are split by the package that has them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests"), str(HERE.parent)]

from fake_cuda.guard import surroundings, why_not  # noqa: E402
from gpu_shapes import SHAPES  # noqa: E402
from operator_layers import kinds_of  # noqa: E402
from operators import STEPS  # noqa: E402

ROUNDS = 9


class Host:
    """A process that takes steps when it is asked to; see `host_step.py`."""

    def __init__(self, asked: Mapping[str, Any], checkout: Path = HERE.parent) -> None:
        command = [sys.executable, "-P", str(HERE / "host_step.py"), str(checkout)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([*command, json.dumps(asked)], env=surroundings(), **pipes)

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.communicate()

    def ask(self, what: str) -> Any:
        """ "count" or "time" a step.

        Raises:
            RuntimeError: it fails. What it says is on stderr.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{what}\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"host_step.py ended with {self.process.wait()}")
        return json.loads(line)


def asked_of(name: str, recompute: str, layers: Mapping[str, int] | None = None) -> dict[str, Any]:
    """A step of `operators.STEPS`, of the whole model unless `layers` says otherwise."""
    step = {**STEPS[name], "recompute": recompute}
    return step | {"layers": layers or kinds_of(SHAPES[step["shape"]])}


def lines(counted: Sequence[Mapping[str, Any]], names: Sequence[str], top: int) -> list[str]:
    """A table of the counts of each checkout, and the functions that are entered most."""
    packages = sorted({package for one in counted for package in one["python"]})
    found = [f"{'':24}" + "".join(f"{name[-16:]:>18}" for name in names)]
    rows = {"calls into ATen": [one["aten"] for one in counted]}
    rows["Python functions"] = [sum(one["python"].values()) for one in counted]
    rows |= {f"  of {name}": [one["python"].get(name, 0) for one in counted] for name in packages}
    found += [f"{row:24}" + "".join(f"{n:18,}" for n in each) for row, each in rows.items()]
    functions = [dict(one["functions"]) for one in counted]
    for name in [*functions[0]][:top]:
        found.append(f"{name[-64:]:64}" + "".join(f"{one.get(name, 0):9,}" for one in functions))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The counts, then the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("step", nargs="?", default="lora in_batch", choices=STEPS)
    parser.add_argument("--recompute", default="none", help="model.activation_checkpointing")
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--beside-recompute", help="of the other checkout, where it differs")
    parser.add_argument("--top", type=int, default=0, help="functions to list")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="steps to time; 0 for none")
    given = parser.parse_args(arguments)
    if why := why_not():
        parser.exit(1, f"host_calls: {why}\n")
    checkouts = [(HERE.parent, given.recompute)]
    if given.beside is not None:
        checkouts.append((given.beside, given.beside_recompute or given.recompute))
    names = [f"{path.resolve().name} {recompute}" for path, recompute in checkouts]
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(Host(asked_of(given.step, recompute), path))
            for path, recompute in checkouts
        ]
        print(*lines([host.ask("count") for host in hosts], names, given.top), sep="\n")
        times = [[host.ask("time") for host in hosts] for _ in range(given.rounds)]
    for name, own in zip(names, zip(*times, strict=True), strict=False):
        print(f"{name}: {median(own):.2f} s ({min(own):.2f} to {max(own):.2f})")


if __name__ == "__main__":
    main()
