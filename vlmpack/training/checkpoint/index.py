"""index.json: which box of which tensor lies in which file. States of torch's generators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmpack.backends.boxes import KINDS, SCALES, Kind, TensorSlice, whole
from vlmpack.recipe.trainable import BLOCK


def box_key(kind: Kind, box: TensorSlice) -> str:
    """A box's key in its file: the tensor's name, and `@a:b,c:d` where the box is a part of it.

    Moments have their kind in front, so that both lie in one file.
    """
    name = box.name if kind == "model" else f"{kind}.{box.name}"
    if box == whole(box.name, box.shape):
        return name
    return f"{name}@" + ",".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBox:
    """A box and where it lies.

    Args:
        box: of which tensor.
        dtype: in safetensors' spelling.
    """

    kind: Kind
    box: TensorSlice
    dtype: str
    file: str

    @property
    def key(self) -> str:
        """Its name in the file."""
        return box_key(self.kind, self.box)


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """All boxes of a checkpoint.

    Args:
        tensors: by kind and name, the boxes of a tensor.
    """

    tensors: Mapping[Kind, Mapping[str, list[StoredBox]]]

    @classmethod
    def of(cls, boxes: Iterable[StoredBox]) -> TensorIndex:
        tensors: dict[Kind, dict[str, list[StoredBox]]] = {kind: {} for kind in KINDS}
        for stored in boxes:
            tensors[stored.kind].setdefault(stored.box.name, []).append(stored)
        return cls(tensors)

    def files(self) -> set[str]:
        return {
            stored.file
            for named in self.tensors.values()
            for boxes in named.values()
            for stored in boxes
        }

    def find_mismatch(
        self, shapes: Mapping[str, tuple[int, ...]], *, optimizer_steps: int
    ) -> str | None:
        """How this differs from an index with each element of these parameters and moments once.

        Args:
            optimizer_steps: there are moments unless it is 0.

        Returns:
            What was found and expected; None where it fits.
        """
        for kind in KINDS:
            expected = self._wanted(kind, shapes) if kind == "model" or optimizer_steps else {}
            tensors = self.tensors[kind]
            if tensors.keys() != expected.keys():
                mismatched = {
                    "missing": expected.keys() - tensors.keys(),
                    "not in the model": tensors.keys() - expected.keys(),
                }
                listed = "; ".join(
                    f"{what}: {', '.join(sorted(names)[:5])}{' ...' if len(names) > 5 else ''}"
                    for what, names in mismatched.items()
                    if names
                )
                return f"{len(tensors)} {kind} tensors, expected {len(expected)} ({listed})"
            for name, boxes in tensors.items():
                problem = _find_gap(boxes, expected[name])
                if problem is not None:
                    return f"{kind} {name}: {problem}"
        return None

    def _wanted(
        self, kind: Kind, shapes: Mapping[str, tuple[int, ...]]
    ) -> Mapping[str, tuple[int, ...]]:
        if kind not in SCALES:
            return shapes
        coded = {name for name, boxes in self.tensors[SCALES[kind]].items() if _is_coded(boxes)}
        return {
            name: (-(-math.prod(shape) // BLOCK),)
            for name, shape in shapes.items()
            if name in coded
        }

    def as_json(self) -> dict[str, Any]:
        return {
            kind: {
                name: {
                    "shape": boxes[0].box.shape,
                    "dtype": boxes[0].dtype,
                    "boxes": [
                        {
                            "file": stored.file,
                            "key": stored.key,
                            "start": stored.box.start,
                            "stop": stored.box.stop,
                        }
                        for stored in boxes
                    ],
                }
                for name, boxes in sorted(named.items())
            }
            for kind, named in self.tensors.items()
            if named or kind not in SCALES
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TensorIndex:
        """Read what `as_json` made.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it is of another shape.
        """
        boxes: list[StoredBox] = []
        for kind in KINDS:
            for name, said in (
                content[kind] if kind not in SCALES else content.get(kind, {})
            ).items():
                shape = tuple(map(int, said["shape"]))
                for part in said["boxes"]:
                    start, stop = (tuple(map(int, part[end])) for end in ("start", "stop"))
                    stored = StoredBox(
                        kind=kind,
                        box=TensorSlice(name=name, shape=shape, start=start, stop=stop),
                        dtype=str(said["dtype"]),
                        file=str(part["file"]),
                    )
                    if stored.key != part["key"]:
                        raise ValueError(f"key {part['key']!r} is not that of {stored.box}")
                    boxes.append(stored)
        return cls.of(boxes)


def _is_coded(boxes: list[StoredBox]) -> bool:
    return any(stored.dtype == "U8" for stored in boxes)


def _find_gap(boxes: list[StoredBox], shape: tuple[int, ...]) -> str | None:
    """What keeps the boxes from holding each element exactly once; None if they do."""
    for stored in boxes:
        box = stored.box
        if box.shape != shape:
            return f"shape {box.shape} in the checkpoint, {shape} in the model"
        if stored.dtype != boxes[0].dtype:
            return f"dtypes {stored.dtype} and {boxes[0].dtype} in one tensor"
        bounds = zip(box.start, box.stop, shape, strict=True)
        if len(box.start) != len(shape) or not all(0 <= a <= b <= n for a, b, n in bounds):
            return f"box {box.start} to {box.stop} lies outside shape {shape}"
    ordered = sorted((stored.box for stored in boxes), key=lambda box: box.start)
    for place, box in enumerate(ordered):
        for other in ordered[place + 1 :]:
            if box.start and other.start[0] >= box.stop[0]:
                break
            if box.intersection(other) is not None:
                return f"boxes from {box.start} and from {other.start} overlap"
    held = sum(math.prod(box.lengths) for box in ordered)
    if held != math.prod(shape):
        return f"the boxes hold {held} elements, expected {math.prod(shape)}"
    return None


def random_state() -> dict[str, Tensor]:
    """A copy of the states, uint8."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Put the generators back; a state of a device that is not here is left alone."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
