"""`make families-sweep`: every class, tried one after another -> vlmpack/capabilities/swept.json.

    python -m vlmpack.proof.sweep.run [MODEL_TYPE ...]   those alone; the others keep their words

Classes are tried in a process of their own, since some take all memory or do not come back; after
one that took too long the next ones have a new process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from select import select

from vlmpack.capabilities import swept
from vlmpack.capabilities.registered import registered
from vlmpack.capabilities.served import SERVED
from vlmpack.capabilities.swept import Swept
from vlmpack.proof.sweep.classes import REASONS
from vlmpack.whole_file import write_atomically

KINDS = ("served", "proven", "refused")

LIMIT_SECONDS = 240
"""Seconds that a class may take."""


def sweep(names: Sequence[str], limit: float = LIMIT_SECONDS) -> dict[str, Swept]:
    """The word of each class; those that a family of ours serves are not tried.

    Args:
        names: values of `model_type`.
        limit: seconds that a class may take.
    """
    found = {name: Swept("served") for name in names if name in SERVED}
    found |= {name: Swept("refused", REASONS[name]) for name in names if name in REASONS}
    waiting = [name for name in names if name not in found]
    while waiting:
        done = _tried(waiting, limit)
        for name, word in done.items():
            print(f"{name}: {word.word} {word.reason}", flush=True)
        found |= done
        waiting = [name for name in waiting if name not in found]
    return {name: found[name] for name in names}


def _tried(names: Sequence[str], limit: float) -> dict[str, Swept]:
    """Those of one process: all, or until one takes too long or ends it."""
    found: dict[str, Swept] = {}
    command = [sys.executable, "-m", "vlmpack.proof.sweep.one", *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for name in names:
            ready, _, _ = select([process.stdout], [], [], limit)
            line = process.stdout.readline() if ready else ""
            if not line:
                process.kill()
                why = "ended its process" if ready else f"took more than {limit:.0f} seconds"
                return found | {name: Swept("refused", f"a tiny model of it {why}")}
            found[name] = Swept(**json.loads(line))
    return found


def main(names: Sequence[str]) -> None:
    """Sweep, and write the table; named classes alone where some are named."""
    everyone = sorted(registered("image-text-to-text"))
    tried = sweep(names or everyone)
    words = {name: tried.get(name) or swept.SWEPT.get(name) for name in everyone}
    known = {name: word for name, word in words.items() if word is not None}
    path = Path(swept.__file__).with_name("swept.json")
    table = {name: asdict(word) for name, word in known.items()}
    write_atomically(path, json.dumps(table, indent=1) + "\n")
    counts = [sum(word.word == kind for word in known.values()) for kind in KINDS]
    print(", ".join(f"{count} {kind}" for count, kind in zip(counts, KINDS, strict=True)))


if __name__ == "__main__":
    main(sys.argv[1:])
