"""Samples for tests, read from the committed shards with tarfile alone."""

from __future__ import annotations

import json
import random
import tarfile
from dataclasses import dataclass
from functools import cache, cached_property
from io import BytesIO
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from PIL import Image

from vlmpack.encode import ImagePart, Message, TextPart, VLMSample

ROOT = Path(__file__).resolve().parents[2]
TINY_MODEL = ROOT / "assets" / "tiny-qwen2_5_vl"
SHARD = ROOT / "assets" / "digits" / "val-000000.tar"


@dataclass(frozen=True)
class RawSample:
    """One sample as the shard holds it: the JSON's messages and the image files in token order."""

    key: str
    messages: list[dict[str, Any]]
    images: tuple[bytes, ...]

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of each image, from its header."""
        return tuple(Image.open(BytesIO(data)).size for data in self.images)

    def cooked(self) -> VLMSample:
        """What the data layer would hand to the encoder."""
        count = 0
        messages = []
        for message in self.messages:
            parts: list[TextPart | ImagePart] = []
            for part in message["content"]:
                if part["type"] == "image":
                    parts.append(ImagePart(count))
                    count += 1
                else:
                    parts.append(TextPart(part["text"]))
            messages.append(Message(message["role"], tuple(parts)))
        return VLMSample(key=self.key, url=str(SHARD), messages=tuple(messages), images=self.images)


def read_shard(path: Path = SHARD, *, limit: int = 1000) -> list[RawSample]:
    """The first `limit` samples of a shard."""
    samples = []
    for key, files in _members(path, path.stat().st_mtime_ns, limit).items():
        document = json.loads(files["json"])
        if "messages" not in document:  # LLaVA form; the data layer has tests of its own for it
            continue
        messages = document["messages"]
        names = [
            part["image"]
            for message in messages
            for part in message["content"]
            if part["type"] == "image"
        ]
        samples.append(RawSample(key, messages, tuple(files[name] for name in names)))
    return samples


@cache
def _members(path: Path, changed_at: int, limit: int) -> dict[str, dict[str, bytes]]:
    """Key -> suffix -> bytes of the first samples, read once for all tests of a process."""
    members: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as tar:
        for entry in tar:
            key, _, suffix = entry.name.partition(".")
            if key not in members and len(members) == limit:
                break
            members.setdefault(key, {})[suffix] = tar.extractfile(entry).read()
    return members


def with_answer(sample: RawSample, answer: str) -> RawSample:
    """The sample with another text in its last turn."""
    turn = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    assert sample.messages[-1]["role"] == "assistant"
    return RawSample(sample.key, [*sample.messages[:-1], turn], sample.images)


def mixed_samples() -> list[RawSample]:
    """Six samples with 0, 1, 2 and 3 images, in an order where the counts alternate.

    Their answers are random letters of various lengths. A model that knows the answer has a loss
    near zero, whose relative error measures the rounding of large logits and nothing else; nobody
    can know these, however well the tiny model was trained.
    """
    by_count: dict[int, list[RawSample]] = {0: [], 1: [], 2: [], 3: []}
    for sample in read_shard():
        by_count[len(sample.images)].append(sample)
    picked = [by_count[count][index] for count, index in ((2, 0), (0, 0), (1, 0), (3, 0), (0, 1))]
    draw = random.Random(0)
    return [
        with_answer(sample, "".join(draw.choices(ascii_lowercase, k=draw.randint(3, 20))))
        for sample in (*picked, by_count[1][1])
    ]


def text_samples() -> list[RawSample]:
    """Six conversations without images: of one to four questions, with and without a system prompt.

    Answers are random letters, for the reason that `mixed_samples` gives.
    """
    draw = random.Random(1)
    samples = []
    for number, (turns, longest) in enumerate([(1, 4), (3, 60), (1, 90), (2, 8), (4, 30), (1, 1)]):
        said = [("system", "Answer in letters.")] if number % 2 else []
        for _ in range(turns):
            said.append(("user", f"What follows {draw.randint(0, 10**longest)}?"))
            said.append(
                ("assistant", "".join(draw.choices(ascii_lowercase, k=draw.randint(3, 20))))
            )
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}]} for role, text in said
        ]
        samples.append(RawSample(f"text{number}", messages, ()))
    return samples


def same_size_pair() -> tuple[RawSample, RawSample]:
    """Two samples of one image each, different images of one size."""
    seen: dict[tuple[int, int], RawSample] = {}
    for sample in read_shard():
        if len(sample.images) != 1:
            continue
        other = seen.setdefault(sample.sizes[0], sample)
        if other.images != sample.images:
            return other, sample
    raise AssertionError("the shard has no two images of one size")
