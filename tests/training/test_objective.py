"""An objective is a value: another one changes sums, divisor and report, and no other code.

The reference is the stock model and plain torch, one sample at a time: Focal Loss of log softmax.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support import layouts
from support.engines import make_engine, make_stepper
from support.forked import check_ranks
from support.listeners import listeners_of
from support.runs import GRADIENT_TOLERANCE, LOSS_TOLERANCE, relative_l2
from support.shards import TINY_MODEL
from support.stock import StockProcessor, gradients_of
from support.toy_objective import FOCAL, focal, take_step

from vlmpack.errors import ObjectiveError
from vlmpack.packing import PackCollator
from vlmpack.training.listener import Boundary
from vlmpack.training.metrics import read_rows
from vlmpack.training.objective import Objective
from vlmpack.training.run_dir import RunDir

COLLATE = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)


@pytest.fixture(scope="module")
def expected(stock_model, mixed):
    """(figures, gradients) of one step over the mixed samples."""
    stock_model.zero_grad(set_to_none=True)
    processor = StockProcessor(TINY_MODEL)
    loss_sum, plain_sum, labels = 0.0, 0.0, 0
    for sample in mixed:
        inputs = processor(sample)
        output = stock_model(
            attention_mask=torch.ones_like(inputs.input_ids),
            use_cache=False,
            **inputs.arguments(),
        )
        targets = inputs.labels[0, 1:]
        log_p = F.log_softmax(output.logits[0, :-1].float(), dim=-1)
        log_p = log_p[torch.arange(len(targets)), targets.clamp(min=0)][targets != -100]
        loss = -((1 - log_p.exp()).square() * log_p).sum()
        (loss / (2 * len(mixed))).backward()
        loss_sum += float(loss.detach().double())
        plain_sum -= float(log_p.detach().double().sum())
        labels += len(log_p)
    gradients = gradients_of(stock_model)
    stock_model.zero_grad(set_to_none=True)
    figures = {"loss": loss_sum / (2 * len(mixed)), "plain_loss": plain_sum / labels}
    norm = torch.stack([value.double().norm() for value in gradients.values()]).norm()
    return figures | {"norm": float(norm)}, gradients


def differences(found, expected):
    """What differs from the reference, by name."""
    (figures, gradients), (right, theirs) = found, expected
    assert figures.keys() == right.keys()
    assert gradients.keys() == theirs.keys()
    bounds = dict.fromkeys(right, LOSS_TOLERANCE) | {"norm": GRADIENT_TOLERANCE}
    wrong = {name for name in right if figures[name] != pytest.approx(right[name], bounds[name])}
    return wrong | {n for n in theirs if relative_l2(gradients[n], theirs[n]) > GRADIENT_TOLERANCE}


def make(engine, encoder):
    if engine == "hf":
        return make_engine(TINY_MODEL, encoder)
    pytest.importorskip("megatron.core")
    from vlmpack.distributed import start_process_group

    return layouts.make_megatron(layouts.LAYOUTS["one"], start_process_group())


ENGINES = pytest.mark.parametrize(
    "engine", ["hf", pytest.param("mcore", marks=pytest.mark.megatron)]
)


@pytest.mark.cases(quick="mcore", slow="hf")
@ENGINES
@pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning")
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
def test_an_objective_in_one_file_trains_what_it_says(engine, encoder, encoded, expected):
    assert differences(take_step(make(engine, encoder), encoded), expected) == set()


@pytest.mark.cases(quick="another divisor")
@pytest.mark.parametrize(
    "broken",
    [
        replace(FOCAL, divisor="num_label_tokens"),
        replace(FOCAL, divisor="num_samples"),
        replace(
            FOCAL,
            sums=lambda losses, batch: {
                name: value / batch.num_label_tokens for name, value in focal(losses, batch).items()
            },
        ),
    ],
    ids=["another divisor", "half the divisor", "means of micro-batches"],
)
def test_a_wrong_objective_is_found(encoder, encoded, expected, broken):
    found = differences(take_step(make("hf", encoder), encoded, objective=broken), expected)
    assert found >= {"loss", "norm"}
    assert len(found) > len(expected[1]), "every gradient"


@pytest.mark.megatron
@pytest.mark.slow
def test_any_layout_trains_the_same_objective(tmp_path, expected):
    pytest.importorskip("megatron.core")
    names = ["tp2-sp", "cp2", "pp2", "dp2"]
    script = layouts.TESTS / "support" / "toy_objective.py"
    check_ranks([script, tmp_path, ",".join(names)], 2)
    for name in names:
        figures = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        found = figures, load_file(str(tmp_path / f"{name}.safetensors"))
        assert differences(found, expected) == set(), name


def test_validation_and_steps_report_what_the_objective_does(
    session_engine, encoded, expected, tmp_path, caplog
):
    caplog.set_level("INFO")
    report = {**FOCAL.report, "of_none": ("plain_sum", "num_skipped")}
    shown = replace(FOCAL, report=report, shown=("plain_loss", "of_none"))
    stepper = make_stepper(session_engine, objective=shown)
    listeners = listeners_of(stepper, RunDir(tmp_path), reports=True)
    listeners.validation.batches = lambda: [COLLATE(encoded[:2]), COLLATE(encoded[2:])]
    here = Boundary(step=1)
    listeners.reporting.on_start(here)
    listeners.validation.on_end(here)
    listeners.reporting.close()
    loss = here.figures["validation_loss"]
    row = read_rows(tmp_path / "metrics.jsonl")[0]
    assert row["validation_loss"] == loss == pytest.approx(expected[0]["loss"], LOSS_TOLERANCE)
    assert row["validation_plain_loss"] == pytest.approx(expected[0]["plain_loss"], LOSS_TOLERANCE)
    assert row["validation_of_none"] is None, "0 of them"
    plain = f"{expected[0]['plain_loss']:.4f}"
    assert f"validation loss {loss:.4f}, plain_loss {plain}, of_none -" in caplog.text


def test_sums_that_the_objective_does_not_name_are_refused(session_engine, encoded):
    stepper = make_stepper(
        session_engine, objective=replace(FOCAL, sum_names=("loss_sum",), report={})
    )
    with pytest.raises(ObjectiveError, match=r"reports loss_sum, plain_sum\. .* names: loss_sum$"):
        stepper.evaluate([COLLATE(encoded)])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"divisor": "num_sampels"}, "asks for num_sampels; there are loss_sum"),
        ({"sum_names": ("loss_sum", "num_samples")}, "share names: num_samples"),
        ({"counts": {"num_tokens": len}}, "share names: num_tokens"),
        ({"sum_names": ("other",)}, "asks for loss_sum"),
        ({"report": {"x": ("loss_sum", "halves")}}, "asks for halves"),
        ({"report": {"loss": ("loss_sum", "num_tokens")}}, "by another meaning: loss"),
        ({"shown": ("plain_lsos",)}, "shows plain_lsos; its report has nothing"),
        ({"terms": {"other": ("num_tokens", 1.0)}}, "asks for other"),
        ({"terms": {"loss_sum": ("halves", 1.0)}}, "asks for halves"),
        (
            {"sum_names": ("loss_sum", "more"), "terms": {"more": ("loss_sum", 1.0)}},
            "counted before the step: loss_sum is a sum",
        ),
    ],
)
def test_names_of_an_objective_are_checked_when_it_is_made(changes, words):
    with pytest.raises(ValueError, match=words):
        Objective(**changes)
