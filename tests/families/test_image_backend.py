"""Pixels are made by PIL and numpy, with torchvision installed or without."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import torchvision_worker
from support.families import TINY
from support.played_torchvision import CLASSES as ON_TORCHVISION_ALONE
from support.shards import ROOT, TINY_MODEL
from support.videos import Shot
from transformers import AutoImageProcessor
from transformers.image_processing_backends import PilBackend, TorchvisionBackend
from transformers.models.auto import image_processing_auto

from vlmpack.data.index.lengths import LengthsBuilder
from vlmpack.data.packs.manifest import note_makers
from vlmpack.encode import Encoder
from vlmpack.families.image_processor import image_processor
from vlmpack.model_folder import load
from vlmpack.model_folder.load import load_image_processor, made_with


class _OnTorchvision:
    """What transformers' class on torchvision would be, where that is installed."""

    backend = "torchvision"
    do_resize, do_center_crop = True, False

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> _OnTorchvision:
        return cls()


_OnTorchvision.__module__ = "transformers.played"


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were installed: each class without Pil in its name is one on torchvision."""
    there = image_processing_auto.get_image_processor_class_from_name

    def by_name(name: str) -> Any:
        return there(name) if name.endswith("Pil") else _OnTorchvision

    monkeypatch.setattr(image_processing_auto, "is_torchvision_available", lambda: True)
    monkeypatch.setattr(image_processing_auto, "DEFAULT_TO_PIL_BACKEND_IMAGE_PROCESSORS", [])
    monkeypatch.setattr(image_processing_auto, "get_image_processor_class_from_name", by_name)


@pytest.mark.usefixtures("torchvision")
def test_torchvision_changes_nothing() -> None:
    left_to_it = AutoImageProcessor.from_pretrained(str(TINY_MODEL), local_files_only=True)
    assert isinstance(left_to_it, _OnTorchvision)  # what would be taken otherwise
    ours = load_image_processor(TINY_MODEL)
    assert isinstance(ours, PilBackend)
    assert not isinstance(ours, TorchvisionBackend)
    assert ours.backend == load.IMAGE_BACKEND


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("name", [name for name, tiny in TINY.items() if tiny.images])
def test_every_family_has_one_on_pil_or_needs_none(name: str, tmp_path: Path) -> None:
    load: Any = TINY[name].images
    shutil.copy(TINY_MODEL / "config.json", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(load))
    for file, text in TINY[name].files.items():
        (tmp_path / file).write_text(text)
    if load["image_processor_type"] in ON_TORCHVISION_ALONE:
        with pytest.raises(ValueError, match="for the backend torchvision alone"):
            image_processor(tmp_path)
    else:
        assert isinstance(image_processor(tmp_path), PilBackend)


@pytest.mark.usefixtures("torchvision")
def test_a_class_on_torchvision_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        image_processing_auto, "get_image_processor_class_from_name", lambda _: _OnTorchvision
    )
    with pytest.raises(ValueError, match="for the backend torchvision alone"):
        load_image_processor(TINY_MODEL)


def test_lengths_are_kept_by_the_version_that_made_them(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    index: Any = SimpleNamespace(rule="index-1")

    def rule() -> str:
        return LengthsBuilder(index, Path(), encoder).rule  # type: ignore[arg-type]

    before, fingerprint = rule(), encoder.fingerprint
    assert before == rule()
    assert made_with() in before
    monkeypatch.setattr(load, "transformers_version", lambda: "5.99")
    assert rule() != before
    assert Encoder(encoder.folder).fingerprint == fingerprint  # a run's identity is not changed


def test_packs_of_another_version_are_said(
    encoder: Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vlmpack")
    parts = dict(encoder.fingerprint_parts)
    packs: Any = SimpleNamespace(encoder=parts)
    note_makers(packs, encoder)
    assert caplog.text == ""
    parts["made_with"] = "images by pil, transformers 5.1.0"
    note_makers(packs, encoder)
    assert "the packs were made with images by pil, transformers 5.1.0; it is " in caplog.text


PATCH = {"height": 14, "width": 14}
BOTH = (
    ("Qwen2VLImageProcessor", {}),
    ("PixtralImageProcessor", {"size": {"longest_edge": 200}, "patch_size": PATCH}),
    (
        "Idefics3ImageProcessor",
        {"size": {"longest_edge": 300}, "max_image_size": {"longest_edge": 150}},
    ),
)


@pytest.mark.soak
def test_the_two_differ_by_two_levels_where_they_resize_and_by_more_at_edges(
    tmp_path: Path,
) -> None:
    """What docs/processors.md says of them, with the real torchvision in a process of its own."""
    where = ROOT / ".references"
    wanted = (ROOT / "tests/support/reference_packages.txt").read_text(encoding="utf-8")
    if not (where / ".installed").exists() or (where / ".installed").read_text() != wanted:
        pytest.skip("make references installs torchvision: .references has not this version of it")
    sizes = {"kept": (56, 56), "tall": (41, 300), "wide": (90, 200), "photo": (640, 480)}
    shown = {name: np.array(Shot(size, 1, smooth=True).frames[0]) for name, size in sizes.items()}
    shown["noise"] = np.random.default_rng(0).integers(0, 256, (311, 407, 3), dtype=np.uint8)
    save_file({k: torch.from_numpy(v) for k, v in shown.items()}, tmp_path / "pictures.safetensors")
    (tmp_path / "cases.json").write_text(json.dumps(BOTH), encoding="utf-8")
    subprocess.run(
        [sys.executable, torchvision_worker.__file__, str(where), str(tmp_path)],
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))},
    )
    levels: dict[tuple[str, str], float] = {}
    for number, (name, settings) in enumerate(BOTH):
        model = torchvision_worker.ON_BOTH[name]
        module = import_module(f"transformers.models.{model}.image_processing_pil_{model}")
        ours = getattr(module, f"{name}Pil")(**settings)
        theirs = load_file(tmp_path / f"{number}.safetensors")
        for key, image in shown.items():
            made = torch.as_tensor(ours(images=[image], return_tensors="pt")["pixel_values"])
            largest = (made - theirs[f"{key}.pixel_values"]).abs().max()
            levels[name, key] = float(largest) * 255 * min(ours.image_std)
    smooth = {pair: value for pair, value in levels.items() if pair[1] != "noise"}
    assert 1.9 < max(smooth.values()) < 2.01, levels
    same = levels["Qwen2VLImageProcessor", "kept"], levels["PixtralImageProcessor", "kept"]
    assert max(same) < 1e-3, "a picture of the right size is the same"
    assert 20 < levels["Qwen2VLImageProcessor", "noise"] < 30
