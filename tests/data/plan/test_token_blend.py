"""`data.weights: tokens`: weights are shares of an epoch's tokens, exact to one sample."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from support.shard_fakes import chat_json, key_of, open_data, write_shard

from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.batches import draws_per_source
from vlmpack.errors import EmptyDataError, RecipeError
from vlmpack.recipe.sources import Source


@pytest.mark.parametrize("seed", range(20))
def test_draws_are_within_one_of_the_exact_share(seed: int) -> None:
    """The reference: the draws x that solve x_d m_d / sum(x m) = w_d / sum(w), sum(x) = epoch."""
    draw = random.Random(seed)
    count, epoch = draw.randint(2, 6), draw.randint(1, 5000)
    weights = [draw.choice((0.1, 0.5, 1.0, 3.0, 7.25)) for _ in range(count)]
    means = [Fraction(draw.randint(1, 90_000), draw.randint(1, 300)) for _ in range(count)]
    draws = draws_per_source(weights, epoch, means)
    assert sum(draws) == epoch
    num_tokens = epoch / sum(
        Fraction(repr(weight)) / mean for weight, mean in zip(weights, means, strict=True)
    )  # of an epoch, per unit of weight
    for weight, mean, found in zip(weights, means, draws, strict=True):
        assert abs(found - num_tokens * Fraction(repr(weight)) / mean) < 1
    assert draws_per_source(weights, epoch, [Fraction(5)] * count) == draws_per_source(
        weights, epoch
    )


def write_source(folder: Path, count: int, first: int, length: int) -> str:
    """Text samples of about `length` tokens each, a shard of five at a time."""
    samples = [
        (key_of(n), {"json": chat_json("x" * length + "y" * (n % 3), "a")})
        for n in range(first, first + count)
    ]
    for place in range(0, count, 5):
        write_shard(folder / f"s-{place:04d}.tar", samples[place : place + 5])
    return str(folder / "s-*.tar")


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Source, ...]:
    """Many short samples and few long ones, the same share of the tokens for each."""
    return tuple(
        Source(name=name, path=write_source(tmp_path / name, *rest), weight=2.5)
        for name, *rest in (("short", 30, 0, 20), ("long", 10, 100, 150))
    )


def lengths_of(data: TrainData) -> list[tuple[int, int]]:
    """(key, tokens) of every draw of the first epoch."""
    steps = data.batches(data.start(), rank=0, dp=1, max_steps=data.steps_per_epoch())
    return [
        (int(sample.key[-6:]), data.ref(sample.number).num_tokens)
        for step in steps
        for micro in step.micro_batches
        for sample in micro.samples
    ]


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_an_epoch_has_the_wanted_share_of_tokens(
    sources: tuple[Source, ...], tmp_path: Path, shuffle: str
) -> None:
    options: dict[str, Any] = {"sources": sources, "epoch_size": 100, "num_probed": 0}
    if shuffle == "window":
        open_data("", tmp_path / "i", shuffle="global", **options)  # indexes
    data = open_data("", tmp_path / "i", shuffle=shuffle, weights="tokens", **options)
    drawn = lengths_of(data)
    assert len(drawn) == 100
    tokens = [sum(n for key, n in drawn if (key >= 100) == long) for long in (False, True)]
    longest = max(n for _, n in drawn)
    # Off by less than a draw of each source, and the part of a pass that is not the mean of one.
    assert abs(tokens[0] - tokens[1]) < 2 * longest
    by_samples = lengths_of(open_data("", tmp_path / "i", shuffle=shuffle, **options))
    share = [sum(n for key, n in by_samples if (key >= 100) == long) for long in (False, True)]
    assert share[1] > 2 * share[0], "guard: by samples the long ones have most of the tokens"
    passes = Counter(key for key, _ in drawn)
    for first, size in ((0, 30), (100, 10)):
        counts = [passes[key] for key in range(first, first + size)]
        assert max(counts) - min(counts) <= 1


def test_both_shuffles_draw_equally_often(sources: tuple[Source, ...], tmp_path: Path) -> None:
    draws = []
    for shuffle in ("global", "window"):
        options: dict[str, Any] = {"sources": sources, "num_probed": 0, "weights": "tokens"}
        data = open_data("", tmp_path / "i", shuffle=shuffle, **options)
        draws.append([source.num_draws for source in data.plan.sources])
        assert "weight 2.5 of the tokens" in str(data.identity["data.train.long"])
    assert draws[0] == draws[1] and sum(draws[0]) == 40  # type: ignore[arg-type]
    assert draws[0][0] > 4 * draws[0][1]  # type: ignore[operator]


def test_without_the_whole_index_it_is_refused(sources: tuple[Source, ...], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data\.weights: tokens.*8 files.*vlmpack index"):
        open_data(
            "", tmp_path / "i", sources=sources, shuffle="window", weights="tokens", epoch_size=40
        )


def test_a_source_without_a_token_is_named(tmp_path: Path) -> None:
    empty = write_source(tmp_path / "e", 5, 0, 300)
    kept = write_source(tmp_path / "k", 5, 100, 10)
    sources = tuple(
        Source(name=name, path=path, weight=1.0)
        for name, path in (("kept", kept), ("empty", empty))
    )
    options: dict[str, Any] = {"sources": sources, "over_long": "drop", "seq_length": 100}
    with pytest.raises(EmptyDataError, match=r"data\.train\.empty: no usable sample"):
        open_data("", tmp_path / "i", weights="tokens", num_probed=0, **options)
