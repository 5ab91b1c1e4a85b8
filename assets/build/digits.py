"""WebDataset shards of handwritten digit questions: train, val and test.

Sample = `<key>.json` + `<key>.0.jpg` ...; the bytes depend on the seed only (fixed tar headers).
`manifest.json` lists the source images of each split, the counts and the shards' checksums.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import sklearn
import webdataset
from PIL import Image

from assets.build import questions
from assets.build.handwriting import Handwriting, load_split, split_sources
from assets.build.questions import IMAGE_MARK, Turn
from assets.build.rows import RowStyle, draw

SEED = 20
NUM_TRAIN, NUM_TRAIN_SHARDS = 2508, 4
NUM_VAL = 152
NUM_TEST = 608
TEXT_SHARE = 0.1
# Short text-only samples beside three long rows: the lengths of a batch differ by far.
MAX_TEXT_DIGITS = 2
LLAVA_SHARE = 0.05
TASK_SHARES = {"read": 8 / 19, "count": 4 / 19, "largest": 4 / 19, "compare": 3 / 19}
# Reading is what handwriting teaches, and one row costs fewer bytes than two.
TRAIN_SHARES = {"read": 11 / 19, "count": 2 / 19, "largest": 4 / 19, "compare": 2 / 19}
# One comparison in eight is between three images, the others are between two.
COMPARED_IMAGES = (2, 2, 2, 2, 2, 2, 2, 3)
# Types that are asked in two ways.
WAYS = {"count": ("length",), "compare": ("compare", "longest")}
MAX_MORE_TURNS = 3
JPEG_QUALITY = 70
EVEN_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
# A long row costs hardly more bytes than a short one and holds more writing to learn from.
TRAIN_LENGTHS = (*EVEN_LENGTHS, 5, 6, 7, 8)


@dataclass(slots=True)
class LengthDeck:
    """Row lengths dealt so that each one in `lengths` comes up equally often."""

    rng: np.random.Generator
    lengths: tuple[int, ...]
    cards: list[int] = field(default_factory=list)

    def deal(self) -> int:
        if not self.cards:
            self.cards = [int(n) for n in self.rng.permutation(self.lengths)]
        return self.cards.pop()


@dataclass(frozen=True, slots=True)
class DigitSample:
    """Turns about zero to three images, before they are written."""

    task: str
    turns: list[Turn]
    images: list[Image.Image]
    rows: list[list[int]]


class SampleMaker:
    """Makes the samples of one split."""

    def __init__(self, writing: Handwriting, rng: np.random.Generator, max_more_turns: int) -> None:
        self.writing = writing
        self.rng = rng
        self.max_more_turns = max_more_turns
        lengths = TRAIN_LENGTHS if max_more_turns else EVEN_LENGTHS
        self.decks = {name: LengthDeck(rng, lengths) for name in questions.IMAGE_TASKS}

    def text_sample(self) -> DigitSample:
        return DigitSample("text", [questions.ask_text(self.rng, MAX_TEXT_DIGITS)], [], [])

    def image_sample(self, task: str, num_images: int) -> DigitSample:
        """One question of type `task`, then (in training) more about the same images."""
        rng = self.rng
        target = int(rng.integers(num_images))
        rows = []
        for _ in range(num_images):
            rows.append(questions.draw_row(rng, self.decks[task].deal(), task))
        if task == "compare" and num_images == 3:
            # "A, B or C" must have one answer: the leading digits differ.
            for row, digit in zip(rows, rng.permutation(10), strict=False):
                row[0] = int(digit)
        way = questions.pick(rng, WAYS.get(task, (task,)))
        if self.max_more_turns:
            turns = questions.conversation(rng, rows, self.turn_plan(way, num_images))
        else:
            turns = [questions.ask(rng, way, rows, target)]
            turns[0] = questions.place_images(rng, turns[0], num_images)
        style = RowStyle()
        images = [draw([self.writing.glyph(d, rng) for d in row], rng, style).image for row in rows]
        return DigitSample(task, turns, images, rows)

    def turn_plan(self, way: str, num_images: int) -> list[str]:
        """Question types of a training sample: `way`, some others, most rows read."""
        one = ("length", "largest")
        others = one if num_images == 1 else ("compare", "longest", "largest")
        num_more = int(self.rng.integers(self.max_more_turns + 1))
        plan = [way, *(questions.pick(self.rng, others) for _ in range(num_more))]
        # Every single row is read: the densest supervision that an image can carry.
        return plan + ["read"] * (1 if num_images == 1 else int(self.rng.integers(2)))

    def samples(self, num_images_questions: int) -> Iterator[DigitSample]:
        """All samples of the split in random order; the shares of the task types are exact."""
        plan: list[tuple[str, int]] = []
        shares = TRAIN_SHARES if self.max_more_turns else TASK_SHARES
        for task, share in shares.items():
            for index in range(round(num_images_questions * share)):
                compared = COMPARED_IMAGES[index % len(COMPARED_IMAGES)]
                plan.append((task, compared if task == "compare" else 1))
        num_text = round(num_images_questions * TEXT_SHARE / (1 - TEXT_SHARE))
        plan += [("text", 0)] * num_text
        for index in self.rng.permutation(len(plan)):
            task, num_images = plan[index]
            yield self.text_sample() if task == "text" else self.image_sample(task, num_images)


def jpeg(image: Image.Image) -> bytes:
    """JPEG bytes, grey or colour."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return buffer.getvalue()


