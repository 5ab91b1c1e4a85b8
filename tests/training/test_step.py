"""One optimizer step: what is normalised, what stops it, and what the host reads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.engines import make_engine, make_stepper
from support.recorders import HostReads
from support.runs import mean_loss
from support.shards import TINY_MODEL

from vlmpack.errors import NonFiniteError
from vlmpack.families.registry import family_of
from vlmpack.packing import PackCollator, pad_batch_sequences
from vlmpack.packing.media import tell_tower
from vlmpack.training.objective import forward_step

COLLATE = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)


@pytest.fixture
def stepper(tiny_folder, encoder):
    """AdamW on an engine of its own: steps change its weights."""
    return make_stepper(make_engine(tiny_folder, encoder))


def weights(stepper):
    return {name: p.detach().clone() for name, p in stepper.engine.parameters()}


def changed(stepper, before):
    return [name for name, p in stepper.engine.parameters() if not torch.equal(p, before[name])]


def train(stepper, batches, *, step=0, num_skipped=0, stop=False):
    return stepper.train(step, batches, num_skipped=num_skipped, stop=stop)


def test_a_step_reports_global_sums_and_changes_every_weight(stepper, encoded, reference):
    before = weights(stepper)
    batches = [COLLATE(encoded[:2]), COLLATE(encoded[2:])]
    sums, seconds = train(stepper, batches, num_skipped=3, stop=True)
    labels = sum(len(losses) for losses in reference.losses.values())
    total = sum(mean_loss(losses) * len(losses) for losses in reference.losses.values())
    assert sums.num_label_tokens == labels
    assert sums.loss == pytest.approx(total / labels, rel=1e-6)  # float32 losses
    assert sums.num_tokens == sum(sample.length for sample in encoded)
    assert sums.num_slots == sum(batch.num_slots for batch in batches) > sums.num_tokens
    widest = [max(s.length for s in part) * len(part) for part in (encoded[:2], encoded[2:])]
    assert sums.num_padded_slots == sum(widest)
    assert (sums.num_samples, sums.num_skipped, sums.stop_votes) == (6, 3, 1)
    assert sums.grad_norm > 0
    assert all(value >= 0 for value in seconds.values())
    assert len(changed(stepper, before)) == len(before)


def test_the_norm_is_that_of_the_mean_gradient_before_clipping(stepper, encoded, reference):
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in reference.gradients.values()))
    stepper.max_grad_norm = norm / 2
    seen = {}
    stepper.engine.optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in stepper.engine.parameters()})
    )
    sums, _ = train(stepper, [COLLATE(encoded)])
    assert sums.grad_norm == pytest.approx(norm, rel=1e-5)  # the gradient's own bound
    clipped = math.sqrt(sum(float(g.double().square().sum()) for g in seen.values()))
    assert clipped == pytest.approx(norm / 2, rel=1e-5)


def test_the_learning_rate_is_the_schedules(stepper, encoded):
    warm = stepper.schedule.optim.model_copy(update={"warmup_steps": 10})
    stepper.schedule = replace(stepper.schedule, optim=warm)
    train(stepper, [COLLATE(encoded[:2])], step=4)
    assert {group["lr"] for group in stepper.engine.optimizer.param_groups} == {
        stepper.schedule.optim.lr / 2
    }


def test_a_step_without_any_label_changes_no_weight_by_its_gradient(stepper):
    before = weights(stepper)
    stepper.engine.optimizer.param_groups[0]["weight_decay"] = 0.0
    sums, _ = train(stepper, [COLLATE.empty(), COLLATE.empty()])
    assert (sums.loss, sums.grad_norm, sums.num_label_tokens) == (None, 0.0, 0)
    assert changed(stepper, before) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_non_finite_loss_stops_before_the_optimizer_and_names_its_samples(
    stepper, encoded, value
):
    train(stepper, [COLLATE(encoded[:2])])  # so that the optimizer has moments to spoil
    before = weights(stepper)
    moments = {
        id(p): {kind: t.clone() for kind, t in state.items()}
        for p, state in stepper.engine.optimizer.state.items()
    }
    bad = encoded[3]
    pixels = bad.media.pixel_values.clone()
    pixels[0, 0] = value
    bad = replace(bad, media=replace(bad.media, pixel_values=pixels))
    with pytest.raises(NonFiniteError) as caught:
        train(stepper, [COLLATE(encoded[:2]), COLLATE([bad, encoded[4]])], step=7)
    message = str(caught.value)
    assert message.startswith("step 8: loss sum nan")
    assert bad.key in message
    assert encoded[4].key in message
    assert encoded[0].key not in message, "a healthy micro-batch is not to blame"
    assert changed(stepper, before) == []
    for parameter, state in stepper.engine.optimizer.state.items():
        for kind, tensor in state.items():
            assert torch.equal(tensor, moments[id(parameter)][kind])
    assert all(p.grad is None for _, p in stepper.engine.parameters())
    train(stepper, [COLLATE(encoded[:2])])  # and the run could go on
    assert changed(stepper, before)


def test_a_gradient_that_alone_overflows_names_every_sample(stepper, encoded):
    before = weights(stepper)
    parameter = stepper.engine.parameters()[0][1]
    parameter.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    with pytest.raises(NonFiniteError, match=r"gradient norm (inf|nan)") as caught:
        train(stepper, [COLLATE(encoded[:3]), COLLATE(encoded[3:])])
    for sample in encoded:
        assert sample.key in str(caught.value)
    assert changed(stepper, before) == []


def reads_of_step(stepper, batches):
    with HostReads() as reads:
        train(stepper, batches)
    return reads


@pytest.mark.cases(quick="in_batch")
@pytest.mark.parametrize("mode", ["in_batch", "none"])
def test_the_host_reads_once_per_optimizer_step(stepper, encoded, mode):
    """One tolist before the optimizer, for any number of micro-batches; none in the tower, whose
    boundaries come with the batch."""
    rule = family_of(TINY_MODEL).tower_rule_of(TINY_MODEL)

    def collate(samples):
        padded = mode == "none"
        batch = pad_batch_sequences(samples, pad_token_id=561) if padded else COLLATE(samples)
        return tell_tower(batch, rule)

    with_images = [sample for sample in encoded if sample.media is not None]
    one = reads_of_step(stepper, [collate(with_images)])
    three = reads_of_step(stepper, [collate(with_images)] * 3)
    assert one.ours == three.ours == [("tolist", "step.py:compute")]
    assert one.of_the_tower == three.of_the_tower == []


def test_a_read_planted_in_the_tower_would_be_seen(stepper, encoded, monkeypatch):
    """Once a block and micro-batch."""
    tower = stepper.engine.vlm.vision
    for block in tower.blocks:
        forward = block.mlp.forward
        monkeypatch.setattr(
            block.mlp, "forward", lambda x, forward=forward: forward(x) * (1 + 0 * x.sum().item())
        )
    reads = reads_of_step(stepper, [COLLATE([s for s in encoded if s.media is not None])] * 2)
    planted = [place for method, place in reads.of_the_tower if method == "item"]
    assert planted == ["test_step.py:<lambda>"] * 2 * len(tower.blocks)


def test_the_recorder_of_host_reads_sees_each_kind(encoded):
    tensor = torch.tensor([1.0])
    with HostReads() as reads:
        tensor.item()
        tensor.tolist()
        bool(tensor)
        float(tensor)
        int(tensor)
        tensor.cpu()
        tensor.to("cpu")
        tensor.nonzero()
        tensor.numpy()
    assert len(reads.ours) >= 9


def test_evaluation_changes_nothing_and_has_the_same_loss(stepper, encoded):
    before = weights(stepper)
    batches = [COLLATE(encoded[:3]), COLLATE(encoded[3:])]
    evaluated = stepper.evaluate(batches)
    assert changed(stepper, before) == []
    assert all(p.grad is None for _, p in stepper.engine.parameters())
    sums, _ = train(stepper, batches)
    assert evaluated.totals["loss_sum"] == sums.totals["loss_sum"]
    assert evaluated.grad_norm == 0.0


def test_every_module_knows_whether_it_is_trained(stepper, encoded):
    """Also behind answers, which put the model into the other mode and back."""
    engine, batches = stepper.engine, [COLLATE(encoded)]

    def modes():
        return {module.training for module in engine.vlm.model.modules()}

    assert modes() == {False}, "from_pretrained's"
    for _ in range(2):
        train(stepper, batches)
        assert modes() == {True}
        with engine.generation():
            assert modes() == {False}
        assert modes() == {True}
        stepper.evaluate(batches)
        assert modes() == {False}
        with engine.generation():
            pass
        assert modes() == {False}


def test_only_the_lead_of_a_replica_counts_and_every_rank_votes(stepper, encoded):
    batches = [COLLATE(encoded)]
    lead, _ = train(stepper, batches)
    stepper.ranks = replace(stepper.ranks, replica_rank=1, replica_size=2)
    peer, _ = stepper.train(1, batches, num_skipped=3, stop=True, writing=True)
    assert lead.num_label_tokens > 0
    assert peer.totals["loss_sum"] > 0, "an engine reports zero where the loss is not its own"
    counts = (peer.num_label_tokens, peer.num_tokens, peer.num_slots, peer.num_padded_slots)
    assert counts == (0, 0, 0, 0)
    assert (peer.num_samples, peer.num_skipped) == (0, 0)
    assert (peer.stop_votes, peer.num_writing) == (1, 1)
    assert (lead.stop_votes, lead.num_writing) == (0, 0)


def test_a_step_without_labels_is_no_optimizer_step(stepper, encoded):
    train(stepper, [COLLATE(encoded)])
    train(stepper, [COLLATE.empty()])
    assert stepper.engine.optimizer_steps == 1


def test_the_forward_step_has_megatrons_contract(vlm, encoded):
    batch = COLLATE(encoded)
    rest = iter([batch, "the next one"])
    output, loss_function = forward_step(rest, vlm)
    assert next(rest) == "the next one", "it takes one micro-batch"
    total, count, report = loss_function(output)
    assert output.shape == (batch.num_label_tokens,)
    assert count == batch.num_label_tokens
    assert torch.equal(total, output.sum())
    assert total.requires_grad
    assert not report["loss_sum"].requires_grad
    assert report["loss_sum"].dtype == torch.float64


def test_steps_are_reproducible_bit_for_bit(tiny_folder, encoder, encoded):
    def run():
        stepper = make_stepper(make_engine(tiny_folder, encoder))
        norms = [train(stepper, [COLLATE(encoded)], step=i)[0].grad_norm for i in range(2)]
        return norms, weights(stepper)

    (norms, first), (again, second) = run(), run()
    assert norms == again
    assert all(torch.equal(first[name], second[name]) for name in first)
