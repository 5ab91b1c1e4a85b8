"""Whether there is memory for the stock model and its gradients, then for the engine and AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from vlmpack.backends.policy import TrainingPolicy
from vlmpack.distributed import Ranks
from vlmpack.errors import CapabilityError
from vlmpack.families.base import ModulePaths
from vlmpack.forecast.parameters import read_shapes
from vlmpack.words import sized

REFERENCE_BYTES = 8
"""Weight and gradient of a parameter in float32. The engine is built when they are gone."""

WEIGHT_BYTES = 4
"""Weight of a parameter of the engine."""

TRAINED_BYTES = 12
"""More of one that is trained: gradient and both moments."""

KEPT_BYTES = 4
"""Gradient of a parameter: those of the stock model wait in host memory."""


class TooLarge(CapabilityError):
    """A model that does not fit a comparison in float32."""


def require_memory(
    folder: Path,
    paths: ModulePaths,
    policy: TrainingPolicy,
    device: torch.device,
    *,
    split: int = 1,
) -> None:
    """Refuse a model that does not fit, before any weight is read.

    Args:
        policy: what is trained; adapters are too small to count.
        split: processes that share one engine's weights.

    Raises:
        TooLarge: with both numbers, and what to do.
    """
    sizes = _shapes(folder)
    parameters = sum(map(math.prod, sizes.values()))
    trained = sum(
        math.prod(shape) for name, shape in sizes.items() if policy.trains_parameter(name, paths)
    )
    engine = (WEIGHT_BYTES * parameters + TRAINED_BYTES * trained) // split
    model = max(REFERENCE_BYTES * parameters, engine)
    if device.type == "cuda":
        _require(parameters, model, str(device), torch.cuda.mem_get_info(device)[0])
        # Of two unpacked runs, until they were compared.
        _require(parameters, 2 * KEPT_BYTES * parameters, "the host", available_bytes())
    else:
        _require(parameters, model + KEPT_BYTES * parameters, str(device), available_bytes())


def require_room_for_weights(folder: Path) -> None:
    """Refuse a model whose weights alone do not fit the host in float32.

    Raises:
        CapabilityError: with both numbers.
    """
    parameters = sum(map(math.prod, _shapes(folder).values()))
    needed, free = WEIGHT_BYTES * parameters, available_bytes()
    if free is not None and needed > free:
        raise CapabilityError(
            "no family of ours serves this model class, so it is first tried with one sample on "
            f"its own weights. {parameters:,} parameters in float32 take {sized(needed)}, and the "
            f"host has {sized(free)} free. Use one with more memory"
        )


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(shape)
        for path in folder.glob("*.safetensors")
        for name, shape in read_shapes(path).items()
    }


def _require(parameters: int, needed: int, where: str, free: int | None) -> None:
    if free is not None and needed > free:
        raise TooLarge(
            f"verify compares {parameters:,} parameters in float32, which takes about "
            f"{sized(needed)} plus activations. {where} has {sized(free)} free. `vlmpack verify "
            "--tiny` takes a model of the same architecture with a few layers and random "
            "weights, on the same samples"
        )


def on_every_rank(ranks: Ranks, check: Callable[[], None]) -> None:
    """Run a check on each rank, and raise the first problem of any rank on all. Collective.

    Free memory differs between ranks, and a rank that continued alone would wait for the others.
    """
    problem: CapabilityError | None = None
    try:
        check()
    except CapabilityError as error:
        problem = error
    for each in ranks.gather_objects(problem):
        if each is not None:
            raise each


def available_bytes() -> int | None:
    """Bytes that Linux can hand out; None elsewhere."""
    path = Path("/proc/meminfo")
    if not path.is_file():
        return None
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
