"""What the host reads in an optimizer step of the Megatron engine: one tensor, the trainer's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from backends.mcore.pair_layouts import KNOBS, batches_of, four_pairs
from support.engines import make_stepper
from support.layouts import LAYOUTS, Layout, collator, make_megatron
from support.recorders import HostReads
from support.shards import TINY_MODEL

from vlmpack.attention import segment_attention
from vlmpack.distributed import start_process_group
from vlmpack.families.registry import family_of
from vlmpack.packing.media import tell_tower
from vlmpack.training.preference import dpo

pytestmark = [
    # Megatron's, of its sharded weights; under a function mode torch blames the mode's file.
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]

OURS = [("tolist", "step.py:compute")]
COLLATE = collator(LAYOUTS["one"])


@pytest.fixture(scope="module", params=[False, True], ids=["replicated", "distributed"])
def stepper(request):
    """One process, both kinds of optimizer."""
    layout = Layout(distributed=request.param)
    return make_stepper(make_megatron(layout, start_process_group()))


@pytest.fixture(scope="module")
def rows(encoded):
    """With images, text-only, and both kinds of samples in one row."""
    images = [sample for sample in encoded if sample.media is not None]
    text = [sample for sample in encoded if sample.media is None]
    assert images
    assert text
    rule = family_of(TINY_MODEL).tower_rule_of(TINY_MODEL)
    rows = {"images": COLLATE(images), "text": COLLATE(text), "both": COLLATE(encoded)}
    return {name: tell_tower(row, rule) for name, row in rows.items()}


def reads_of_step(stepper, batches, step=1):
    with HostReads() as reads:
        stepper.train(step, batches, num_skipped=0, stop=False)
    return reads


@pytest.mark.cases(quick="distributed-text", slow="replicated-both")
@pytest.mark.parametrize("kind", ["images", "text", "both"])
def test_the_host_reads_once_per_optimizer_step(stepper, rows, kind):
    """None in the tower, whose boundaries come with the batch."""
    one = reads_of_step(stepper, [rows[kind]])
    three = reads_of_step(stepper, [rows[kind]] * 3)
    assert one.ours == three.ours == OURS
    assert one.of_megatron == three.of_megatron == []
    assert one.of("torch.optim") == three.of("torch.optim"), "grows with the micro-batches"
    assert one.of_the_tower == three.of_the_tower == []


@pytest.mark.cases(quick="distributed")
def test_three_different_micro_batches(stepper, rows):
    reads = reads_of_step(stepper, list(rows.values()))
    assert (reads.ours, reads.of_megatron) == (OURS, [])


@pytest.mark.cases(slow="distributed")
def test_pairs_read_no_more(stepper):
    """Their log-probabilities, sums and counts, with a term of a divisor of its own. Label tokens
    are counted in the batches, which lie in host memory."""
    batches = batches_of(LAYOUTS["one"], "packed", four_pairs()[1], torch.zeros(8))
    of_pairs = replace(stepper, objective=dpo(KNOBS["sigmoid"]))
    assert of_pairs.objective.terms
    reads = reads_of_step(of_pairs, batches)
    counting = ("__int__", "preference.py:num_chosen_tokens")
    assert ([read for read in reads.ours if read != counting], reads.of_megatron) == (OURS, [])


def test_evaluation_reads_once_too(stepper, rows):
    with HostReads() as reads:
        stepper.evaluate(list(rows.values()))
    assert (reads.ours, reads.of_megatron) == ([("tolist", "step.py:evaluate")], [])


@pytest.mark.cases(quick="distributed")
def test_a_read_in_a_layer_would_be_seen(stepper, rows, monkeypatch):
    """Of our attention, once per layer and micro-batch."""
    core = stepper.engine.model.gpt.decoder.layers[0].self_attention.core_attention

    def reading(query, key, value, params, **options):
        assert query.sum().item() != 0
        return segment_attention(query, key, value, params, **options)

    monkeypatch.setattr(core, "varlen", reading)
    reads = reads_of_step(stepper, [rows["both"]] * 3)
    assert Counter(reads.ours) == Counter(OURS + 3 * [("item", "test_host_reads.py:reading")])


@pytest.mark.cases(slow="replicated")
def test_a_read_in_the_tower_would_be_seen(stepper, rows, monkeypatch):
    """Once a block and micro-batch."""
    blocks = stepper.engine.model.vision.blocks
    for block in blocks:
        forward = block.mlp.forward
        monkeypatch.setattr(
            block.mlp, "forward", lambda x, forward=forward: forward(x) * (1 + 0 * x.sum().item())
        )
    reads = reads_of_step(stepper, [rows["both"]] * 3)
    assert reads.of_the_tower == 3 * len(blocks) * [("item", "test_host_reads.py:<lambda>")]


def test_a_read_of_megatron_would_be_seen(stepper, rows, monkeypatch):
    """Its optimizer's own clipping reads the gradient norm."""
    part = stepper.engine.optimizer.parts[0]
    monkeypatch.setattr(part, "step_with_ready_grads", part.get_grad_norm)
    reads = reads_of_step(stepper, [rows["text"]])
    assert reads.of_megatron
    assert reads.ours == OURS
