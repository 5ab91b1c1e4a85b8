"""pack_padded_batch: the same row as pack_batch_sequences, and every input that must be refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.samples import text_sample

from vlmpack.errors import PackingError
from vlmpack.packing import IGNORE_INDEX, pack_batch_sequences, pack_padded_batch

PAD = 99
ROWS = ([5, PAD, 7], [8, 9, 10, 11, PAD], [12, 13])
"""Real tokens equal to the pad id inside the text and at its end."""


def padded(rows=ROWS, width=6, axes=None):
    """Arguments of a right-padded batch; the padding holds the pad id and an ignored label."""
    samples = [text_sample(f"row-{i}", row, num_targets=2) for i, row in enumerate(rows)]

    def fill(pieces, value):
        out = torch.full((len(pieces), width), value)
        for row, piece in enumerate(pieces):
            out[row, : len(piece)] = piece
        return out

    tokens = fill([s.input_ids for s in samples], PAD)
    labels = fill([s.labels for s in samples], IGNORE_INDEX)
    positions = fill([s.position_ids[0] for s in samples], 0)
    if axes is not None:
        positions = positions.expand(axes, -1, -1)
    mask = fill([torch.ones(len(row), dtype=torch.int64) for row in rows], 0)
    arguments = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": (labels != IGNORE_INDEX).float(),
        "attention_mask": None,
        "position_ids": positions,
    }
    return arguments, mask, torch.tensor([len(row) for row in rows]), samples


def assert_same(batch, expected):
    for name in ("input_ids", "labels", "loss_mask", "cu_seqlens", "label_positions"):
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name
    assert torch.equal(batch.position_ids[:1], expected.position_ids)
    if expected.cu_seqlens_padded is None:
        assert batch.cu_seqlens_padded is None
    else:
        assert torch.equal(batch.cu_seqlens_padded, expected.cu_seqlens_padded)
    assert batch.segment_lengths == expected.segment_lengths
    assert batch.lengths == expected.lengths
    assert batch.keys == expected.keys


@pytest.mark.parametrize("alignment", [1, 2, 4, 8])
@pytest.mark.parametrize("given", ["lengths", "attention_mask", "padding_mask", "lengths and mask"])
def test_equals_packing_the_same_rows(given, alignment):
    arguments, mask, lengths, samples = padded()
    extra = {
        "lengths": {"lengths": lengths},
        "attention_mask": {"attention_mask": mask},
        "padding_mask": {"padding_mask": mask},
        "lengths and mask": {"lengths": lengths, "attention_mask": mask.bool()},
    }[given]
    batch = pack_padded_batch(**(arguments | extra), pad_token_id=PAD, pad_to_multiple_of=alignment)
    expected = pack_batch_sequences(samples, pad_to_multiple_of=alignment, pad_token_id=PAD)
    assert_same(batch, expected)


@pytest.mark.parametrize("alignment", [1, 4])
def test_a_pipeline_stage_without_labels_packs_the_row_of_the_others(alignment):
    """First and middle stages have none, and must compute the same row as the last."""
    arguments, mask, _, _ = padded()
    arguments |= {"padding_mask": mask}
    options = {"pad_token_id": PAD, "pad_to_multiple_of": alignment}
    last = pack_padded_batch(**arguments, **options)
    middle = pack_padded_batch(**(arguments | {"labels": None, "loss_mask": None}), **options)
    assert last.num_label_tokens > 0 == middle.num_label_tokens
    assert (middle.labels == IGNORE_INDEX).all() and middle.labels.shape == last.labels.shape
    assert not middle.loss_mask.any()
    stripped = replace(
        last,
        labels=middle.labels,
        loss_mask=middle.loss_mask,
        label_positions=last.label_positions[:0],
    )
    assert_same(middle, stripped)
    assert torch.equal(middle.position_ids, last.position_ids)


def test_tokens_equal_to_the_pad_id_are_kept():
    arguments, mask, _, _ = padded()
    batch = pack_padded_batch(**(arguments | {"attention_mask": mask}), pad_token_id=PAD)
    assert batch.input_ids[0].tolist() == [token for row in ROWS for token in row]
    assert batch.lengths == (3, 5, 2)
    assert PAD in batch.labels[0].tolist(), "a target equal to the pad id stays a target"


def test_three_position_axes_are_carried():
    arguments, mask, _, samples = padded(axes=3)
    batch = pack_padded_batch(**(arguments | {"attention_mask": mask}), pad_token_id=PAD)
    assert batch.position_ids.shape == (3, 1, 10)
    assert_same(batch, pack_batch_sequences(samples, pad_token_id=PAD))


def test_the_loss_mask_is_the_only_truth_about_loss():
    arguments, mask, _, _ = padded()
    arguments["labels"] = torch.full_like(arguments["labels"], 3)  # labels where there is no loss
    batch = pack_padded_batch(**(arguments | {"attention_mask": mask}), pad_token_id=PAD)
    assert batch.num_label_tokens == int(arguments["loss_mask"].sum()) > 0
    assert torch.equal(batch.loss_mask, batch.labels != IGNORE_INDEX)


def test_a_row_of_one_token_and_a_full_row_are_packed():
    arguments, mask, _, samples = padded(rows=([1], [1, 2, 3, 4, 5, 6]))
    batch = pack_padded_batch(**(arguments | {"attention_mask": mask}), pad_token_id=PAD)
    assert_same(batch, pack_batch_sequences(samples, pad_token_id=PAD))


def broken(**changes):
    arguments, mask, lengths, _ = padded()
    arguments["attention_mask"] = mask
    for name, value in changes.items():
        arguments[name] = value({**arguments, "lengths": lengths}) if callable(value) else value
    return arguments


def edited(name, *places):
    def change(arguments):
        value = arguments[name].clone()
        for row, column, new in places:
            value[row, column] = new
        return value

    return change


REFUSED = {
    "left padding": (
        {"attention_mask": edited("attention_mask", (0, 0, 0), (0, 3, 1))},
        "row 0: attention_mask padded at the left",
    ),
    "a hole": (
        {"attention_mask": edited("attention_mask", (1, 2, 0))},
        "row 1: attention_mask has a hole",
    ),
    "an empty row": (
        {"attention_mask": edited("attention_mask", (2, 0, 0), (2, 1, 0))},
        "row 2: attention_mask marks no real token",
    ),
    "a 4-D mask": (
        {"attention_mask": torch.ones(3, 1, 6, 6)},
        r"attention_mask has shape \(3, 1, 6, 6\).*4-D",
    ),
    "a mask of another width": (
        {"attention_mask": torch.ones(3, 5)},
        r"attention_mask has shape \(3, 5\), expected \(3, 6\)",
    ),
    "a mask with other numbers": (
        {"attention_mask": edited("attention_mask", (1, 1, 2))},
        "must hold only 0 and 1",
    ),
    "an indexed mask": (
        {"attention_mask": lambda a: a["attention_mask"] * torch.tensor([[1], [2], [3]])},
        "must hold only 0 and 1",
    ),
    "both masks": ({"padding_mask": lambda a: a["attention_mask"]}, "not both"),
    "neither mask nor lengths": ({"attention_mask": None}, "never guessed from pad_token_id"),
    "lengths against the mask": (
        {"lengths": torch.tensor([3, 4, 2])},
        "row 1: lengths says 4 tokens, attention_mask says 5",
    ),
    "a length of zero": (
        {"attention_mask": None, "lengths": torch.tensor([3, 0, 2])},
        r"row 1: length 0 is not in 1\.\.6",
    ),
    "a length beyond the width": (
        {"attention_mask": None, "lengths": torch.tensor([3, 7, 2])},
        r"row 1: length 7 is not in 1\.\.6",
    ),
    "too few lengths": ({"lengths": torch.tensor([3, 5])}, r"expected \(3,\), one per row"),
    "loss on padding": (
        {
            "labels": edited("labels", (0, 4, 1)),
            "loss_mask": edited("loss_mask", (0, 4, 1.0)),
        },
        r"row 0: loss_mask is 1 on padding \(beyond 3 real tokens\)",
    ),
    "loss on an ignored label": (
        {"loss_mask": edited("loss_mask", (1, 0, 1.0))},
        "whose label is -100",
    ),
    "a weighted loss mask": (
        {"loss_mask": edited("loss_mask", (1, 2, 0.5))},
        "weights per token are not supported",
    ),
    "no rows": (
        {"tokens": torch.empty(0, 6, dtype=torch.int64)},
        r"tokens must be \(B, S\) with B, S >= 1",
    ),
    "flat tokens": ({"tokens": torch.ones(6, dtype=torch.int64)}, r"tokens must be \(B, S\)"),
    "labels of another shape": (
        {"labels": torch.ones(3, 5, dtype=torch.int64)},
        r"labels has shape \(3, 5\)",
    ),
    "a loss mask of another shape": ({"loss_mask": torch.ones(3, 5)}, "loss_mask has shape"),
    "labels without a loss mask": ({"loss_mask": None}, "labels without loss_mask: give both"),
    "a loss mask without labels": ({"labels": None}, "loss_mask without labels: give both"),
    "positions of another shape": (
        {"position_ids": torch.ones(3, 5, dtype=torch.int64)},
        "position_ids have shape",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, message = REFUSED[name]
    with pytest.raises(PackingError, match=message):
        pack_padded_batch(**broken(**changes), pad_token_id=PAD)


def test_the_unbroken_arguments_of_the_refusals_are_accepted():
    assert pack_padded_batch(**broken(), pad_token_id=PAD).num_tokens == 10


def test_a_target_of_the_last_real_token_stays_in_its_own_segment():
    """Megatron's tokens are text[:-1] and its labels text[1:]: the last token has a target too."""
    arguments, mask, _, _ = padded()
    labels = torch.where(mask == 1, arguments["tokens"] + 1000, IGNORE_INDEX)
    arguments |= {"labels": labels, "loss_mask": mask.float(), "attention_mask": mask}
    batch = pack_padded_batch(**arguments, pad_token_id=PAD, pad_to_multiple_of=4)
    at = batch.label_positions
    assert torch.equal(batch.labels[0, at], batch.input_ids[0, at] + 1000)
    assert batch.num_label_tokens == batch.num_tokens == 10
