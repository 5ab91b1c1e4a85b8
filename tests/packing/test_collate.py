"""pack_batch_sequences and pad_batch_sequences: the layout, and every refusal."""

from __future__ import annotations

import pickle
import random
from dataclasses import FrozenInstanceError, replace
from itertools import accumulate

import pytest
import torch
from support.samples import image_sample, text_sample

from vlmpack.errors import PackingError, VlmpackError
from vlmpack.packing import (
    IGNORE_INDEX,
    PackCollator,
    PadCollator,
    move_batch,
    pack_batch_sequences,
    pad_batch_sequences,
)

PAD = 0


def test_the_row_of_the_docstring():
    a, b = text_sample("a", [5, 6, 7], num_targets=2), text_sample("b", [8, 9])
    batch = pack_batch_sequences([a, b], pad_to_multiple_of=4, pad_token_id=PAD)
    assert batch.input_ids.tolist() == [[5, 6, 7, PAD, 8, 9, PAD, PAD]]
    assert batch.labels.tolist() == [[6, 7, -100, -100, 9, -100, -100, -100]]
    assert batch.position_ids.tolist() == [[[0, 1, 2, 0, 0, 1, 0, 0]]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.cu_seqlens_padded.tolist() == [0, 4, 8]
    assert batch.segment_lengths == (4, 4)
    assert batch.label_positions.tolist() == [0, 1, 4]
    assert (batch.keys, batch.lengths) == (("a", "b"), (3, 2))
    assert (batch.num_tokens, batch.num_slots, batch.num_label_tokens) == (5, 8, 3)


def test_dtypes_and_host_integers():
    batch = pack_batch_sequences(
        [text_sample("a", [1, 2, 3], axes=3)], pad_to_multiple_of=4, pad_token_id=PAD
    )
    assert batch.cu_seqlens.dtype == batch.cu_seqlens_padded.dtype == torch.int32
    for name in ("input_ids", "labels", "position_ids", "label_positions", "media_positions"):
        assert getattr(batch, name).dtype == torch.int64, name
    assert batch.loss_mask.dtype == torch.bool
    assert type(batch.max_seqlen) is int
    params = batch.packed_seq_params()
    assert params.qkv_format == "thd"
    assert type(params.max_seqlen_q) is int
    assert all(type(n) is int for n in params.segment_lengths)


def test_padded_boundaries_exist_only_where_they_differ():
    samples = [text_sample("a", range(8)), text_sample("b", range(16))]
    exact = pack_batch_sequences(samples, pad_to_multiple_of=8, pad_token_id=PAD)
    assert exact.cu_seqlens_padded is None
    assert exact.packed_seq_params().cu_seqlens_q_padded is None
    assert exact.packed_seq_params().cu_seqlens_physical is exact.cu_seqlens
    gapped = pack_batch_sequences(samples, pad_to_multiple_of=16, pad_token_id=PAD)
    params = gapped.packed_seq_params()
    assert params.cu_seqlens_physical.tolist() == [0, 16, 32]
    assert params.cu_seqlens_kv_padded.tolist() == [0, 16, 32]


def test_a_total_multiple_is_met_by_a_tail_segment_of_its_own():
    samples = [text_sample("a", range(5)), text_sample("b", range(3))]
    batch = pack_batch_sequences(
        samples, pad_to_multiple_of=2, pad_token_id=PAD, total_multiple_of=16
    )
    assert batch.segment_lengths == (6, 4, 6)
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 14]
    assert batch.cu_seqlens_padded.tolist() == [0, 6, 10, 16]
    assert batch.max_seqlen == 6, "the fill must not stretch the last real segment"
    assert batch.keys == ("a", "b")
    assert not batch.loss_mask[0, 10:].any()


def test_a_row_that_fits_has_no_tail_segment():
    samples = [text_sample("a", range(5)), text_sample("b", range(3))]
    batch = pack_batch_sequences(samples, pad_token_id=PAD, total_multiple_of=4)
    assert batch.segment_lengths == (5, 3)
    assert batch.cu_seqlens_padded is None


