"""WebDataset shards of text-only conversations: lists of digits to sort, reverse, sum up and so on.

Sample = `<key>.json` alone. A system prompt, where there is one, says how to answer, and all turns
follow it. The sizes of the lists are lognormal and the number of turns is geometric, so lengths
have the long tail of real text. The bytes depend on the seed only (fixed tar headers).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import webdataset

SEED = 31
SPLITS = {"train": (180, 2), "val": (16, 1), "test": (24, 1)}
"""Samples and shards."""
MEDIAN_DIGITS, SIGMA, MAX_DIGITS = 8, 0.9, 90
MORE_TURNS = 0.55
"""Probability of one more turn; in training only."""
MAX_TURNS = 8

Digits = list[int]


def joined(digits: Digits) -> str:
    """`3 1 4`."""
    return " ".join(map(str, digits))


TASKS: dict[str, tuple[str, Callable[[Digits], str]]] = {
    "copy": ("Repeat {}.", joined),
    "reverse": ("Reverse {}.", lambda digits: joined(digits[::-1])),
    "sort": ("Sort {}.", lambda digits: joined(sorted(digits))),
    "largest": ("Which is the largest of {}?", lambda digits: str(max(digits))),
    "count": ("How many digits are in {}?", lambda digits: str(len(digits))),
    "sum": ("Add {}.", lambda digits: str(sum(digits))),
}
"""Question and answer of each task."""

STYLES: dict[str, str] = {
    "Answer with the result alone.": "{answer}",
    "Say the digits first, then the result.": "{digits}: {answer}",
    "Answer in a sentence.": "The answer is {answer}.",
}
"""System prompt -> form of the answer. Without one it is the result alone."""
SYSTEM_SHARE = 0.5


def draw_turn(rng: np.random.Generator, task: str, form: str) -> list[dict[str, str]]:
    """A question and its answer."""
    size = min(MAX_DIGITS, max(1, round(MEDIAN_DIGITS * float(np.exp(SIGMA * rng.normal())))))
    digits = [int(digit) for digit in rng.integers(10, size=size)]
    question, answer = TASKS[task]
    return [
        {"role": "user", "content": question.format(joined(digits))},
        {
            "role": "assistant",
            "content": form.format(digits=joined(digits), answer=answer(digits)),
        },
    ]


def draw_record(rng: np.random.Generator, index: int, *, max_turns: int) -> dict[str, Any]:
    """A conversation; `task` names that of its first turn."""
    names = list(TASKS)
    first = names[index % len(names)]
    messages: list[dict[str, str]] = []
    form = "{answer}"
    if rng.random() < SYSTEM_SHARE:
        prompt = list(STYLES)[int(rng.integers(len(STYLES)))]
        messages.append({"role": "system", "content": prompt})
        form = STYLES[prompt]
    messages += draw_turn(rng, first, form)
    for _ in range(max_turns - 1):
        if rng.random() >= MORE_TURNS:
            break
        messages += draw_turn(rng, names[int(rng.integers(len(names)))], form)
    return {"messages": messages, "task": first}


def write_split(folder: Path, name: str) -> dict[str, Any]:
    """All shards of one split; returns its part of the manifest."""
    count, num_shards = SPLITS[name]
    rng = np.random.default_rng([SEED, list(SPLITS).index(name)])
    records = [
        draw_record(rng, index, max_turns=MAX_TURNS if name == "train" else 1)
        for index in range(count)
    ]
    per_shard = -(-count // num_shards)
    shards = {}
    for shard in range(num_shards):
        path = folder / f"{name}-{shard:06d}.tar"
        start = shard * per_shard
        with webdataset.TarWriter(str(path), mtime=0, user="", group="", mode=0o644) as tar:
            for index, record in enumerate(records[start : start + per_shard], start):
                data = json.dumps(record, separators=(",", ":")).encode()
                tar.write({"__key__": f"{name}{index:05d}", "json": data})
        shards[path.name] = {
            "samples": len(records[start : start + per_shard]),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
    roles = [message["role"] for record in records for message in record["messages"]]
    return {
        "samples": count,
        "turns": roles.count("assistant"),
        "with_system_prompt": roles.count("system"),
        "shards": shards,
    }


def write_text(folder: Path) -> None:
    """All splits and the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.tar"):
        old.unlink()
    manifest = {"seed": SEED, "splits": {name: write_split(folder, name) for name in SPLITS}}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
