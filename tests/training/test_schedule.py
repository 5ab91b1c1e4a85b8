"""The learning rate is a pure function of the step; biases and norms do not decay."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from vlmpack.backends.hf.optimizer import build_optimizer
from vlmpack.backends.policy import ParameterPolicy
from vlmpack.recipe.trainable import OptimSection
from vlmpack.training.step import Schedule


def schedule(kind, **changes):
    values = {"warmup_steps": 4, "total_steps": 12} | changes
    total_steps = values.pop("total_steps")
    return Schedule(OptimSection(lr=1.0, min_lr_ratio=0.1, schedule=kind, **values), total_steps)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_the_warm_up_is_linear_and_never_zero(kind):
    assert [schedule(kind)(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_the_recipes_text_says_what_the_schedule_does():
    """Beside transformers' own schedules, which the text names."""
    text = " ".join(str(OptimSection.model_fields["warmup_steps"].description).split())
    assert "The first of N runs at 1/N of the peak, the N-th at the peak." in text
    assert "The warm-up of transformers is a step behind, as its first step runs at 0." in text
    steps, total = 4, 12
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_linear_schedule_with_warmup(optimizer, steps, total).lr_lambdas[0]
    ours = Schedule(OptimSection(lr=1.0, warmup_steps=steps, schedule="linear"), total)
    assert ours(0) == 1 / steps and ours(steps - 1) == 1.0 == theirs(steps)
    assert theirs(0) == 0.0
    assert [ours(step) for step in range(steps)] == [theirs(step + 1) for step in range(steps)]
    assert [ours(step) for step in range(steps, total + 1)] == [
        theirs(step) for step in range(steps, total + 1)
    ]
    said = str(OptimSection.model_fields["min_lr_ratio"].description)
    assert "one step after the last" in said
    assert ours(total - 1) > ours(total) == 0.0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cosine", {4: 1.0, 8: 0.55, 10: 0.1 + 0.45 * (1 + math.cos(0.75 * math.pi)), 12: 0.1}),
        ("linear", {4: 1.0, 8: 0.55, 10: 0.325, 12: 0.1}),
        ("constant", {4: 1.0, 8: 1.0, 12: 1.0}),
    ],
)
def test_values_after_the_warm_up(kind, expected):
    for step, value in expected.items():
        assert schedule(kind)(step) == pytest.approx(value, abs=1e-12), step


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_the_decay_is_monotone_and_stays_at_the_floor(kind):
    values = [schedule(kind)(step) for step in range(4, 20)]
    assert values == sorted(values, reverse=True)
    assert values[8:] == pytest.approx([0.1] * 8)


def test_no_warm_up_and_a_run_of_one_step():
    assert schedule("cosine", warmup_steps=0)(0) == 1.0
    assert schedule("cosine", warmup_steps=0, total_steps=1)(0) == 1.0
    assert schedule("linear", warmup_steps=5, total_steps=5)(4) == 1.0


def trained_alone(name, ndim):
    """The policy of a model without components."""
    return ParameterPolicy(component="language", trains=True, decays=ndim >= 2, lr_scale=1.0)


def test_weights_decay_and_biases_and_norms_do_not():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    optimizer = build_optimizer(
        list(model.named_parameters()),
        OptimSection(lr=1.0, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3),
        policy_of=trained_alone,
    )
    decays = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert len(decays) == 4
    for name, parameter in model.named_parameters():
        assert decays[id(parameter)] == (0.3 if name == "0.weight" else 0.0), name
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
    assert {group["eps"] for group in optimizer.param_groups} == {1e-6}
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}, "the schedule's to set"


def test_every_parameter_of_the_tiny_model_is_optimised_once(session_engine):
    parameters = session_engine.parameters()
    optimizer = build_optimizer(
        parameters,
        OptimSection(lr=1.0, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1),
        policy_of=trained_alone,
    )
    seen = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(seen) == sorted(id(p) for _, p in parameters)
    assert len(set(seen)) == len(seen) > 50
