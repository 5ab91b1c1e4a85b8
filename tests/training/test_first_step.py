"""The check of the first step finds what would not be trained, and what moves though frozen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.engines import make_engine, make_stepper, policy

from vlmpack.backends.boxes import CHUNK, digest
from vlmpack.errors import TrainabilityError
from vlmpack.packing import PackCollator, PadCollator
from vlmpack.packing.batch import DrawnAnswer
from vlmpack.training import step as step_module
from vlmpack.training.step import count_seen_images

COLLATE = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)


def train(stepper, samples, step=0):
    return stepper.train(step, [COLLATE(samples)], num_skipped=0, stop=False)


def stepper_of(tiny_folder, encoder, modes=("frozen", "full", "frozen")):
    return make_stepper(make_engine(tiny_folder, encoder, policy=policy(*modes)), check=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_any_changed_bit_changes_a_digest(dtype):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(0, 200, (37, 11), generator=generator).to(dtype)
    known = digest(tensor)
    assert torch.equal(digest(tensor.clone()), known)
    for place in (0, 200, 406):
        other = tensor.clone()
        bits = other.view(torch.uint8).flatten()
        bits[place * tensor.element_size()] ^= 1
        assert not torch.equal(digest(other), known)
    swapped = tensor.clone()
    swapped[0], swapped[1] = tensor[1], tensor[0]
    assert not torch.equal(digest(swapped), known)
    assert digest(torch.zeros(0)).item() == 0


def test_digests_of_tensors_longer_than_a_chunk():
    long = torch.zeros(CHUNK + 3)
    known = digest(long)
    long[CHUNK + 1] = 1e-30
    assert not torch.equal(digest(long), known)


def test_a_frozen_group_that_moves_is_found(tiny_folder, encoder, encoded):
    stepper = stepper_of(tiny_folder, encoder)
    engine = stepper.engine
    victim = dict(engine.vlm.model.named_parameters())["model.visual.blocks.0.norm1.weight"]
    engine.optimizer.param_groups[0]["params"].append(victim)
    victim.grad = torch.full_like(victim, 1e-6)
    engine.zero_gradients = lambda: None
    with pytest.raises(
        TrainabilityError,
        match=r"1 frozen parameters of vision moved .*: model\.visual\.blocks\.0\.norm1\.weight\.",
    ):
        train(stepper, encoded)


def test_weight_decay_alone_moves_a_frozen_weight(tiny_folder, encoder, encoded):
    """torch's AdamW leaves parameters without a gradient alone; another optimizer may not."""
    stepper = stepper_of(tiny_folder, encoder)
    engine, real = stepper.engine, stepper.engine.optimizer.step

    def step():
        real()
        with torch.no_grad():
            engine.vlm.model.get_input_embeddings().weight.mul_(1 - 1e-6)

    engine.optimizer.step = step
    with pytest.raises(TrainabilityError, match="frozen parameters of language moved"):
        train(stepper, encoded)


def test_a_trained_group_without_a_gradient_is_found_before_the_step(
    tiny_folder, encoder, encoded, monkeypatch
):
    stepper = stepper_of(tiny_folder, encoder, ("full", "full", "full"))
    engine = stepper.engine
    merge = engine.vlm.image_features

    def detached(media, device):
        found = merge(media, device)
        return type(found)(found.features.detach(), found.deep)

    monkeypatch.setattr(engine.vlm, "image_features", detached)
    before = {name: p.detach().clone() for name, p in engine.parameters()}
    with pytest.raises(TrainabilityError, match=r"trainable\.vision is full, .*with images"):
        train(stepper, encoded)
    assert all(torch.equal(p, before[name]) for name, p in engine.parameters())


