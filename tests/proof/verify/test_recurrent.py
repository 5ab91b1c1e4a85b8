"""`vlmpack verify` on models whose layers carry state: each way in which state crosses the ends of
samples fails the rows of the table that are about it, in words that say where."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from support.hybrid import hybrid_folder, serve_hybrid
from support.shards import TINY_MODEL, text_samples
from support.verified import Subject, failed, recipe_for

from vlmpack.build.engine import engine_spec
from vlmpack.distributed import Ranks
from vlmpack.packing import PackCollator
from vlmpack.proof.verify.packed import verified_spec
from vlmpack.proof.verify.recurrent import ALONE, SEGMENTS
from vlmpack.recurrence import RowSegments

GRADIENTS = "leak test of gradients"
OUTPUTS = "language model: each layer's output"
OURS = {SEGMENTS, ALONE, GRADIENTS, "gradients: recurrent layers"}
NUMBERS = {
    OUTPUTS,
    "loss of each sample",
    "logits of each sample",
    "gradients: language model",
    "gradients: recurrent layers",
}
RECURRENCE = {"qwen3_5_text": "delta_rule", "nemotron_h": "scan"}


def subject_of(tmp_path, monkeypatch, model_type, **how):
    """Three samples of text on a tiny model."""
    serve_hybrid(monkeypatch, model_type)
    folder = hybrid_folder(tmp_path, model_type, **how)
    return Subject(folder, text_samples()[:3], recipe_folder=TINY_MODEL)


def with_ghost(subject):
    """A collator without gaps between samples, whose rows end in a ghost segment."""
    slots = sum(sample.length for sample in subject.samples)
    return PackCollator(
        pad_token_id=subject.encoder.pad_token_id,
        num_position_axes=subject.encoder.num_position_axes,
        pad_to_multiple_of=1,
        total_multiple_of=slots + 13,
    )


def told(lengths):
    """A row's segments."""
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return RowSegments(tuple(lengths), cu_seqlens)


def break_inside(monkeypatch, kinds, fault):
    """Implementations of some kinds that take the row for `fault(lengths)`: all looks right
    outside."""
    from vlmpack.backends.hf import engine

    choose = engine.choose_recurrence

    def broken(chosen):
        def function(*args, **options):
            args = [told(fault(x.lengths)) if isinstance(x, RowSegments) else x for x in args]
            return chosen.function(*args, **options)

        return replace(chosen, function=function)

    def choose_broken(**where):
        right = choose(**where)
        return replace(right, **{kind: broken(getattr(right, kind)) for kind in kinds})

    monkeypatch.setattr(engine, "choose_recurrence", choose_broken)


def no_reset(lengths):
    """One segment over the row."""
    return (sum(lengths),)


def test_kernels_that_know_bfloat16_alone_give_way_in_float32(tmp_path, monkeypatch):
    subject = subject_of(tmp_path, monkeypatch, "lfm2")

    def verified(asked, dtype):
        recipe = recipe_for(TINY_MODEL, model__recurrence=asked)
        spec = engine_spec(recipe, subject.encoder, Ranks())
        return verified_spec(spec, dtype).model.recurrence

    assert verified("kernels", torch.float32) == "auto"
    assert verified("kernels", torch.bfloat16) == "kernels"
    assert verified("torch", torch.float32) == "torch"


@pytest.mark.cases(slow="lfm2")
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "nemotron_h", "lfm2"])
def test_it_passes_and_says_what_it_saw(tmp_path, monkeypatch, model_type):
    subject = subject_of(tmp_path, monkeypatch, model_type)
    checks = subject.checks(with_ghost(subject))
    assert failed(checks) == set()
    assert set(checks) >= OURS
    assert ("gradients: recurrent scalars" in checks) == (model_type in RECURRENCE)
    calls = 2 if model_type == "lfm2" else 6 if "qwen" in model_type else 4
    assert checks[SEGMENTS].detail.startswith(f"those of the row in {calls} calls of ")
    assert 0 < checks[ALONE].measured < checks[ALONE].bound
    for part in {"gradients: recurrent layers", "gradients: recurrent scalars"} & set(checks):
        assert 0 < checks[part].measured <= checks[part].bound == 1e-5
        assert "stock's own is off by" in checks[part].detail
    assert checks[GRADIENTS].detail == "3 losses in turn, zero in every other segment"