@pytest.mark.parametrize("alignment", [1, 2, 4, 8, 16])
def test_every_length_up_to_three_alignments(alignment):
    draw = random.Random(alignment)
    lengths = list(range(1, 3 * alignment + 1))
    draw.shuffle(lengths)
    samples = [
        text_sample(f"s{n}", draw.choices(range(100), k=n), num_targets=draw.randint(0, n))
        for n in lengths
    ]
    total = draw.choice([1, 4 * alignment])
    batch = pack_batch_sequences(
        samples, pad_to_multiple_of=alignment, pad_token_id=PAD, total_multiple_of=total
    )
    assert all(n % alignment == 0 for n in batch.segment_lengths)
    assert batch.num_slots == sum(batch.segment_lengths)
    assert batch.num_slots % total == 0
    assert batch.num_slots < sum(lengths) + alignment * len(lengths) + total
    assert torch.equal(batch.loss_mask, batch.labels != IGNORE_INDEX)
    assert torch.equal(batch.label_positions, batch.loss_mask[0].nonzero()[:, 0])
    physical = batch.cu_seqlens_padded if batch.cu_seqlens_padded is not None else batch.cu_seqlens
    assert physical.tolist() == [0, *accumulate(batch.segment_lengths)]
    assert (batch.cu_seqlens >= 0).all(), "no sentinels"
    for sample, start in zip(samples, physical.tolist(), strict=False):
        here = slice(start, start + sample.length)
        assert torch.equal(batch.input_ids[0, here], sample.input_ids)
        assert torch.equal(batch.labels[0, here], sample.labels)
        assert torch.equal(batch.position_ids[:, 0, here], sample.position_ids)
    assert batch.num_label_tokens == sum(int((s.labels != -100).sum()) for s in samples)


def test_no_target_crosses_a_border():
    samples = [text_sample(f"s{i}", [10 * i + 1, 10 * i + 2], num_targets=1) for i in range(4)]
    batch = pack_batch_sequences(samples, pad_token_id=PAD)
    for position in batch.label_positions.tolist():
        assert batch.labels[0, position] == batch.input_ids[0, position + 1]
        assert batch.labels[0, position] // 10 == batch.input_ids[0, position] // 10
    assert batch.num_label_tokens == 4


def test_a_real_token_equal_to_the_pad_token_is_kept():
    sample = text_sample("a", [PAD, 5, PAD, PAD])
    batch = pack_batch_sequences([sample, sample], pad_to_multiple_of=1, pad_token_id=PAD)
    assert batch.lengths == (4, 4)
    assert batch.input_ids.tolist() == [[PAD, 5, PAD, PAD] * 2]
    assert batch.labels[0, 2] == PAD, "a target equal to the pad token is a target"


def test_media_stay_in_sample_order_and_point_into_the_row():
    samples = [
        image_sample("one"),
        text_sample("text", [1, 2, 3], axes=3),
        image_sample("other", grid=(1, 2, 4)),
    ]
    batch = pack_batch_sequences(samples, pad_to_multiple_of=4, pad_token_id=PAD)
    assert batch.media.grid_thw == ((1, 4, 4), (1, 2, 4))
    assert batch.media.num_tokens == (4, 2)
    assert batch.media.pixel_values[:, 0].tolist() == [3.0] * 16 + [5.0] * 8
    assert batch.media_positions.tolist() == [0, 1, 2, 3, 12, 13]
    assert (batch.input_ids[0, batch.media_positions] == 9).all()
    assert batch.media.num_images == 2


def test_a_row_of_text_has_no_media():
    batch = pack_batch_sequences([text_sample("a", [1, 2])], pad_token_id=PAD)
    assert batch.media is None
    assert batch.media_positions.shape == (0,)


def refused(sample, **kwargs):
    with pytest.raises(PackingError) as caught:
        pack_batch_sequences([sample], pad_token_id=PAD, **kwargs)
    with pytest.raises(PackingError):
        pad_batch_sequences([sample], pad_token_id=PAD)
    return str(caught.value)


def test_an_empty_list_is_refused():
    with pytest.raises(PackingError, match="nothing to pack: the list of samples is empty"):
        pack_batch_sequences([], pad_token_id=PAD)
    with pytest.raises(PackingError, match="nothing to pad: the list of samples is empty"):
        pad_batch_sequences([], pad_token_id=PAD)


def test_a_sample_without_tokens_is_refused():
    empty = replace(
        text_sample("hollow", [1]),
        input_ids=torch.empty(0, dtype=torch.int64),
        labels=torch.empty(0, dtype=torch.int64),
        position_ids=torch.empty(1, 0, dtype=torch.int64),
    )
    message = refused(empty)
    assert "'hollow'" in message
    assert "s >= 1" in message


def test_ids_with_a_batch_dimension_are_refused():
    message = refused(replace(text_sample("flat", [1, 2]), input_ids=torch.ones(1, 2).long()))
    assert "(s,)" in message
    assert "(1, 2)" in message


def test_labels_or_positions_of_another_length_are_refused():
    sample = text_sample("odd", [1, 2, 3])
    assert "3 input_ids, but labels have shape (2,)" in refused(
        replace(sample, labels=sample.labels[:2])
    )
    assert "position_ids (1, 2)" in refused(
        replace(sample, position_ids=sample.position_ids[:, :2])
    )


def test_labels_that_were_not_shifted_are_refused():
    sample = text_sample("raw", [1, 2, 3])
    message = refused(replace(sample, labels=sample.input_ids))
    assert "'raw'" in message
    assert "Shift the labels inside the sample" in message
    assert "last label is 3" in message


