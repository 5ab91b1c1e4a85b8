"""Run in ranks: recipes one after the other, and what the processes of a replica said and held.

    torchrun --nproc-per-node N replica_runs.py RECIPE [RECIPE ...]

Beside each RECIPE, as RECIPE.<rank>.json: the bytes that each vote sent to a peer, at which steps
more was told, and the bytes of pixels that this process held of each row of each step.

The variable CONTROL breaks the last process in its third step: `fails`, its reader does;
`silent`, it leaves the vote out.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlmpack.api import resolve, run_recipe
from vlmpack.data.loading.loader import BinDataset
from vlmpack.distributed import Ranks, ranks, start_process_group
from vlmpack.run.session import Session


def watched(found: dict[str, list[Any]]) -> None:
    """Note what is sent in this process, and what is held."""
    vote, tell, steps = Ranks.gather_in_replica, Ranks.gather_objects_in_replica, Session.steps

    def noted_vote(self: Ranks, values: Any) -> Any:
        found["rank"] = self.rank
        found["votes"].append(values.numel() * values.element_size())
        if broken(self, found) == "silent":
            return [values]
        return vote(self, values)

    def noted_tell(self: Ranks, value: Any) -> Any:
        found["told"].append(len(found["held"]))
        return tell(self, value)

    def noted_steps(self: Session) -> Iterator[Any]:
        for step in steps(self):
            media = [m.batch.media for m in step.micro_batches]
            rows = [0 if m is None else m.pixel_values.nbytes for m in media]
            found["held"].append(rows)
            yield step

    Ranks.gather_in_replica = noted_vote  # type: ignore[method-assign]
    Ranks.gather_objects_in_replica = noted_tell  # type: ignore[method-assign]
    Session.steps = noted_steps  # type: ignore[method-assign]


def broken(self: Ranks, found: dict[str, list[Any]]) -> str | None:
    """What this process does wrong now."""
    is_it = self.replica_rank == self.replica_size - 1 and len(found["votes"]) == 3
    return os.environ.get("CONTROL") if is_it else None


def failing_reader() -> None:
    """The last process cannot read the bins of its third step."""
    read, calls = BinDataset.read, []

    def failing(self: BinDataset, request: Any) -> Any:
        calls.append(request)
        if len(calls) > 4:
            raise OSError("the disk of one machine is gone")
        return read(self, request)

    BinDataset.read = failing  # type: ignore[method-assign]


def stay() -> None:
    """In place of leaving the process group between two runs, which gloo may not join again."""
    while ranks._at_stop:
        ranks._at_stop.pop()()
    gc.collect()


def main(recipes: list[Path]) -> None:
    """All of them."""
    start_process_group()
    leave, ranks.stop_process_group = ranks.stop_process_group, stay
    found: dict[str, Any] = {"rank": 0, "votes": [], "told": [], "held": []}
    watched(found)
    if os.environ.get("CONTROL") == "fails" and os.environ["RANK"] == "1":
        failing_reader()
    for recipe in recipes:
        for name in ("votes", "told", "held"):
            found[name].clear()
        run_recipe(resolve(json.loads(recipe.read_text()), {}))
        recipe.with_suffix(f".{found['rank']}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
