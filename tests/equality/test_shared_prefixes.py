"""Rows whose samples share what they begin with compute what each sample computes alone.

The reference is the family's stock model, one sequence at a time, each with its own run of the
tower; in float32 within 1e-6 of its loss and 1e-5 of every gradient.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate

import pytest
import torch
from support.doubles import stock_double, stock_log_p, use_double
from support.engines import make_engine
from support.families import TEXT_FAMILIES, TINY, tiny_family_folder
from support.runs import find_differences, relative_l2
from support.shards import TINY_MODEL
from support.shared import (
    by_sequence,
    collators,
    encoded_pairs,
    pairs_about_one_image,
    questions,
    run_row,
    sequences,
)
from support.stock import StockProcessor, load_stock, run_one_by_one

from vlmpack.capabilities.served import SERVED
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError

QUICK = ("qwen3_vl",)
NAMED = ("qwen2_vl", "internvl", "llava_onevision")
SHARING = [name for name in TINY if name in SERVED and SERVED[name].unshared is None]
FAMILIES = [
    *QUICK,
    *(pytest.param(name, marks=pytest.mark.slow) for name in NAMED),
    *(
        pytest.param(name, marks=pytest.mark.soak)
        for name in SHARING
        if name not in (*QUICK, *NAMED)
    ),
]


class Case:
    """One family's rows, and what the stock model makes of their sequences."""

    def __init__(self, name, folder):
        self.encoder = Encoder(folder).replace(share_prefix=True)
        self.pair_encoder = Encoder(folder).replace(pairs=True, share_prefix=True)
        self.vlm = make_engine(folder, self.encoder).vlm.train()
        is_text = name in TEXT_FAMILIES
        raw = [each for each in questions() if not (is_text and each.images)]
        raw_pairs = [each for each in pairs_about_one_image() if not (is_text and each[0].images)]
        self.samples = {
            "questions": [self.encoder.encode(each.cooked()) for each in raw],
            "pairs": encoded_pairs(self.pair_encoder, raw_pairs),
        }
        stock, processor = load_stock(folder).train(), StockProcessor(folder)
        alone = {"questions": raw, "pairs": sequences(raw_pairs)}
        self.reference = {
            kind: run_one_by_one(stock, {each.key: processor(each) for each in members})
            for kind, members in alone.items()
        }

    def rows(self, kind, multiple=1):
        """(shared, separate)"""
        return tuple(make(self.samples[kind]) for make in collators(self.encoder, multiple))


@pytest.fixture(scope="module")
def case_of(tmp_path_factory):
    return cache(lambda name: Case(name, tiny_family_folder(name, tmp_path_factory.mktemp(name))))


@pytest.fixture(scope="module")
def case(case_of):
    return case_of(QUICK[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["questions", "pairs"])
@pytest.mark.parametrize("name", FAMILIES)
def test_shared_rows_compute_what_each_sequence_does_alone(name, kind, case_of):
    case = case_of(name)
    shared, separate = case.rows(kind, multiple=8)
    if name not in TEXT_FAMILIES or kind == "pairs":
        assert shared.prefix_tree is not None, "something is shared"
        assert shared.num_slots < separate.num_slots
    assert find_differences(run_row(case.vlm, shared), case.reference[kind]) == []


@pytest.mark.slow
def test_questions_about_one_image_are_the_stock_models_in_double(monkeypatch):
    """Five of them, and others beside: log p within 1e-11, every gradient within 1e-12."""
    use_double(monkeypatch.setattr)
    encoder = Encoder(TINY_MODEL).replace(share_prefix=True)
    samples = [encoder.encode(raw.cooked()) for raw in questions()]
    batch = collators(encoder, 8)[0](samples)
    assert batch.num_shared_tokens > 100
    stock = stock_double()
    alone = stock_log_p(stock, encoder, samples)
    (-alone.sum() / batch.num_label_tokens).backward()
    vlm = make_engine(TINY_MODEL, encoder).vlm.double()
    run = run_row(vlm, batch)
    for name, theirs in zip(run.losses, alone.detach(), strict=True):
        assert abs(float(run.losses[name].double().sum() + theirs)) < 1e-11
    for name, parameter in stock.named_parameters():
        if parameter.grad is not None:
            assert relative_l2(run.gradients[name], parameter.grad) < 1e-12, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [("qwen3_5_text", "carry state"), ("nemotron_h", "carry state"), ("gemma3", "both directions")],
)
def test_models_that_would_not_compute_it_refuse_a_row(name, words, tmp_path):
    folder = tiny_family_folder(name, tmp_path)
    encoder = Encoder(folder).replace(pairs=True, share_prefix=True)
    vlm = make_engine(folder, encoder).vlm
    text = [pair for pair in pairs_about_one_image() if not pair[0].images]
    batch = collators(encoder)[0](encoded_pairs(encoder, text))
    assert batch.prefix_tree is not None
    with pytest.raises(CapabilityError, match=f"{words}.*packing.share_prefix: false"):
        vlm(batch, batch.packed_seq_params())


