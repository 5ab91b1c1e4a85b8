"""Where a run stands in its plan, and what the plan was made from. JSON of about 2 KB at most.

The state belongs to the run, not to a rank: any number of ranks and workers continues from it with
the same global batches. What the plan was made from is kept in readable form, so that a resume
with other data or settings is refused with a list of the differences; or, where the user allows it
and only the data differ, goes on as a new era.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from vlmpack.data.plan.batches import Cursor, Cursors, Position
from vlmpack.errors import UNREADABLE, CheckpointError
from vlmpack.file_format import DATA_STATE

IdentityValue = str | int | float | None
Identity = Mapping[str, IdentityValue]
"""What decides the order: flat names and plain values, such as "data.seed": 7."""


@dataclass(frozen=True, slots=True)
class Era:
    """A stretch of the run with one identity.

    Args:
        start_batch: global batches consumed when it began.
        identity: what the plan was made from. Of an era that is over: what differs from the one
            after it, or `folded`, a digest of several.
    """

    start_batch: int
    identity: Identity


@dataclass(frozen=True, slots=True)
class DataState:
    """The next global batch, and how it was arrived at.

    Args:
        epoch, window, batch: the next global batch's position in the plan.
        batches: global batches consumed by optimizer steps since the run's start.
        cursors: per source, where it stood before the current window began.
        eras: oldest first; the last one is current.
        shards: digest of the shards that the current window, or a cursor, stands in; None where the
            identity has all of them.
    """

    epoch: int
    window: int
    batch: int
    batches: int
    cursors: Cursors
    eras: tuple[Era, ...]
    shards: str | None = None

    @property
    def position(self) -> Position:
        """The next global batch's position."""
        return Position(self.epoch, self.window, self.batch)

    @property
    def identity(self) -> Identity:
        """The identity of the current era."""
        return self.eras[-1].identity

    def to_json(self) -> str:
        """One line of JSON."""
        value = DATA_STATE.mark(asdict(self))
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> DataState:
        """The state that `to_json` wrote.

        Raises:
            CheckpointError: not such a state, or of another version.
        """
        try:
            value = json.loads(text)
            DATA_STATE.take(value, "the data state", CheckpointError)
            eras = tuple(
                Era(int(era["start_batch"]), dict(era["identity"])) for era in value["eras"]
            )
            counts = {name: int(value[name]) for name in ("epoch", "window", "batch", "batches")}
            cursors = tuple(map(_cursor, value["cursors"]))
            state = cls(**counts, cursors=cursors, eras=eras, shards=value["shards"])
        except UNREADABLE as error:
            raise CheckpointError(f"the data state cannot be read: {error!r}") from error
        if not eras or min(counts.values()) < 0:
            raise CheckpointError("the data state cannot be read: a count is negative or missing")
        return state


def _cursor(value: object) -> Cursor:
    if isinstance(value, int):
        return value
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"cursor {value!r}")
    number, place, offset = (int(part) for part in value)
    return (number, place, offset)


def _packs(fingerprint: IdentityValue) -> str:
    if fingerprint is None:
        return "none"
    return f"those whose pack.json says fingerprints.plan {str(fingerprint)!r}"


def identity_differences(saved: Identity, current: Identity) -> list[str]:
    """One readable line for each difference."""
    lines = []
    for name in sorted(saved.keys() | current.keys()):
        before, now = saved.get(name), current.get(name)
        if before == now:
            continue
        if name == "packing.packs":
            lines.append(
                f"packing.path: other packs; the run has {_packs(before)}, now {_packs(now)}"
            )
        else:
            lines.append(f"{name}: the run has {before!r}, now {now!r}")
    return lines
