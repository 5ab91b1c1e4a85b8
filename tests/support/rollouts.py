"""Rollouts for tests: groups of answers of random ids, and the policy loss one at a time.

The literal loss runs the stock model on each answer alone, in double, and follows the papers token
by token. It shares no line with `vlmpack.training.policy`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from support.shards import read_shard, with_answer
from torch import Tensor

from vlmpack.encode import Encoder
from vlmpack.families.base import stock_arguments
from vlmpack.packing import IGNORE_INDEX, Batch, EncodedSample
from vlmpack.packing.batch import DrawnAnswer

WORDS = range(20, 500)
"""Ids of the tiny model that are no special token."""


def answered(prompt: EncodedSample, answer: Sequence[int], key: str) -> EncodedSample:
    """The prompt of a sample with other answer tokens, as ids."""
    end = int((prompt.labels != IGNORE_INDEX).nonzero()[0, 0]) + 1
    first = prompt.position_ids[:, end - 1 : end] + 1
    positions = [prompt.position_ids[:, :end], first + torch.arange(len(answer))]
    ids = torch.tensor(answer)
    nothing = torch.tensor([IGNORE_INDEX])
    return replace(
        prompt,
        key=key,
        input_ids=torch.cat([prompt.input_ids[:end], ids]),
        labels=torch.cat([nothing.expand(end - 1), ids, nothing]),
        position_ids=torch.cat(positions, dim=1),
        prefixes=tuple(each for each in prompt.prefixes if each.length < end),
    )


def drawn_groups(
    encoder: Encoder,
    lengths: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    temperatures: Sequence[float] = (1.0,),
    is_raw: bool = False,
) -> list[EncodedSample]:
    """A group of answers to each of some prompts, which have 1, 0, 2, 3 images in turn.

    Args:
        lengths: of the answers of each group, in tokens.
        temperatures: of the draws of each group, in turn.
    """
    draw, samples = random.Random(seed), []
    by_count: dict[int, list[Any]] = {0: [], 1: [], 2: [], 3: []}
    for sample in read_shard():
        by_count[len(sample.images)].append(sample)
    for group, counts in enumerate(lengths):
        of_count = by_count[(1, 0, 2, 3)[group % 4]]
        prompt = encoder.encode(with_answer(draw.choice(of_count), "a").cooked())
        for number, count in enumerate(counts):
            answer = answered(prompt, draw.choices(WORDS, k=count), f"group{group}-{number}")
            nothing = torch.zeros(count, dtype=torch.float64)
            temperature = temperatures[group % len(temperatures)]
            samples.append(
                replace(
                    answer, drawn=DrawnAnswer(log_p=nothing, temperature=temperature, is_raw=is_raw)
                )
            )
    return samples


@dataclass(frozen=True)
class Known:
    """What is known of each answer: (l,) float64 tensors by answer, and a number each."""

    sampler: list[Tensor]
    old: list[Tensor]
    reference: list[Tensor]
    advantages: list[float]

    def given_to(self, samples: Sequence[EncodedSample]) -> list[EncodedSample]:
        """The samples, each with what its sampler said."""
        return [
            replace(sample, drawn=replace(sample.drawn, log_p=log_p))
            for sample, log_p in zip(samples, self.sampler, strict=True)
        ]

    def beside(self, batch: Batch, places: Sequence[int]) -> Batch:
        """The batch of the samples at these places, with the other columns."""
        if batch.rollouts is None:
            return batch
        advantages = torch.tensor([self.advantages[n] for n in places], dtype=torch.float64)
        columns = replace(
            batch.rollouts,
            advantages=advantages,
            rewards=advantages.sign(),
            old=torch.cat([self.old[n] for n in places]),
            reference=torch.cat([self.reference[n] for n in places]),
        )
        return replace(batch, rollouts=columns)


def literal_log_p(model: Any, encoder: Encoder, samples: Sequence[EncodedSample]) -> list[Tensor]:
    """(l,) log p of each answer's tokens: alone, its logits divided by its temperature."""
    found = []
    for sample in samples:
        arguments = stock_arguments(encoder.family, sample, placeholder_id=encoder.placeholder_id)
        logits = model(use_cache=False, **arguments).logits[0]
        learnt = sample.labels != IGNORE_INDEX
        divided = logits[learnt] / sample.drawn.temperature
        weights = divided.exp()
        chosen = weights.gather(1, sample.labels[learnt][:, None])[:, 0]
        found.append((chosen / weights.sum(1)).log())
    return found


