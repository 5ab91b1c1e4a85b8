"""Each known way to pack wrongly is found by `find_differences`; its unbroken twin is not.

A suite that accepts any of these would prove nothing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.engines import make_stepper
from support.runs import (
    find_differences,
    gradient_errors,
    pack,
    relabelled,
    relative_l2,
    run_batch,
    starts_of,
)
from support.shards import TINY_MODEL, same_size_pair, with_answer
from support.stock import StockProcessor, run_one_by_one

from vlmpack.encode import Encoder
from vlmpack.packing.batch import IGNORE_INDEX
from vlmpack.training.objective import SFT, forward_step


def kinds(differences):
    """The words before 'of': what differs."""
    return {line.split(" of ")[0].split(":")[0] for line in differences}


def test_no_isolation_is_found(vlm, encoded, reference):
    batch = pack(encoded, alignment=8)
    one_segment = replace(
        batch,
        cu_seqlens=torch.tensor([0, batch.num_slots], dtype=torch.int32),
        cu_seqlens_padded=None,
        segment_lengths=(batch.num_slots,),
    ).packed_seq_params()
    assert find_differences(run_batch(vlm, batch), reference) == []
    broken = find_differences(run_batch(vlm, batch, one_segment), reference)
    assert kinds(broken) == {"loss", "gradient"}


@pytest.fixture(scope="module")
def all_tokens(stock_model, mixed):
    """Samples with a label on every text token, and their reference."""
    processor = StockProcessor(TINY_MODEL, loss_on="all")
    encoder = Encoder(TINY_MODEL).replace(loss_on="all")
    reference = run_one_by_one(stock_model, {sample.key: processor(sample) for sample in mixed})
    return [encoder.encode(sample.cooked()) for sample in mixed], reference


def test_labels_shifted_after_concatenation_are_found(vlm, encoder, all_tokens):
    samples, reference = all_tokens
    batch = pack(samples)
    unshifted = batch.input_ids.clone()
    unshifted[batch.input_ids == encoder.placeholder_id] = IGNORE_INDEX
    shifted_late = torch.full_like(unshifted, IGNORE_INDEX)
    shifted_late[:, :-1] = unshifted[:, 1:]
    ends = torch.tensor(starts_of(batch)[1:]) - 1
    across = torch.zeros_like(batch.loss_mask)
    across[0, ends] = True
    assert torch.equal(shifted_late[~across], batch.labels[~across]), "differs at borders alone"

    assert find_differences(run_batch(vlm, batch), reference) == []
    broken = find_differences(run_batch(vlm, relabelled(batch, shifted_late)), reference)
    assert kinds(broken) == {"label tokens", "loss", "gradient"}


def row_positions(stock_model, batch, encoder):
    """get_rope_index over the whole row, as if it were one sample."""
    is_image = batch.input_ids == encoder.placeholder_id
    positions, _ = stock_model.model.get_rope_index(
        batch.input_ids,
        mm_token_type_ids=is_image.int(),
        image_grid_thw=torch.tensor(batch.media.grid_thw),
    )
    return positions


def test_mrope_over_the_whole_row_is_found(vlm, stock_model, encoded, encoder, reference):
    """It shifts every sample by a constant, which attention cannot see: compared directly."""
    batch = pack(encoded)
    over_row = row_positions(stock_model, batch, encoder)
    first = batch.lengths[0]
    assert torch.equal(over_row[..., :first], batch.position_ids[..., :first])
    assert find_differences(run_batch(vlm, batch), reference) == []
    broken = find_differences(run_batch(vlm, replace(batch, position_ids=over_row)), reference)
    assert sum(line.startswith("positions") for line in broken) == len(encoded) - 1


def test_one_dimensional_positions_are_found_by_loss_and_gradient(vlm, encoded, reference):
    """What MRoPE over the row became elsewhere: a count over the row on all three axes."""
    batch = pack(encoded)
    count = torch.arange(batch.num_slots).expand(3, 1, -1)
    broken = find_differences(run_batch(vlm, replace(batch, position_ids=count)), reference)
    assert kinds(broken) == {"positions", "loss", "gradient"}
    text_only = {sample.key for sample in encoded if sample.media is None}
    assert not any(line.startswith("loss") and key in line for line in broken for key in text_only)


def test_swapped_pixels_are_found(vlm, stock_model, encoder):
    pair = [
        with_answer(sample, answer)
        for sample, answer in zip(same_size_pair(), ("left", "right"), strict=True)
    ]
    processor = StockProcessor(TINY_MODEL)
    reference = run_one_by_one(stock_model, {sample.key: processor(sample) for sample in pair})
    batch = pack([encoder.encode(sample.cooked()) for sample in pair])
    assert batch.media.grid_thw[0] == batch.media.grid_thw[1]
    first, second = batch.media.pixel_values.chunk(2)
    swapped = replace(batch, media=replace(batch.media, pixel_values=torch.cat((second, first))))
    assert find_differences(run_batch(vlm, batch), reference) == []
    broken = find_differences(run_batch(vlm, swapped), reference)
    assert kinds(broken) == {"loss", "gradient"}
    assert sum(line.startswith("loss") for line in broken) == 2


@pytest.mark.parametrize("where", ["alignment gap", "tail segment"])
def test_a_pad_slot_counted_in_the_loss_is_found(vlm, encoded, reference, where):
    batch = pack(encoded, alignment=8, total=128)
    if where == "tail segment":
        slot = sum(batch.segment_lengths[:-1])
    else:
        index = next(i for i, n in enumerate(batch.lengths) if n % 8)
        slot = starts_of(batch)[index] + batch.lengths[index]
    assert batch.input_ids[0, slot] == 561
    assert not batch.loss_mask[0, slot]
    labels = batch.labels.clone()
    labels[0, slot] = 561
    assert find_differences(run_batch(vlm, batch), reference) == []
    broken = find_differences(run_batch(vlm, relabelled(batch, labels)), reference)
    expected = {"gradient"} if where == "tail segment" else {"label tokens", "loss", "gradient"}
    assert kinds(broken) == expected


def mean_of_means(data_iterator, model):
    """A forward step whose engine divides each micro-batch by its own label count."""
    losses, _ = forward_step(data_iterator, model)

    def loss_function(output):
        total = output.mean() * mean_of_means.labels_of_step / mean_of_means.micro_batches
        return total, output.shape[0], {"loss_sum": total.detach().double()}

    return losses, loss_function


def gradients_of_step(engine, batches, objective=SFT):
    """What the Stepper hands to the optimizer, which then changes nothing."""
    stepper = make_stepper(engine, objective=objective, max_grad_norm=None)
    seen = {}

    def steal(*_):
        seen.update({name: p.grad.detach().clone() for name, p in engine.parameters()})

    engine.optimizer.register_step_pre_hook(steal)
    before = {name: p.detach().clone() for name, p in engine.parameters()}
    stepper.train(0, batches, num_skipped=0, stop=False)
    with torch.no_grad():
        for name, parameter in engine.parameters():
            parameter.copy_(before[name])
    return seen


def test_mean_of_micro_batch_means_is_found(session_engine, encoded, reference):
    by_labels = sorted(encoded, key=lambda sample: int((sample.labels != IGNORE_INDEX).sum()))
    batches = [pack(by_labels[:1], alignment=8), pack(by_labels[1:], alignment=8)]
    few, many = (batch.num_label_tokens for batch in batches)
    assert many > 3 * few, "equal counts would make both rules agree"

    right = replace(reference, gradients=gradients_of_step(session_engine, batches))
    assert find_differences(right, reference) == []

    mean_of_means.labels_of_step, mean_of_means.micro_batches = few + many, 2
    objective = replace(SFT, forward_step=mean_of_means)
    wrong = replace(reference, gradients=gradients_of_step(session_engine, batches, objective))
    broken = find_differences(wrong, reference)
    assert kinds(broken) == {"gradient"}
    assert len(broken) == len(reference.gradients), "every parameter is weighted wrongly"


@pytest.mark.cases(quick="3")
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 6])
def test_any_split_into_micro_batches_has_the_same_gradients(
    session_engine, encoded, reference, micro_batches
):
    batches = [pack(encoded[i::micro_batches], alignment=4) for i in range(micro_batches)]
    run = replace(reference, gradients=gradients_of_step(session_engine, batches))
    assert find_differences(run, reference) == []


def test_a_missing_gradient_is_a_difference(vlm, encoded, reference):
    run = run_batch(vlm, pack(encoded))
    name = "model.visual.merger.mlp.0.weight"
    run.gradients[name] = torch.full_like(run.gradients[name], float("nan"))
    assert kinds(find_differences(run, reference)) == {"gradient"}
    run.gradients.pop(name)
    assert find_differences(run, reference) != []
    assert relative_l2(torch.ones(2), torch.zeros(2)) == float("inf")
    assert max(gradient_errors(reference, reference).values()) == 0.0
