"""What memory a process may have: its GPU's, or its share of the machine's or the container's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that processes share.

    Args:
        size: bytes of all of it.
        where: whose it is, in words.
        processes: of this run that share it.
    """

    size: int
    where: str
    processes: int


def room_of(device: torch.device) -> Room | None:
    """What this process computes in; None where the system does not tell."""
    if device.type == "cuda":
        return Room(torch.cuda.mem_get_info(device)[1], str(device), 1)
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
    """The least limit of this process's control group and of those around it, version 2 or 1."""
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
    found = [limit for limit in limits if limit is not None]
    return min(found, default=None)


def _limit(path: Path) -> int | None:
    """None for "max", and for a file that is not there."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
