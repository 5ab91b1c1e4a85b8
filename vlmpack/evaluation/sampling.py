"""Answers drawn from a model's distribution, each by random numbers of its own.

    logits z -> softmax(z / T) -> top_k, top_p, min_p -> renormalised p
    u uniform in [0, 1) -> the first token whose cumulated p exceeds u

The u of an answer come from (seed, round, digest of the prompt, number of the sample) alone. So an
answer does not depend on the others of its batch, nor on their order. Logits do, in their last
bits: a matrix product of another shape rounds otherwise. Another token is drawn only where u lies
that close to a border.

Shape letters: B answers of a batch, V entries of the vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmpack.encode.rollouts import Finish
from vlmpack.errors import NonFiniteError, VlmpackError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How answers are drawn. Truncations are as transformers applies them, in this order.

    Args:
        temperature: logits are divided by it.
        top_k: only so many of the likeliest tokens are drawn; 0 for all.
        top_p: of these the likeliest ones, until they have this share of the probability.
        min_p: of these the ones with at least this share of the likeliest one's probability.
        max_new_tokens: longest answer, its end token included.

    Raises:
        VlmpackError: a value out of its range. Temperature 0 is one: nothing is drawn then.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (0 < self.temperature < math.inf, "above 0, where answers are drawn"),
            "top_p": (0 < self.top_p <= 1, "above 0, up to 1"),
            "top_k": (self.top_k == 0 or self.top_k > 1, "0 for all tokens, or at least 2"),
            "min_p": (0 <= self.min_p < 1, "from 0, below 1"),
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
        }
        for name, (is_good, expected) in ranges.items():
            if not is_good:
                raise VlmpackError(f"{name} is {getattr(self, name)}; expected {expected}")

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def fields(self) -> dict[str, float]:
        """As records and servers name them, with penalties that change nothing."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One answer.

    Args:
        token_ids: with the end token, where there is one.
        log_probs: of each token, given those before it.
        finish: whether an end token or `max_new_tokens` ended it.
        text: without special tokens.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: Finish
    text: str


def prompt_digest(token_ids: Sequence[int], shown: object, images: Iterable[bytes]) -> str:
    """32 hexadecimal digits that say which prompt this is.

    Args:
        token_ids: with expanded placeholders.
        shown: its images and videos, with the times of frames.
        images: its image files.
    """
    parts = [np.array(token_ids, dtype="<i8").tobytes(), repr(shown).encode(), *images]
    digests = (hashlib.blake2b(part, digest_size=16).digest() for part in parts)
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def uniform_numbers(seed: int, round_: int, digest: str, number: int) -> np.random.Generator:
    """Where the random numbers of one answer come from, one a token."""
    text = f"{seed} {round_} {digest} {number}".encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def log_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """(B, V) float64 log-probabilities of what is drawn next; -inf for what never is.

    Args:
        logits: (B, V) of any type.
    """
    log_p = torch.log_softmax(logits.double() / sampling.temperature, dim=-1)
    if not sampling.truncates:
        return log_p
    ordered, order = log_p.sort(dim=-1, descending=True, stable=True)
    size = logits.shape[-1]
    kept = (torch.arange(size, device=logits.device) < (sampling.top_k or size)).expand_as(log_p)
    if sampling.top_p < 1:
        p = torch.softmax(ordered.where(kept, -torch.inf), dim=-1)
        kept = kept & (p.cumsum(-1) - p < sampling.top_p)
    if sampling.min_p > 0:
        kept = kept & (ordered >= ordered[:, :1] + math.log(sampling.min_p))
    ordered = ordered.where(kept, -torch.inf)
    return torch.log_softmax(torch.empty_like(log_p).scatter(-1, order, ordered), dim=-1)


def draw_tokens(log_p: Tensor, uniform: Tensor) -> Tensor:
    """(B,) tokens by the inverse of the cumulated distribution.

    Args:
        log_p: (B, V) float64, of `log_distribution`.
        uniform: (B,) float64 in [0, 1).
    """
    cumulated = log_p.exp().cumsum(-1)
    total = cumulated[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # a product may round up to the total
    places = torch.minimum(uniform[:, None] * total, below)
    return torch.searchsorted(cumulated, places, right=True)[:, 0]


class Draws:
    """Draws the tokens of a batch while transformers' greedy search goes through it.

    The search calls it as a processor of logits, and takes the only token that it leaves. It reads
    the logits from the model's output, since the search rounds them to float32.

    Args:
        numbers: of each answer.
    """

    def __init__(self, sampling: Sampling, numbers: Sequence[np.random.Generator]) -> None:
        self._sampling = sampling
        self._numbers = numbers
        self._logits: Tensor | None = None
        self._steps: list[tuple[Tensor, Tensor]] = []

    def hear(self, module: object, arguments: object, output: Any) -> None:
        """A forward hook of the model."""
        self._logits = output.logits[:, -1]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) scores of which the drawn token's alone is finite.

        Raises:
            NonFiniteError: the model gives no distribution.
        """
        assert self._logits is not None
        log_p = log_distribution(self._logits, self._sampling)
        uniform = torch.tensor([one.random() for one in self._numbers], dtype=torch.float64)
        if bool(log_p.isnan().any()):
            raise NonFiniteError("the model's logits are not finite, so nothing can be drawn")
        tokens = draw_tokens(log_p, uniform.to(log_p.device))[:, None]
        self._steps.append((tokens, log_p.gather(-1, tokens)))
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens, 0.0)

    def answers(self, ends: set[int]) -> list[tuple[tuple[int, ...], tuple[float, ...], Finish]]:
        """Token ids, log-probabilities and finish of each answer, up to its end token.

        Args:
            ends: ids that end an answer.
        """
        tokens, log_p = (torch.cat(each, dim=1).tolist() for each in zip(*self._steps, strict=True))
        found: list[tuple[tuple[int, ...], tuple[float, ...], Finish]] = []
        for ids, values in zip(tokens, log_p, strict=True):
            end = next((place for place, token in enumerate(ids) if token in ends), None)
            length = len(ids) if end is None else end + 1
            finish: Finish = "length" if end is None else "stop"
            found.append((tuple(ids[:length]), tuple(values[:length]), finish))
        return found
