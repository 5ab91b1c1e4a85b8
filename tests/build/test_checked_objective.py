"""A program's objective computes what it did, and each of its parts is named where it fails."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engines import make_stepper
from support.handed_over import (
    REMARK,
    bare,
    count_raises,
    of_sums,
    one,
    step_raises,
    sums_exit,
    sums_raise,
    two_sums,
)
from support.toy_objective import FOCAL, focal

import vlmpack
from vlmpack.build.checked_objective import checked_objective
from vlmpack.errors import CapabilityError, ObjectiveError
from vlmpack.packing import PackCollator
from vlmpack.training.objective import SFT, forward_step

COLLATE = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)
SUM = "{'loss_sum': a 0-d tensor}"


def own_step(data_iterator: Any, model: Any) -> Any:
    return forward_step(data_iterator, model, sums=focal)


def with_loss(loss: Any, **more: Any) -> vlmpack.Objective:
    """One of a forward step of its own, whose loss function is another one."""

    def step(data_iterator: Any, model: Any) -> Any:
        return forward_step(data_iterator, model)[0], loss

    return vlmpack.Objective(forward_step=step, **more)


def returns(value: Any) -> Any:
    return lambda *_: value


def evaluated(engine: Any, encoded: Any, objective: vlmpack.Objective) -> Any:
    return make_stepper(engine, objective=objective).evaluate([COLLATE(encoded)]).totals


@pytest.mark.cases(quick="given2", slow="given0")
@pytest.mark.parametrize("given", [FOCAL, replace(FOCAL, forward_step=own_step), SFT])
def test_it_computes_the_same(session_engine: Any, encoded: Any, given: vlmpack.Objective) -> None:
    checked = checked_objective(given)
    found = evaluated(session_engine, encoded, checked)
    assert found == evaluated(session_engine, encoded, given)
    assert found["loss_sum"] > 0 and checked.report == given.report


def test_terms_are_scaled_as_before(session_engine: Any, encoded: Any) -> None:
    """The forward step is called with `scales` then."""

    def step(data_iterator: Any, model: Any, scales: Any) -> Any:
        seen.append(set(scales))
        return forward_step(data_iterator, model, sums=focal, scales=scales)

    seen: list[set[str]] = []
    for own in (step, None):
        given = replace(FOCAL, forward_step=own, terms={"plain_sum": ("num_label_tokens", 0.5)})
        found = evaluated(session_engine, encoded, checked_objective(given))
        assert found == evaluated(session_engine, encoded, given)
    assert seen == [{"plain_sum"}] * 2


def test_a_row_that_another_rank_reports_is_none_of_its_faults(
    session_engine: Any, encoded: Any
) -> None:
    given = checked_objective(with_loss(lambda losses: (losses.sum(), 1, {})))
    assert evaluated(session_engine, encoded, given)["loss_sum"] == 0


@pytest.mark.parametrize("label_losses", [3, 0])
def test_a_loss_without_a_gradient_is_its_fault(label_losses: int) -> None:
    """torch would say so in the backward pass, where nothing names the objective."""

    def detached(losses: Any, batch: Any) -> Any:
        return {"loss_sum": losses.detach().sum()}

    losses = torch.ones(label_losses, requires_grad=True)
    for given in (detached, of_sums(detached)):
        sums = checked_objective(given).sums
        with pytest.raises(ObjectiveError, match=r"detached.* returned a 'loss_sum' that has no "):
            sums(losses, None)
        assert sums(losses.detach(), None)["loss_sum"] == label_losses, "guard: in validation"
    step = returns((losses, lambda losses: (losses.detach().sum(), 1, {})))
    own = checked_objective(vlmpack.Objective(forward_step=step)).forward_step
    output, loss_function = own(iter(()), torch.nn.Identity())
    with pytest.raises(ObjectiveError, match="returned a tensor that has no gradient"):
        loss_function(output)


@pytest.mark.cases(quick=("sums_raise*", "sums_exit*", "bare-*"))
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (sums_raise, "objective sums_raise raised ZeroDivisionError: of my own (handed_over.py, l"),
        (sums_exit, "objective sums_exit raised SystemExit: 0 (handed_over.py, line"),
        (bare, f"objective bare returned a 0-d tensor; expected {SUM}; a vlmpack.Objective can"),
        (
            two_sums,
            f"objective two_sums returned {SUM[:-1]}, 'other': a 0-d tensor}}; expected {SUM}",
        ),
        (returns({"loss_sum": torch.ones(3)}), "returned {'loss_sum': a 1-d tensor}; expected {'l"),
        (returns({"loss_sum": 3.0}), "returned {'loss_sum': a float}; expected {'loss_sum': a 0-d"),
        (returns(None), "returned None; expected {'loss_sum': a 0-d tensor}"),
        (
            of_sums(sums_raise),
            "objective.sums (sums_raise) raised ZeroDivisionError: of",
        ),
        (of_sums(two_sums), f"a 0-d tensor}}; expected {SUM}, as `sum_names` names them"),
        (
            of_sums(returns({}), sum_names=("loss_sum", "other")),
            "returned {}; expected {'loss_sum': a 0-d tensor, 'other': a 0-d tensor}, as `sum_nam",
        ),
        (
            vlmpack.Objective(forward_step=step_raises),
            "objective.forward_step (step_raises) raised KeyError",
        ),
        (
            vlmpack.Objective(forward_step=returns(None)),
            "objective.forward_step (<lambda>) returned None; expected (the model's output, a",
        ),
        (
            with_loss(lambda losses: losses.no_such_field),
            "the loss function of objective.forward_step (step) raised AttributeError",
        ),
        (
            with_loss(lambda losses: (losses, 1, {})),
            "returned (a 1-d tensor, an int, {}). Expected (a 0-d tensor to differentiate, a "
            f"number of tokens, {SUM})",
        ),
        (
            with_loss(lambda losses: (losses.sum(), 1, {"other": losses.sum()})),
            "returned (a 0-d tensor, an int, {'other': a 0-d tensor}). Expected",
        ),
        (
            vlmpack.Objective(counts={"mine": count_raises}),
            "objective.counts['mine'] raised AttributeError: ",
        ),
        (
            vlmpack.Objective(counts={"mine": returns("3")}),
            "objective.counts['mine'] returned a string; expected a number",
        ),
        (
            vlmpack.Objective(sum_names=("loss_sum", "other")),
            "its forward step reports loss_sum. Expected what its `sum_names` names: loss_sum, o",
        ),
    ],
)
def test_what_fails_is_named(session_engine: Any, encoded: Any, given: Any, said: str) -> None:
    with pytest.raises(ObjectiveError) as raised:
        evaluated(session_engine, encoded, checked_objective(given))
    assert said in str(raised.value)


@pytest.mark.parametrize("found", [2, 2.0, True, torch.tensor(2)])
def test_a_count_may_be_any_number(found: Any) -> None:
    given = vlmpack.Objective(counts={"mine": returns(found)})
    assert checked_objective(given).counts["mine"](None) == float(found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("which", "said"),
    [
        (REMARK.which, "objective.remarks['mine'].which raised AttributeError"),
        (returns([2]), "objective.remarks['mine'].which returned [2]; expected places of samples"),
        (
            returns([0, "a"]),
            "returned [0, 'a']; expected places of samples in the micro-batch, which",
        ),
        (
            returns(None),
            "returned None; expected places of samples in the micro-batch, which has 2",
        ),
    ],
)
def test_what_finds_a_remarks_samples_is_named(which: Any, said: str) -> None:
    def of(which: Any) -> Any:
        remarks = {"mine": replace(REMARK, which=which)}
        given = vlmpack.Objective(counts={"mine": one}, remarks=remarks)
        return checked_objective(given).remarks["mine"].which(batch)

    batch: Any = SimpleNamespace(keys=("a", "b"))
    assert of(returns(torch.tensor([1, 0]))) == [1, 0]
    with pytest.raises(ObjectiveError) as raised:
        of(which)
    assert said in str(raised.value)


def lost(losses: Any, batch: Any) -> Any:
    exec(compile("raise RuntimeError('timed out')", "/site/torch/distributed/c10d.py", "exec"))


def out_of_memory(losses: Any, batch: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def our_own(losses: Any, batch: Any) -> Any:
    raise CapabilityError("no such kernel")


@pytest.mark.parametrize(
    ("sums", "kind"),
    [(lost, RuntimeError), (out_of_memory, torch.OutOfMemoryError), (our_own, CapabilityError)],
)
def test_a_process_that_is_gone_and_memory_are_no_faults_of_its(sums: Any, kind: Any) -> None:
    """What a launch says of a lost connection is read from torch's own error."""
    checked: Any = checked_objective(of_sums(sums)).sums
    with pytest.raises(kind) as raised:
        checked(torch.ones(3), None)
    assert raised.type is kind
