"""Layers that carry state inside a whole model with images: what breaks them is found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from support.engines import make_engine
from support.families import tiny_family_folder
from support.hybrids import replaced_kernels
from support.recurrences import segments
from support.runs import find_differences, pack, run_batch, starts_of
from support.shards import text_samples
from support.stock import StockProcessor, load_stock, run_one_by_one
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding

from vlmpack import packed_model
from vlmpack.backends.hf import model as packed_models
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.packing import IGNORE_INDEX
from vlmpack.recurrence import RowSegments, choose_recurrence

TYPES = ("qwen3_5", "nemotron_h")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory, mixed):
    """model_type -> (engine, samples, batch with gaps and a tail, reference), made once."""

    @cache
    def make(name):
        folder = tiny_family_folder(name, tmp_path_factory.mktemp(name))
        encoder, processor = Encoder(folder), StockProcessor(folder)
        samples = text_samples() if name == "nemotron_h" else mixed
        encoded = [encoder.encode(sample.cooked()) for sample in samples]
        batch = pack(encoded, alignment=8, total=128)
        assert batch.num_slots > sum(batch.segment_lengths[: len(encoded)]), "no tail"
        engine = make_engine(folder, encoder)
        engine.vlm.train()
        inputs = {sample.key: processor(sample) for sample in samples}
        reference = run_one_by_one(load_stock(folder).train(), inputs)
        assert find_differences(run_batch(engine.vlm, batch), reference) == []
        return engine, encoded, batch, reference

    return make


def losses_found(differences):
    """Keys of the samples whose loss differs."""
    return {line.split()[2].rstrip(":") for line in differences if line.startswith("loss of")}


def without_resets(chosen):
    """An implementation that takes the row for one segment."""

    def whole(*args, **options):
        told = [segments((x.width,)) if isinstance(x, RowSegments) else x for x in args]
        return chosen.function(*told, **options)

    return replace(chosen, function=whole)


@pytest.mark.cases(slow="nemotron_h")
@pytest.mark.parametrize("name", TYPES)
def test_the_engine_says_what_runs(hybrid, name):
    said = hybrid(name)[0].description["recurrence"]
    rule = {"qwen3_5": "delta rule", "nemotron_h": "scan"}[name]
    assert said.startswith(f"convolution: segments, {rule}: segments (causal_conv1d needs a CUDA")


@pytest.mark.slow
def test_the_recipe_and_a_loop_of_ones_own_may_ask_for_what_runs(hybrid):
    model = hybrid("nemotron_h")[0].vlm.model
    folder = model.config.name_or_path
    encoder = Encoder(folder)
    engine = make_engine(folder, encoder, recurrence="torch")
    said = engine.description["recurrence"]
    assert said == "convolution: segments, scan: segments (as the recipe asks)"
    with pytest.raises(CapabilityError, match=r"kernels has none for the convolution, the scan: "):
        make_engine(folder, encoder, recurrence="kernels")
    with pytest.raises(CapabilityError, match=r"kernels has none for the convolution, the scan: "):
        packed_model(model, encoder, recurrence="kernels")


def test_a_dense_model_has_nothing_to_ask_for(tiny_folder):
    with pytest.raises(CapabilityError, match=r"model\.recurrence: torch, but no layer of the mod"):
        make_engine(tiny_folder, Encoder(tiny_folder), recurrence="torch")


# A missing reset


@pytest.mark.cases(quick="recurrence-nemotron_h", slow="convolution-qwen3_5")
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("broken", ["convolution", "recurrence", "both"])
def test_a_missing_reset_is_found_in_all_samples_but_the_first(hybrid, name, broken):
    engine, _, batch, reference = hybrid(name)
    right = choose_recurrence(device=CPU, dtype=torch.float32)
    rule = {"qwen3_5": "delta_rule", "nemotron_h": "scan"}[name]
    kinds = {"convolution": ("convolution",), "recurrence": (rule,)}.get(
        broken, ("convolution", rule)
    )
    wrong = replace(right, **{kind: without_resets(getattr(right, kind)) for kind in kinds})
    with replaced_kernels(engine.vlm.language, wrong):
        found = find_differences(run_batch(engine.vlm, batch), reference)
    assert losses_found(found) == set(batch.keys[1:])
    assert find_differences(run_batch(engine.vlm, batch), reference) == []


class Told(RowSegments):
    """A row that is told to recurrences otherwise than it is."""

    @staticmethod
    def cut(params, size):
        """Every segment in pieces of `size` slots."""
        lengths = [
            piece
            for length in params.segment_lengths
            for piece in (*[size] * (length // size), *([length % size] if length % size else []))
        ]
        return segments(lengths)

    @staticmethod
    def joined(params):
        """The tail joined to the last sample."""
        *others, last, tail = params.segment_lengths
        return segments((*others, last + tail))


def tell(monkeypatch, how):
    """Recurrences get the segments that `how` makes of a row's boundaries."""

    def of(params, *, width):
        return how(params)

    monkeypatch.setattr(packed_models.RowSegments, "of", of)


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_a_reset_at_every_chunk_is_found(hybrid, name, monkeypatch):
    engine, encoded, batch, reference = hybrid(name)
    tell(monkeypatch, partial(Told.cut, size=64))
    late = {sample.key for sample in encoded if bool((sample.labels[64:] != IGNORE_INDEX).any())}
    assert late
    assert losses_found(find_differences(run_batch(engine.vlm, batch), reference)) == late