def test_five_questions_an_image_save_at_least_half_of_tokens_and_of_the_tower(case):
    five = case.samples["questions"][:5]
    shared, separate = (make(five) for make in collators(case.encoder))
    assert shared.num_tokens == separate.num_tokens == sum(each.length for each in five)
    assert separate.num_tokens >= 2 * shared.num_slots
    assert shared.num_shared_tokens == separate.num_slots - shared.num_slots
    seen = []
    hook = case.vlm.vision.register_forward_pre_hook(
        lambda _module, args, given: seen.append(len((args or [*given.values()])[0])),
        with_kwargs=True,
    )
    with torch.no_grad():
        for batch in (shared, separate):
            case.vlm(batch, batch.packed_seq_params())
    hook.remove()
    patches = five[0].media.pixel_values.shape[0]
    assert seen == [patches, 5 * patches]
    assert shared.num_shared_patches == 4 * patches
    assert separate.num_shared_patches == separate.num_shared_tokens == 0


def log_p(vlm, batch):
    with torch.no_grad():
        losses = vlm(batch, batch.packed_seq_params())
    return {name: float(own.double().sum()) for name, own in by_sequence(batch, losses).items()}


def redrawn(batch, segment):
    """Other text in one segment, at unchanged lengths."""
    starts = [0, *accumulate(batch.segment_lengths)]
    ids, images = batch.input_ids.clone(), set(batch.media_positions.tolist())
    for slot in range(starts[segment], starts[segment] + batch.segment_tokens[segment]):
        if slot not in images:
            ids[0, slot] = (ids[0, slot] + 7) % 500
    return replace(batch, input_ids=ids)


@pytest.mark.cases(slow="questions")
@pytest.mark.parametrize("kind", ["questions", "pairs"])
def test_no_branch_sees_another(kind, case):
    """What changes in one leaves its siblings bit-equal; what changes in a shared stretch changes
    those behind it alone."""
    batch, _ = case.rows(kind)
    before = log_p(case.vlm, batch)
    for segment in range(len(batch.segment_tokens)):
        after = log_p(case.vlm, redrawn(batch, segment))
        moved = [place for place, name in enumerate(before) if after[name] != before[name]]
        behind = [
            place
            for place, segments in enumerate(batch.segments_of_sequences)
            if segment in segments
        ]
        assert moved == behind, segment


def test_gradients_are_those_of_separate_rows(case):
    """The same loss, so the same step of the optimizer."""
    shared, separate = (run_row(case.vlm, batch) for batch in case.rows("pairs"))
    for name, theirs in separate.gradients.items():
        assert relative_l2(shared.gradients[name], theirs) < 1e-5, name
    assert shared.losses.keys() == separate.losses.keys()


def one_behind_the_other(batch):
    """Each branch goes on from the one before it, as where branches see one another."""
    parents, prefix_tree = [*batch.prefix_tree.parents], batch.prefix_tree
    for place in range(1, len(parents)):
        if parents[place] >= 0 and place - 1 in prefix_tree.ends and prefix_tree.lengths[place]:
            parents[place] = place - 1
    return replace(batch, prefix_tree=replace(prefix_tree, parents=tuple(parents)))


def positions_from_0(batch):
    """Each segment counts by itself."""
    positions, starts = batch.position_ids.clone(), [0, *accumulate(batch.segment_lengths)]
    for place, parent in enumerate(batch.prefix_tree.parents):
        if parent >= 0:
            own = slice(starts[place], starts[place + 1])
            positions[:, :, own] -= positions[:, :, starts[place], None]
    return replace(batch, position_ids=positions)


def cut_off(batch):
    """Branches without what they go on from."""
    parents = (-1,) * len(batch.prefix_tree.parents)
    return replace(batch, prefix_tree=replace(batch.prefix_tree, parents=parents))


@pytest.mark.parametrize("kind", ["questions", "pairs"])
@pytest.mark.parametrize("wrong", [one_behind_the_other, positions_from_0, cut_off])
def test_what_is_wrong_is_found(wrong, kind, case):
    batch, _ = case.rows(kind)
    broken, right = wrong(batch), log_p(case.vlm, batch)
    found = log_p(case.vlm, broken)
    far = max(abs(found[name] - right[name]) / abs(right[name]) for name in right)
    assert far > 1e-3
