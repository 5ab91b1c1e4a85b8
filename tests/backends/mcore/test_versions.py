"""What versions of megatron-core have in other shapes, in either shape; the engine's own tests run
on the version that is here (`make test-megatron`: on the newest)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec

from vlmpack.backends.mcore import versions
from vlmpack.capabilities.versions import TESTED, release, version_limit


@dataclass
class Parts:
    router: str
    experts: str


def build(config: str, *, submodules: Parts, kind: str) -> tuple[str, Parts, str]:
    return config, submodules, kind


def test_parts_are_replaced_in_a_spec_and_in_what_builds_a_layer():
    parts = Parts("theirs", "experts")
    spec = ModuleSpec(module=build, params={"kind": "a"}, submodules=parts)
    ours = versions.with_parts(spec, router="ours")
    assert ours == replace(spec, submodules=Parts("ours", "experts"))
    made = versions.with_parts(partial(build, submodules=parts, kind="a"), router="ours")
    assert made("config") == ("config", Parts("ours", "experts"), "a")
    assert parts == Parts("theirs", "experts"), "Megatron's own is as it was"
    for each in (spec, partial(build, submodules=parts)):
        with pytest.raises(TypeError, match="gate"):
            versions.with_parts(each, gate="ours")


def test_the_shape_is_the_one_of_the_version_that_is_here():
    """Else one of the two branches above would be nobody's."""
    layer = get_gpt_layer_local_spec(num_experts=2, moe_grouped_gemm=False).submodules
    is_partial = release(metadata.version("megatron-core")) >= (0, 18)
    assert isinstance(layer.mlp, partial if is_partial else ModuleSpec)


def test_gradients_for_the_norm_by_either_name():
    old, new = [torch.zeros(1)], [torch.ones(1)]
    known = SimpleNamespace(get_main_grads_for_grad_norm=lambda: old)
    assert versions.gradients_for_norm(known) is old
    both = SimpleNamespace(
        get_main_grads_for_grad_norm=lambda: old, get_grads_for_grad_norm=lambda: new
    )
    assert versions.gradients_for_norm(both) is new
    with pytest.raises(AttributeError, match="get_main_grads_for_grad_norm"):
        versions.gradients_for_norm(SimpleNamespace())


def test_routers_find_that_there_is_no_transformer_engine(monkeypatch):
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    versions.routers_need_no_transformer_engine()
    assert moe_utils.te_general_gemm is None
    monkeypatch.setattr(moe_utils, "te_general_gemm", build)
    versions.routers_need_no_transformer_engine()
    assert moe_utils.te_general_gemm is build, "Transformer Engine's is left"


def test_two_lines_that_need_nothing_are_left_out_and_no_other(caplog):
    for _ in range(2):
        versions.hide_advice_to_us()
    own = "megatron.core.distributed.distributed_data_parallel"
    model = "megatron.core.models.gpt.gpt_model"
    said = {
        own: ["DistributedDataParallel: full_param_layout not provided with", "other"],
        model: ["GPTModel IS DEPRECATED. GPTModel is only", "a GPTModel IS DEPRECATED"],
    }
    for name, lines in said.items():
        for line in lines:
            logging.getLogger(name).warning(line)
        assert len(logging.getLogger(name).filters) == 1
    assert caplog.messages == ["other", "a GPTModel IS DEPRECATED"]


def test_the_version_that_is_here_is_in_the_range():
    assert version_limit("megatron-core", metadata.version("megatron-core")) is None
    assert version_limit("megatron-core", TESTED["megatron-core"]) is None
