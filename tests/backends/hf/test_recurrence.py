"""Packed rows of models whose layers carry state, against stock transformers one by one."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from support.hybrids import (
    CONFIGS,
    CPU,
    UNPACKABLE,
    gradients,
    hybrid,
    losses_alone,
    packed_hidden,
    packed_losses,
    packing,
    replaced_kernels,
    row_params,
    sample_slots,
    samples,
)
from support.recurrences import delta_rule, segments
from support.runs import GRADIENT_TOLERANCE, LOSS_TOLERANCE, mean_loss, relative_l2

from vlmpack.backends.hf import recurrence
from vlmpack.backends.hf.recurrence import (
    DECORATOR,
    KERNELS,
    decorated_kernels,
    packed_row,
    recurrence_kinds,
    replace_kernels,
)
from vlmpack.backends.recompute import recompute_layers
from vlmpack.errors import CapabilityError
from vlmpack.recurrence import RowSegments, choose_recurrence

LENGTHS = (5, 70, 2, 33, 64, 90)
QUICK = ("qwen3_5_text", "nemotron_h")
NEVER_FUSED = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text", "olmo_hybrid", "lfm2", "lfm2_moe")
TYPES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


def choice(*, fixed: bool = False):
    return choose_recurrence("auto", device=CPU, dtype=torch.float32, fixed_shape=fixed)


def the_row():
    """Six samples, gaps up to a multiple of 8, a ghost and two empty segments."""
    return row_params(LENGTHS, multiple=8, ghost=24, empty=2)


def loss_error(ours, theirs):
    """The largest relative error of a sample's mean loss."""
    pairs = zip(ours, theirs, strict=True)
    return max(abs(mean_loss(a.detach()) / mean_loss(b.detach()) - 1) for a, b in pairs)


def gradient_error(ours, theirs):
    """The largest relative L2 error of a parameter, and which one."""
    assert ours.keys() == theirs.keys()
    return max((relative_l2(ours[name], theirs[name]), name) for name in theirs)


@pytest.mark.slow
def test_every_kernel_that_transformers_decorates_is_known():
    found: dict[str, list[str]] = {}
    bare: set[str] = set()
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        decorated = decorated_kernels(source)
        marks = len(re.findall(rf"^@{DECORATOR}\(", source, re.MULTILINE))
        assert len(decorated) >= marks, path
        if len(decorated) > marks:
            bare.add(path.parent.name)
        for kernel in decorated.values():
            found.setdefault(kernel, []).append(path.parent.name)
    assert {"qwen3_5", "nemotron_h", "lfm2"} <= set(found["causal_conv1d_fn"])
    assert set(found) == set(KERNELS)
    assert bare <= {"lfm3"}, "functions that are named as a kernel and not decorated"


@pytest.mark.parametrize("fixed", [False, True], ids=["segments", "fixed"])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_packed_row_equals_its_samples_alone(model_type, fixed):
    model, ids = hybrid(model_type), samples(LENGTHS)
    alone = losses_alone(model, ids)
    wanted = gradients(model, alone)
    with packing(model, choice(fixed=fixed)):
        packed = packed_losses(model, ids, the_row())
        found = gradients(model, packed)
    assert loss_error(packed, alone) < LOSS_TOLERANCE
    error, name = gradient_error(found, wanted)
    assert error < GRADIENT_TOLERANCE, name


