"""Where a run stands in its plan, and what the plan was made from: JSON of about 2 KB at most.

The state belongs to the run, not to a rank. Any number of ranks and workers continues from it with
the same global batches. What the plan was made from is readable, so a resume with other data or
settings is refused with a list of differences. If only the data differ and the user allows it, the
run goes on as a new era.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b85decode, b85encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from vlmpack.data.plan.batches import MANY_SOURCES, Cursor, Cursors, Position
from vlmpack.errors import UNREADABLE, CheckpointError, RunIdentityError
from vlmpack.file_format import DATA_STATE
from vlmpack.words import indented

IdentityValue = str | int | float | None
Identity = Mapping[str, IdentityValue]
"""What decides the order: flat names and plain values, such as "data.seed": 7."""


@dataclass(frozen=True, slots=True)
class Era:
    """A part of the run with one identity. A past era keeps its differences from the next, or
    `folded`, a digest of several."""

    start_batch: int
    identity: Identity


@dataclass(frozen=True, slots=True)
class DataState:
    """The next global batch, and what was consumed before it.

    Args:
        batches: global batches consumed by optimizer steps since the run's start.
        cursors: per source, where it stood before the current window began.
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
        value = DATA_STATE.mark(asdict(replace(self, cursors=())))
        value["cursors"] = _written(self.cursors)
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
            cursors = _read(value["cursors"])
            state = cls(**counts, cursors=cursors, eras=eras, shards=value["shards"])
        except UNREADABLE as error:
            raise CheckpointError(f"the data state cannot be read: {error!r}") from error
        if not eras or min(counts.values()) < 0:
            raise CheckpointError("the data state cannot be read: a count is negative or missing")
        return state