@pytest.mark.cases(slow="nemotron_h-kinds2")
@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("qwen3_5_text", ("convolution",)),
        ("qwen3_5_text", ("delta_rule",)),
        ("nemotron_h", ("scan",)),
        ("nemotron_h", ("convolution",)),
        ("qwen3_5_text", ("convolution", "delta_rule")),
        ("nemotron_h", ("convolution", "scan")),
    ],
)
def test_no_reset(tmp_path, monkeypatch, model_type, kinds):
    subject = subject_of(tmp_path, monkeypatch, model_type)
    break_inside(monkeypatch, kinds, no_reset)
    checks = subject.checks(with_ghost(subject))
    assert failed(checks) >= NUMBERS | {ALONE, "leak test", GRADIENTS}
    assert checks[SEGMENTS].status == "pass", "what is told is right, what is made of it is not"
    first = kinds[0].replace("_", " ")
    assert f"first differs: {first} of model.layers.0." in checks[ALONE].detail
    assert "model.layers.0 (recurrent)" in checks[OUTPUTS].detail
    for name in (ALONE, OUTPUTS):
        assert checks[name].look_at.startswith("recurrent layers: their state must be reset")
    assert checks["leak test"].detail.startswith(f"{subject.samples[0].key} moves ")


@pytest.mark.slow
def test_no_reset_behind_alignment_gaps(tmp_path, monkeypatch):
    """Gaps of nothing keep it from the label tokens: losses and gradients would say all is well."""
    subject = subject_of(tmp_path, monkeypatch, "lfm2", padding=0.0)
    break_inside(monkeypatch, ("convolution",), no_reset)
    checks = subject.checks(subject.collator(alignment=8))
    assert failed(checks) == {OUTPUTS, "logits of each sample", "leak test", ALONE}


@pytest.mark.slow
def test_a_reset_at_every_chunk(tmp_path, monkeypatch):
    """Nothing leaks: what is lost is what a sample should have kept of itself."""
    subject = subject_of(tmp_path, monkeypatch, "qwen3_5_text")

    def cut(lengths):
        return [part for n in lengths for part in (16,) * (n // 16) + (n % 16,) if part]

    break_inside(monkeypatch, ("delta_rule",), cut)
    assert max(sample.length for sample in subject.samples) > 16
    checks = subject.checks(with_ghost(subject))
    assert failed(checks) >= NUMBERS | {ALONE}
    assert failed(checks).isdisjoint({"leak test", GRADIENTS, SEGMENTS})
    assert "first differs: delta rule of model.layers.0." in checks[ALONE].detail
    assert "and nowhere else" in checks[ALONE].look_at


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("delta_rule",), ("convolution",)])
def test_state_into_the_ghost_segment(tmp_path, monkeypatch, kinds):
    """No sample is harmed: only rows of the table that look at the ghost can see it."""
    subject = subject_of(tmp_path, monkeypatch, "qwen3_5_text")
    break_inside(monkeypatch, kinds, lambda lengths: (*lengths[:-2], sum(lengths[-2:])))
    checks = subject.checks(with_ghost(subject))
    assert failed(checks) == {ALONE, "leak test"}
    assert checks["leak test"].detail == f"{subject.samples[-1].key} moves the tail"
    assert "e.g. the tail" in checks[ALONE].detail


