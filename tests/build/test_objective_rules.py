"""An objective that runs a backward pass, changes its batch or returns a mean is named; right sums,
and means that are said to be one, are not."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from support.engines import make_stepper
from support.handed_over import of_sums
from support.toy_objective import FOCAL
from torch import Tensor

import vlmpack
from vlmpack.build.checked_objective import checked_objective, twice
from vlmpack.errors import ObjectiveError
from vlmpack.packing import PackCollator, PadCollator
from vlmpack.training.objective import forward_step

COLLATE = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)
PADDED = PadCollator(pad_token_id=561, num_position_axes=3)


def runs_backward(losses: Any, batch: Any) -> Any:
    losses.sum().backward(retain_graph=True)
    return {"loss_sum": losses.sum()}


def changes(losses: Any, batch: Any) -> Any:
    batch.labels[0].zero_()
    return {"loss_sum": losses.sum()}


def mean(losses: Any, batch: Any) -> Any:
    return {"loss_sum": losses.mean()}


def by_count(losses: Any, batch: Any) -> Any:
    return {"loss_sum": losses.sum() / batch.num_label_tokens}


def by_mask(losses: Any, batch: Any) -> Any:
    return {"loss_sum": (losses**2).sum() / batch.loss_mask.sum()}


def by_samples(losses: Any, batch: Any) -> Any:
    return {"loss_sum": losses.sum() / len(batch.keys)}


def step_runs_backward(data_iterator: Any, model: Any) -> Any:
    losses, loss = forward_step(data_iterator, model)
    losses.sum().backward(retain_graph=True)
    return losses, loss


def step_changes(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    batch.position_ids.add_(1)
    return forward_step(iter([batch]), model)


def with_loss(loss: Any) -> vlmpack.Objective:
    def step(data_iterator: Any, model: Any) -> Any:
        return forward_step(data_iterator, model)[0], loss

    return vlmpack.Objective(forward_step=step)


def loss_runs_backward(losses: Any) -> Any:
    losses.sum().backward(retain_graph=True)
    return losses.sum(), 1, {"loss_sum": losses.detach().sum()}


def loss_is_mean(losses: Any) -> Any:
    return losses.mean(), 1, {"loss_sum": losses.detach().mean()}


def count_changes(batch: Any) -> int:
    batch.loss_mask.zero_()
    return 1


BACKWARD = r"ran a backward pass through the model \(\.backward\(\)\)"
MEAN = "returned a mean as 'loss_sum'. Expected the sum"


def trained(engine: Any, encoded: Any, objective: Any, collate: Any = COLLATE) -> Any:
    stepper = make_stepper(engine, objective=checked_objective(objective))
    return stepper.train(0, [collate(encoded)], num_skipped=0, stop=False)[0]


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (runs_backward, f"^objective runs_backward {BACKWARD}"),
        (changes, "objective changes changed batch.labels in place"),
        (mean, f"objective mean {MEAN}"),
        (of_sums(mean), rf"objective.sums \(mean\) {MEAN}"),
        (by_count, MEAN),
        (by_mask, MEAN),
        (by_samples, MEAN),
        (vlmpack.Objective(forward_step=step_runs_backward), BACKWARD),
        (vlmpack.Objective(forward_step=step_changes), "changed batch.position_ids in place"),
        (with_loss(loss_runs_backward), BACKWARD),
        (with_loss(loss_is_mean), MEAN),
        (
            vlmpack.Objective(counts={"mine": count_changes}),
            r"objective\.counts\['mine'\] changed batch.loss_mask in place",
        ),
    ],
)
def test_what_an_objective_may_not_do_is_named(
    session_engine: Any, encoded: Any, objective: Any, said: str
) -> None:
    before = {name: p.detach().clone() for name, p in session_engine.module.named_parameters()}
    with pytest.raises(ObjectiveError, match=said):
        trained(session_engine, encoded, objective)
    for name, parameter in session_engine.module.named_parameters():
        assert torch.equal(parameter, before[name]), "no step was taken"


@pytest.mark.parametrize("said", [mean, by_count, by_samples])
def test_a_mean_over_a_padded_batch_is_named_too(
    session_engine: Any, encoded: Any, said: Any
) -> None:
    with pytest.raises(ObjectiveError, match=MEAN):
        trained(session_engine, encoded, said, PADDED)


def per_sample(losses: Tensor, batch: Any) -> Any:
    """The sum over samples of each one's mean."""
    owner = torch.searchsorted(batch.cu_seqlens, batch.label_positions, right=True)
    means = [losses[owner == place].mean() for place in owner.unique()]
    return {"loss_sum": torch.stack(means).sum()}


def halved(losses: Tensor, batch: Any) -> Any:
    return {"loss_sum": losses.sum() / 2}


def own_gradient(losses: Tensor, batch: Any) -> Any:
    """A gradient with respect to the losses alone goes through no model."""
    (slope,) = torch.autograd.grad(losses.square().sum(), losses, retain_graph=True)
    return {"loss_sum": (losses + 0 * slope).sum()}


def random(losses: Tensor, batch: Any) -> Any:
    return {"loss_sum": (losses * torch.rand(len(losses))).sum()}


def rowwise(losses: Tensor, batch: Any) -> Any:
    return {"loss_sum": losses.mean(), "rows": torch.ones(())}


ROWWISE = of_sums(rowwise, sum_names=("loss_sum", "rows"), divisor="rows")
"""A mean of each row's mean, and it says so."""


@pytest.mark.parametrize("objective", [per_sample, halved, own_gradient, random, ROWWISE, FOCAL])
def test_what_is_right_trains_as_without_a_look(
    session_engine: Any, encoded: Any, objective: Any
) -> None:
    """Bit for bit: no random number is drawn for the second question, no gradient is added."""
    bare = objective if isinstance(objective, vlmpack.Objective) else of_sums(objective)
    found = []
    for one in (bare, checked_objective(objective)):
        torch.manual_seed(3)
        session_engine.zero_gradients()
        reports = session_engine.forward_backward(
            one.step_with(), iter([COLLATE(encoded)]), num_microbatches=1
        )
        grads = [p.grad.clone() for p in session_engine.module.parameters() if p.grad is not None]
        found.append((float(reports[0]["loss_sum"]), torch.rand(1).item(), grads))
    assert found[0][:2] == found[1][:2] and found[0][2], "guard: there are gradients"
    assert all(torch.equal(a, b) for a, b in zip(found[0][2], found[1][2], strict=True))


@pytest.mark.parametrize("collate", [COLLATE, PADDED])
def test_a_row_twice_is_that_of_its_samples_twice(encoded: Any, collate: Any) -> None:
    batch = collate(list(encoded))
    made, expected = twice(batch), collate([*encoded, *encoded])
    assert made is not None
    left_out = {"media", "media_positions", "media_sources", "image_blocks"}
    for entry in fields(batch):
        if entry.name in left_out:
            continue
        mine, theirs = getattr(made, entry.name), getattr(expected, entry.name)
        same = torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs
        assert same, entry.name
    assert twice(None) is None  # type: ignore[arg-type]
