"""`vlmpack verify` fails on every known way to pack wrongly, in the rows that are about it.

Each fault is put into what a run uses: the collator, attention, the model, the optimizer. The
unbroken twin passes (`test_nothing_fails_without_a_fault`, and beside each fault of its own model).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.shards import TINY_MODEL, mixed_samples, same_size_pair, text_samples, with_answer
from support.verified import Subject, failed

from vlmpack.packing import IGNORE_INDEX

NUMBERS = {
    "language model: each layer's output",
    "loss of each sample",
    "logits of each sample",
    "gradients: language model",
}
WITH_TOWER = NUMBERS | {"gradients: tower", "gradients: projector"}


@pytest.fixture(scope="module")
def subject():
    """The committed model; three samples of 2, 0 and 1 images."""
    subject = Subject(TINY_MODEL, mixed_samples()[:3])
    assert [s.media.num_images if s.media else 0 for s in subject.samples] == [2, 0, 1]
    return subject


class Broken:
    """A collator whose rows are changed by `fault(row, samples)`."""

    def __init__(self, collator, fault):
        self.collator, self.fault = collator, fault
        self.pad_to_multiple_of = collator.pad_to_multiple_of

    def __call__(self, samples):
        """A row, broken."""
        return self.fault(self.collator(samples), samples)


def test_samples_without_images_leave_the_tower_unjudged():
    """Nothing is wrong with a model that has a tower and data that have no images."""
    checks = Subject(TINY_MODEL, text_samples()[:2]).checks()
    assert failed(checks) == set()
    unjudged = {name for name, check in checks.items() if check.status == "too few"}
    assert unjudged == {"gradients: tower", "gradients: projector", "trained components learn"}
    assert "no label comes after an image" in checks["trained components learn"].detail
    assert checks["gradients: language model"].status == "pass"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "one label",
        *(
            pytest.param(n, marks=pytest.mark.soak)
            for n in ("a gap's label", "one image's positions")
        ),
    ],
)
def test_small_faults_of_a_row(subject, fault):
    """One number of the row is off by one; what it does to the losses is far above the bounds."""

    def broken(row, samples):
        labels, positions = row.labels.clone(), row.position_ids.clone()
        if fault == "one label":
            labels[0, row.label_positions[-1] - 1] = labels[0, row.label_positions[-1]]
        elif fault == "a gap's label":
            gaps = zip(samples, row.segment_lengths, strict=False)
            assert samples[0].length < next(gaps)[1]
            labels[0, samples[0].length] = 0
        else:
            positions[-1, 0, row.media_positions[-row.media.num_tokens[-1] :]] += 1
        mask = labels != IGNORE_INDEX
        return replace(
            row,
            position_ids=positions,
            labels=labels,
            loss_mask=mask,
            label_positions=mask.flatten().nonzero().squeeze(1),
        )

    checks = subject.checks(Broken(subject.collator(), broken))
    named = "positions" if "positions" in fault else "labels and loss mask"
    assert failed(checks) >= {named, "loss of each sample", "gradients: language model"}


@pytest.mark.slow
def test_boundaries_off_by_one_inside_attention(subject, monkeypatch):
    from vlmpack.backends.hf import engine

    register = engine.register_attention

    def register_broken(choice):
        def attend(query, key, value, params, **options):
            lengths = list(params.segment_lengths)
            lengths[0], lengths[1] = lengths[0] + 1, lengths[1] - 1
            return choice.function(
                query, key, value, replace(params, segment_lengths=tuple(lengths)), **options
            )

        return register(replace(choice, function=attend))

    monkeypatch.setattr(engine, "register_attention", register_broken)
    checks = subject.checks()
    assert failed(checks) >= NUMBERS | {"leak test"}
    assert checks["loss of each sample"].measured > 1000 * checks["loss of each sample"].bound


@pytest.mark.slow
def test_nothing_fails_without_a_fault(subject):
    assert failed(subject.checks(Broken(subject.collator(), lambda row, _: row))) == set()


def test_attention_without_isolation(subject, monkeypatch):
    """One segment over the row, inside attention: everything on the outside looks right."""
    from vlmpack.backends.hf import engine

    register = engine.register_attention

    def register_broken(choice):
        def attend(query, key, value, params, **options):
            slots = query.shape[0]
            whole = torch.tensor([0, slots], dtype=torch.int32)
            params = replace(
                params,
                cu_seqlens_q=whole,
                cu_seqlens_kv=whole,
                cu_seqlens_q_padded=None,
                cu_seqlens_kv_padded=None,
                max_seqlen_q=slots,
                max_seqlen_kv=slots,
                segment_lengths=(slots,),
            )
            return choice.function(query, key, value, params, **options)

        return register(replace(choice, function=attend))

    monkeypatch.setattr(engine, "register_attention", register_broken)
    checks = subject.checks()
    assert failed(checks) == WITH_TOWER | {"leak test"}
    first = checks["language model: each layer's output"]
    assert "model.language_model.layers.0" in first.detail
    assert "isolation" in first.look_at
    assert "moves" in checks["leak test"].detail


@pytest.mark.slow
def test_boundaries_over_the_whole_row(subject):
    def one_segment(row, _):
        return replace(
            row,
            cu_seqlens=torch.tensor([0, row.num_slots], dtype=torch.int32),
            cu_seqlens_padded=None,
            segment_lengths=(row.num_slots,),
        )

    checks = subject.checks(Broken(subject.collator(), one_segment))
    assert failed(checks) == WITH_TOWER | {"leak test", "boundaries"}
    assert "segment 0, " in checks["boundaries"].detail


def test_positions_over_the_whole_row(subject):
    """Each sample shifted by a constant: rotary attention cannot see it, so nothing else can."""

    def counted_on(row, samples):
        positions, start, shift = row.position_ids.clone(), 0, 0
        for sample, slots in zip(samples, row.segment_lengths, strict=False):
            positions[..., start : start + sample.length] += shift
            shift = int(positions[..., start : start + sample.length].max()) + 1
            start += slots
        return replace(row, position_ids=positions)

    checks = subject.checks(Broken(subject.collator(), counted_on))
    assert "positions" in failed(checks)
    assert "get_rope_index" in checks["positions"].look_at
    assert subject.samples[1].key in checks["positions"].detail, "the first sample is right"


@pytest.mark.slow
def test_one_dimensional_positions(subject):
    def arange(row, _):
        count = torch.arange(row.num_slots).expand(3, 1, -1)
        return replace(row, position_ids=count)

    checks = subject.checks(Broken(subject.collator(), arange))
    assert failed(checks) >= {"positions", *NUMBERS}


def test_swapped_pixels():
    pair = [
        with_answer(sample, answer)
        for sample, answer in zip(same_size_pair(), ("left", "right"), strict=True)
    ]
    subject = Subject(TINY_MODEL, pair)
    assert len({sample.media.grid_thw for sample in subject.samples}) == 1

    def swap(row, _):
        first, second = row.media.pixel_values.chunk(2)
        return replace(row, media=replace(row.media, pixel_values=torch.cat((second, first))))

    assert failed(subject.checks()) == set()
    checks = subject.checks(Broken(subject.collator(), swap))
    assert failed(checks) >= {"pixels in order", "tower: features", "projector: features"}
    assert "leak test" in failed(checks), "each sample sees the other's image"
    assert {"boundaries", "positions", "labels and loss mask"}.isdisjoint(failed(checks))


def test_labels_across_samples(subject):
    """Shifted after concatenation: the last token of a sample learns the first of the next."""

    def shift_late(row, samples):
        labels, start = row.labels.clone(), 0
        for sample, slots, after in zip(samples, row.segment_lengths, samples[1:], strict=False):
            labels[0, start + sample.length - 1] = int(after.input_ids[0])
            start += slots
        mask = labels != IGNORE_INDEX
        return replace(
            row,
            labels=labels,
            loss_mask=mask,
            label_positions=mask.flatten().nonzero().squeeze(1),
        )

    checks = subject.checks(Broken(subject.collator(), shift_late))
    assert failed(checks) >= {"labels and loss mask", "loss of each sample"}
    assert "label tokens" in checks["loss of each sample"].detail
    assert {"boundaries", "positions", "pixels in order", "leak test"}.isdisjoint(failed(checks))


@pytest.mark.slow
def test_a_loss_mask_that_is_not_the_labels(subject):
    def forget(row, _):
        return replace(row, loss_mask=torch.ones_like(row.loss_mask))

    assert failed(subject.checks(Broken(subject.collator(), forget))) == {"labels and loss mask"}


@pytest.mark.slow
def test_a_frozen_tower_that_moves(subject, monkeypatch):
    """Freezing that is undone after the policy was resolved, as adapters did it elsewhere."""
    from vlmpack.backends.hf import engine

    frozen = {"trainable__vision": "frozen"}
    right = subject.checks(**frozen)
    assert failed(right) == set()
    assert "gradients: tower" not in right, "a frozen part has none"
    assert "bit by bit" in right["frozen parameters stay"].detail

    apply = engine.apply_policy

    def undone(model, *args, **kwargs):
        apply(model, *args, **kwargs)
        model.requires_grad_(True)

    monkeypatch.setattr(engine, "apply_policy", undone)
    checks = subject.checks(**frozen)
    assert failed(checks) == {"frozen parameters stay"}
    assert "model.visual" in checks["frozen parameters stay"].detail


@pytest.mark.slow
def test_trained_weights_that_do_not_learn(subject, monkeypatch):
    from vlmpack.backends.hf import engine

    apply = engine.apply_policy

    def forgotten(model, *args, **kwargs):
        apply(model, *args, **kwargs)
        model.model.visual.merger.requires_grad_(False)
        model.model.language_model.norm.requires_grad_(False)

    monkeypatch.setattr(engine, "apply_policy", forgotten)
    checks = subject.checks()
    assert failed(checks) == {
        "trained components learn",
        "gradients: projector",
        "gradients: language model",
    }
    assert "projector" in checks["trained components learn"].detail
    assert "model.language_model.norm.weight" in checks["gradients: language model"].detail


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [{}, pytest.param({"trainable__lora__dora": True}, marks=pytest.mark.soak)]
)
def test_adapters_whose_update_is_scaled_by_one_percent_too_much(subject, monkeypatch, variant):
    """The engine alone cannot show it: rows of one sample are as wrong as rows of many."""
    from vlmpack.backends.hf import engine

    adapted = {"trainable__language": "lora", "trainable__lora__rslora": True, **variant}
    right = subject.checks(**adapted)
    assert failed(right) == set()
    assert 0 < right["gradients: adapters"].measured < right["gradients: adapters"].bound

    apply = engine.apply_policy

    def scaled(model, *args, **kwargs):
        apply(model, *args, **kwargs)
        for module in model.modules():
            if isinstance(scaling := getattr(module, "scaling", None), dict):
                scaling["default"] *= 1.01

    monkeypatch.setattr(engine, "apply_policy", scaled)
    checks = subject.checks(**adapted)
    assert failed(checks) == {"gradients: adapters"}
    assert checks["gradients: adapters"].measured == pytest.approx(0.01, rel=0.1)