def noise_around(log_p: Sequence[Tensor], *, seed: int = 0) -> Known:
    """Policies near the current one, so that some ratios are clipped and some corrections too."""
    draw = torch.Generator().manual_seed(seed)

    def near(values: Tensor, scale: float) -> Tensor:
        noise = torch.randn(len(values), generator=draw, dtype=torch.float64)
        return values.detach() + scale * noise

    old = [near(one, 0.25) for one in log_p]
    advantages = torch.randn(len(log_p), generator=draw, dtype=torch.float64).tolist()
    return Known(
        sampler=[near(one, 0.6) for one in old],
        old=old,
        reference=[near(one, 0.5) for one in log_p],
        advantages=[0.0 if n % 7 == 6 else value for n, value in enumerate(advantages)],
    )


def literal_loss(
    log_p: Sequence[Tensor], known: Known, knobs: Any, *, is_raw: bool = False
) -> tuple[Tensor, dict[str, float]]:
    """The loss of all answers, token by token, and figures of the report."""
    whole = torch.zeros((), dtype=torch.float64)
    tokens = sum(len(one) for one in log_p)
    seen: dict[str, list[float]] = {name: [] for name in ("clipped", "limited", "kl", "ratio")}
    for n, p in enumerate(log_p):
        old = known.sampler[n] if knobs.old == "sampler" else known.old[n]
        advantage, own = known.advantages[n], torch.zeros((), dtype=torch.float64)
        of_sequence = torch.exp((p - old).sum() / len(p))
        for t in range(len(p)):
            r = torch.exp(p[t] - old[t]) if knobs.ratio == "token" else of_sequence
            low, high, at = 1 - knobs.clip_low, 1 + knobs.clip_high, r.item()
            bounded = min(max(at, low), high)
            if knobs.surrogate == "cispo":
                term, is_clipped = -bounded * advantage * p[t], bounded != at
            else:
                is_clipped = bounded * advantage < at * advantage
                term = p[t] * 0 - bounded * advantage if is_clipped else -r * advantage
            weight = 1.0 if is_raw else math.exp((old[t] - known.sampler[n][t]).item())
            is_limited = weight > knobs.correction_limit
            if knobs.correction == "truncated":
                term = min(weight, knobs.correction_limit) * term
            elif knobs.correction == "masked":
                term = term * (0.0 if is_limited else weight)
            kl = torch.zeros((), dtype=torch.float64)
            if knobs.kl_weight:
                q = known.reference[n][t]
                kl = {
                    "k1": p[t] - q,
                    "k2": (p[t] - q) ** 2 / 2,
                    "k3": torch.exp(q) / torch.exp(p[t]) - 1 - (q - p[t]),
                }[knobs.kl]
            own = own + term + knobs.kl_weight * kl
            seen["clipped"].append(float(is_clipped))
            seen["limited"].append(float(is_limited))
            seen["kl"].append(float(kl.detach()))
            seen["ratio"].append(float(r.detach()))
        if knobs.average == "token":
            whole = whole + own / tokens
        elif knobs.average == "sequence":
            whole = whole + own / len(p) / len(log_p)
        else:
            whole = whole + own / knobs.average_tokens / len(log_p)
    return whole, {name: sum(values) / tokens for name, values in seen.items()}
