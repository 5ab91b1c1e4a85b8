"""Which layers of a mixture of experts get adapters, as docs/trainable.md says."""

from __future__ import annotations

import json

import pytest
from support.engines import policy
from support.families import TINY

from vlmpack.backends.hf.adapters import adapter_targets
from vlmpack.backends.skeleton import model_skeleton
from vlmpack.capabilities.served import SERVED
from vlmpack.errors import CapabilityError
from vlmpack.families.registry import family_of

SHARED = {"shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"}
BESIDE_EXPERTS = {
    "qwen3_5_moe": SHARED | {"mlp.shared_expert_gate"},
    "qwen3_5_moe_text": SHARED | {"mlp.shared_expert_gate"},
    "nemotron_h": {"shared_experts.up_proj", "shared_experts.down_proj"},
    "nemotron_h_omni": {"shared_experts.up_proj", "shared_experts.down_proj"},
    "qwen3_vl_moe": set(),
    "gemma4-mixture": {"router.proj"},
    **{
        name: {"shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj"}
        for name in ("glm4_moe", "glm4_moe_lite", "deepseek_v3")
    },
}


def targets_of(name, folder, targets="all-linear"):
    config = TINY[name].config()
    (folder / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    family = family_of(folder)
    model = model_skeleton(family.auto_class(), folder)
    asked = policy("frozen", "frozen", "lora", targets=targets)
    return model, adapter_targets(model, family.modules, asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE_EXPERTS)
def test_routed_experts_have_no_adapters_and_shared_ones_do(name, tmp_path):
    model, found = targets_of(name, tmp_path)
    routed = {n for n, _ in model.named_parameters() if ".experts." in n}
    assert routed and not any(target in parameter for target in found for parameter in routed)
    ends = {".".join(n.split(".")[-2:]) for n in found if "expert" in n or ".router." in n}
    assert ends == BESIDE_EXPERTS[name]
    only = sorted({n.rpartition(".")[2] for n in routed} - {n.rpartition(".")[2] for n in found})
    for target in only:
        with pytest.raises(CapabilityError, match=f"ends in '{target}'; there are .*o_proj"):
            targets_of(name, tmp_path, [target])
    assert ("gate_up_proj" in only) == ("nemotron" not in name)


def test_the_page_names_every_family_with_experts():
    mixtures = {name for name, model in SERVED.items() if model.has_experts}
    mixtures = {"gemma4-mixture" if name.startswith("gemma4") else name for name in mixtures}
    assert mixtures == BESIDE_EXPERTS.keys()
