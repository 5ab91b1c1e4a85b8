"""Whether a state may go on with the data there are: the same, or a new era of the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from vlmpack.data.plan.batches import Cursors
from vlmpack.data.plan.state import DataState, Era, Identity, identity_differences
from vlmpack.errors import RunIdentityError
from vlmpack.words import indented

MAX_STATE_BYTES = 2048
"""Old eras are folded together where they would make the state larger."""

Start = Callable[[int, int], Cursors]


def check_identity(state: DataState, current: Identity, *, key: str) -> None:
    """Refuses to continue a run on other data or another order.

    Args:
        key: the split's, such as "data.train".

    Raises:
        RunIdentityError: with every difference.
    """
    hint = ""
    planned, now = (side.get("packing.alignment") for side in (state.identity, current))
    cut_otherwise = planned != now
    if is_data_change(state.identity, current, key=key):
        new = "rows of the new alignment, from the next epoch" if cut_otherwise else "the new data"
        hint = f"; checkpoint.on_data_change: new_era goes on with {new}"
    if cut_otherwise and isinstance(planned, int) and isinstance(now, int):
        hint += f".\n{alignment_words(planned, now)}"
    lines = identity_differences(state.identity, current)
    if lines:
        raise RunIdentityError(
            f"the data of this run differs from what its first {state.batches} global batches "
            f"were planned from:\n{indented(lines)}\n"
            f"Restore these, or start a new run folder{hint}."
        )


def alignment_words(planned: int, wanted: int) -> str:
    """What a run's rows were planned with, and which layouts it can go on in. No full stop.

    Args:
        planned: tokens that the run's planned lengths are rounded up to.
        wanted: those that this launch plans with.
    """
    return (
        f"packing.alignment: the rows of this run are planned with lengths rounded up to multiples "
        f"of {planned}, and this launch would take {wanted}. Left out, it is the multiple of 2 x "
        f"parallelism.context from 8 up, and a run keeps the one that it began with where 2 x "
        f"parallelism.context divides it: this one can go on with parallelism.context "
        f"{_in_words(_contexts(planned))}. A new run with packing.alignment: {wanted} can take "
        f"parallelism.context {_in_words(_contexts(wanted))}, from its first step on"
    )


def _contexts(alignment: int) -> list[int]:
    """Sizes of context parallelism that planned lengths divide over, smallest first: 2 x CP divides
    them, or CP is 1."""
    half = alignment // 2 if alignment % 2 == 0 else 1
    return [size for size in range(1, half + 1) if half % size == 0]


def _in_words(sizes: Sequence[int]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}" if most else last


def is_data_change(saved: Identity, current: Identity, *, key: str) -> bool:
    """Whether two identities differ, and only by which data there is, how it is blended, and what
    the packer settles by it or by the parallel layout.

    Args:
        key: the split's, such as "data.train".
    """
    names = {name for name in saved.keys() | current.keys() if saved.get(name) != current.get(name)}
    # Where the recipe leaves them open; what it says of rows is part of the run's own identity.
    rows = ("packing.alignment", "packing.max_tokens", "packing.max_sequences", "window")
    settled = ("lengths", "data.epoch_size", *rows)
    return bool(names) and all(
        name in (*settled, key) or name.startswith(f"{key}.") for name in names
    )


def admit(
    state: DataState, current: Identity, *, key: str, new_era: bool, start: Start
) -> DataState:
    """The state to go on from: the same, or that of a new era where the data changed.

    A new era begins an epoch of the new data: the current one where it has just begun, else
    the next, so that no order is begun a second time.

    Args:
        current: what the plan is made from now.
        key: the split's, such as "data.train".
        new_era: whether other data are admitted.
        start: (epoch, pass) -> the cursors of that epoch's first window.

    Raises:
        RunIdentityError: other data where they are refused, or another order.
    """
    if not new_era or not is_data_change(state.identity, current, key=key):
        check_identity(state, current, key=key)
        return state
    begun = state.window > 0 or state.batch > 0
    epoch = state.epoch + begun
    passes = [cursor[0] + begun for cursor in state.cursors if isinstance(cursor, tuple)]
    return begin_era(state, current, epoch=epoch, cursors=start(epoch, max([epoch, *passes])))


def begin_era(state: DataState, identity: Identity, *, epoch: int, cursors: Cursors) -> DataState:
    """The same run from its next global batch on, planned from other data.

    Args:
        state: where the old data ended.
        identity: of the new data.
        epoch, cursors: where the new plan begins.
    """
    old = state.eras[-1]
    differing = {k: v for k, v in old.identity.items() if identity.get(k) != v}
    eras = [
        *state.eras[:-1],
        Era(old.start_batch, differing),
        Era(state.batches, identity),
    ]
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