def test_placeholders_that_do_not_match_the_images_are_refused():
    sample = image_sample("cut")
    message = refused(replace(sample, media_positions=torch.arange(3)))
    assert "'cut': 3 placeholder tokens, but its images need 4" in message
    text = replace(text_sample("none", [9, 1]), media_positions=torch.tensor([0]))
    assert "1 placeholder tokens, but its images need 0" in refused(text)


def test_pixels_that_do_not_match_the_grids_are_refused():
    sample = image_sample("short")
    media = replace(sample.media, pixel_values=sample.media.pixel_values[:12])
    message = refused(replace(sample, media=media))
    assert "hold 12 patches of 1 images, but the 1 grids sum to 16" in message


def test_a_total_that_the_segment_multiple_does_not_divide_is_refused():
    with pytest.raises(PackingError, match="total_multiple_of=6 is not a multiple of"):
        pack_batch_sequences(
            [text_sample("a", [1, 2])], pad_token_id=PAD, pad_to_multiple_of=4, total_multiple_of=6
        )


def test_packing_errors_are_user_errors_and_value_errors():
    assert issubclass(PackingError, VlmpackError)
    assert issubclass(PackingError, ValueError)


def test_padded_rows():
    samples = [text_sample("a", [5, 6, 7], num_targets=2, axes=3), image_sample("img")]
    batch = pad_batch_sequences(samples, pad_token_id=PAD, pad_to_multiple_of=4)
    assert batch.input_ids.shape == (2, 8)
    assert batch.position_ids.shape == (3, 2, 8)
    assert batch.input_ids[0].tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert batch.labels[0].tolist() == [6, 7] + [-100] * 6
    assert torch.equal(batch.loss_mask, batch.labels != IGNORE_INDEX)
    assert batch.media_positions.tolist() == [8, 9, 10, 11]
    assert torch.equal(batch.label_positions, batch.loss_mask.flatten().nonzero()[:, 0])
    assert batch.packed_seq_params() is None
    assert (batch.num_tokens, batch.num_slots) == (10, 16)


@pytest.mark.parametrize("axes", [1, 3])
def test_an_empty_bin_is_a_row_without_labels(axes):
    collate = PackCollator(
        pad_token_id=PAD, num_position_axes=axes, pad_to_multiple_of=4, total_multiple_of=8
    )
    for batch in (collate([]), collate.empty()):
        assert batch.num_slots == 8
        assert batch.num_label_tokens == batch.num_tokens == 0
        assert batch.keys == batch.lengths == ()
        assert batch.position_ids.shape == (axes, 1, 8)
        assert not batch.loss_mask.any()
        assert batch.packed_seq_params().segment_lengths == (8,)
    pad = PadCollator(pad_token_id=PAD, num_position_axes=axes, pad_to_multiple_of=4)
    for batch in (pad([]), pad.empty()):
        assert batch.input_ids.shape == (1, 4)
        assert batch.num_label_tokens == 0


def test_the_collators_pass_their_multiples_on():
    samples = [text_sample("a", [1, 2, 3])]
    pack = PackCollator(
        pad_token_id=7, num_position_axes=1, pad_to_multiple_of=2, total_multiple_of=8
    )
    assert pack(samples).segment_lengths == (4, 4)
    assert pack(samples).input_ids[0, 3:].tolist() == [7] * 5
    pad = PadCollator(pad_token_id=7, num_position_axes=1, pad_to_multiple_of=8)
    assert pad(samples).input_ids.shape == (1, 8)


def test_batches_are_frozen_and_cross_process_borders():
    batch = pack_batch_sequences([image_sample("a")], pad_token_id=PAD)
    with pytest.raises(FrozenInstanceError):
        batch.input_ids = None
    copy = pickle.loads(pickle.dumps(batch))
    assert torch.equal(copy.input_ids, batch.input_ids)
    assert copy.media.grid_thw == batch.media.grid_thw


def test_moving_touches_every_tensor_and_nothing_else():
    batch = pack_batch_sequences([image_sample("a")], pad_token_id=PAD, pad_to_multiple_of=4)
    assert move_batch(batch, torch.device("cpu")) is batch
    moved = move_batch(batch, torch.device("meta"))
    tensors = ("input_ids", "labels", "loss_mask", "position_ids", "cu_seqlens")
    tensors += ("cu_seqlens_padded", "label_positions", "media_positions")
    for name in tensors:
        assert getattr(moved, name).device.type == "meta", name
    assert moved.media.pixel_values.device.type == "meta"
    assert moved.segment_lengths == batch.segment_lengths
    assert moved.keys == batch.keys


def test_packing_never_touches_the_global_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    pack_batch_sequences([image_sample("a")], pad_token_id=PAD, pad_to_multiple_of=4)
    assert torch.equal(torch.get_rng_state(), before)
