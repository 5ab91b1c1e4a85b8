"""The `rollout` of a record as samplers write it, for tests."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.rollouts import WORDS
from support.shard_fakes import write_shard
from support.shards import RawSample, read_shard

from vlmpack.data.shards.samples import cook_text
from vlmpack.encode import VLMSample


def rollout(drawn: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A record's `rollout` with other values of `sampling`, and others of its own."""
    sampling: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "log_probs": "raw",
    }
    return {
        "token_ids": [5, 7, 2],
        "log_probs": [-0.5, -1.25, -0.125],
        "prompt_token_ids": [1, 3, 3, 4],
        "reward": 1.0,
        "rewards": {"exact": 1.0},
        "group": "a",
        "number": 0,
        "policy_version": 3,
        "sampling": sampling | dict(drawn or {}),
        "finish": "stop",
        "server": {"name": "vllm", "version": "0.33.0"},
        **changes,
    }


@dataclass(frozen=True)
class Drawn:
    """An answer of random ids to a committed prompt, as a record of a shard."""

    prompt: RawSample
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    record: dict[str, Any]

    def changed(self, drawn: Mapping[str, Any] | None = None, **changes: Any) -> Drawn:
        """With other values of `sampling` and of the rollout."""
        of = self.record["rollout"]
        sampling = of["sampling"] | dict(drawn or {})
        new = {k: v for k, v in (of | {"sampling": sampling} | changes).items() if v is not None}
        return replace(self, record=self.record | {"rollout": new})

    @property
    def files(self) -> dict[str, bytes]:
        """The members of its sample in a shard, by field."""
        images = {f"{place}.png": data for place, data in enumerate(self.prompt.images)}
        return {"json": json.dumps(self.record).encode(), **images}

    @property
    def sample(self) -> VLMSample:
        """What the data layer hands to the encoder."""
        key = self.prompt.key
        fields = tuple(self.files)
        text = cook_text(key, "shard.tar", self.files["json"], fields)
        return replace(text.sample, images=self.prompt.images)


def compact_prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Ids of transformers' own chat template, one marker an image."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return [*tokenizer(text, add_special_tokens=False)["input_ids"]]


def drawn_answers(
    tokenizer: Any, sizes: Sequence[int] = (4, 4, 1, 3), *, seed: int = 0, most: int = 12
) -> list[Drawn]:
    """Groups of answers to prompts of 1, 0, 2, 3 images in turn; their texts are not their ids.

    Args:
        sizes: answers of each group.
        most: tokens of an answer, its end token included.
    """
    draw, answers = random.Random(seed), []
    by_count: dict[int, list[RawSample]] = {0: [], 1: [], 2: [], 3: []}
    for sample in read_shard():
        by_count[len(sample.images)].append(sample)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for group, size in enumerate(sizes):
        chosen = draw.choice(by_count[(1, 0, 2, 3)[group % 4]])
        ids_of_prompt = compact_prompt(tokenizer, chosen.messages[:-1])
        for number in range(size):
            ids = (*draw.choices(WORDS, k=draw.randint(0, most - 1)), end)
            log_probs = tuple(-draw.random() * 5 for _ in ids)
            said = rollout(
                token_ids=[*ids],
                log_probs=[*log_probs],
                prompt_token_ids=ids_of_prompt,
                group=f"prompt {seed}-{group}",
                number=number,
                reward=float(draw.randint(0, 3)),
            )
            names = iter(f"{place}.png" for place in range(len(chosen.images)))
            turns = [
                {
                    "role": turn["role"],
                    "content": [
                        {"type": "image", "image": next(names)} if part["type"] == "image" else part
                        for part in turn["content"]
                    ],
                }
                for turn in chosen.messages[:-1]
            ]
            record = {
                "messages": [*turns, {"role": "assistant", "content": f"answer {number}"}],
                "rollout": said,
            }
            prompt = replace(chosen, key=f"{seed}-{group}-{number}")
            answers.append(Drawn(prompt, ids, log_probs, record))
    return answers


def write_drawn(path: Path, answers: Sequence[Drawn]) -> Path:
    """A shard of them, under the keys of their prompts."""
    return write_shard(path, [(each.prompt.key, each.files) for each in answers], mtime=0)
