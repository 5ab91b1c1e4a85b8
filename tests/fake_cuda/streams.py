"""The fake GPU's one stream, its events, and what is on its way to the host.

Work runs in order and at once, but for copies into pinned memory that the host does not wait for:
until it waits for an event behind such a copy, its target holds anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Arrivals:
    """Pages of the host that are locked, and copies that are on their way there."""

    def __init__(self) -> None:
        self.locked: dict[int, Tensor] = {}
        self.begun = 0
        self._coming: list[tuple[Tensor, Tensor]] = []

    def lock(self, made: Tensor) -> Tensor:
        """Remember a tensor's pages as locked; they stay so."""
        self.locked[made.untyped_storage().data_ptr()] = made
        return made

    def is_locked(self, tensor: Tensor) -> bool:
        """Whether a tensor of the CPU lies on such pages."""
        return tensor.untyped_storage().data_ptr() in self.locked

    def start(self, target: Tensor, source: Tensor) -> Tensor:
        """Copy, but not yet."""
        _spoil(target)
        self._coming.append((target, source))
        self.begun += 1
        return target

    def arrive(self, begun: int) -> None:
        """The copies that were begun first are there; the others may be half way."""
        while self._coming and self.begun - len(self._coming) < begun:
            target, source = self._coming.pop(0)
            target.copy_(source)
        for target, _ in self._coming:
            _spoil(target)


def _spoil(tensor: Tensor) -> None:
    tensor.view(torch.uint8).fill_(0xA5)


class Stream:
    """The one stream.

    Args:
        gpu: the fake device.
    """

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu

    def record_event(self, event: Event | None = None) -> Event:
        """A place behind what was begun."""
        event = Event(self.gpu) if event is None else event
        event.record(self)
        return event

    def wait_stream(self, _: object) -> None:
        """It is this one."""

    wait_event = wait_stream

    def query(self) -> bool:
        """All work is done."""
        return True

    def synchronize(self) -> None:
        """The host waits."""
        self.gpu.arrivals.arrive(self.gpu.arrivals.begun)
        self.gpu.wait("all work")


class Event:
    """A place in the one stream.

    Args:
        gpu: the fake device.
    """

    def __init__(self, gpu: Any) -> None:
        self.gpu, self.begun = gpu, 0

    def record(self, stream: object = None) -> None:
        """It is behind the copies that were begun."""
        self.begun = self.gpu.arrivals.begun

    def wait(self, stream: object = None) -> None:
        """The stream is in order."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def synchronize(self) -> None:
        """The host waits."""
        self.gpu.arrivals.arrive(self.begun)
        self.gpu.wait("all work")
