"""The device guard: built once for each torch, and loaded in front of a process of its own.

No network and no CUDA: the headers are those of the installed torch. Where there is no C++ compiler
there is no guard, and tests say so and are skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.limits import of_a_launch

SOURCE = Path(__file__).with_name("guard.cpp")
TESTS = SOURCE.parents[1]
TORCH = Path(torch.__file__).parent


def why_not() -> str | None:
    """One phrase, where no guard can be built."""
    if sys.platform != "linux":
        return "the device guard is preloaded, which is tried on Linux alone"
    if torch.version.cuda is not None:
        return "torch is built for CUDA and has a guard of its own"
    if shutil.which("g++") is None:
        return "no g++ to build the device guard with"
    return None


def guard() -> Path:
    """The shared library; built where it is not there yet.

    Raises:
        RuntimeError: the compiler fails; with what it says.
    """
    text = SOURCE.read_bytes() + torch.__version__.encode()
    name = f"vlmpack-fake-cuda-{os.getuid()}/{hashlib.blake2b(text, digest_size=8).hexdigest()}.so"
    made = Path(tempfile.gettempdir()) / name
    if made.exists():
        return made
    made.parent.mkdir(mode=0o700, exist_ok=True)
    fresh = made.with_suffix(f".{os.getpid()}")  # another process may be building it, too
    command = ["g++", "-O0", "-fPIC", "-shared", "-std=c++20", str(SOURCE), "-o", str(fresh)]
    command += [f"-I{TORCH}/include", f"-L{TORCH}/lib", "-lc10", "-ltorch_cpu"]
    command.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"the device guard does not compile: {ran.stderr[-2000:]}")
    fresh.replace(made)
    return made


def surroundings(*beside: Path) -> dict[str, str]:
    """The environment of a process under the guard, which imports from tests/ and from these."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, [TESTS, TESTS.parent, *beside])),
        "LD_LIBRARY_PATH": str(TORCH / "lib"),
        "LD_PRELOAD": str(guard()),
        "OMP_NUM_THREADS": "1",
    }


def run_under_guard(
    module: str, request: Any, *, seconds: float | None = None, beside: Sequence[Path] = ()
) -> Any:
    """What `python -m MODULE` answers with on the last line of stdout, both in JSON.

    Args:
        beside: folders that it imports from too.

    Raises:
        RuntimeError: it fails; with the end of what it says.
    """
    ran = subprocess.run(
        [sys.executable, "-m", module, json.dumps(request)],
        env=surroundings(*beside),
        capture_output=True,
        text=True,
        timeout=of_a_launch() if seconds is None else seconds,
    )
    if ran.returncode:
        raise RuntimeError(f"{module} failed: {ran.stderr[-4000:]}")
    return json.loads(ran.stdout.splitlines()[-1])
