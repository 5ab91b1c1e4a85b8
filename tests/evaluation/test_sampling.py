"""Drawn answers equal those of a literal loop, whatever batch they are drawn in."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.shards import SHARD, read_shard

from vlmpack.encode import Encoder
from vlmpack.errors import DataError, NonFiniteError, VlmpackError
from vlmpack.evaluation.generation import (
    Asked,
    _media,
    _model_inputs,
    _tokenise,
    draw_answers,
    load_for_generation,
)
from vlmpack.evaluation.predictions import Question
from vlmpack.evaluation.sampling import (
    Draws,
    Sampling,
    draw_tokens,
    log_distribution,
    prompt_digest,
    uniform_numbers,
)

NUM_NEW = 6
EACH = 3
HOT = Sampling(temperature=1.3, max_new_tokens=NUM_NEW)
CUT = Sampling(temperature=1.3, top_k=9, top_p=0.95, min_p=0.01, max_new_tokens=NUM_NEW)


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> tuple[Any, Encoder]:
    return load_for_generation(tiny_folder)


@pytest.fixture(scope="module")
def asked(loaded: tuple[Any, Encoder]) -> list[Asked]:
    """Eight prompts with 0 to 3 images."""
    by_count: dict[int, list[Asked]] = {}
    for sample in read_shard(SHARD):
        one = Asked.of(Question.from_sample(sample.cooked()), loaded[1])
        by_count.setdefault(len(one.question.images), []).append(one)
    assert set(by_count) == {0, 1, 2, 3}
    return [by_count[count][i] for i in range(2) for count in (1, 0, 3, 2)]


def drawn(loaded: Any, asked: list[Asked], sampling: Sampling, batch_size: int, seed: int = 5):
    numbers = [[uniform_numbers(seed, 2, one.digest, n) for n in range(EACH)] for one in asked]
    questions = [one.question for one in asked]
    return draw_answers(*loaded, questions, numbers, sampling, batch_size=batch_size)


def literal(loaded: Any, one: Asked, number: int, sampling: Sampling) -> tuple[Any, Any]:
    """Token ids and log-probabilities of one answer: whole forward passes, numpy's sums."""
    model, encoder = loaded
    inputs = _model_inputs(encoder, [(_tokenise(0, one.question, encoder), None)])
    media, ids = _media(one.question, encoder), inputs["input_ids"][0].tolist()
    assert tuple(ids) == one.token_ids
    stops = {*np.atleast_1d(model.generation_config.eos_token_id), encoder.tokenizer.eos_token_id}
    numbers, log_probs, length = uniform_numbers(5, 2, one.digest, number), [], len(ids)
    while len(ids) < length + sampling.max_new_tokens and (
        len(ids) == length or ids[-1] not in stops
    ):
        row = torch.tensor([ids])
        more: dict[str, Any] = {}
        if media is not None:
            more = encoder.family.image_arguments(media)
            more["mm_token_type_ids"] = (row == encoder.placeholder_id).long()
        with torch.no_grad():
            logits = model(input_ids=row, attention_mask=torch.ones_like(row), **more).logits[0, -1]
        scaled = logits.double().numpy() / sampling.temperature
        p = np.exp(scaled - scaled.max())
        p /= p.sum()
        if sampling.truncates:
            order = np.argsort(-p, kind="stable")[: sampling.top_k]
            before = np.cumsum(p[order] / p[order].sum()) - p[order] / p[order].sum()
            order = order[before < sampling.top_p]
            order = order[p[order] >= sampling.min_p * p[order[0]]]
            kept = np.zeros_like(p)
            kept[order] = p[order]
            p = kept / kept.sum()
        u = numbers.random()
        token = int(np.flatnonzero(np.cumsum(p) > u * p.sum())[0])
        ids.append(token)
        log_probs.append(np.log(p[token]))
    return tuple(ids[length:]), log_probs


