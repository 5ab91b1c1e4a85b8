"""The main claim: every parallel layout takes the optimizer steps of the hf engine in one process.

Same weights, same bins, float32; with AdamW and clipping, and with SGD, which compares gradients.
CI has one process, and TP with sequence parallelism, CP, PP and replicas on two; the others, and
captured decoders, are left to `make soak`.
"""

from __future__ import annotations

import json
from itertools import chain, pairwise
from math import prod

import pytest
from backends.mcore.launches import once
from support import layouts
from support.forked import check_ranks
from support.layouts import BINS, LAYOUTS, OPTIMIZERS, STEPS

IN_CI = ("one", "tp2-sp", "cp2", "pp2", "dp2")


def launch_of(name):
    """Layouts with the same number of processes share a launch, those of `make soak` their own."""
    return LAYOUTS[name].processes, name in IN_CI


NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.soak)
    for name in LAYOUTS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def trained(folder):
    """Runs all layouts of one launch at once, when the first of them is asked for."""

    @once
    def launch(processes, in_ci):
        names = [name for name in LAYOUTS if launch_of(name) == (processes, in_ci)]
        check_ranks([layouts.__file__, folder, ",".join(names)], processes)

    def load(name):
        launch(*launch_of(name))
        facts = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        return {o: layouts.Trained.load(folder / f"{name}-{o}") for o in OPTIMIZERS}, facts

    return load


@pytest.fixture(scope="module")
def expected():
    """The hf engine's steps, by optimizer."""
    return {optimizer: layouts.train_reference(optimizer) for optimizer in OPTIMIZERS}


@pytest.fixture(scope="module")
def start():
    return layouts.start_weights()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_five_steps_are_those_of_one_process(trained, expected, start, name, optimizer):
    found = trained(name)[0][optimizer]
    assert len(found.rows) == STEPS
    errors = layouts.worst_errors(found, expected[optimizer], start)
    print(f"\n{name:12} {optimizer:6} " + "  ".join(f"{w} {e:.1e}" for w, e in errors.items()))
    assert layouts.beyond_tolerance(errors) == {}


@pytest.mark.parametrize("name", NAMES)
def test_the_layout_is_spread_as_it_says(trained, start, name):
    _, facts = trained(name)
    layout = LAYOUTS[name]
    total = sum(value.numel() for value in start.values())
    assert [fact["world"] for fact in facts] == [layout.processes] * layout.processes
    places = [tuple(fact["place"].values()) for fact in facts]
    assert len(set(places)) == layout.processes
    assert max(places) == (
        *(layout.tensor - 1, layout.context - 1, layout.pipeline - 1, layout.dp - 1),
    )
    for fact in facts:
        place = fact["place"]
        assert fact["dp_rank"] == place["dp"], "samples are dealt to other ranks than Megatron's"
        assert fact["copies_agree"], "copies of a weight have drifted apart"
        first_stage = place["pp"] == 0
        each = 4 // layout.pipeline
        assert fact["layers"] == [place["pp"] * each + n + 1 for n in range(each)]
        again = {"none": (), 4: (4,)}.get(layout.recompute, (1, 2, 3, 4))
        assert fact["again"] == [number for number in fact["layers"] if number in again]
        shapes = fact["shapes"]
        layer = "gpt.decoder.layers.0."
        assert shapes[layer + "self_attention.linear_qkv.weight"] == [256 // layout.tensor, 128]
        assert shapes[layer + "self_attention.linear_proj.weight"] == [128, 128 // layout.tensor]
        assert shapes[layer + "mlp.linear_fc1.weight"] == [768 // layout.tensor, 128]
        assert any(n.startswith("vision.") for n in shapes) == first_stage
        if first_stage:
            assert shapes["gpt.embedding.word_embeddings.weight"] == [576 // layout.tensor, 128]
        if layout.tensor * layout.pipeline > 1:
            assert fact["elements"] < 0.82 * total
        else:
            assert fact["elements"] == total
        shards = layout.context * layout.dp if layout.distributed else 1
        assert fact["optimized"] == pytest.approx(fact["elements"] / shards, rel=0.01)
        if not first_stage:
            assert fact["patches"] == []


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_computes_its_tokens_and_its_images(trained, name):
    _, facts = trained(name)
    layout = LAYOUTS[name]
    rows = layouts.batches_of(layout)
    blank = 4
    for fact in facts:
        place = fact["place"]
        mine = rows[place["dp"] :: layout.dp]
        share = layout.context * (layout.tensor if layout.sequence else 1)
        if layout.captured:  # Megatron's block is not called
            assert fact["graph"] == [1, STEPS * len(mine)] and fact["tokens"] == []
        else:
            assert fact["graph"] is None
            assert fact["tokens"] == [row.num_slots // share for row in mine]
        if place["pp"] == 0:
            peers = [
                peer["patches"]
                for peer in facts
                if peer["place"]["pp"] == 0 and peer["place"]["dp"] == place["dp"]
            ]
            assert len(peers) == layout.tensor * layout.context
            for number, row in enumerate(mine):
                patches = [peer[number] for peer in peers]
                grids = row.media.grid_thw if row.media is not None else ()
                idle = max(0, len(peers) - len(grids))
                assert sum(patches) == sum(map(prod, grids)) + idle * blank
                assert all(patches), "a rank left the tower out"


@pytest.mark.slow
def test_the_samples_are_the_awkward_ones(start, expected):
    """What the comparison would be worth without."""
    samples = layouts.samples()
    rows = layouts.batches_of(LAYOUTS["cp2"])
    assert len({tuple(sorted(bin_)) for bin_ in BINS}) == len(BINS)
    assert set(chain(*BINS)) == set(range(len(samples)))
    images = [sum(s.media.num_images for s in (samples[i] for i in b) if s.media) for b in BINS]
    assert images[0] > 4, "more images than ranks"
    assert images[1::2] == [0, 0], "the second of two replicas has no image"
    assert images[2] == 1, "fewer images than ranks"
    assert min(sample.length for sample in samples) == 3, "shorter than 2 * CP"
    assert rows[3].num_label_tokens == 1, "a CP rank without a label"
    assert any(len(set(row.segment_lengths)) > 1 for row in rows)
    for optimizer, reference in expected.items():
        losses = [loss for loss, _ in reference.rows]
        assert losses == sorted(losses, reverse=True)
        assert all(a - b > 1 for a, b in pairwise(losses)), "no lesson"
        assert losses[-1] > 10, "a guessed answer has a loss of rounding"
        moved = {
            name: layouts.relative_l2(reference.weights[name], value)
            for name, value in start.items()
        }
        assert reference.weights.keys() == start.keys()
        assert min(moved.values()) > 2 * layouts.TOLERANCES["weights"], optimizer
        assert sorted(moved.values())[len(moved) // 2] > 20 * layouts.TOLERANCES["weights"]
