"""Rows with shared prefixes pass every check, and each way to break one fails."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from support.pairs import write_pairs
from support.recipes import run_settings, write_recipe
from support.shards import TINY_MODEL
from support.shared import collators, encoded_pairs, pairs_about_one_image, questions

from vlmpack.alignment import Alignment
from vlmpack.encode import Encoder
from vlmpack.packing.pairs import sequences_of
from vlmpack.proof.rows.checks import check_row
from vlmpack.proof.rows.opening import Wanted, open_row
from vlmpack.proof.rows.row import Row, RowRules, without_prefixes
from vlmpack.proof.rows.view import RowView, view_first, view_samples
from vlmpack.report.inspect.page import render_page, totals


@pytest.fixture(scope="module")
def encoders():
    return Encoder(TINY_MODEL).replace(share_prefix=True), Encoder(TINY_MODEL).replace(
        pairs=True, share_prefix=True
    )


@pytest.fixture(scope="module", params=["questions", "pairs"])
def samples(request, encoders):
    if request.param == "pairs":
        return encoded_pairs(encoders[1], pairs_about_one_image())
    return [encoders[0].encode(raw.cooked()) for raw in questions()]


def row_of(batch, samples, encoder, multiple):
    alone = tuple(part for sample in samples for part in sequences_of(sample))
    return Row(
        batch=batch,
        alone=alone,
        rules=RowRules(
            context=1,
            multiples=Alignment(multiple, 1),
            placeholder_ids=encoder.placeholder_ids,
            pad_token_id=561,
        ),
        planned=batch.keys,
        positions=tuple(item.position_ids for item in alone),
        sequences=len(sequences_of(samples[0])),
    )


def faults(row):
    return {check.name for check in check_row(row) if check.status != "pass"}


@pytest.mark.parametrize("multiple", [1, 8])
def test_a_shared_row_is_its_samples(multiple, samples, encoders):
    batch = collators(encoders[0], multiple)[0](samples)
    row = row_of(batch, samples, encoders[0], multiple)
    checks = {check.name: check for check in check_row(row)}
    assert faults(row) == set()
    assert f"{batch.num_shared_tokens:,} tokens not repeated" in checks["shared prefixes"].detail
    plain = without_prefixes(row).batch
    assert plain.prefix_tree is None
    apart = collators(encoders[0], multiple)[1](samples)
    assert plain.num_slots == apart.num_slots
    # As trained, and beside it with nothing shared: the slots of the row that nobody unfolded.
    held, alone = sum(batch.segment_tokens), sum(item.length for item in samples)
    assert held < alone
    assert checks["padding"].detail == (
        f"{batch.num_slots - held:,} of {batch.num_slots:,} slots, all of them the fill token "
        f"without loss; with nothing shared {apart.num_slots - alone:,} of {apart.num_slots:,} "
        "slots"
    )
    detail = checks["boundaries"].detail
    assert f"{batch.cu_seqlens.numel()} of them over {batch.num_slots:,} slots, as the" in detail
    assert f"{apart.cu_seqlens.numel()} of them over {apart.num_slots:,} slots" in detail
    detail = checks["pixels in order"].detail
    assert detail.startswith(f"{batch.media.num_images} image")
    assert f"in {batch.media_positions.numel():,} placeholders; with nothing shared" in detail
    assert detail.endswith(f"in {apart.media_positions.numel():,} placeholders")


def test_a_row_that_shares_nothing_says_one_number(samples, encoders):
    batch = collators(encoders[0], 8)[1](samples)
    checks = check_row(row_of(batch, samples, encoders[0], 8))
    assert len(checks) >= 6
    assert not [check for check in checks if check.fails or "nothing shared" in check.detail]


def changed(tensor, place, value):
    copy = tensor.clone()
    assert int(copy[place]) != value
    copy[place] = value
    return copy


def test_what_is_wrong_in_one_is_found(samples, encoders):
    batch = collators(encoders[0], 8)[0](samples)
    starts = [*accumulate(batch.segment_lengths, initial=0)]
    own = batch.prefix_tree.ends[0]
    fork, shared = starts[own], starts[batch.prefix_tree.parents[own]]

    def found(**fields):
        return faults(row_of(replace(batch, **fields), samples, encoders[0], 8))

    assert "samples" in found(input_ids=changed(batch.input_ids, (0, fork), 7))
    assert "samples" in found(input_ids=changed(batch.input_ids, (0, shared), 7))
    assert "positions" in found(position_ids=changed(batch.position_ids, (0, 0, fork), 0))
    labels = changed(batch.labels, (0, shared), int(batch.input_ids[0, shared + 1]))
    mask = labels != -100
    learnt = {"labels": labels, "loss_mask": mask, "label_positions": mask[0].nonzero()[:, 0]}
    assert {"shared prefixes", "labels and loss mask"} <= found(**learnt)
    apart = replace(batch.prefix_tree, parents=(-1,) * len(batch.prefix_tree.parents))
    assert "shared prefixes" in found(prefix_tree=apart)
    ends = (batch.prefix_tree.ends[1], batch.prefix_tree.ends[0], *batch.prefix_tree.ends[2:])
    assert faults(
        row_of(
            replace(batch, prefix_tree=replace(batch.prefix_tree, ends=ends)),
            samples,
            encoders[0],
            8,
        )
    )
    pixels = replace(batch.media, pixel_values=batch.media.pixel_values.flip(0))
    assert found(media=pixels) == {"pixels in order"}
    gap = starts[own] + batch.prefix_tree.lengths[own]
    if gap < starts[own + 1]:
        broken = found(input_ids=changed(batch.input_ids, (0, gap), 7))
        assert broken == {"shared prefixes", "padding"}


def test_what_is_shared_is_shown_as_a_stretch_of_its_own(samples, encoders):
    batch = collators(encoders[0])[0](samples)
    views = tuple(view_samples(batch, encoders[0]))
    assert [view.num_tokens for view in views] == list(batch.segment_tokens)
    assert views[0].shared_by > 1
    assert views[0].name == f"{batch.keys[0]} and {views[0].shared_by - 1} more"
    assert views[0].media is not None
    assert views[0].num_labels == 0
    assert sum(view.num_labels for view in views) == batch.num_label_tokens
    lines = [*RowView("row", views, (), *batch.input_ids.shape).lines()]
    count = f"{len(samples)} pairs" if batch.num_pairs else f"{len(samples)} samples"
    assert lines[0].startswith(f"row: {count}, {batch.num_slots} tokens")
    whole = view_first(batch, encoders[0])
    alone = collators(encoders[0])[1](samples)
    first = next(view_samples(alone, encoders[0]))
    assert whole.num_tokens == first.num_tokens == batch.lengths[0]
    assert whole.lines() == first.lines()
    assert whole.num_labels == first.num_labels


def test_inspect_shows_and_checks_a_shared_row(tmp_path):
    shard = write_pairs(tmp_path / "pairs.tar", pairs_about_one_image())
    settings = run_settings(
        tmp_path,
        data__train=str(shard),
        data__index_dir=str(tmp_path / "i"),
        objective__name="dpo",
        packing__share_prefix=True,
        training__micro_batch_size=4,
    )
    recipe = write_recipe(tmp_path / "recipe.yaml", settings)
    row, _, encoder = open_row(recipe, Wanted(row=0))
    assert row.batch.num_shared_tokens > 0
    assert faults(row) == set()
    shared = [segment for segment in row.segments if segment.sample and segment.sample.shared_by]
    assert len(shared) >= 4
    assert sum(segment.length for segment in row.segments) == row.num_slots
    shown, alone = totals(row), sum(item.length for item in row.alone)
    assert row.batch.num_slots + row.batch.num_shared_tokens == alone
    assert shown["tokens"] == (
        f"{row.num_slots:,} in {row.num_slots:,} slots ({alone:,} in {alone:,} with nothing shared)"
    )
    assert shown["pairs"] == str(len(row.batch.keys))
    page = render_page(row, check_row(row), encoder, "recipe")
    assert f"{row.batch.num_shared_tokens:,} tokens, " in page
    assert f"{len(row.batch.keys)} pairs in {row.num_slots} slots, to scale" in page
    assert f"{shared[0].name}" in page