def chat_record(sample: DigitSample) -> dict[str, Any]:
    """The `messages` form: image parts name the sample's own members."""
    messages: list[dict[str, Any]] = []
    names = iter(f"{i}.jpg" for i in range(len(sample.images)))
    for turn in sample.turns:
        parts: list[dict[str, str]] = []
        for index, text in enumerate(turn.prompt.split(IMAGE_MARK)):
            if index:
                parts.append({"type": "image", "image": next(names)})
            if text:
                parts.append({"type": "text", "text": text})
        messages.append({"role": "user", "content": parts})
        answer = [{"type": "text", "text": turn.answer}]
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages, "task": sample.task}


def llava_record(sample: DigitSample) -> dict[str, Any]:
    """LLaVA's `conversations` form with `<image>` marks in the text."""
    turns = []
    for turn in sample.turns:
        turns.append({"from": "human", "value": turn.prompt})
        turns.append({"from": "gpt", "value": turn.answer})
    images = [f"{i}.jpg" for i in range(len(sample.images))]
    return {"conversations": turns, "images": images, "task": sample.task}


def write_shard(path: Path, samples: list[tuple[str, DigitSample, bool]]) -> None:
    """One tar; the JSON comes first, then the images in order."""
    with webdataset.TarWriter(str(path), mtime=0, user="", group="", mode=0o644) as tar:
        for key, sample, llava in samples:
            record = llava_record(sample) if llava else chat_record(sample)
            data = json.dumps(record, separators=(",", ":")).encode()
            images = {f"{i}.jpg": jpeg(image) for i, image in enumerate(sample.images)}
            tar.write({"__key__": key, "json": data, **images})


def write_split(folder: Path, name: str, num_questions: int, num_shards: int) -> dict[str, Any]:
    """All shards of one split; returns its part of the manifest."""
    stream = list(split_sources(SEED)).index(name)
    rng = np.random.default_rng([SEED, stream])
    maker = SampleMaker(load_split(name, SEED), rng, MAX_MORE_TURNS if name == "train" else 0)
    named = []
    for index, sample in enumerate(maker.samples(num_questions)):
        llava = name == "train" and rng.random() < LLAVA_SHARE
        named.append((f"{name}{index:05d}", sample, llava))
    per_shard = -(-len(named) // num_shards)
    shards = {}
    for shard in range(num_shards):
        path = folder / f"{name}-{shard:06d}.tar"
        write_shard(path, named[shard * per_shard : (shard + 1) * per_shard])
        shards[path.name] = {
            "samples": len(named[shard * per_shard : (shard + 1) * per_shard]),
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
    lengths = [len(row) for _, sample, _ in named for row in sample.rows]
    tasks = [sample.task for _, sample, _ in named]
    return {
        "samples": len(named),
        "turns": sum(len(sample.turns) for _, sample, _ in named),
        "images": len(lengths),
        "samples_by_task": {task: tasks.count(task) for task in sorted(set(tasks))},
        "rows_by_length": {str(n): lengths.count(n) for n in range(1, 9)},
        "llava_samples": sum(llava for _, _, llava in named),
        "shards": shards,
        "source_images": split_sources(SEED)[name].tolist(),
    }


def write_digits(folder: Path) -> None:
    """All splits and the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.tar"):
        old.unlink()
    sizes = {"train": (NUM_TRAIN, NUM_TRAIN_SHARDS), "val": (NUM_VAL, 1), "test": (NUM_TEST, 1)}
    manifest = {
        "source": "scikit-learn load_digits: UCI optdigits, test part, CC BY 4.0",
        "seed": SEED,
        "versions": {
            "numpy": np.__version__,
            "pillow": PIL.__version__,
            "scikit-learn": sklearn.__version__,
            "webdataset": webdataset.__version__,
        },
        "splits": {
            name: write_split(folder, name, count, shards)
            for name, (count, shards) in sizes.items()
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, separators=(",", ":")) + "\n")
