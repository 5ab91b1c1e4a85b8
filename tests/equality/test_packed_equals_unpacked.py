"""The main claim: a packed row computes what each sample would have computed alone.

The reference is transformers' own model and processor, one sample at a time (support/stock.py).
`pytest -s` prints the largest errors beside the noise that the unpacked run has by itself.
"""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from support.engines import make_engine
from support.runs import (
    GRADIENT_TOLERANCE,
    GROUPS,
    LOSS_TOLERANCE,
    find_differences,
    gradient_errors,
    group_of,
    loss_errors,
    pack,
    relative_l2,
    run_batch,
    split_by_sample,
    starts_of,
)
from support.shards import TINY_MODEL
from support.stock import StockProcessor, run_one_by_one, run_padded

from vlmpack.encode import Encoder
from vlmpack.packing import pad_batch_sequences

ALIGNMENTS = (1, 4, 8, 16)


def orders(count, how_many):
    """As given, reversed, then random permutations."""
    draw = random.Random(0)
    found = [list(range(count)), list(range(count))[::-1]]
    while len(found) < how_many:
        found.append(draw.sample(range(count), count))
    return found[:how_many]


@pytest.fixture(scope="module")
def unpacked_noise(stock_model, tiny_folder, mixed, reference):
    """The stock model on the same samples as one right-padded batch."""
    processor = StockProcessor(tiny_folder)
    inputs = {sample.key: processor(sample) for sample in mixed}
    return run_padded(stock_model, inputs, pad_token_id=processor.tokenizer.pad_token_id)


@pytest.fixture(scope="module")
def table():
    """Rows of (run, largest loss error, largest gradient error); printed at the end."""
    rows = {}
    yield rows
    print(f"\n{'run':<44}{'loss':>12}{'gradient':>12}")
    print(f"{'(bound)':<44}{LOSS_TOLERANCE:>12.1e}{GRADIENT_TOLERANCE:>12.1e}")
    for name, (loss, gradient) in rows.items():
        print(f"{name:<44}{loss:>12.1e}{gradient:>12.1e}")


def record(table, name, run, reference):
    table[name] = (
        max(loss_errors(run, reference).values()),
        max(gradient_errors(run, reference).values()),
    )


def test_the_reference_covers_every_image_count_and_every_group(mixed, reference):
    assert [len(sample.images) for sample in mixed] == [2, 0, 1, 3, 0, 1]
    assert len({len(losses) for losses in reference.losses.values()}) > 3
    lengths = reference.lengths.values()
    for alignment in ALIGNMENTS[1:]:
        assert any(length % alignment for length in lengths), "no gap would be tested"
    norms = {group: [] for group in GROUPS}
    for name, gradient in reference.gradients.items():
        norms[group_of(name)].append(float(gradient.norm()))
    for group, values in norms.items():
        assert len(values) > 4, group
        assert min(values) > 0, group


def test_the_unpacked_run_has_noise_of_its_own(unpacked_noise, reference, table):
    record(table, "unpacked: padded against one by one", unpacked_noise, reference)
    loss, gradient = table["unpacked: padded against one by one"]
    assert find_differences(unpacked_noise, reference) == []
    assert 0 < gradient < GRADIENT_TOLERANCE
    assert loss < LOSS_TOLERANCE


@pytest.mark.cases(quick=("4-no-tail", "8-tail"), slow="16-tail")
@pytest.mark.parametrize("tail", [False, True], ids=["no-tail", "tail"])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_packed_equals_unpacked(vlm, encoded, reference, table, alignment, tail):
    total = 112 if tail else 1
    batch = pack(encoded, alignment=alignment, total=total)
    assert (len(batch.segment_lengths) > len(encoded)) == tail
    run = run_batch(vlm, batch)
    record(table, f"packed, alignment {alignment}{', tail' * tail}", run, reference)
    assert find_differences(run, reference) == []


@pytest.mark.cases(quick="*3, 5, 0*")
@pytest.mark.parametrize("order", orders(6, 5)[1:], ids=str)
def test_order_in_the_row_changes_nothing(vlm, encoded, reference, table, order):
    run = run_batch(vlm, pack([encoded[index] for index in order], alignment=8))
    record(table, f"packed, alignment 8, order {order}", run, reference)
    assert find_differences(run, reference) == []


@pytest.mark.cases(slow="8-tail")
@pytest.mark.slow
@pytest.mark.parametrize("total", [1, 128], ids=["no-tail", "tail"])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_every_alignment_in_many_orders(vlm, encoded, reference, alignment, total):
    for order in orders(6, 24):
        batch = pack([encoded[index] for index in order], alignment=alignment, total=total)
        assert find_differences(run_batch(vlm, batch), reference) == [], order