@pytest.mark.parametrize("sampling", [HOT, CUT], ids=["whole", "truncated"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["float32", "double"]
)
def test_answers_are_those_of_a_literal_loop(loaded, asked, sampling, dtype, bound) -> None:
    model, encoder = loaded
    model = copy.deepcopy(model).to(dtype)
    found = drawn((model, encoder), asked[:4], sampling, batch_size=5)
    assert {len(one.question.images) for one in asked[:4]} == {0, 1, 2, 3}
    worst = 0.0
    for one, answers in zip(asked, found, strict=False):
        for number, answer in enumerate(answers):
            ids, log_probs = literal((model, encoder), one, number, sampling)
            assert answer.token_ids == ids
            worst = max(worst, np.abs(np.array(answer.log_probs) - log_probs).max())
    assert worst < bound
    assert {x.finish for each in found for x in each} == {"stop", "length"}
    assert len({x.token_ids for each in found for x in each}) > 6


def test_an_answer_depends_on_nothing_else(loaded, asked) -> None:
    def by_prompt(order: list[Asked], batch_size: int, seed: int = 5) -> dict[str, list[Any]]:
        found = drawn(loaded, order, HOT, batch_size, seed)
        return {
            one.digest: [x.token_ids for x in each] for one, each in zip(order, found, strict=True)
        }

    shuffled = random.Random(3).sample(asked, len(asked))
    assert shuffled != asked
    expected = by_prompt(asked, 4)
    assert by_prompt(shuffled, 7) == by_prompt(asked[::-1], 64) == expected
    assert by_prompt(asked, 4, seed=6) != expected
    assert any(len({*each}) > 1 for each in expected.values())


def test_text_and_log_probabilities_go_with_the_ids(loaded, asked) -> None:
    for answers in drawn(loaded, asked, HOT, batch_size=64):
        for answer in answers:
            assert len(answer.token_ids) == len(answer.log_probs) <= NUM_NEW
            assert all(value <= 0 for value in answer.log_probs)
            decoded = loaded[1].tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            assert answer.text == decoded


def test_a_bad_question_moves_no_other_answer(loaded, asked) -> None:
    whole = asked[0].question.images[0]
    cut = replace(asked[0].question, key="cut", images=(whole[: len(whole) // 2],))
    numbers = [[uniform_numbers(5, 2, one.digest, 0)] for one in (asked[0], asked[1])]
    bad: list[DataError] = []
    found = draw_answers(
        *loaded, [cut, asked[1].question], numbers, HOT, batch_size=4, on_bad_sample=bad.append
    )
    assert [error.key for error in bad] == ["cut"]
    assert found[0] == []
    alone = draw_answers(
        *loaded,
        [asked[1].question],
        [[uniform_numbers(5, 2, asked[1].digest, 0)]],
        HOT,
        batch_size=4,
    )
    assert [x.token_ids for x in found[1]] == [x.token_ids for x in alone[0]]


def test_tokens_come_as_often_as_they_are_likely() -> None:
    p = np.array([0.45, 0.0, 0.25, 0.15, 0.1, 0.05])
    count = 200_000
    uniform = torch.from_numpy(uniform_numbers(0, 0, "x", 0).random(count))
    with np.errstate(divide="ignore"):
        log_p = torch.from_numpy(np.log(p)).expand(count, -1)
    seen = np.bincount(draw_tokens(log_p, uniform).numpy(), minlength=6)
    assert seen[1] == 0
    likely = p > 0
    chi_squared = ((seen[likely] - count * p[likely]) ** 2 / (count * p[likely])).sum()
    assert chi_squared < 18.5  # 4 degrees of freedom: 1 in 1,000
    control = np.roll(p[likely], 1)
    assert ((seen[likely] - count * control) ** 2 / (count * control)).sum() > 1000


def test_borders_of_the_random_numbers() -> None:
    log_p = torch.tensor([[-torch.inf, 0.3, 0.7, -torch.inf]], dtype=torch.float64).log_softmax(-1)
    largest = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert draw_tokens(log_p, torch.zeros(1, dtype=torch.float64)).item() == 1
    assert draw_tokens(log_p, largest).item() == 2
    many = torch.randn(4000, 50, generator=torch.manual_seed(0), dtype=torch.float64)
    many[:, -1] = -torch.inf  # sums that are a little above 1
    assert (draw_tokens(many.log_softmax(-1), largest.expand(4000)) < 49).all()


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8, "min_p": 0.05}],
    ids=str,
)
def test_truncations_are_those_of_transformers(fields: dict[str, Any]) -> None:
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(16, 40, generator=torch.manual_seed(1), dtype=torch.float64) * 2
    scores = TemperatureLogitsWarper(0.7)(None, logits)
    for name, warper in (
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        if name in fields:
            scores = warper(fields[name])(None, scores)
    found = log_distribution(logits, Sampling(temperature=0.7, **fields))
    torch.testing.assert_close(found, scores.log_softmax(-1), rtol=0, atol=1e-12)
    assert 16 < found.isfinite().sum() < 16 * 40


def test_numbers_come_from_each_of_the_four() -> None:
    first = {
        uniform_numbers(*key).random()
        for key in [(0, 0, "a", 0), (1, 0, "a", 0), (0, 1, "a", 0), (0, 0, "b", 0), (0, 0, "a", 1)]
    }
    assert len(first) == 5
    again = uniform_numbers(0, 0, "a", 0).random(3)
    assert (again == uniform_numbers(0, 0, "a", 0).random(3)).all()
    assert len({prompt_digest(ids, (), files) for ids in ([1], [2]) for files in ([], [b"x"])}) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.0), ("top_p", 0.0), ("top_k", -1), ("min_p", 1.0), ("max_new_tokens", 0)],
)
def test_values_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(VlmpackError, match=f"{field} is {value}; expected"):
        Sampling(**{field: value})


def test_logits_that_are_no_numbers_are_refused() -> None:
    draws = Draws(HOT, [uniform_numbers(0, 0, "a", 0)])
    draws.hear(None, None, type("Output", (), {"logits": torch.full((1, 1, 4), torch.nan)}))
    with pytest.raises(NonFiniteError, match="not finite"):
        draws(torch.zeros(1, 1), torch.zeros(1, 4))
