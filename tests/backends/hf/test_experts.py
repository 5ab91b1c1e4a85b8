"""How experts are computed: each form against transformers' loop, and the choice among them."""

from __future__ import annotations

import copy
import json
from unittest.mock import patch

import pytest
import torch
from support.engines import make_engine
from support.families import tiny_family_folder
from support.runs import relative_l2
from support.stock import load_stock
from transformers.integrations import moe

from vlmpack.backends.hf.router_loss import (
    InComputeDtype,
    grouped_experts,
    set_experts,
)
from vlmpack.encode import Encoder

VALUE, GRADIENT = 1e-6, 1e-5
"""Relative L2 in float32: the stated bounds."""
FOUND = 1e-3

FORMS = {
    "grouped_mm, as it is chosen": grouped_experts,
    "grouped_mm of transformers": moe.grouped_mm_experts_forward,
    "batched_mm of transformers": moe.batched_mm_experts_forward,
}
FAMILIES = ("qwen3_vl_moe", "glm4_moe", "deepseek_v3")


@pytest.fixture(scope="module", params=FAMILIES)
def layer(request, tmp_path_factory):
    """The experts of a layer of a family, (E, ..., ...) weights and all."""
    model = load_stock(tiny_family_folder(request.param, tmp_path_factory.mktemp("moe")))
    (first, *_) = [part for part in model.modules() if hasattr(part, "_is_expert_parallel")]
    return first


def routes(tokens, skipped=()):
    """Hidden states, and two different experts of four for each token; some get no token."""
    draw = torch.Generator().manual_seed(tokens)
    chances = torch.rand(tokens, 4, generator=draw)
    chances[:, list(skipped)] = -1.0
    index = chances.topk(2, dim=-1).indices
    weights = torch.rand(tokens, 2, generator=draw)
    return torch.randn(tokens, 64, generator=draw), index, weights


def outcome(form, layer, case, autocast=None):
    """Output, and gradients of hidden states, weights of the route and experts; None: the loop."""
    part = copy.deepcopy(layer)
    hidden, index, weights = case
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        if form is None:
            part.config._experts_implementation_internal = "eager"
            output = part(hidden, index, weights)
        else:
            output = form(part, hidden, index, weights)
    pattern = torch.linspace(-1, 1, output.numel()).view_as(output)
    (output * pattern).sum().backward()
    gradients = [hidden.grad, weights.grad, *(p.grad for p in part.parameters())]
    assert len(gradients) == 4
    assert all(bool(gradient.any()) for gradient in gradients)
    return output.detach(), gradients


def errors(found, expected):
    """Relative L2 of the output, and the largest of a gradient."""
    gradients = [relative_l2(*pair) for pair in zip(found[1], expected[1], strict=True)]
    return relative_l2(found[0], expected[0]), max(gradients)


@pytest.mark.cases(quick=0.2, slow="*")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [(1, ()), (5, (0, 3)), (130, ()), (130, (1,))], ids=str)
def test_each_form_is_exact(layer, form, case):
    case = routes(*case)
    expected = outcome(None, layer, case)
    value, gradient = errors(outcome(FORMS[form], layer, case), expected)
    assert value < VALUE
    assert gradient < GRADIENT


def shifted(part, hidden, index, weights):
    """A form that is wrong: every token goes to the neighbour of its expert."""
    return grouped_experts(part, hidden, (index + 1) % 4, weights)


def unweighed(part, hidden, index, weights):
    """A form that is wrong in gradients alone: the route gets none that is its own."""
    output = grouped_experts(part, hidden, index, weights.detach())
    return output + 0.0 * weights.sum() + (weights - weights.detach()).sum()


@pytest.mark.parametrize(("form", "place"), [(shifted, 0), (unweighed, 1)])
def test_a_wrong_form_is_caught(layer, form, place):
    """The negative control."""
    case = routes(130)
    found = errors(outcome(form, layer, case), outcome(None, layer, case))
    assert found[place] > FOUND
    assert form is not unweighed or found[0] < VALUE


def test_under_autocast_it_computes_in_the_dtype_of_the_loop(layer):
    """transformers' own would compute in that of the weights, float32."""
    case, seen = routes(130), []

    def watched(part, *arguments):
        seen.append(part.down_proj.dtype)
        return form(part, *arguments)

    form = moe.grouped_mm_experts_forward
    with patch.object(moe, "grouped_mm_experts_forward", watched):
        found = outcome(grouped_experts, layer, case, autocast=torch.bfloat16)
    assert seen == [torch.bfloat16]
    exact, loop = outcome(None, layer, case), outcome(None, layer, case, autocast=torch.bfloat16)
    noise, ours = errors(loop, exact), errors(found, exact)
    assert 1e-4 < max(noise) < 0.05
    assert max(ours) < 2 * max(noise)
    assert all(gradient.dtype == torch.float32 for gradient in found[1])


def test_a_view_in_another_dtype_has_all_that_is_no_weight(layer):
    view = InComputeDtype(layer, torch.bfloat16)
    assert view.gate_up_proj.dtype == torch.bfloat16
    assert view.num_experts == layer.num_experts == 4
    assert view.act_fn is layer.act_fn


def test_the_choice_is_reported_and_leaves_no_trace_in_an_export(tmp_path):
    folder = tiny_family_folder("qwen3_vl_moe", tmp_path / "model")
    engine = make_engine(folder, Encoder(folder))
    assert engine.description["experts"] == "grouped_mm (first choice)"
    assert engine.vlm.language.config._experts_implementation == "vlmpack_grouped_mm"
    engine.export(tmp_path / "export", processor_from=folder, dtype=None)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert "vlmpack" not in json.dumps(config)


def test_where_it_cannot_run_the_loop_does(tmp_path):
    language = load_stock(tiny_family_folder("qwen3_vl_moe", tmp_path)).model.language_model

    def refused():
        raise ImportError("torch is too old")

    with patch.object(language, "_grouped_mm_can_dispatch", refused):
        said = set_experts(language)
    assert said == {"experts": "eager (grouped_mm cannot run: torch is too old)"}
    assert language.config._experts_implementation == "eager"


def test_a_dense_model_has_nothing_to_choose(tiny_folder):
    engine = make_engine(tiny_folder, Encoder(tiny_folder))
    assert set_experts(engine.vlm.language) == {}
    assert "experts" not in engine.description
