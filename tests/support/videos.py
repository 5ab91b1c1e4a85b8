"""Conversations with videos, stored as frames, beside images and text; and transformers' own
processor on them, in a process of its own that has torchvision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL.Image import Image, fromarray
from safetensors.torch import load_file, save_file
from support.images import file_of, picture
from support.shards import ROOT
from support.stock import IGNORED

from vlmpack.data.shards.samples import cook_texts
from vlmpack.encode import VLMSample

REFERENCES = ROOT / ".references"
WANTED = ROOT / "tests/support/reference_packages.txt"


@dataclass(frozen=True)
class Shot:
    """A video: its frames, and when they were taken."""

    size: tuple[int, int]
    count: int
    fps: float | None = None
    times: tuple[float, ...] = ()
    seed: int = 0

    smooth: bool = False

    @property
    def frames(self) -> list[Image]:
        """Pictures that differ from one another; smooth ones have no edge, which filters swing
        over."""
        if not self.smooth:
            return [picture(*self.size, seed=self.seed + 5 * n) for n in range(self.count)]
        y, x = np.mgrid[: self.size[1], : self.size[0]].astype(float)
        angles = 6 * x / self.size[0] + 4 * y / self.size[1]
        waves = [128 + 60 * np.sin(angles + n + np.arange(3)[:, None, None]) for n in range(9)]
        levels = [wave.transpose(1, 2, 0).round().astype(np.uint8) for wave in waves]
        return [fromarray(each) for each in levels[: self.count]]

    @property
    def rate(self) -> dict[str, Any]:
        """What its part says."""
        return {"fps": self.fps} if self.fps is not None else {"times": list(self.times)}

    def metadata(self) -> dict[str, Any]:
        """What transformers is told: a rate and frame numbers, or of one frame a second the time
        of each; a processor that has one rate alone gets the mean."""
        if self.fps is not None:
            return {"fps": self.fps, "at": list(range(self.count))}
        return {"fps": 1.0, "at": list(self.times)}


Part = str | tuple[int, int] | Shot
"""A text, the size of an image, or a video."""


@dataclass(frozen=True)
class Told:
    """A question about images and videos, and its answer."""

    key: str
    asked: tuple[Part, ...]
    answer: str

    def files(self) -> dict[str, Image]:
        """Member -> picture, in token order."""
        found: dict[str, Image] = {}
        for part in self.asked:
            if isinstance(part, Shot):
                found |= {f"f{len(found) + n}.png": one for n, one in enumerate(part.frames)}
            elif isinstance(part, tuple):
                found[f"i{len(found)}.png"] = picture(*part, seed=len(found))
        return found

    def record(self) -> dict[str, Any]:
        """The JSON of a shard."""
        names = iter(self.files())
        content: list[dict[str, Any]] = []
        for part in self.asked:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            elif isinstance(part, Shot):
                frames = [next(names) for _ in range(part.count)]
                content.append({"type": "video", "frames": frames, **part.rate})
            else:
                content.append({"type": "image", "image": next(names)})
        return {
            "messages": [
                {"role": "user", "content": content},
                {"role": "assistant", "content": [{"type": "text", "text": self.answer}]},
            ]
        }

    def document(self) -> bytes:
        """The JSON member of a shard."""
        return json.dumps(self.record()).encode()

    def cooked(self) -> VLMSample:
        """As the shard reader makes it."""
        files = {name: file_of(image) for name, image in self.files().items()}
        document = self.document()
        (text,) = cook_texts(self.key, "memory", document, ("json", *files))
        return text.sample.__class__(
            key=self.key,
            url="memory",
            messages=text.sample.messages,
            images=tuple(files[name] for name in text.image_fields),
            image_names=text.image_fields,
        )

    def case(self, model: Path) -> dict[str, Any]:
        """For `video_worker.py`."""
        names = list(self.files())
        stills: list[str] = []
        videos: list[dict[str, Any]] = []
        place = 0
        for part in self.asked:
            if isinstance(part, Shot):
                frames = [f"{self.key}.{name}" for name in names[place : place + part.count]]
                videos.append({"frames": frames, **part.metadata()})
                place += part.count
            elif not isinstance(part, str):
                stills.append(f"{self.key}.{names[place]}")
                place += 1
        messages = [
            {**turn, "content": [_bare(part) for part in turn["content"]]}
            for turn in self.record()["messages"]
        ]
        return {"model": str(model), "messages": messages, "stills": stills, "videos": videos}


def _bare(part: Mapping[str, Any]) -> dict[str, Any]:
    return dict(part) if part["type"] == "text" else {"type": part["type"]}


def by_transformers(
    told: Sequence[Told], models: Mapping[str, Path], folder: Path
) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    """Model -> key -> what the processor of its folder returns; skips without torchvision."""
    stamp = REFERENCES / ".installed"
    if not stamp.exists() or stamp.read_text() != WANTED.read_text():
        pytest.skip("make references installs torchvision: .references has not this version of it")
    pictures = {
        f"{each.key}.{name}": torch.from_numpy(np.array(image))
        for each in told
        for name, image in each.files().items()
    }
    save_file(pictures, str(folder / "pictures.safetensors"))
    cases = [(name, each) for name in models for each in told]
    content = [each.case(models[name]) for name, each in cases]
    (folder / "cases.json").write_text(json.dumps(content), encoding="utf-8")
    worker = ROOT / "tests/support/video_worker.py"
    subprocess.run(
        [sys.executable, str(worker), str(REFERENCES), str(folder)],
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))},
    )
    found: dict[str, dict[str, dict[str, torch.Tensor]]] = {name: {} for name in models}
    for number, (name, each) in enumerate(cases):
        found[name][each.key] = load_file(str(folder / f"{number}.safetensors"))
    return found


def in_the_papers_way(counted: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """(3, s) of one sample: what a class of transformers 5 counts, token by token moved to where
    Qwen2-VL's paper (2.1) has it: text goes on from the largest position so far plus one."""
    kinds = given["mm_token_type_ids"][0].tolist()
    moved = counted.clone()
    for n in range(1, len(kinds)):
        if kinds[n] == 0 or kinds[n] != kinds[n - 1]:
            moved[:, n:] += int(moved[:, :n].max()) + 1 - int(moved[:, n].min())
    return moved