@pytest.mark.cases(slow="segments")
@pytest.mark.parametrize("fixed", [False, True], ids=["segments", "fixed"])
def test_strong_decays_equal_the_rule_itself_in_double(fixed, monkeypatch):
    from transformers.models.qwen3_5 import modeling_qwen3_5

    def literal(query, key, value, g, beta, use_qk_l2norm_in_kernel, **_):
        assert use_qk_l2norm_in_kernel
        parts = (x[0].double() for x in (query, key, value, g, beta))
        return delta_rule(*parts, normalize=True)[None], None

    model, ids = hybrid("qwen3_5_text", decays=(0.01, 16.0)).double(), samples(LENGTHS)
    with packing(model, choice(fixed=fixed)):
        packed = packed_losses(model, ids, the_row())
        found = gradients(model, packed)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", literal)
    alone = losses_alone(model, ids)
    # The class itself takes A_log, the steps and what it norms through float32.
    assert loss_error(packed, alone) < 1e-7
    error, name = gradient_error(found, gradients(model, alone))
    assert error < GRADIENT_TOLERANCE, name


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("qwen3_5_text", ("convolution", "delta_rule")),
        ("nemotron_h", ("convolution", "scan")),
        ("lfm2", ("convolution",)),
    ],
)
def test_the_kinds_that_are_chosen_for_are_those_that_are_reported(model_type, kinds):
    model = hybrid(model_type)
    assert recurrence_kinds(model) == kinds
    with replaced_kernels(model, choice()) as replaced:
        said = replaced["recurrence"]
    assert said.startswith(", ".join(f"{kind.replace('_', ' ')}: segments" for kind in kinds))


def test_a_kernel_that_is_not_known_is_nothing_to_choose(monkeypatch):
    monkeypatch.delitem(KERNELS, "causal_conv1d_fn")
    assert recurrence_kinds(hybrid("qwen3_5_text")) == ("delta_rule",)


def without_resets(chosen):
    """An implementation that takes the row for one segment."""

    def whole(*args, **options):
        tensors = [segments((x.width,)) if isinstance(x, RowSegments) else x for x in args]
        return chosen.function(*tensors, **options)

    return replace(chosen, function=whole)


@pytest.mark.cases(
    quick=("broken0-nemotron_h", "broken1-nemotron_h", "broken2-qwen3_5_text"),
    slow="broken1-qwen3_5_text",
)
@pytest.mark.parametrize("model_type", QUICK)
@pytest.mark.parametrize(
    "broken", [("convolution",), ("delta_rule", "scan"), ("convolution", "delta_rule", "scan")]
)
def test_a_missing_reset_is_seen(model_type, broken):
    model, ids, right = hybrid(model_type), samples(LENGTHS), choice()
    alone = losses_alone(model, ids)
    wanted = gradients(model, alone)
    wrong = replace(right, **{kind: without_resets(getattr(right, kind)) for kind in broken})
    with packing(model, wrong):
        packed = packed_losses(model, ids, the_row())
        found = gradients(model, packed)
    assert loss_error(packed, alone) > 10 * LOSS_TOLERANCE
    assert gradient_error(found, wanted)[0] > 100 * GRADIENT_TOLERANCE