@pytest.mark.parametrize("name", TYPES)
def test_the_tail_takes_in_no_state(hybrid, name, monkeypatch):
    engine, encoded, batch, _ = hybrid(name)
    params = batch.packed_seq_params()
    tail = slice(sum(batch.segment_lengths[: len(encoded)]), None)
    last = encoded[-1]
    other = replace(last, input_ids=last.input_ids.clone())
    other.input_ids[0] = (last.input_ids[0] + 7) % 500
    changed = pack([*encoded[:-1], other], alignment=8, total=128)

    def tails():
        with torch.no_grad():
            rows = [engine.vlm.hidden_states(each, params) for each in (batch, changed)]
        start = starts_of(batch)[-1]
        assert not torch.equal(*(row[start : tail.start] for row in rows))
        return [row[tail] for row in rows]

    assert torch.equal(*tails())
    tell(monkeypatch, Told.joined)
    assert not torch.equal(*tails())


@pytest.mark.parametrize("name", TYPES)
def test_segments_of_a_row_of_another_width_are_refused(hybrid, name):
    engine, encoded, batch, _ = hybrid(name)
    longer = pack(encoded, alignment=8, total=2 * batch.num_slots).packed_seq_params()
    with pytest.raises(ValueError, match=rf"segments sum to {sum(longer.segment_lengths)} slots, "):
        engine.vlm.hidden_states(batch, longer)


def test_a_model_whose_layers_nobody_replaced_packs_nothing(hybrid):
    engine, _, batch, _ = hybrid("qwen3_5")
    modules = engine.vlm.stateful
    assert [module.__name__.rpartition(".")[2] for module in modules] == ["modeling_qwen3_5"]
    placed = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if hasattr(value, "choice")
    ]
    assert len(placed) == 4
    try:
        for module, name, value in placed:
            setattr(module, name, value.before)
        with pytest.raises(CapabilityError, match="modeling_qwen3_5 carry state"):
            engine.vlm(batch, batch.packed_seq_params())
    finally:
        for module, name, value in placed:
            setattr(module, name, value)


# What Qwen3.5 has beyond Qwen3-VL


def test_axes_in_blocks_are_found(hybrid, mixed, monkeypatch):
    engine, _, batch, reference = hybrid("qwen3_5")
    rotary = engine.vlm.language.rotary_emb

    def in_blocks(freq):
        return Qwen2_5_VLRotaryEmbedding.recomposition_frequencies(rotary, freq)

    monkeypatch.setattr(rotary, "recomposition_frequencies", in_blocks)
    broken = find_differences(run_batch(engine.vlm, batch), reference)
    shown = {sample.key for sample in mixed if sample.images}
    assert losses_found(broken) == shown, "text has three equal axes"


def test_every_expert_is_used_and_the_shared_one(tmp_path, mixed):
    folder = tiny_family_folder("qwen3_5_moe", tmp_path)
    encoder = Encoder(folder)
    vlm = make_engine(folder, encoder).vlm.train()
    batch = pack([encoder.encode(sample.cooked()) for sample in mixed], alignment=8)
    gradients = run_batch(vlm, batch).gradients
    for n in range(4):
        mlp = f"model.language_model.layers.{n}.mlp"
        assert [bool(one.any()) for one in gradients[f"{mlp}.experts.down_proj"]] == [True] * 4
        assert gradients[f"{mlp}.shared_expert.down_proj.weight"].any()
        assert gradients[f"{mlp}.shared_expert_gate.weight"].any()
