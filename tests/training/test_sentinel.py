"""A sample of a trained row, run alone through the plain path while training."""

from __future__ import annotations

import logging
import math
import random
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from support import engines
from support.engines import make_engine, make_stepper, policy
from support.pairs import cooked_pair, raw_pairs
from support.recipes import MINIMAL, rows, run_settings, write_recipe
from support.shards import TINY_MODEL
from support.shared import encoded_pairs, pairs_about_one_image, questions
from torch import Tensor

from vlmpack.alignment import alignment
from vlmpack.api import resolve, run_recipe
from vlmpack.attention import segment_attention
from vlmpack.backends.decoder_graph import DecoderGraph
from vlmpack.backends.fused import FusedOps
from vlmpack.backends.hf import compiled_layers
from vlmpack.backends.hf import engine as hf_engine
from vlmpack.backends.row_operators import rms_norm
from vlmpack.build.engine import resolved_compute
from vlmpack.build.objective import build_stepper, objective_spec
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError, SentinelError
from vlmpack.packing import PackCollator, PadCollator
from vlmpack.packing.batch import ImageOwners
from vlmpack.packing.pairs import sample_in
from vlmpack.recipe import load_recipe
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training.objective import SFT, Objective
from vlmpack.training.preference import dpo
from vlmpack.training.sentinel import BOUNDS, Sentinel

COLLATE = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)
PADDED = PadCollator(pad_token_id=561, num_position_axes=3)


def watched(engine, *, interval=1, on_difference="stop", seed=3, objective=SFT):
    stepper = make_stepper(engine, objective=objective)
    stepper.sentinel = Sentinel(
        engine=engine,
        interval=interval,
        on_difference=on_difference,
        seed=seed,
        multiples=alignment(),
    )
    return stepper


def train(stepper, batches, step=0):
    return stepper.train(step, batches, num_skipped=0, stop=False)[0]


def planted(monkeypatch, attend):
    """Engines made from here on attend by another function; the plain path does not."""

    def compute(*args, **options):
        own = resolved_compute(*args, **options)
        return replace(own, attention=replace(own.attention, name="planted", function=attend))

    monkeypatch.setattr(engines, "resolved_compute", compute)


def leaks(weight):
    """Each segment reads one token of another, the last one before it, with this weight."""

    def attend(query, key, value, params, **options):
        out, lengths = (
            segment_attention(query, key, value, params, **options),
            params.segment_lengths,
        )
        starts = torch.tensor([0, *accumulate(lengths)][:-1])
        others = torch.repeat_interleave(starts - 1, torch.tensor(lengths))  # -1: the row's last
        foreign = value[others].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return (1 - weight) * out + weight * foreign

    return attend