@pytest.mark.slow
@pytest.mark.parametrize("place", ["host", "device"])
def test_segments_of_another_row(tmp_path, monkeypatch, place):
    """Told to the layers; the row and its attention are right."""
    from vlmpack.backends.hf import model

    class Stale(RowSegments):
        @staticmethod
        def of(params, *, width):
            lengths = list(params.segment_lengths)
            lengths[0], lengths[1] = lengths[0] + 3, lengths[1] - 3
            row, other = RowSegments.of(params), told(lengths)
            if place == "host":
                return RowSegments(other.lengths, row.cu_seqlens)
            return RowSegments(row.lengths, other.cu_seqlens)

    subject = subject_of(tmp_path, monkeypatch, "qwen3_5_text")
    monkeypatch.setattr(model, "RowSegments", Stale)
    checks = subject.checks(with_ghost(subject))
    assert failed(checks) >= NUMBERS | {SEGMENTS, ALONE, "leak test", GRADIENTS}
    end = subject.samples[0].length
    assert checks[SEGMENTS].detail.startswith(
        f"the convolution of model.layers.0.linear_attn was told no boundary at slot {end}, and "
    )
    assert checks["boundaries"].status == "pass"


@pytest.mark.slow
def test_a_layer_that_asks_no_recurrence(tmp_path, monkeypatch):
    """It computes its convolution by itself, over the whole row."""
    from transformers.models.lfm2 import modeling_lfm2

    subject = subject_of(tmp_path, monkeypatch, "lfm2")
    assert subject.stock.recurrent
    forward = modeling_lfm2.Lfm2ShortConv.forward

    def by_itself(self, hidden_states, *args, **kwargs):
        if "row_segments" in kwargs and self.layer_idx == 0:
            gate, c, x = self.in_proj(hidden_states).transpose(-1, -2).chunk(3, dim=-2)
            mixed = self.conv(gate * x)[..., : x.shape[-1]]
            return self.out_proj((c * mixed).transpose(-1, -2))
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(modeling_lfm2.Lfm2ShortConv, "forward", by_itself)
    checks = subject.checks(with_ghost(subject))
    assert SEGMENTS in failed(checks)
    said = "model.layers.0.conv asked no recurrence that knows of segments"
    assert checks[SEGMENTS].detail == said


def test_a_backward_pass_that_forgets_boundaries(tmp_path, monkeypatch):
    """The forward pass is right to the last bit, so no output, loss or leak can show it."""
    from vlmpack.backends.hf import engine

    class Forgetful(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad + 1e-3 * grad.roll(-1, dims=2)

    choose = engine.choose_recurrence

    def choose_broken(**where):
        right = choose(**where)

        def function(x, *args, **options):
            return right.convolution.function(Forgetful.apply(x), *args, **options)

        return replace(right, convolution=replace(right.convolution, function=function))

    subject = subject_of(tmp_path, monkeypatch, "lfm2")
    monkeypatch.setattr(engine, "choose_recurrence", choose_broken)
    checks = subject.checks(with_ghost(subject))
    assert failed(checks) >= {GRADIENTS, "gradients: recurrent layers"}
    assert failed(checks).isdisjoint({OUTPUTS, "loss of each sample", "leak test", ALONE})
    assert "has a gradient in" in checks[GRADIENTS].detail


@pytest.mark.slow
def test_strong_decays_pass_within_the_stated_bounds_of_float64(tmp_path, monkeypatch):
    """As published models draw them: stock's own float32 is far outside of them."""
    subject = subject_of(tmp_path, monkeypatch, "qwen3_5_text", decays=(0.01, 16.0))
    checks = subject.checks(with_ghost(subject))
    assert failed(checks) == set()
    scalars = checks["gradients: recurrent scalars"]
    assert scalars.bound < 5e-5
    own = float(scalars.detail.rpartition(" ")[2])
    assert own > 3 * scalars.bound, "stock's float32 would not pass"


@pytest.mark.slow
def test_a_rule_that_is_not_stocks(tmp_path, monkeypatch):
    """vlmpack's rule, wrong alone and in the row alike: float64 agrees with it, and stock does
    not."""
    from vlmpack.proof.verify import recurrent

    right = recurrent.segment_delta_rule

    def wrong(query, key, value, g, beta, row, **options):
        return right(query, key, value, 1.1 * g, beta, row, **options)

    monkeypatch.setattr(recurrent, "segment_delta_rule", wrong)
    subject = subject_of(tmp_path, monkeypatch, "qwen3_5_text")
    checks = subject.checks(with_ghost(subject))
    assert failed(checks) >= {"gradients: recurrent scalars", ALONE}
