"""`make families-sweep`: every class, tried one after another -> vlmpack/capabilities/swept.json
and swept_text.json.

    python -m tools.sweep.run [MODEL_TYPE ...]   those alone; the others keep their words

Classes are tried in a process of their own, since some take all memory or do not come back; after
one that took too long the next ones have a new process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from select import select

from tools.sweep.classes import LANGUAGE_MODELS, REASONS
from vlmpack.capabilities import refused
from vlmpack.capabilities.refused import Kind, Swept, kind_of, registered
from vlmpack.capabilities.served import SERVED
from vlmpack.terminal import say
from vlmpack.whole_file import write_atomically

WORDS = ("served", "proven", "refused")

KINDS: tuple[Kind, ...] = ("image-text-to-text", "text")

LIMIT_SECONDS = 300
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
        found |= _tried(waiting, limit)
        waiting = [name for name in waiting if name not in found]
    return {name: found[name] for name in names}


def _tried(names: Sequence[str], limit: float) -> dict[str, Swept]:
    """Those of one process: all, or until one takes too long or ends it."""
    found: dict[str, Swept] = {}
    command = [sys.executable, "-m", "tools.sweep.one", *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for name in names:
            ready, _, _ = select([process.stdout], [], [], limit)
            line = process.stdout.readline() if ready else ""
            if not line:
                process.kill()
                why = "ended its process" if ready else f"took more than {limit:.0f} seconds"
                return found | {name: Swept("refused", f"a tiny model of it {why}")}
            word = found[name] = Swept(**json.loads(line))
            say(f"{name}: {word.word} {word.reason}")
    return found


def everyone(kind: Kind) -> list[str]:
    """Values of `model_type` that are swept as classes of a kind, each under one kind alone."""
    known = registered(kind)
    if kind == "text":
        return sorted(name for name in {*SERVED, *LANGUAGE_MODELS} & known if kind_of(name) == kind)
    return sorted(known)


def write_table(kind: Kind, tried: Mapping[str, Swept]) -> None:
    """The words of a kind's classes; those that were not tried keep theirs."""
    words = {name: tried.get(name) or refused.SWEPT.get(name) for name in everyone(kind)}
    known = {name: word for name, word in words.items() if word is not None}
    path = Path(refused.__file__).with_name(refused.FILES[kind])
    table = {name: asdict(word) for name, word in known.items()}
    write_atomically(path, json.dumps(table, indent=1) + "\n")
    counts = [sum(word.word == each for word in known.values()) for each in WORDS]
    said = ", ".join(f"{count} {word}" for count, word in zip(counts, WORDS, strict=True))
    say(f"{kind}: {said}")


def main(names: Sequence[str]) -> None:
    """Sweep, and write both tables; named classes alone where some are named."""
    for kind in KINDS:
        chosen = [name for name in everyone(kind) if not names or name in names]
        write_table(kind, sweep(chosen))


if __name__ == "__main__":
    main(sys.argv[1:])
