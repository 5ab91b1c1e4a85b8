"""WebDataset shards of preferences: one question about handwritten digits, a right reading of them
and a wrong one.

Sample = `<key>.json` + `<key>.0.jpg` ...; the rejected answer differs from the chosen one in one
digit. The bytes depend on the seed only (fixed tar headers). A source image belongs to the split
that it belongs to in `digits/`, so that no digit of the held-out pairs was trained on, there or
here.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import webdataset

from assets.build.digits import SEED as WRITING_SEED
from assets.build.digits import DigitSample, SampleMaker, chat_record, jpeg
from assets.build.handwriting import load_split

SEED = 47
SPLITS = {"train": 1440, "val": 304}
"""Pairs."""
TWO_IMAGES_SHARE = 0.1
"""Share of pairs whose question names one of two rows."""


def one_digit_off(rng: np.random.Generator, reading: str) -> str:
    """The reading with one digit replaced by another."""
    place = int(rng.integers(len(reading)))
    wrong = (int(reading[place]) + int(rng.integers(1, 10))) % 10
    return f"{reading[:place]}{wrong}{reading[place + 1 :]}"


def pair_record(rng: np.random.Generator, sample: DigitSample) -> dict[str, Any]:
    """The prompt's turns, and both answers beside them."""
    (turn,) = sample.turns
    record = chat_record(sample)
    return {
        "messages": record["messages"][:-1],
        "chosen": turn.answer,
        "rejected": one_digit_off(rng, turn.answer),
    }


def write_split(folder: Path, name: str) -> dict[str, Any]:
    """The shard of one split; returns its part of the manifest."""
    rng = np.random.default_rng([SEED, list(SPLITS).index(name)])
    maker = SampleMaker(load_split(name, WRITING_SEED), rng, 0)
    path = folder / f"{name}-000000.tar"
    images = 0
    with webdataset.TarWriter(str(path), mtime=0, user="", group="", mode=0o644) as tar:
        for index in range(SPLITS[name]):
            sample = maker.image_sample("read", 1 + int(rng.random() < TWO_IMAGES_SHARE))
            record = json.dumps(pair_record(rng, sample), separators=(",", ":")).encode()
            drawn = {f"{i}.jpg": jpeg(image) for i, image in enumerate(sample.images)}
            tar.write({"__key__": f"{name}{index:05d}", "json": record, **drawn})
            images += len(drawn)
    return {
        "pairs": SPLITS[name],
        "images": images,
        "shards": {path.name: hashlib.sha256(path.read_bytes()).hexdigest()},
    }


def write_pairs(folder: Path) -> None:
    """Both splits and the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.tar"):
        old.unlink()
    manifest = {"seed": SEED, "splits": {name: write_split(folder, name) for name in SPLITS}}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