@pytest.mark.parametrize("model_type", QUICK)
def test_a_reset_at_every_chunk_is_seen(model_type):
    model, ids = hybrid(model_type), samples(LENGTHS)
    alone = losses_alone(model, ids)
    cut: list[int] = []
    for length in the_row().segment_lengths:
        cut += [64] * (length // 64) + [length % 64] * bool(length % 64)
    with packing(model):
        packed = packed_losses(model, ids, the_row(), segments(cut))
    assert loss_error(packed, alone) > 10 * LOSS_TOLERANCE


@pytest.mark.parametrize("fixed", [False, True], ids=["segments", "fixed"])
@pytest.mark.parametrize("model_type", TYPES)
def test_no_bit_changes_with_the_other_samples(model_type, fixed):
    model, params = hybrid(model_type), the_row()
    ids, others = samples(LENGTHS), samples(LENGTHS, seed=1)
    mixed = [others[0], ids[1], others[2], others[3], ids[4], others[5]]
    with packing(model, choice(fixed=fixed)), torch.no_grad():
        before, after = (packed_losses(model, each, params) for each in (ids, mixed))
    for number, pair in enumerate(zip(before, after, strict=True)):
        same = torch.equal(*pair)
        if "num_experts_per_tok" in CONFIGS[model_type]:
            # Which tokens share an expert's matrix product follows from all samples.
            same = torch.allclose(*pair, rtol=1e-5, atol=0.0)
        assert same == (number in (1, 4))


@pytest.mark.parametrize("model_type", QUICK)
def test_gaps_and_ghosts_take_nothing_in_and_give_nothing_out(model_type):
    model, params = hybrid(model_type), the_row()
    ids, others = samples(LENGTHS), samples(LENGTHS, seed=1)
    ghost = slice(sum(params.segment_lengths) - 24, None)
    with packing(model), torch.no_grad():
        one, two = (packed_hidden(model, each, params) for each in (ids, others))
        assert torch.equal(one[ghost], two[ghost])
        alone = packed_hidden(model, [], row_params((), ghost=24))
        assert torch.allclose(one[ghost], alone, atol=1e-5)
        joined = (*params.segment_lengths[:5], params.segment_lengths[5] + 24, 0, 0, 0)
        told = segments(joined)
        leaked = [packed_hidden(model, each, params, told)[ghost] for each in (ids, others)]
        assert not torch.allclose(*leaked, atol=1e-3)
        # Another id in the gaps: what is no sample's reaches no sample.
        longer = [torch.cat((x, x[:1])) if len(x) % 8 else x for x in ids]
        slots = sample_slots(ids, params)
        filled = packed_hidden(model, longer, params)
        assert all(torch.equal(one[where], filled[where]) for where in slots)


@pytest.mark.parametrize("model_type", QUICK)
def test_layers_that_are_recomputed_know_their_segments(model_type):
    model, ids, params, right = hybrid(model_type), samples(LENGTHS), the_row(), choice()
    calls = []

    def counted(*args, **options):
        calls.append(args[3].lengths)
        return right.convolution.function(*args, **options)

    counting = replace(right, convolution=replace(right.convolution, function=counted))
    with packing(model, counting):
        kept = gradients(model, packed_losses(model, ids, params))
        once = len(calls)
        recompute_layers(model, "full", draws=False)
        again = gradients(model, packed_losses(model, ids, params))
    assert len(calls) == 3 * once
    assert set(calls) == {params.segment_lengths}
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("model_type", QUICK)
def test_autocast_packs_as_well(model_type):
    model, ids, params = hybrid(model_type), samples(LENGTHS), the_row()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with packing(model):
            packed = packed_losses(model, ids, params)
            assert all(g.isfinite().all() for g in gradients(model, packed).values())
        alone = losses_alone(model, ids)
    assert loss_error(packed, alone) < 0.02


def test_a_model_that_is_not_packed_is_not_touched():
    model, ids = hybrid("nemotron_h"), samples((9, 30))
    modules = recurrence.modeling_modules(model)
    stock = {module: dict(vars(module)) for module in modules}
    with torch.no_grad():
        before = losses_alone(model, ids)
        with replaced_kernels(model, choice()):
            assert len(recurrence.kernel_places(model)) == 5
            assert all(map(torch.equal, losses_alone(model, ids), before))
            prompt = ids[0][None]
            long = model.eval().generate(prompt, max_new_tokens=3, do_sample=False)
        assert torch.equal(model.generate(prompt, max_new_tokens=3, do_sample=False), long)
    assert stock == {module: dict(vars(module)) for module in modules}


def test_a_second_replacement_takes_the_place_of_the_first():
    model = hybrid("lfm2")
    modeling = recurrence.modeling_modules(model)[0]
    there = modeling.causal_conv1d_fn  # engines of other tests put theirs there and leave it
    stock = getattr(there, "before", there)
    with replaced_kernels(model, choice()):
        held, second = modeling.causal_conv1d_fn, choice(fixed=True)
        with replaced_kernels(model, second):
            assert modeling.causal_conv1d_fn.before is stock
            assert modeling.causal_conv1d_fn.choice is second
        assert modeling.causal_conv1d_fn is held
    assert modeling.causal_conv1d_fn is there


def test_the_fused_path_of_training_is_left_alone_in_packed_rows(monkeypatch):
    from transformers.models.nemotron_h import modeling_nemotron_h

    called = []
    monkeypatch.setattr(
        modeling_nemotron_h,
        "mamba2_split_conv1d_scan_combined",
        lambda *args, **kwargs: called.append(kwargs),
    )
    model, ids = hybrid("nemotron_h"), samples(LENGTHS)
    with packing(model):
        packed_losses(model, ids, the_row())
        assert called == []
        assert model.training
    with replaced_kernels(model, choice()):
        model(ids[0][None], use_cache=False)
    assert len(called) == 2  # outside of packed rows, once a layer


@pytest.mark.cases(quick=("nemotron_h", "mamba2", "qwen3_next"), slow="qwen3_5_moe_text")
@pytest.mark.parametrize("model_type", CONFIGS)
def test_layers_that_a_fused_path_reads_alone_are_known(model_type, monkeypatch):
    """Those whose weights stock hands to it in training; they get no adapters."""
    model, given = hybrid(model_type), []

    def heard(*args, **options):
        given.extend(map(id, (*args, *options.values())))

    for module, function, kernel in recurrence.kernel_places(model):
        if kernel == "mamba_split_conv1d_scan_combined":
            monkeypatch.setattr(module, function, heard)
    losses_alone(model, samples((9,)))
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    taken = {name for name, layer in linear.items() if id(layer.weight) in given}
    assert taken == recurrence.uncalled_layers(model)
    assert bool(taken) == (model_type not in NEVER_FUSED)


def test_a_layer_that_hands_no_segments_on_is_found():
    model, ids = hybrid("lfm2"), samples((9,))[0][None]
    said = pytest.raises(CapabilityError, match="causal_conv1d_fn was called in a packed row")
    with replaced_kernels(model, choice()):
        with packed_row(), said:
            model(ids)
        model(ids)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", UNPACKABLE)
def test_a_hybrid_that_cannot_be_packed_is_refused(model_type):
    model, ids = hybrid(model_type), samples(LENGTHS)
    assert len(losses_alone(model, ids)) == len(ids)
    with packing(model), pytest.raises(CapabilityError, match="in a packed row without row_seg"):
        packed_losses(model, ids, the_row())


@pytest.mark.parametrize("name", [name for name in KERNELS if "conv1d_fn" not in name])
def test_kernels_that_cannot_pack_say_why(name):
    kernel, row = KERNELS[name], segments((2, 3))
    if kernel.kind is not None:
        asked = inspect.signature(kernel.ours).parameters.values()
        tensors = [torch.ones(1, 5, 1, 1) for each in asked if each.kind is not each.VAR_KEYWORD]
        with pytest.raises(CapabilityError, match="a packed row has no cache"):
            options = {"output_final_state": True, "return_final_states": True}
            kernel.ours(choice(), row, *tensors[2:], **options)
    elif "mamba_inner" in name or "split" in name:
        assert kernel.ours(choice(), row) is None
    else:
        with pytest.raises(CapabilityError, match="packed rows cannot run here: "):
            kernel.ours(choice(), row)


def test_a_gate_inside_the_scan_is_refused():
    with pytest.raises(CapabilityError, match="a gate inside Mamba-2's scan"):
        tensors = [torch.ones(1)] * 5
        KERNELS["mamba_chunk_scan_combined"].ours(choice(), segments((5,)), *tensors, z=1)


def test_a_kernel_that_nobody_knows_is_refused(monkeypatch):
    model = hybrid("lfm2")
    known = {name: kernel for name, kernel in KERNELS.items() if name != "causal_conv1d_fn"}
    monkeypatch.setattr(recurrence, "KERNELS", known)
    before = [dict(vars(module)) for module in recurrence.modeling_modules(model)]
    with pytest.raises(CapabilityError, match=r"modeling_lfm2 calls a kernel .* causal_conv1d_fn"):
        replace_kernels(model, choice())
    assert before == [dict(vars(module)) for module in recurrence.modeling_modules(model)]


def test_what_runs_is_reported_for_the_layers_that_are_there():
    with replaced_kernels(hybrid("lfm2"), choice()) as replaced:
        said = replaced["recurrence"]
        assert said.startswith("convolution: segments (causal_conv1d needs a CUDA")
        assert "scan" not in said
    with replaced_kernels(torch.nn.Linear(2, 2), choice()) as nothing:
        assert nothing == {}
