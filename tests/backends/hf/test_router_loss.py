"""The load-balancing loss on the hf engine: over real tokens, as transformers and mcore have it.

Gradients of a mixture of experts with its load-balancing loss, on two replicas, or of two processes
that share rows.

Run as: test_router_loss.py MODEL FOLDER CONTEXT, in each process; the main one writes
FOLDER/{none,fsdp,shared}.safetensors, and in .json beside what a step reports.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import layouts
from support.engines import make_engine, make_stepper
from support.families import tiny_family_folder
from support.forked import check_ranks
from support.recorders import HostReads
from support.runs import relative_l2
from support.stock import load_stock
from support.tiny_gemma4 import MIXTURE, text
from torch.distributed.tensor import DTensor
from transformers import Gemma4TextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from vlmpack.backends.engine import ROUTER_SUM
from vlmpack.backends.hf import router_loss as module
from vlmpack.backends.hf.router_loss import (
    RouterLoss,
    balance_loss,
    describe_router_loss,
    routed,
    router_loss,
)
from vlmpack.distributed import start_process_group
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.packing import FixedShape, PackCollator, pad_batch_sequences
from vlmpack.training.objective import forward_step

AUX_LOSS = 0.01
COLLATE_TIGHT = PackCollator(
    pad_token_id=layouts.PAD, num_position_axes=3, pad_to_multiple_of=16, total_multiple_of=64
)


def rows_of_ranks(model: Path) -> list:
    """The micro-batches of a step; some rows have no image."""
    samples = layouts.samples(model)
    return [COLLATE_TIGHT([samples[index] for index in bin_]) for bin_ in layouts.BINS]


WAYS = {
    1: {"none": {}, "fsdp": {"sharding": "fsdp"}},
    2: {"shared": {"context": 2}},
}
"""By processes to a row: the settings of each way to have two."""


def main(model: Path, folder: Path, context: int) -> None:
    """The micro-batches of each replica, accumulated and reduced."""
    ranks = start_process_group(context=context)
    mine = rows_of_ranks(model)[ranks.dp_rank :: ranks.dp_size]
    assert len(mine) == 2 * context
    for way, split in WAYS[context].items():
        engine = make_engine(model, Encoder(model), ranks=ranks, aux_loss=AUX_LOSS, **split)
        engine.zero_gradients()
        engine.forward_backward(forward_step, iter(mine), num_microbatches=len(mine))
        engine.finish_gradients(torch.tensor(7.0), None)
        whole = {
            name: (
                p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
            ).contiguous()
            for name, p in engine.parameters()
        }
        stepper = make_stepper(engine)
        stepper.schedule = lambda step: 0.0
        sums, _ = stepper.train(0, mine, num_skipped=0, stop=False)
        if ranks.is_main:
            save_file(whole, str(folder / f"{way}.safetensors"))
            reported = json.dumps(stepper.reported(sums))
            (folder / f"{way}.json").write_text(reported, encoding="utf-8")


pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.distributed.*is deprecated:FutureWarning",
    r"ignore:The \.grad attribute of a Tensor that is not a leaf",
)

WEIGHT = AUX_LOSS
TOLERANCE = 1e-5
"""Relative L2 of every gradient: the stated bound of the project."""
FOUND = 1e-3
"""What a wrong gradient is beyond."""

COLLATE = {
    "tight": PackCollator(pad_token_id=layouts.PAD, num_position_axes=3),
    "gaps and a tail": PackCollator(
        pad_token_id=layouts.PAD, num_position_axes=3, pad_to_multiple_of=16, total_multiple_of=64
    ),
}
EXPERTS, TOP_K = 4, 2
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_family_folder("qwen3_vl_moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def samples(folder):
    return layouts.samples(folder)


@pytest.fixture(scope="module")
def engines(folder):
    """With and without the loss."""
    encoder = Encoder(folder)
    return {weight: make_engine(folder, encoder, aux_loss=weight) for weight in (0.0, WEIGHT)}


def rows_of(samples, how="tight"):
    """The micro-batches, in one of several forms."""
    chosen = [[samples[index] for index in bin_] for bin_ in layouts.BINS]
    if how == "padded":
        return [
            pad_batch_sequences(bin_, pad_token_id=layouts.PAD, pad_to_multiple_of=8)
            for bin_ in chosen
        ]
    return [COLLATE[how](bin_) for bin_ in chosen]


def gradients(engine, rows):
    """Gradients of sums, by transformers' names."""
    engine.zero_gradients()
    engine.forward_backward(forward_step, iter(rows), num_microbatches=len(rows))
    return {name: parameter.grad.clone() for name, parameter in engine.parameters()}


