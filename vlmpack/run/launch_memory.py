"""The memory that a launch will need and what its machine has, before any weight is read.

The kernel kills a process that takes more than there is, without a message. So the plan's estimate
is made again from the model's headers and the lengths of indexed samples. The room is the memory of
a GPU, or a share of the machine's or the container's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path

import numpy as np
import torch

from vlmpack.activity import ACTIVITY
from vlmpack.build.engine import EngineSpec, resolved_model
from vlmpack.data.pipeline import TrainData
from vlmpack.errors import DeviceMemoryError, ModelError
from vlmpack.forecast.activations import forms_on
from vlmpack.forecast.figures import LargestMicroBatch, MemoryFigures
from vlmpack.forecast.memory import given_room, least_that_fits, memory_figures, next_rung
from vlmpack.forecast.parameters import read_sizes
from vlmpack.forecast.trained import trained_sizes
from vlmpack.recipe.schema import ModelSection, described
from vlmpack.words import sized

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


logger = logging.getLogger("vlmpack")


DRAWN = 1000
"""Micro-batches that are drawn for the largest one, where rows are not planned by a budget."""


ADVICE = (
    "The kernel or CUDA may end this run silently. Set trainable.* to frozen or lora, "
    "model.activation_checkpointing: auto or full, or over more processes parallelism.sharding: "
    "fsdp or model.backend: mcore. Or lower training.micro_batch_size, packing.max_tokens, "
    "packing.max_vision_patches or training.seq_length. `vlmpack plan` has the figures"
)


def resolved_memory(spec: EngineSpec, train: TrainData, *, answers: bool) -> EngineSpec:
    """The engine with `model.activation_checkpointing: auto` resolved, the same on every rank.

    The main rank logs the estimate and the room, and warns with the knobs if it does not fit.
    `auto` computes nothing again if the model folder lacks the sizes. Collective.
    """
    ranks = spec.ranks
    least = min(ranks.gather_objects(room_of(ranks.device)), key=_bytes_each)
    model = ranks.on_main(lambda: _resolved(spec, train, least, answers=answers))
    return replace(spec, model=model)


@contextmanager
def out_of_memory_named(spec: EngineSpec) -> Iterator[None]:
    """Add to CUDA's message what would need less, where steps run out of memory.

    Raises:
        DeviceMemoryError: in place of torch's own.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = str(error).partition("\n")[0].partition(" GPU ")[0].strip()
        now = described(spec.model.recomputed)
        trains = ACTIVITY.phase not in ("validation", "answering questions")
        less = next_rung(spec.model, spec.parallelism) if trains else None
        knob = "packing.max_tokens, packing.max_vision_patches or training.micro_batch_size"
        remedy = f"lower {knob}, or split the model (docs/gpu.md)"
        if less is not None:
            remedy = f"set model.activation_checkpointing: {less}, or lower {knob}"
        raise DeviceMemoryError(
            f"{'a step' if trains else ACTIVITY.phase} does not fit the memory of "
            f"{spec.ranks.device}: {said.rstrip('.')}. The backward pass computes again: {now}. "
            f"To make it fit, {remedy}"
        ) from error


def _resolved(
    spec: EngineSpec, train: TrainData, room: Room | None, *, answers: bool
) -> ModelSection:
    section, device = spec.model, spec.ranks.device
    try:
        sizes = read_sizes(spec.encoder.folder)
    except ModelError:
        sizes = None
    given, where = given_room(section)
    if sizes is None or (room is None and not given):
        if section.recomputes_what_fits:
            logger.info("%-14s nothing: what fits is unknown here", "recomputed")
        return section

    largest = largest_micro_batch(train)
    trained = trained_sizes(spec.policy, spec.encoder)

    def estimate(model: ModelSection) -> MemoryFigures:
        return memory_figures(
            model,
            spec.parallelism,
            sizes,
            largest,
            global_batch_size=train.config.training.global_batch_size,
            world_size=spec.ranks.world_size,
            trained=trained,
            forms=forms_on(device, model, captured=spec.captures),
            answers=answers,
        )

    model = resolved_model(section, device)
    if not section.recomputes_what_fits:
        figures = estimate(model)
    else:
        if room is not None and not given:
            given, where = int(_bytes_each(room)), room.where
        model, figures = least_that_fits(model, spec.parallelism, estimate, given, where)
        logger.info("%-14s %s", "recomputed", figures.recomputed)
    if room is not None:
        _say(figures, room)
    chosen = model.activation_checkpointing
    return section.model_copy(update={"activation_checkpointing": chosen})


