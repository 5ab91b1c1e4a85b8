"""Pairs of answers for tests: prompts of the committed shards, answers of random letters."""

from __future__ import annotations

import io
import json
import random
import tarfile
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from support.shards import RawSample, read_shard, with_answer

from vlmpack.encode import Message, TextPart, VLMSample


def answer(draw: random.Random, *, most: int = 20) -> str:
    """Letters that no model knows."""
    return "".join(draw.choices(ascii_lowercase, k=draw.randint(1, most)))


def raw_pairs(seed: int = 0, *, least: int = 6) -> list[tuple[RawSample, RawSample]]:
    """(with the chosen answer, with the rejected one), on 0 to 3 images each."""
    draw = random.Random(seed)
    by_count: dict[int, list[RawSample]] = {0: [], 1: [], 2: [], 3: []}
    for sample in read_shard():
        by_count[len(sample.images)].append(sample)
    counts = [2, 0, 1, 3, 0, 1][:least]
    prompts = [draw.choice(by_count[count]) for count in counts]
    keys = [f"pair{number}" for number in range(len(prompts))]
    return [
        (
            with_answer(RawSample(key, prompt.messages, prompt.images), answer(draw)),
            with_answer(RawSample(key, prompt.messages, prompt.images), answer(draw)),
        )
        for key, prompt in zip(keys, prompts, strict=True)
    ]


def cooked_pair(chosen: RawSample, rejected: RawSample) -> VLMSample:
    """What the data layer hands to the encoder."""
    both = [raw.cooked().messages[-1].text for raw in (chosen, rejected)]
    whole = chosen.cooked()
    return VLMSample(
        key=whole.key,
        url=whole.url,
        messages=whole.messages[:-1],
        images=whole.images,
        answers=tuple((Message("assistant", (TextPart(text),)),) for text in both),
    )


def record_of(chosen: RawSample, rejected: RawSample) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A shard's JSON and the images beside it, by name."""
    names = [f"{place}.png" for place in range(len(chosen.images))]
    left = iter(names)
    messages = [
        {
            "role": turn["role"],
            "content": [
                {"type": "image", "image": next(left)} if part["type"] == "image" else part
                for part in turn["content"]
            ],
        }
        for turn in chosen.messages[:-1]
    ]
    said = [raw.messages[-1]["content"][0]["text"] for raw in (chosen, rejected)]
    record = {"messages": messages, "chosen": said[0], "rejected": said[1]}
    return record, dict(zip(names, chosen.images, strict=True))


def write_pairs(path: Path, pairs: list[tuple[RawSample, RawSample]]) -> Path:
    """A shard of pairs."""
    with tarfile.open(path, "w") as tar:
        for number, pair in enumerate(pairs):
            record, images = record_of(*pair)
            files = {"json": json.dumps(record).encode(), **images}
            for name, data in files.items():
                entry = tarfile.TarInfo(f"{number:05d}.{name}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return path