def test_padded_mode_equals_unpacked(vlm, encoded, reference, table):
    batch = pad_batch_sequences(encoded, pad_token_id=561, pad_to_multiple_of=8)
    run = run_batch(vlm, batch)
    record(table, "mode none (padded rows)", run, reference)
    assert find_differences(run, reference) == []


def test_activation_checkpointing_changes_nothing(tiny_folder, encoder, encoded, reference, table):
    engine = make_engine(tiny_folder, encoder, activation_checkpointing="full")
    engine.vlm.train()
    recomputed = 0

    def count(*_):
        nonlocal recomputed
        recomputed += 1

    engine.vlm.language.layers[0].self_attn.register_forward_hook(count)
    run = run_batch(engine.vlm, pack(encoded, alignment=8))
    assert recomputed == 2, "the layer ran once: nothing was checkpointed"
    record(table, "packed, activation checkpointing", run, reference)
    assert find_differences(run, reference) == []


def test_loss_on_all_tokens_equals_unpacked(vlm, stock_model, mixed):
    processor = StockProcessor(TINY_MODEL, loss_on="all")
    theirs = run_one_by_one(stock_model, {sample.key: processor(sample) for sample in mixed})
    encoder = Encoder(TINY_MODEL).replace(loss_on="all")
    batch = pack([encoder.encode(sample.cooked()) for sample in mixed], alignment=4)
    assert find_differences(run_batch(vlm, batch), theirs) == []


def test_each_sample_alone_has_its_own_gradient_inside_a_row(vlm, stock_model, mixed, encoded):
    """Row-wide sums could hide errors that cancel: differentiate one sample's loss at a time."""
    processor = StockProcessor(TINY_MODEL)
    batch = pack(encoded, alignment=8)
    for sample in mixed[:4]:
        theirs = run_one_by_one(stock_model, {sample.key: processor(sample)})
        vlm.zero_grad(set_to_none=True)
        losses = split_by_sample(batch, vlm(batch, batch.packed_seq_params()))[sample.key]
        losses.mean().backward()
        for name, parameter in vlm.model.named_parameters():
            error = relative_l2(parameter.grad, theirs.gradients[name])
            assert error <= GRADIENT_TOLERANCE, (sample.key, name, error)


@pytest.mark.slow
def test_bfloat16_packing_stays_within_bfloat16_noise(tiny_folder, encoded, reference):
    """Autocast rounds to 8 bits: 2e-2 is five of its roundings."""
    engine = make_engine(tiny_folder, Encoder(tiny_folder))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = run_batch(engine.vlm.train(), pack(encoded, alignment=8))
    errors = loss_errors(run, reference)
    assert 0 < max(errors.values()) < 2e-2


def test_boundaries_are_those_of_the_samples(encoded, reference):
    batch = pack(encoded, alignment=8, total=128)
    lengths = [reference.lengths[key] for key in batch.keys]
    padded = [-(-length // 8) * 8 for length in lengths]
    tail = -sum(padded) % 128
    assert tail > 0
    assert batch.cu_seqlens.tolist() == [0, *accumulate([*lengths, tail])]
    assert batch.cu_seqlens_padded.tolist() == [0, *accumulate([*padded, tail])]
    assert batch.segment_lengths == (*padded, tail)
    assert batch.max_seqlen == max(*padded, tail)


def test_ids_labels_and_pixels_are_those_of_the_stock_processor(encoded, mixed, tiny_folder):
    processor = StockProcessor(tiny_folder)
    for ours, sample in zip(encoded, mixed, strict=True):
        theirs = processor(sample)
        assert torch.equal(ours.input_ids, theirs.input_ids[0])
        assert torch.equal(ours.labels[:-1], theirs.labels[0, 1:])
        assert (ours.media is None) == (theirs.pixel_values is None)
        if ours.media is not None:
            assert torch.equal(ours.media.pixel_values, theirs.pixel_values)
            assert list(map(list, ours.media.grid_thw)) == theirs.image_grid_thw.tolist()
            assert torch.equal(ours.media_positions, theirs.mm_token_type_ids[0].nonzero()[:, 0])


def test_starts_of_the_helper_agree_with_the_batch(encoded):
    batch = pack(encoded, alignment=8, total=128)
    assert starts_of(batch) == batch.cu_seqlens_padded.tolist()[: len(encoded)]