def _say(figures: MemoryFigures, room: Room) -> None:
    line = memory_line(figures, room)
    if figures.total * room.processes > room.size:
        logger.warning("%-14s %s\n%s", "memory", line, ADVICE)
    else:
        logger.info("%-14s %s", "memory", line)


def memory_line(figures: MemoryFigures, room: Room) -> str:
    """The estimate and what there is, in words."""
    parts = ["weights", "gradients", "optimizer", "activations", "logits"]
    parts += ["answers"] * bool(figures.answers)
    each = ", ".join(f"{name} {sized(getattr(figures, name))}" for name in parts)
    shared = f", for {room.processes} processes" if room.processes > 1 else ""
    return (
        f"about {sized(figures.total)} a process ({each}); {room.where} has "
        f"{sized(room.size)}{shared}"
    )


def largest_micro_batch(train: TrainData) -> LargestMicroBatch:
    """Slots and patches of the largest micro-batch.

    The slots are a planned row's budget, or the largest of many drawn micro-batches. The patches
    are those of the densest sample over as many slots, up to the budget's.
    """
    mode, micro = train.config.mode, train.config.training.micro_batch_size
    count, densest = 0, 0.0
    for lengths, patches in train.split.usable_sizes():
        count += lengths.size
        densest = max(densest, float((patches / np.maximum(lengths, 1)).max(initial=0.0)))
    if mode.facts.plans_rows:
        slots = mode.budget.max_tokens
        dense = ceil(slots * densest)
        return LargestMicroBatch(1, slots, mode.most_patches(dense))
    if not count:
        return LargestMicroBatch(micro, 0, 0)
    drawn = np.random.default_rng(0).integers(count, size=(DRAWN, micro))
    sizes, first = np.empty((2, *drawn.shape), np.int64), 0
    for lengths, patches in train.split.usable_sizes():
        here = (drawn >= first) & (drawn < first + lengths.size)
        sizes[:, here] = lengths[drawn[here] - first], patches[drawn[here] - first]
        first += lengths.size
    tokens, weights = sizes
    rows = tokens.max(axis=1) * micro if mode.facts.pads else tokens.sum(axis=1)
    return LargestMicroBatch(micro, int(rows.max()), int(weights.sum(axis=1).max()))


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that processes share.

    Args:
        size: bytes of all of it.
    """

    size: int
    where: str
    processes: int


def _bytes_each(room: Room | None) -> float:
    return inf if room is None else room.size / room.processes


def room_of(device: torch.device) -> Room | None:
    """What this process computes in; None where the system does not tell."""
    if device.type == "cuda":
        return Room(torch.cuda.mem_get_info(device)[0], f"what is free on {device}", 1)
    machine, group = _machine_bytes(), _group_bytes()
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    processes = max(1, int(local)) if local.isdigit() else 1
    if group is not None and (machine is None or group < machine):
        return Room(group, "this container (the memory limit of its cgroup)", processes)
    return None if machine is None else Room(machine, "this machine", processes)


def _machine_bytes() -> int | None:
    try:
        text = (PROC / "meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    sizes = [line.split()[1] for line in text.splitlines() if line.startswith("MemTotal:")]
    return int(sizes[0]) * 1024 if sizes else None


def _group_bytes() -> int | None:
    """The least limit of this process's control group and of its parents, version 2 or 1."""
    try:
        lines = (PROC / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            limits.append(_limit(place / name))
            if place == root:
                break
    bounds = [limit for limit in limits if limit is not None]
    return min(bounds, default=None)


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
