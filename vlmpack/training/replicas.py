"""Whether ranks that should hold the same hold the same, looked at before each save.

Each rank makes a digest of every part that it holds of weights, moments and buffers. A part has a
name, which also says which elements it has. Ranks that name the same part must have the same
digest. So what is compared follows from the layout: whole weights under DDP, a shard's copies under
HSDP, norms under TP, tied embeddings under PP. What one rank alone holds is not compared.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Mapping

import torch

from vlmpack.activity import ACTIVITY
from vlmpack.backends.boxes import digest
from vlmpack.data.plan.state import DataState
from vlmpack.errors import ReplicaError
from vlmpack.training.listener import Boundary, Listener, TrainStep
from vlmpack.training.step import MAX_NAMES, Stepper, seed_of_step
from vlmpack.words import counted, some_of

logger = logging.getLogger("vlmpack")

DROPOUT = "dropout's seed less the formula of the rank"


class Replicas(Listener):
    """Compares what several ranks hold, at the start of a launch and before each save."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self._step = self._agreed = 0
        self._data: DataState | None = None
        self._seeded = (0, 0)

    def on_start(self, here: Boundary) -> None:
        """Compare for the first time, and say how much is compared.

        Raises:
            ReplicaError: on all ranks alike, where something differs.
        """
        self._step = self._agreed = here.step
        shared = self._compare() if self.stepper.ranks.world_size > 1 else 0
        said = f"{counted(shared, 'part')} of weights, moments and buffers compared at each save"
        logger.info("%-14s %s", "replicas", said if shared else "nothing is held by two ranks")

    def on_step(self, step: TrainStep) -> None:
        """Note where this rank stands, before any other listener can change it."""
        self._step, self._data = step.step, step.data.state
        if step.sums.loss is not None:  # a step that is taken back leaves an older seed
            on_device = torch.cuda if self.stepper.engine.device.type == "cuda" else torch
            self._seeded = step.step, on_device.initial_seed()

    def on_save(self) -> None:
        """Compare.

        Raises:
            ReplicaError: on all ranks alike, where something differs. Nothing is saved then.
        """
        if self.stepper.ranks.world_size > 1:
            self._compare()

    def _facts(self) -> dict[str, int]:
        """What must be equal besides tensors, as 64-bit numbers."""
        if self._data is None:
            return {}
        stepper, ranks, (step, drawn) = self.stepper, self.stepper.ranks, self._seeded
        facts = {
            "step": self._step,
            "optimizer steps": stepper.engine.optimizer_steps,
            "data position": _number(self._data.to_json()),
            "learning rate": _number(repr(stepper.schedule(self._step - 1))),
        }
        if stepper.dropout_seed is not None and step:
            replica, own = divmod(ranks.rank, ranks.stage_size)
            place = replica + ranks.dp_size * own  # nothing with stages draws
            drawn ^= seed_of_step(stepper.dropout_seed, step - 1, place)
            facts |= {DROPOUT: _signed(drawn), "seed of all dropout": _signed(stepper.dropout_seed)}
        return facts

    def _compare(self) -> int:
        """Compare; the number of parts of this rank that others hold too. Collective."""
        ACTIVITY.enter_alone("comparing replicas")
        engine, ranks, facts = self.stepper.engine, self.stepper.ranks, self._facts()
        held = [(name, digest(values)) for name, values in engine.held_parts()]
        names = [*(name for name, _ in held), *facts]
        keys = torch.tensor([_number(name) for name in names], device=engine.device)
        others = torch.tensor([*facts.values()], dtype=torch.int64, device=engine.device)
        found = torch.cat([torch.stack([value for _, value in held]), others])
        rows = ranks.gather_rows(torch.stack([keys, found], dim=1))
        if DROPOUT in facts:  # the formula's row: no difference
            rows.append(torch.tensor([[_number(DROPOUT), 0]], device=engine.device))
        whose = torch.repeat_interleave(torch.tensor([len(part) for part in rows]))
        key, value = torch.cat(rows).cpu().unbind(1)
        unique, place, holders = key.unique(return_inverse=True, return_counts=True)
        least, most = (
            value.new_zeros(len(unique)).scatter_reduce(0, place, value, how, include_self=False)
            for how in ("amin", "amax")
        )
        if not torch.equal(least, most):
            differing = (least != most)[place]
            table = torch.stack([key, value, whose], dim=1)[differing].tolist()
            raise self._error(dict(zip(map(_number, names), names, strict=True)), table)
        self._agreed = self._step
        return int((holders[place[: whose.eq(0).sum()]] > 1).sum()) - len(facts)

    def _error(self, names: Mapping[int, str], table: list[list[int]]) -> ReplicaError:
        """What differs, by which ranks disagree. Collective.

        Args:
            names: of this rank's parts, by key.
            table: (key, digest, rank) of the parts that differ, of all ranks.
        """
        ranks = self.stepper.ranks
        keys = {key for key, _, _ in table}
        mine = {key: names[key] for key in keys if key in names}
        known = ranks.gather_objects((mine, socket.gethostname()))
        everywhere = {key: name for theirs, _ in known for key, name in theirs.items()}
        by_sides: dict[tuple[tuple[int, ...], ...], list[str]] = {}
        for key in sorted(keys, key=everywhere.__getitem__):
            by_digest: dict[int, list[int]] = {}
            for _, value, rank in (row for row in table if row[0] == key):
                by_digest.setdefault(value, []).append(rank)
            sides = sorted(map(tuple, by_digest.values()), key=lambda side: (len(side), side))
            by_sides.setdefault(tuple(sides), []).append(everywhere[key])
        hosts = [host for _, host in known]
        lines = [
            f"{' against '.join(_words(side, hosts) for side in sides)}: "
            f"{counted(len(parts), 'part')}, {some_of(parts, MAX_NAMES)}"
            for sides, parts in by_sides.items()
        ]
        return ReplicaError(
            f"step {self._step}: ranks that should hold the same differ since step "
            f"{self._agreed}. {'; '.join(lines)}. Nothing of this step is saved: the same command "
            "goes on from the newest checkpoint. Exclude the device of a rank that differs again"
        )


def _words(side: tuple[int, ...], hosts: list[str]) -> str:
    """Ranks in words, with the machine of a single one; past the last is the formula of seeds."""
    named = [str(rank) for rank in side if rank < len(hosts)]
    formula = ["the formula of the rank"] if len(named) < len(side) else []
    if len(named) == 1:
        named = [f"rank {named[0]} (on {hosts[side[0]]})"]
    elif named:
        named = [f"ranks {some_of(named, 8)}"]
    return " and ".join(named + formula)


def _number(text: str) -> int:
    """A 64-bit digest of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def _signed(number: int) -> int:
    """An unsigned 64-bit number's bits as a signed one."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