def test_tower_and_projector_wait_for_images(tiny_folder, encoder, encoded, monkeypatch, caplog):
    """A batch of texts has gradients of zero for them, and that is no fault."""
    texts = [sample for sample in encoded if sample.media is None]
    assert texts and len(texts) < len(encoded)
    stepper = stepper_of(tiny_folder, encoder, ("full", "full", "full"))
    train(stepper, texts)
    assert stepper.check.pending
    stepper.check.name_untrained()
    assert "projector, vision: without a gradient" in caplog.text
    caplog.clear()
    train(stepper, encoded[:3], step=1)
    assert not stepper.check.pending
    stepper.check.name_untrained()
    assert not caplog.text

    stepper = stepper_of(tiny_folder, encoder, ("full", "full", "full"))
    train(stepper, texts)
    monkeypatch.setattr(
        stepper.engine, "gradient_norms", lambda: torch.tensor([0.0, 1.0, 1.0]).double()
    )
    with pytest.raises(TrainabilityError, match=r"trainable\.vision"):
        train(stepper, encoded, step=1)


def test_nothing_is_looked_at_once_all_was_seen(tiny_folder, encoder, encoded, monkeypatch):
    stepper = stepper_of(tiny_folder, encoder)
    calls = []
    for name in ("gradient_norms", "frozen_digests"):
        real = getattr(stepper.engine, name)
        monkeypatch.setattr(
            stepper.engine, name, lambda name=name, real=real: calls.append(name) or real()
        )
    seen = step_module.count_seen_images
    monkeypatch.setattr(
        step_module, "count_seen_images", lambda batches: calls.append("images") or seen(batches)
    )
    train(stepper, encoded[:3])
    assert sorted(calls) == ["frozen_digests", "frozen_digests", "gradient_norms", "images"]
    train(stepper, encoded[:3], step=1)
    assert len(calls) == 4


def test_frozen_weights_wait_for_a_learning_rate(tiny_folder, encoder, encoded):
    stepper = stepper_of(tiny_folder, encoder)
    constant = stepper.schedule
    stepper.schedule = lambda step: 0.0
    train(stepper, encoded[:3])
    assert stepper.check.pending, "with a learning rate of 0 nothing could move"
    stepper.schedule = constant
    train(stepper, encoded[:3], step=1)
    assert not stepper.check.pending


def seen_by_hand(sample):
    """Placeholders with a label at or after them, counted one by one."""
    labelled = [index for index, label in enumerate(sample.labels.tolist()) if label != -100]
    return sum(
        any(index >= place for index in labelled) for place in sample.media_positions.tolist()
    )


def test_images_count_where_a_label_comes_after_them(encoder, encoded):
    padded = PadCollator(pad_token_id=561, num_position_axes=3)
    expected = sum(map(seen_by_hand, encoded))
    assert expected > 0
    assert count_seen_images([COLLATE(encoded)]) == expected
    assert count_seen_images([padded(encoded)]) == expected
    with_image = next(sample for sample in encoded if sample.media is not None)
    text = next(sample for sample in encoded if sample.media is None)
    mute = replace(with_image, labels=torch.full_like(with_image.labels, -100))
    assert seen_by_hand(mute) == 0
    assert count_seen_images([COLLATE([mute, text])]) == 0, "another sample's labels do not count"
    assert count_seen_images([padded([mute, text])]) == 0
    assert count_seen_images([COLLATE([text])]) == 0


def test_answers_without_an_advantage_pass_no_gradients(encoder, encoded):
    """Neither to tower nor to text: a row of them alone waits for a later one."""
    with_image = next(sample for sample in encoded if sample.media is not None)
    text = next(sample for sample in encoded if sample.media is None)
    drawn = []
    for sample in (with_image, text):
        count = int((sample.labels != -100).sum())
        log_p = torch.zeros(count, dtype=torch.float64)
        drawn.append(replace(sample, drawn=DrawnAnswer(log_p=log_p, temperature=1.0)))
    row = COLLATE(drawn)
    labels = [int((sample.labels != -100).sum()) for sample in drawn]
    images = seen_by_hand(with_image)
    for advantages, taught, seen in (
        ((1.0, -1.0), sum(labels), images),
        ((0.0, 2.0), labels[1], 0),
        ((2.0, 0.0), labels[0], images),
        ((0.0, 0.0), 0, 0),
    ):
        batch = row.with_columns(advantages=torch.tensor(advantages, dtype=torch.float64))
        assert step_module._num_taught(batch) == taught
        assert count_seen_images([batch]) == seen
    assert step_module._num_taught(row) == sum(labels) and images > 0
