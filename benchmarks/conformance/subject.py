"""What every trainer is judged on: tiny models that the repository has or makes, six samples."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.torchvision_worker import declare  # noqa: E402

if find_spec("torchvision"):  # its published build is for CUDA; no operator of it is called
    LIBRARY = declare()

from support.families import tiny_family_folder  # noqa: E402
from support.foreign import features  # noqa: E402

from benchmarks.conformance import stand_in  # noqa: E402
from vlmpack.encode import Encoder  # noqa: E402

LANGUAGE, VISION = "qwen3", "qwen2_5_vl"


@cache
def folder(name: str) -> Path:
    return Path(tiny_family_folder(name, Path(tempfile.mkdtemp())))


@cache
def encoder(name: str) -> Encoder:
    return Encoder(folder(name))


def samples(name: str) -> list[dict[str, Any]]:
    """ids, unshifted labels, and of images what transformers takes; no batch dimension."""
    return features(encoder(name), images=name == VISION)


def model(name: str, attention: str) -> Any:
    """The stock class in float32; `flash` is the exact stand-in."""
    loaded = (
        encoder(name)
        .family.auto_class()
        .from_pretrained(str(folder(name)), dtype=torch.float32, attn_implementation="sdpa")
    )
    if attention == "flash":
        stand_in.install(loaded)
    return loaded


@dataclass(kw_only=True)
class Case:
    """One way of a trainer to make batches.

    Args:
        what: its class or function, with the options that matter.
        model: of `LANGUAGE` and `VISION`.
        attention: sdpa or flash.
        collate: list of samples -> batch.
        samples: what it takes; None for `samples(model)`.
        given: further arguments of `vlmpack.judge`.
        note: what had to be added by hand.
    """

    what: str
    model: str
    attention: str
    collate: Any
    samples: list[Any] | None = None
    given: dict[str, Any] = field(default_factory=dict)
    note: str = ""