def worst(found, expected):
    assert found.keys() == expected.keys()
    return max(relative_l2(found[name], value) for name, value in expected.items())


def step_of(engine, rows):
    """What an optimizer step that moves nothing reports beside its loss, and what the host read."""
    stepper = make_stepper(engine)
    stepper.schedule = lambda step: 0.0
    with HostReads() as reads:
        sums, _ = stepper.train(0, rows, num_skipped=0, stop=False)
    return stepper.reported(sums), reads


@pytest.fixture(scope="module")
def reference(stock):
    """Gradients of the losses and of transformers' own loss for the routers."""
    return stock[0]


@pytest.fixture(scope="module")
def balance(stock):
    """transformers' own loss for the routers: (tokens, mean over layers) of each micro-batch."""
    return stock[1]


def over_tokens(balance):
    """Their mean over tokens."""
    return sum(tokens * loss for tokens, loss in balance) / sum(tokens for tokens, _ in balance)


@pytest.fixture(scope="module")
def stock(folder, samples):
    """transformers' own loss and its own sum: a bin is one padded batch, with its mask."""
    model = load_stock(folder).train()
    total = torch.zeros(())
    balance = []
    for bin_ in layouts.BINS:
        rows = pad_batch_sequences([samples[index] for index in bin_], pad_token_id=layouts.PAD)
        media = {}
        if rows.media is not None:
            media = {
                "pixel_values": rows.media.pixel_values,
                "image_grid_thw": torch.tensor(rows.media.grid_thw),
            }
        slots = torch.arange(rows.input_ids.shape[1])
        mask = (slots < torch.tensor(rows.lengths)[:, None]).long()
        output = model(
            input_ids=rows.input_ids,
            position_ids=rows.position_ids,
            attention_mask=mask,
            output_router_logits=True,
            **media,
        )
        assert len(output.router_logits) == 3
        losses = torch.nn.functional.cross_entropy(
            output.logits.flatten(0, 1), rows.labels.flatten(), reduction="sum"
        )
        layers = [
            load_balancing_loss_func((logits,), EXPERTS, TOP_K, mask)
            for logits in output.router_logits
        ]
        total = total + losses + WEIGHT * int(mask.sum()) * sum(layers) / TOP_K
        balance.append((int(mask.sum()), float(torch.stack(layers).detach().mean()) / TOP_K))
    total.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, balance


@pytest.mark.cases(slow="gaps and a tail")
@pytest.mark.parametrize("how", [*COLLATE, "padded"])
def test_gradients_are_those_of_transformers_own_loss(engines, samples, reference, how):
    rows = rows_of(samples, how)
    if how != "tight":
        assert all(row.num_slots > row.num_tokens for row in rows)
    found = gradients(engines[WEIGHT], rows)
    assert worst(found, reference) < TOLERANCE
    without = gradients(engines[0.0], rows)
    gates = [name for name in found if name.endswith("mlp.gate.weight")]
    assert len(gates) == 3
    assert min(relative_l2(without[name], reference[name]) for name in gates) > FOUND