@dataclass(frozen=True)
class ProcessedInputs:
    """What a processor returned, as `support.stock.run_one_by_one` takes its inputs."""

    features: dict[str, torch.Tensor]
    labels: torch.Tensor
    has_rope_index: bool = True

    @property
    def input_ids(self) -> torch.Tensor:
        """(1, s)."""
        return self.features["input_ids"]

    @property
    def rules(self) -> Any:
        """Its positions are those of the class."""
        return self

    @property
    def positions(self) -> Any:
        """(model, inputs) -> (3, s) by the model's own `get_rope_index`; None where it has none."""
        if not self.has_rope_index:
            return None

        def counted(model: Any, inputs: ProcessedInputs) -> torch.Tensor:
            names = (
                "input_ids",
                "mm_token_type_ids",
                "image_grid_thw",
                "video_grid_thw",
                "second_per_grid_ts",
            )
            given = {name: inputs.features[name] for name in names if name in inputs.features}
            return in_the_papers_way(model.model.get_rope_index(**given)[0][:, 0], given)

        return counted

    def prepared(self, model: Any) -> dict[str, torch.Tensor]:
        """What the model's forward takes; positions where there is a video, which its class would
        count otherwise."""
        if self.positions is None or "video_grid_thw" not in self.features:
            return self.features
        return {**self.features, "position_ids": self.positions(model, self)[:, None]}

    @classmethod
    def of(
        cls,
        features: dict[str, torch.Tensor],
        answer_ids: Sequence[int],
        *,
        has_rope_index: bool = True,
    ) -> ProcessedInputs:
        """Labels are the ids of the answer, which stand once in the sample, near its end."""
        ids = features["input_ids"][0].tolist()
        wanted = list(answer_ids)
        starts = [n for n in range(len(ids)) if ids[n : n + len(wanted)] == wanted]
        assert len(starts) == 1, starts
        labels = torch.full_like(features["input_ids"], IGNORED)
        span = slice(starts[0], starts[0] + len(wanted))
        labels[0, span] = features["input_ids"][0, span]
        return cls(features, labels, has_rope_index)