def scaled(factor):
    """Every number of the output is off by this factor, up and down by turns, as a norm behind it
    would take out one that is the same for all."""

    def attend(query, key, value, params, **options):
        out = segment_attention(query, key, value, params, **options)
        ups = torch.tensor([factor, 2 - factor], dtype=out.dtype)
        return out * ups.repeat(out.shape[-1] // 2)

    return attend


@pytest.fixture
def engine(tiny_folder, encoder):
    return make_engine(tiny_folder, encoder)


@pytest.fixture(scope="module")
def pairs():
    encoder = Encoder(TINY_MODEL).replace(pairs=True, share_prefix=True)
    return [encoder.encode(cooked_pair(*pair)) for pair in raw_pairs()]


def same_sample(found, sample):
    for name in ("input_ids", "labels", "position_ids", "media_positions"):
        assert torch.equal(getattr(found, name), getattr(sample, name)), name
    assert (found.key, found.sequences) == (sample.key, sample.sequences)
    assert (found.media is None) == (sample.media is None)
    if sample.media is not None:
        assert torch.equal(found.media.pixel_values, sample.media.pixel_values)
        assert found.media.grid_thw == sample.media.grid_thw
        assert found.media.num_tokens == sample.media.num_tokens
        assert found.media.blocks == sample.media.blocks


@pytest.mark.parametrize("collate", [COLLATE, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", ["samples", "pairs"])
def test_a_sample_of_a_batch_is_the_one_that_went_in(encoded, pairs, collate, kind):
    samples = encoded if kind == "samples" else pairs
    batch = collate(samples)
    assert any(sample.media is not None for sample in samples)
    for place, sample in enumerate(samples):
        same_sample(sample_in(batch, place), sample)


def test_a_sample_has_the_images_of_its_process(encoded):
    """Of two processes that divide the images of a row, one has those of every other place."""
    samples, number = [], 0
    for sample in encoded:
        media = sample.media
        if media is not None:
            ranks = tuple((number + n) % 2 for n in range(media.num_images))
            number += media.num_images
            parts = media.pixel_values.split([math.prod(grid) for grid in media.grid_thw])
            mine = [part for part, rank in zip(parts, ranks, strict=True) if rank == 1]
            pixels = torch.cat(mine) if mine else media.pixel_values[:0]
            media = replace(media, pixel_values=pixels, owners=ImageOwners(ranks, 1, 2))
        samples.append(replace(sample, media=media))
    batch = COLLATE(samples)
    for place, sample in enumerate(samples):
        found = sample_in(batch, place)
        same_sample(found, sample)
        assert sample.media is None or found.media.owners == sample.media.owners
    assert number > 4


def test_a_sample_of_a_row_that_shares_prefixes_is_whole():
    encoder = Encoder(TINY_MODEL).replace(share_prefix=True)
    asked = [encoder.encode(raw.cooked()) for raw in questions()]
    together = encoded_pairs(encoder.replace(pairs=True), pairs_about_one_image())
    collate = replace(COLLATE, share_prefix=True)
    for samples in (asked, together):
        batch = collate(samples)
        assert batch.prefix_tree is not None
        for place, sample in enumerate(samples):
            same_sample(sample_in(batch, place), sample)


def rows_of(kind, encoded, pairs):
    """Micro-batches of a kind of rows, and their objective."""
    asked = [Encoder(TINY_MODEL).replace(share_prefix=True).encode(q.cooked()) for q in questions()]
    text = [sample for sample in encoded if sample.media is None]
    dealt = [COLLATE(pairs[:4]), COLLATE.empty(), COLLATE(pairs[4:])]
    shared = replace(COLLATE, share_prefix=True)
    reference = [replace(b, reference=torch.zeros(len(b.lengths)).double()) for b in dealt]
    return {
        "images": ([COLLATE(encoded[:3]), COLLATE(encoded[3:])], SFT),
        "text": ([COLLATE(text)], SFT),
        "padded": ([PADDED(encoded[:3]), PADDED(encoded[3:])], SFT),
        "empty among others": ([COLLATE.empty(), COLLATE(encoded)], SFT),
        "shared prefixes": ([shared(asked)], SFT),
        "pairs": (reference, dpo(ObjectiveSection(name="dpo", sft_weight=0.1))),
        "a forward step of its own": ([COLLATE(encoded)], Objective(forward_step=SFT.step_with())),
    }[kind]


KINDS = (
    *("images", "text", "padded", "empty among others", "shared prefixes", "pairs"),
    "a forward step of its own",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_alone_has_the_losses_of_its_row(engine, encoded, pairs, caplog, kind):
    batches, objective = rows_of(kind, encoded, pairs)
    stepper = watched(engine, objective=objective)
    with caplog.at_level(logging.INFO, logger="vlmpack"):
        train(stepper, batches)
    said = [record.message for record in caplog.records if "alone" in record.message]
    assert len(said) == 1
    assert "step 1: losses of 1 sample alone are those of its row, within" in said[0]
    assert stepper.sentinel.wall_seconds > 0


@pytest.mark.parametrize("collate", [COLLATE, PADDED], ids=["packed", "padded"])
def test_a_step_without_a_sample_is_run_and_not_compared(engine, caplog, collate):
    stepper = watched(engine)
    with caplog.at_level(logging.INFO, logger="vlmpack"):
        train(stepper, [collate.empty(), collate.empty()])
    assert stepper.sentinel.wall_seconds > 0
    assert "alone" not in caplog.text


@pytest.mark.slow
def test_a_run_is_the_same_bit_for_bit_with_it(tiny_folder, encoder, encoded):
    ends = []
    for interval in (None, 2):
        trained = policy("lora", "full", "lora", dropout=0.2)
        stepper = watched(make_engine(tiny_folder, encoder, policy=trained), interval=interval or 1)
        stepper.dropout_seed = 5
        if interval is None:
            stepper.sentinel = None
        random.seed(0)
        for step in range(6):
            train(stepper, [COLLATE(encoded[step % 3 :]), COLLATE(encoded[:2])], step=step)
        drawn = torch.get_rng_state(), random.random()
        ends.append((drawn, {n: p.detach().clone() for n, p in stepper.engine.parameters()}))
    (drawn, weights), (drawn_with, weights_with) = ends
    assert torch.equal(drawn[0], drawn_with[0])
    assert drawn[1] == drawn_with[1]
    assert all(torch.equal(weights[name], weights_with[name]) for name in weights)
    assert len(weights) > 10


def test_the_sample_follows_from_seed_step_and_replica(engine, encoded):
    batches = [COLLATE(encoded[:3]), COLLATE(encoded[3:])]
    chosen = [
        watched(engine, seed=s).sentinel._choose(n, batches) for s in (3, 3, 4) for n in range(8)
    ]
    assert chosen[:8] == chosen[8:16]
    assert chosen[:8] != chosen[16:]
    assert len(set(chosen)) > 3


def test_a_recipe_says_how_often_it_looks(engine, tmp_path):
    path = write_recipe(tmp_path / "recipe.yaml", MINIMAL)
    asked = ["training.sentinel_interval=7", "training.on_sentinel=warn", "training.seed=5"]
    for texts, found in (([], None), (asked, (7, "warn", 5))):
        spec = objective_spec(load_recipe(path, texts))
        made = build_stepper(spec, engine, engine.ranks, total_steps=9).sentinel
        assert (made and (made.interval, made.on_difference, made.seed)) == found


def test_layers_without_a_plain_path_are_refused_at_launch():
    engine = SimpleNamespace(has_plain_path=False)
    with pytest.raises(CapabilityError, match="layers of Transformer Engine have no plain path"):
        Sentinel(engine=engine, interval=5, on_difference="stop", seed=0, multiples=alignment())


def test_it_looks_at_each_nth_step(engine, encoded, monkeypatch):
    stepper, looked = watched(engine, interval=3), []
    monkeypatch.setattr(Sentinel, "compare", lambda self, step, *_: looked.append(step + 1))
    for step in range(7):
        train(stepper, [COLLATE(encoded[:2])], step=step)
    assert looked == [3, 6]


def weights(engine):
    return [value.detach().clone() for _, value in engine.parameters()]


FAULTS = {"leak": leaks(1e-3), "kernel": scaled(1.02)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_before_the_optimizer_step(
    tiny_folder, encoder, encoded, monkeypatch, fault
):
    planted(monkeypatch, FAULTS[fault])
    stepper = watched(make_engine(tiny_folder, encoder))
    before = weights(stepper.engine)
    batch = COLLATE(encoded)
    with pytest.raises(SentinelError) as caught:
        train(stepper, [batch], step=6)
    assert all(map(torch.equal, before, weights(stepper.engine)))
    said = str(caught.value)
    _, place = stepper.sentinel._choose(6, [batch])
    assert f"sentinel: step 7: sample {batch.keys[place]!r}, token " in said
    assert f"of {encoded[place].length}: the loss is " in said
    assert f"the bound in float32 is {BOUNDS[torch.float32]:.2g}" in said
    assert "With training.on_sentinel warn" in said


def test_a_fault_is_logged_where_it_may_go_on(tiny_folder, encoder, encoded, monkeypatch, caplog):
    planted(monkeypatch, scaled(1.02))
    stepper = watched(make_engine(tiny_folder, encoder), on_difference="warn")
    before = weights(stepper.engine)
    train(stepper, [COLLATE(encoded)])
    assert "sentinel: step 1: sample" in caplog.text
    assert not all(map(torch.equal, before, weights(stepper.engine)))


def test_a_fused_layer_that_is_off_is_found(tiny_folder, encoder, encoded, monkeypatch):
    """The planted norm stands in every layer, so the stock one is what it is compared with."""

    def off(*args):
        return 1.02 * rms_norm(*args)

    for norm, found in ((rms_norm, False), (off, True)):
        ops = FusedOps("planted", "a test", norm=norm)
        monkeypatch.setattr(hf_engine, "choose_fused", lambda *_, ops=ops: (ops, ""))
        engine = make_engine(tiny_folder, encoder)
        assert engine.fused.modules
        stepper = watched(engine)
        if not found:
            train(stepper, [COLLATE(encoded)])
            continue
        with pytest.raises(SentinelError):
            train(stepper, [COLLATE(encoded)])


def off_by_turns(values):
    """(..., even) by 2%, up and down by turns."""
    return values * torch.tensor([1.02, 0.98], dtype=values.dtype).repeat(values.shape[-1] // 2)


def spoil_compiled(monkeypatch):
    original = compiled_layers._compiled

    def compiled(*given):
        run = original(*given)

        def spoiled(*inputs):
            outputs = run(*inputs)
            if isinstance(outputs, Tensor):
                return off_by_turns(outputs)
            return [off_by_turns(one) if is_hidden(one) else one for one in outputs]

        return spoiled

    def is_hidden(value):
        return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()

    monkeypatch.setattr(compiled_layers, "_compiled", compiled)


def spoil_captured(monkeypatch):
    original = DecoderGraph.__call__
    monkeypatch.setattr(
        DecoderGraph, "__call__", lambda self, row: off_by_turns(original(self, row))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "spoil"),
    [
        pytest.param(
            {"model__compile": "layers"},
            spoil_compiled,
            id="compiled",
            marks=pytest.mark.skipif(
                compiled_layers.why_not_compiled() is not None, reason="this torch compiles none"
            ),
        ),
        pytest.param({"training__cuda_graphs": "decoder"}, spoil_captured, id="captured"),
    ],
)
def test_compiled_and_captured_layers_are_compared_with_stock_ones(
    tmp_path, monkeypatch, values, spoil
):
    """A clean run has no alarm and is bit for bit the same without it. Faults there are found."""
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager")
    planned = {"packing__mode": "online", "packing__max_tokens": 512}
    batch = {"training__micro_batch_size": 1, "training__global_batch_size": 2}

    def settings(name, **more):
        return run_settings(
            tmp_path, run_dir=str(tmp_path / name), **planned, **batch, **values, **more
        )

    run_recipe(resolve(settings("without"), {}))
    looked, compared, compare = {"training__sentinel_interval": 1}, [], Sentinel.compare

    def counted(self, step, *given):
        compared.append(step)
        compare(self, step, *given)

    monkeypatch.setattr(Sentinel, "compare", counted)
    run_recipe(resolve(settings("with", **looked), {}))
    exact = [rows(tmp_path / name, "loss", "grad_norm") for name in ("without", "with")]
    assert exact[0] == exact[1] and len(exact[0]) == 3
    assert compared == [0, 1, 2]
    spoil(monkeypatch)
    with pytest.raises(SentinelError, match="the loss is"):
        run_recipe(resolve(settings("off", **looked), {}))


@pytest.mark.slow
def test_a_run_ends_at_a_difference_and_goes_on_from_the_step_before(tmp_path, monkeypatch):
    def settings(name, **more):
        lengths = {"training__max_steps": 4, "checkpoint__interval_steps": 1}
        return run_settings(tmp_path, run_dir=str(tmp_path / name), **lengths, **more)

    run_recipe(resolve(settings("without"), {}))
    run_recipe(resolve(settings("with", training__sentinel_interval=2), {}))
    expected = rows(tmp_path / "without", "loss", "grad_norm")
    assert rows(tmp_path / "with", "loss", "grad_norm") == expected and len(expected) == 4
    faulty = resolve(settings("faulty", training__sentinel_interval=3), {})
    with monkeypatch.context() as patch:
        patch.setitem(BOUNDS, torch.float32, -1.0)
        with pytest.raises(SentinelError, match="sentinel: step 3: sample"):
            run_recipe(faulty)
    assert rows(tmp_path / "faulty", "loss", "grad_norm") == expected[:2]
    kept = sorted(path.name for path in (tmp_path / "faulty/checkpoints").iterdir())
    assert kept[-1] == "step-00000002"
    run_recipe(resolve(settings("faulty"), {}))  # the identity has no sentinel
    assert rows(tmp_path / "faulty", "loss", "grad_norm") == expected
