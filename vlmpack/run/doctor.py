"""What is installed here, what would run on this machine, and why not something else.

It explains why a kernel is not used, and serves bug reports. It contains no secret, no user name
and no path below a home folder.
"""

from __future__ import annotations

import os
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from vlmpack.attention import choose_attention
from vlmpack.backends.fused import choose_fused
from vlmpack.data.index.parts import BuildSettings
from vlmpack.errors import VlmpackError
from vlmpack.recurrence import choose_recurrence
from vlmpack.run.launch_memory import room_of
from vlmpack.terminal import printable
from vlmpack.words import sized

OPTIONAL = {
    name: name.replace("-", "_")
    for name in (
        *("megatron-core", "transformer-engine", "flash-attn", "flash-linear-attention"),
        *("causal-conv1d", "mamba-ssm", "liger-kernel", "bitsandbytes", "triton", "tensorboard"),
        *("wandb", "mlflow", "swanlab", "matplotlib", "av"),
    )
} | {"megatron-core": "megatron.core", "flash-linear-attention": "fla"}
"""Package -> the module that shows whether it can be imported."""

VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS", "WORLD_SIZE"),
    *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "PYTORCH_CUDA_ALLOC_CONF"),
    *("HF_HUB_OFFLINE", "MALLOC_MMAP_THRESHOLD_", "TORCHELASTIC_RESTART_COUNT"),
)
"""Variables of the environment that change what runs, and hold no secret."""


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was looked at.

    Args:
        note: the reason, or what is wrong; may be empty.
        is_bad: whether it keeps a requested feature from running.
    """

    section: str
    name: str
    found: str
    note: str = ""
    is_bad: bool = False


def look() -> list[Line]:
    """Everything, section by section. Imports the optional packages; raises nothing."""
    found: list[Line] = []
    for section, lines in (
        ("machine", _machine),
        ("packages", _packages),
        ("kernels", _kernels),
        ("environment", _environment),
    ):
        try:
            for rest in lines():  # one by one: what was found before a failure stays
                found.append(Line(section, *rest))
        except Exception as error:  # a broken installation is what this is for
            found.append(Line(section, "look", "failed", _said(error), True))
    return found


def as_json(lines: list[Line]) -> list[dict[str, Any]]:
    return [asdict(line) for line in lines]


Rest = tuple[str, str] | tuple[str, str, str] | tuple[str, str, str, bool]


def _machine() -> Iterator[Rest]:
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "python", platform.python_version()
    yield "torch", torch.__version__, f"{torch.get_num_threads()} threads"
    yield "cores", str(os.cpu_count())
    room = room_of(torch.device("cpu"))
    yield "memory", "unknown" if room is None else f"{sized(room.size)}, {room.where}"
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(number)
            capability = f"compute capability {facts.major}.{facts.minor}"
            yield f"GPU {number}", facts.name, f"{sized(facts.total_memory)}, {capability}"
        yield "CUDA", str(torch.version.cuda)
    else:
        built = torch.version.cuda
        why = f"torch is built for CUDA {built} and finds none" if built else "torch has no CUDA"
        yield "GPU", "none", why
    folder = BuildSettings().directory
    for name, path in (("index cache", folder), ("this folder", Path.cwd())):
        there = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
        writable = os.access(there, os.W_OK)
        free = f"{sized(shutil.disk_usage(there).free)} free"
        note = free if writable else f"{free}; cannot be written: data.index_dir names another"
        yield name, "writable" if writable else "not writable", note, not writable


def _packages() -> Iterator[Rest]:
    from packaging.requirements import Requirement

    requirements: dict[str, Requirement] = {}
    for text in metadata.requires("vlmpack") or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra})
            for extra in ("", *(metadata.metadata("vlmpack").get_all("Provides-Extra") or ()))
            if extra != "dev"
        ):
            requirements.setdefault(requirement.name, requirement)
    for name in dict.fromkeys([*requirements, *OPTIONAL]):
        yield _package(name, requirements.get(name))


def _package(name: str, requirement: Any) -> Rest:
    versions = "" if requirement is None else str(requirement.specifier)
    needed = requirement is not None and requirement.marker is None
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return name, "not installed", f"needed: {versions}" if needed else "", needed
    module = OPTIONAL.get(name)
    if module is not None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_module(module)
        except Exception as error:
            return name, version, f"cannot be imported: {_said(error)}", True
    if versions and not requirement.specifier.contains(version, prereleases=True):
        return name, version, f"expected {versions}", True
    return name, version


def _kernels() -> Iterator[Rest]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shown = f"on {device.type} in {str(dtype).removeprefix('torch.')}"

    def chosen(name: str, choose: Callable[[], tuple[str, str]]) -> Rest:
        try:
            choice, why = choose()
        except VlmpackError as error:
            return name, "none", _said(error), True
        return name, choice, f"{shown}: {why}"

    def attention() -> tuple[str, str]:
        choice = choose_attention("auto", device=device, dtype=dtype)
        return choice.name, choice.reason

    def fused() -> tuple[str, str]:
        ops, why = choose_fused("auto", device)
        return "none" if ops is None else ops.name, why if ops is None else ops.reason

    yield chosen("attention", attention)
    recurrence = choose_recurrence(device=device, dtype=dtype)
    for kind in ("convolution", "delta_rule", "scan"):
        choice = getattr(recurrence, kind)
        yield kind.replace("_", " "), choice.name, f"{shown}: {choice.reason}"
    yield chosen("fused layers", fused)
    try:
        from vlmpack.backends.mcore.te_versions import passed_transformer_engine

        passed = passed_transformer_engine(device, dtype)
        why = "" if passed else "none that tests/gpu has passed with is here"
        yield "Transformer Engine", passed or "not chosen", why
    except ImportError as error:
        yield "Transformer Engine", "not chosen", _said(error)


def _environment() -> Iterator[Rest]:
    for name in VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]


def _said(error: Exception) -> str:
    text = _without_home(f"{type(error).__name__}: {error}")
    return printable(" ".join(text.split()))[:200]


def _without_home(text: object) -> str:
    home = str(Path.home())
    return str(text).replace(home, "~") if len(home) > 1 else str(text)
