"""Doors of files of records, videos, adapters and kept log-probabilities."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from support import record_data
from support.fuzz import Door, changed, damaged, json_bytes
from support.shard_fakes import micro_batches, open_data

from vlmpack.capabilities.adapter_config import AdapterConfig
from vlmpack.convert.videos import VideoSettings, decode_video
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.model_folder.weights import weight_files
from vlmpack.recipe.sources import Source
from vlmpack.training.reference import ReferenceFile

Go = Callable[[random.Random], object]
SKIP = {"integrity": "skip", "schema": "skip", "decode": "skip"}
CAPS = SampleCaps(max_member_bytes=1 << 20, max_image_pixels=1 << 20)


def _records(kind: str) -> Callable[[Path], Go]:
    def door(folder: Path) -> Go:
        path = Path(record_data.write_records(folder, kind, range(4)))
        good = path.read_bytes()

        def go(draw: random.Random) -> None:
            path.write_bytes(damaged(good, draw, [good]))
            index = folder / "index"
            shutil.rmtree(index, ignore_errors=True)
            source = (Source(name="d", path=str(path)),)
            data = open_data("", index, sources=source, shuffle="global", on_error=SKIP)
            found = micro_batches(data, data.steps_per_epoch())
            told = sum(len(micro.samples) + len(micro.skipped) for micro in found)
            assert told == data.fitted.table.num_samples, "samples are lost"

        return go

    return door


def _video(folder: Path) -> Go:
    import av

    path = folder / "v.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in range(8):
            picture = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    good = path.read_bytes()

    def go(draw: random.Random) -> None:
        found = decode_video(io.BytesIO(damaged(good, draw, [good])), "v", VideoSettings(), CAPS)
        assert len(found.frames) == len(found.times) <= 64

    return go


ADAPTER = {
    "peft_type": "LORA",
    "base_model_name_or_path": "m",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"v_proj": 2},
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
}


def _adapter(folder: Path) -> Go:
    (folder / "adapter_model.safetensors").write_bytes(b"")
    good = json_bytes(ADAPTER)

    def go(draw: random.Random) -> None:
        value = damaged(good, draw, [good]) if draw.random() < 0.4 else None
        content = json_bytes(changed(ADAPTER, draw)) if value is None else value
        (folder / "adapter_config.json").write_bytes(content)
        found = AdapterConfig.read(folder)
        assert found.refusal is None or found.refusal
        assert found.unknown_here is None or found.unknown_here
        if found.refusal is None and found.unknown_here is None:
            list(found.settings())

    return go


def _reference(folder: Path) -> Go:
    def file() -> ReferenceFile:
        return ReferenceFile(folder / "reference", {"weights": "ab"}, 4)

    file().write([(2, -1 / 3, -2.5), (0, -1.0, -7.0)])
    truth = file().read()
    good = {path: path.read_bytes() for path in (folder / "reference").iterdir()}

    def go(draw: random.Random) -> None:
        path = draw.choice(sorted(good))
        if path.suffix == ".json" and draw.random() < 0.5:
            path.write_bytes(json_bytes(changed(json.loads(good[path]), draw)))
        else:
            path.write_bytes(damaged(good[path], draw, [good[path]]))
        try:
            found = file().read()
        finally:
            path.write_bytes(good[path])
        same = (found == truth) | np.isnan(truth)
        assert bool((same | np.isnan(found)).all()), "another number was taken"

    return go


def _weight_index(folder: Path) -> Go:
    good = {"metadata": {"total_size": 4}, "weight_map": {"a": "x.safetensors"}}
    (folder / "x.safetensors").write_bytes(b"")

    def go(draw: random.Random) -> None:
        content = json_bytes(changed(good, draw))
        (folder / "model.safetensors.index.json").write_bytes(content)
        assert all(path.parent == folder for path in weight_files(folder))

    return go


DOORS = [
    Door("JSONL", 0.3, _records("jsonl")),
    Door("parquet", 0.3, _records("parquet of bytes")),
    Door("CSV", 0.3, _records("csv")),
    Door("video", 0.5, _video),
    Door("adapter", 2, _adapter),
    Door("reference cache", 1, _reference),
    Door("weight index", 1, _weight_index),
]