@pytest.mark.cases(slow="gaps and a tail")
@pytest.mark.parametrize("how", [*COLLATE, "padded"])
def test_what_is_reported_is_transformers_own_loss_over_tokens(engines, samples, balance, how):
    """Over several micro-batches of a step, free of the recipe's coefficient."""
    rows = rows_of(samples, how)
    expected = over_tokens(balance)
    assert step_of(engines[WEIGHT], rows)[0] == {"router_loss": pytest.approx(expected, rel=1e-6)}
    by_row = sum(loss for _, loss in balance) / len(balance)
    assert abs(by_row - expected) > 1e-4, "a mean over rows would do as well"
    last = step_of(engines[WEIGHT], rows[-1:])[0]["router_loss"]
    assert last == pytest.approx(balance[-1][1], rel=1e-6), "of the step before"
    assert step_of(engines[0.0], rows)[0] == {}


def test_the_host_reads_no_more_for_it(engines, samples):
    text = [row for row in rows_of(samples) if row.media is None]
    once = [("tolist", "step.py:compute")]
    for rows in (text[:1], text * 3):
        assert step_of(engines[WEIGHT], rows)[1].ours == once


def test_a_validation_reports_none_and_leaves_none_behind(engines, samples, balance):
    engine, rows = engines[WEIGHT], rows_of(samples)
    make_stepper(engine).evaluate(rows)
    found = step_of(engine, rows[:1])[0]["router_loss"]
    assert found == pytest.approx(balance[0][1], rel=1e-6)


def test_the_losses_that_are_reported_are_without_it(engines, samples):
    row = rows_of(samples)[0]
    with_it, without = (
        engines[weight].vlm(row, row.packed_seq_params()) for weight in (WEIGHT, 0.0)
    )
    assert torch.equal(with_it, without)


@pytest.mark.slow
@pytest.mark.megatron
def test_gradients_are_those_of_the_mcore_engine(folder, engines, samples):
    """The same knob, the same numbers, on either engine."""
    rows = rows_of(samples, "gaps and a tail")
    theirs = layouts.make_megatron(layouts.Layout(), start_process_group(), folder, aux_loss=WEIGHT)
    theirs.zero_gradients()
    theirs.forward_backward(forward_step, iter(rows), num_microbatches=len(rows))
    ours = gradients(engines[WEIGHT], rows)
    compared = 0
    for local in theirs.layout.parameters:
        name = local.pieces[0].box.name
        if name.endswith(("mlp.gate.weight", "embed_tokens.weight")):
            assert relative_l2(ours[name], local.parameter.main_grad) < TOLERANCE, name
            compared += 1
    assert compared == 4
    figures = [float(each.router_sum.take(CPU)[ROUTER_SUM]) for each in (engines[WEIGHT], theirs)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)
    assert figures[0] > sum(row.num_tokens for row in rows), "never below 1"
    assert step_of(theirs, rows)[1].ours == [("tolist", "step.py:compute")]


def test_padding_that_counts_is_found(engines, samples, reference, balance):
    """The negative control: gaps and the tail segment count as tokens."""
    rows = rows_of(samples, "gaps and a tail")
    with patch.object(
        module, "padding_mask", lambda row: torch.zeros_like(row.input_ids, dtype=torch.bool)
    ):
        assert worst(gradients(engines[WEIGHT], rows), reference) > FOUND
        found = step_of(engines[WEIGHT], rows)[0]["router_loss"]
        assert abs(found / over_tokens(balance) - 1) > FOUND
        tight = gradients(engines[WEIGHT], rows_of(samples))
    assert worst(tight, reference) < TOLERANCE, "without padding there is nothing to mask"


def test_ghost_segments_and_empty_rows_add_nothing(engines, samples):
    """Rows of one shape, whose last segments hold no sample."""
    shape = FixedShape(row_tokens=512, max_sequences=8)
    collate = replace(COLLATE["gaps and a tail"], fixed=shape)
    chosen = [samples[index] for index in layouts.BINS[0]]
    row, empty = collate(chosen), collate([])
    assert (row.num_slots, empty.num_tokens) == (512, 0)
    tight = gradients(engines[WEIGHT], [COLLATE["tight"](chosen)])
    assert worst(gradients(engines[WEIGHT], [row, empty]), tight) < TOLERANCE
    nothing = gradients(engines[WEIGHT], [empty])
    assert all(not bool(gradient.any()) for gradient in nothing.values())


