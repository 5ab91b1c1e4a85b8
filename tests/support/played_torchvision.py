"""transformers' image processors that exist on torchvision alone, run without it.

Of torchvision they call two functions. Their work on float32 is torch's own: resizing is
`torch.nn.functional.interpolate`, and normalising a subtraction and a division. Bytes are resized
by Pillow, as everywhere in vlmpack. Everything else that decides pixels is transformers' code.
`tests/families/test_on_torchvision.py` compares with the real one where that can be had.
"""

from __future__ import annotations

import enum
import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL.Image import fromarray
from transformers import image_processing_backends
from transformers.utils import is_torchvision_available

CLASSES = {
    "Gemma4UnifiedImageProcessor": "gemma4_unified",
    "NemotronH_Omni_Reasoning_V3ImageProcessor": "nemotron_h_omni",
}
"""Names of classes, and of the folder of models that holds them."""


class _Interpolation(enum.Enum):
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def _resize(image: Any, size: Any, interpolation: Any, antialias: bool) -> Any:
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    if image.dtype == torch.uint8:
        assert interpolation in (3, _Interpolation.BICUBIC)
        resized = fromarray(image.permute(1, 2, 0).numpy()).resize(tuple(size)[::-1], 3)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    assert image.dtype == torch.float32
    batch = image if image.ndim == 4 else image[None]
    resized = F.interpolate(
        batch, list(size), mode=interpolation.value, align_corners=False, antialias=antialias
    )
    return resized if image.ndim == 4 else resized[0]


def _normalize(image: Any, mean: Any, std: Any, inplace: bool) -> Any:
    mean, std = (torch.as_tensor(each)[:, None, None] for each in (mean, std))
    return (image.sub_(mean) if inplace else image.sub(mean)).div_(std)


def _functional() -> ModuleType:
    played = ModuleType("torchvision.transforms.v2.functional")
    vars(played).update(resize=_resize, normalize=_normalize, InterpolationMode=_Interpolation)
    return played


@contextmanager
def _there(functional: ModuleType) -> Iterator[None]:
    """As if it were imported, for transformers' backend and for what is imported meanwhile."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    played = {name: ModuleType(name) for name in names} | {functional.__name__: functional}
    vars(played[names[-1]])["functional"] = functional
    modes = {0: None, 2: _Interpolation.BILINEAR, 3: _Interpolation.BICUBIC}
    backend = {"tvF": functional, "pil_torch_interpolation_mapping": modes}
    before = {name: vars(image_processing_backends).get(name) for name in backend}
    assert not sys.modules.keys() & played.keys()
    sys.modules.update(played)
    vars(image_processing_backends).update(backend)
    try:
        yield
    finally:
        vars(image_processing_backends).update(before)
        for name in played:
            del sys.modules[name]


@cache
def module_of(name: str) -> dict[str, Any]:
    """What the module of a class defines."""
    path = f"transformers.models.{CLASSES[name]}.image_processing_{CLASSES[name]}"
    with _there(_functional()):
        module = importlib.import_module(path)
        del sys.modules[path]  # a later import must fail as it does without torchvision
    return vars(module)


class Played:
    """A processor that is called as any other.

    Args:
        name: of its class.
        settings: the content of its preprocessor_config.json.
    """

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        kind = module_of(name)[name]
        with _there(_functional()):
            self.processor = kind(**settings)

    def __call__(self, **arguments: Any) -> Any:
        """Its features."""
        with _there(_functional()):
            return self.processor(**arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.processor, name)


def processor_on_torchvision(folder: Path) -> Any:
    """That of a model folder."""
    from transformers import AutoImageProcessor

    if is_torchvision_available():
        return AutoImageProcessor.from_pretrained(str(folder))
    settings = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    return Played(settings["image_processor_type"], settings)
