"""Inputs of recomputed layers in pinned host memory, from one layer's forward pass to its backward.

    forward of layer i     its inputs are copied to the host while it runs, and freed behind it
    backward of layer i    those of layer i - 1 are copied back meanwhile

So the device holds the inputs of two layers at a time. torch's `save_on_cpu` waits for each copy,
and fetches none ahead. A second stream of the device copies, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from vlmpack.errors import CapabilityError


class _Stored:
    """An input.

    Args:
        device: as it was given.
        before: those of the layer before, as long as its backward pass is to come.
    """

    def __init__(self, device: Tensor, before: WeakSet[_Stored]) -> None:
        self.host = torch.empty_like(device, device="cpu", pin_memory=True)
        self.device: Tensor | None = device.detach()
        self.place = device.device
        self.before = before
        self.copied: Any = None

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        # What was queued may still make the source, or read what lay at the target.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            self.copied = stream.record_event()

    def fetch(self, stream: Any) -> None:
        """Begin to copy it back, if it is not there."""
        if self.device is None:
            self.device = torch.empty_like(self.host, device=self.place)
            self.copy(self.device, self.host, stream)

    def free(self) -> None:
        """Let go of it on the device, behind the copy."""
        torch.cuda.current_stream().wait_event(self.copied)
        self.device = None


class Offload:
    """Runs layers that are computed again, and has their inputs.

    Args:
        run: calls a layer, and computes it again in the backward pass.

    Raises:
        CapabilityError: the device has no memory of its own.
    """

    def __init__(self, run: Callable[..., Any], device: torch.device) -> None:
        if device.type != "cuda":
            raise CapabilityError(
                f"model.activation_offloading: true moves activations from a GPU to the host, and "
                f"this run is on {device}; set it to false"
            )
        self.run, self.stream = run, torch.cuda.Stream()
        self.newest: WeakSet[_Stored] = WeakSet()

    def __call__(self, layer: Callable[..., Any], *args: Any) -> Any:
        """What the layer makes."""
        store = partial(self._store, self.newest, WeakSet())
        with torch.autograd.graph.saved_tensors_hooks(store, self._restore):
            return self.run(layer, *args)

    def _store(
        self, before: WeakSet[_Stored], inputs: WeakSet[_Stored], given: Tensor
    ) -> _Stored | Tensor:
        if not given.is_cuda or not given.numel():
            return given
        stored = _Stored(given, before)
        stored.copy(stored.host, given, self.stream)
        for earlier in before:
            earlier.free()
        inputs.add(stored)
        self.newest = inputs
        return stored

    def _restore(self, stored: _Stored | Tensor) -> Tensor:
        if isinstance(stored, Tensor):
            return stored
        stored.fetch(self.stream)
        torch.cuda.current_stream().wait_event(stored.copied)
        found, stored.device = stored.device, None
        assert found is not None
        self.newest = stored.before
        for earlier in stored.before:
            earlier.fetch(self.stream)
        return found