def _written(cursors: Cursors) -> Cursors | str:
    """Cursors as a state has them: those of many sources with shards as one number.

    The number's digits are the parts of the cursors, of mixed radix: each is 1 above the largest of
    its kind. With shards of 2,000 samples a source takes 3 bytes, so 500 sources fit 2 KB. The
    place in a shard alone has 11 bits, so no exact form is much shorter.
    """
    places = [cursor for cursor in cursors if isinstance(cursor, tuple)]
    if len(places) <= MANY_SOURCES:
        return cursors
    radices = [max(parts) + 1 for parts in zip(*places, strict=True)]
    number = 0
    for place in places:
        for part, radix in zip(place, radices, strict=True):
            number = number * radix + part
    body = b85encode(number.to_bytes(-(-number.bit_length() // 8))).decode()
    return " ".join([*map(str, (len(places), *radices)), body])


def _read(value: str | Sequence[object]) -> Cursors:
    if not isinstance(value, str):
        return tuple(map(_cursor, value))
    *counts, body = value.split(" ")
    count, *radices = map(int, counts)
    number = int.from_bytes(b85decode(body))
    if len(radices) != 3 or count > MAX_SOURCES:
        raise ValueError(f"cursors {value[:40]!r}")
    cursors = []
    for _ in range(count):
        number, offset = divmod(number, radices[2])
        number, shard = divmod(number, radices[1])
        number, passed = divmod(number, radices[0])
        cursors.append((passed, shard, offset))
    if number:
        raise ValueError(f"more than {count} cursors")
    return tuple(reversed(cursors))


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


MAX_STATE_BYTES = 2048
"""Old eras are folded together where they would make the state larger."""
MAX_SOURCES = 1_000_000

Start = Callable[[int, int], Cursors]


def check_identity(state: DataState, current: Identity, *, key: str) -> None:
    """Refuses to continue a run on other data or another order.

    Raises:
        RunIdentityError: with every difference.
    """
    hint = ""
    planned, now = (side.get("packing.alignment") for side in (state.identity, current))
    rows_differ = planned != now
    if is_data_change(state.identity, current, key=key):
        new = "rows of the new alignment, from the next epoch" if rows_differ else "the new data"
        hint = f"; checkpoint.on_data_change: new_era goes on with {new}"
    if rows_differ and isinstance(planned, int) and isinstance(now, int):
        hint += f".\n{alignment_words(planned, now)}"
    lines = identity_differences(state.identity, current)
    if lines:
        raise RunIdentityError(
            f"the data of this run differs from what its first {state.batches} global batches "
            f"were planned from:\n{indented(lines)}\n"
            f"Restore these, or start a new run folder{hint}."
        )


def alignment_words(planned: int, wanted: int) -> str:
    """The alignment of a run's rows, and the layouts it can continue in. No full stop."""
    return (
        "packing.alignment: this run rounds lengths up to "
        f"multiples of {planned}, and this launch to {wanted}. This run can go on with "
        f"parallelism.context {_in_words(_contexts(planned))}. A new run with packing.alignment: "
        f"{wanted} can take parallelism.context {_in_words(_contexts(wanted))}"
    )


def _contexts(alignment: int) -> list[int]:
    """Context parallel sizes that the alignment allows, smallest first: CP is 1, or 2 x CP divides
    it."""
    half = alignment // 2 if alignment % 2 == 0 else 1
    return [size for size in range(1, half + 1) if half % size == 0]


def _in_words(sizes: Sequence[int]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}" if most else last


def is_data_change(saved: Identity, current: Identity, *, key: str) -> bool:
    """Whether two identities differ only in their data, its blend, and what the packer derives from
    it or from the parallel layout."""
    names = {name for name in saved.keys() | current.keys() if saved.get(name) != current.get(name)}
    # Where the recipe leaves them open; what it says of rows is part of the run's own identity.
    rows = ("packing.alignment", "packing.max_tokens", "packing.max_sequences", "window")
    fixed: tuple[str, ...] = ("lengths", "data.epoch_size", *rows)
    if None in (saved.get("objects"), current.get("objects")):
        fixed = (*fixed, "objects")  # the first of them; others are as they were written
    return bool(names) and all(
        name in (*fixed, key) or name.startswith(f"{key}.") for name in names
    )


def admit(
    state: DataState, current: Identity, *, key: str, new_era: bool, start: Start
) -> DataState:
    """The state to go on from. It is the same, or that of a new era if the data changed.

    A new era begins an epoch of the new data: the current one where it has just started, else the
    next, so that no order begins twice.

    Args:
        start: (epoch, pass) -> the cursors of that epoch's first window.

    Raises:
        RunIdentityError: other data where they are refused, or another order.
    """
    if not new_era or not is_data_change(state.identity, current, key=key):
        check_identity(state, current, key=key)
        return state
    started = state.window > 0 or state.batch > 0
    epoch = state.epoch + started
    passes = [cursor[0] + started for cursor in state.cursors if isinstance(cursor, tuple)]
    return start_era(state, current, epoch=epoch, cursors=start(epoch, max([epoch, *passes])))


def start_era(state: DataState, identity: Identity, *, epoch: int, cursors: Cursors) -> DataState:
    """The same run from its next global batch on, planned from other data."""
    old = state.eras[-1]
    differing = {k: v for k, v in old.identity.items() if identity.get(k) != v}
    eras = [*state.eras[:-1], Era(old.start_batch, differing), Era(state.batches, identity)]
    while True:
        new = DataState(epoch, 0, 0, state.batches, cursors, tuple(eras))
        old_ones = eras[:-1]
        is_folded = len(old_ones) == 1 and "folded" in old_ones[0].identity
        if len(new.to_json()) < MAX_STATE_BYTES or is_folded:
            return new
        eras = [_fold(old_ones[:2]), *eras[len(old_ones[:2]) :]]


def _fold(eras: Sequence[Era]) -> Era:
    text = json.dumps([asdict(era) for era in eras], sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return Era(eras[0].start_batch, {"folded": digest})