@pytest.fixture(scope="module")
def on_two_replicas(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("replicas")
    check_ranks([__file__, folder, out, "1"], 2)
    return out


@pytest.fixture(scope="module")
def sharing_rows(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("shared")
    check_ranks([__file__, folder, out, "2"], 2)
    return out


@pytest.mark.cases(slow="shared")
@pytest.mark.parametrize("way", ["none", "fsdp", "shared"])
def test_two_processes_have_the_gradients_of_one(request, folder, engines, way):
    """DDP and FSDP2 with two micro-batches each, and four that are shared."""
    written = request.getfixturevalue("sharing_rows" if way == "shared" else "on_two_replicas")
    found = load_file(str(written / f"{way}.safetensors"))
    rows = rows_of_ranks(folder)
    expected = {name: value / 7.0 for name, value in gradients(engines[WEIGHT], rows).items()}
    assert worst(found, expected) < TOLERANCE
    without = {name: value / 7.0 for name, value in gradients(engines[0.0], rows).items()}
    assert worst(found, without) > FOUND
    reported = json.loads((written / f"{way}.json").read_text())
    assert reported == pytest.approx(step_of(engines[WEIGHT], rows)[0], rel=1e-6)


@pytest.mark.slow
def test_layers_that_are_recomputed_count_once(folder, samples, engines):
    encoder = Encoder(folder)
    again = make_engine(folder, encoder, activation_checkpointing="full", aux_loss=WEIGHT)
    rows = rows_of(samples)
    found, plain = (gradients(engine, rows) for engine in (again, engines[WEIGHT]))
    assert worst(found, plain) < 1e-6


def test_a_layer_whose_experts_are_chosen_alike_has_a_loss_of_one():
    logits = torch.eye(4).repeat(6, 1) * 1e-4
    logits += logits.roll(1, dims=1)
    assert float(
        balance_loss(routed(logits, torch.ones(24, dtype=torch.bool), 2), 2)
    ) == pytest.approx(1.0)
    one_sided = torch.tensor([[9.0, 8.0, 0.0, 0.0]]).repeat(24, 1)
    found = float(balance_loss(routed(one_sided, torch.ones(24, dtype=torch.bool), 2), 2))
    assert found == pytest.approx(2.0, rel=1e-3)
    assert float(balance_loss(routed(one_sided, torch.zeros(24, dtype=torch.bool), 2), 2)) == 0.0


def test_who_has_such_a_loss_and_what_is_said(folder, tiny_folder, engines):
    moe = engines[0.0].vlm.language
    assert router_loss(moe, 0.0) is None
    assert router_loss(moe, 0.5) == RouterLoss(0.5, TOP_K)
    dense = make_engine(tiny_folder, Encoder(tiny_folder)).vlm.language
    with pytest.raises(
        CapabilityError, match=r"model\.router_aux_loss_coef: 0\.5, but Qwen2.*is dense"
    ):
        router_loss(dense, 0.5)
    mixture = SimpleNamespace(config=Gemma4TextConfig(**text(MIXTURE)))
    with pytest.raises(
        CapabilityError, match=r"num_experts: 4\), but its config knows no router_aux_loss_coef"
    ):
        router_loss(mixture, 0.5)
    assert describe_router_loss(moe, 0.0) == {}
    assert describe_router_loss(moe, 0.01)["router loss"].startswith("0.01 x load balancing")
    with patch.object(moe.config, "output_router_logits", True):
        assert describe_router_loss(moe, 0.0)["router loss"].startswith(
            "none: model.router_aux_loss_coef"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
