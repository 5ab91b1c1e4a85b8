"""Names of every family's export, against what servers were seen to take (`make servers`)."""

from __future__ import annotations

import math

import pytest
import torch
from support.exported_names import FOR_SERVERS, write_adapters, write_exported
from support.families import FAMILIES, QUICK_FAMILIES, TEXT_FAMILIES, model_type_of
from transformers import AutoModelForImageTextToText

from tools.servers.facts import pattern, read_facts, shapes_of, unknown_names
from vlmpack.backends.adapter_folder import adapted_layers
from vlmpack.capabilities.servers import SERVERS
from vlmpack.errors import CapabilityError

GGUF = read_facts()["gguf"]["families"]
FACTS = {server: read_facts()[server] for server in SERVERS}
_OTHER_TOWER = "SigLIP's names are those of transformers 5, without vision_model"
REFUSED = {
    ("vllm", "gemma3"): _OTHER_TOWER,
    ("vllm", "llava_onevision"): _OTHER_TOWER,
    ("sglang", "gemma3"): _OTHER_TOWER,
    ("sglang", "gemma3_text"): "SGLang leaves the head out: it is tied in every published folder",
    ("sglang", "qwen3_vl_moe"): "SGLang has experts in each layer, the tiny model not in one",
    **{(server, "nemotron_h_omni"): "another config.json" for server in ("sglang", "vllm")},
}
"""Exports that a server does not take as they are, and why."""
UNFED = {("sglang", "gemma4"), ("sglang", "gemma4_text"), ("sglang", "gemma4_unified")}
"""Where a norm of keys is not fed, in layers that take their keys from an earlier one."""
UNREGISTERED = {"idefics3", "internvl", "llava_onevision", "smolvlm"}
"""Families that SGLang has no class for."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK_FAMILIES else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_servers_have_a_place_for_every_name(name, tmp_path):
    names = shapes_of(write_exported(name, tmp_path / "export"))
    assert len(names) > 10, "guard"
    assert GGUF[name]["export"] == sum(map(math.prod, names.values())), "make gguf"
    for server, facts in FACTS.items():
        family = facts["families"][name]
        assert ("unregistered" in family) == (server == "sglang" and name in UNREGISTERED)
        wrong = family.keys() - {"ends", "unregistered", "adapters"}
        if (server, name) in UNFED:
            (unfed,) = family["unfed"]
            assert wrong == {"unfed"} and unfed.endswith("self_attn.k_norm.weight")
        else:
            assert bool(wrong) == ((server, name) in REFUSED), (server, wrong)
        if "unregistered" in family or (server, name) in REFUSED:
            continue
        assert unknown_names(names, family) == [], server
        changed = {name.replace("norm.", "normal."): shape for name, shape in names.items()}
        assert unknown_names(changed, family), "a name that is changed is not known"


def taken(server, model_type, layers):
    """Whether a server takes adapters of layers, by what an export says."""
    try:
        SERVERS[server].check_layers(model_type, layers)
    except CapabilityError:
        return False
    return True


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK_FAMILIES else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_every_layer_of_an_adapter_ends_in_one_module_or_is_refused(name, tmp_path):
    written = {form: adapted_layers(at) for form, at in write_adapters(name, tmp_path).items()}
    assert len(written["layers"]) > 5, "guard"
    for server, facts in FACTS.items():
        known = facts["families"][name].get("adapters")
        if known is None:
            assert model_type_of(name) in SERVERS[server].refused
            continue
        assert known.keys() == written.keys()
        kind = model_type_of(name)
        for form, layers in written.items():
            ends, refused = (known[form].get(key, {}) for key in ("ends", "refused"))
            assert "" in refused or {*ends, *refused} == set(map(pattern, layers)), (server, form)
            if form not in ("layers", SERVERS[server].expert_form(kind)):
                continue
            fit = {layer for layer in layers if pattern(layer) in ends and ALONE not in known[form]}
            assert taken(server, kind, layers) == (fit == layers), (server, form)
            assert not any(taken(server, kind, {layer}) for layer in layers - fit), (server, form)
            if form == "layers" and SERVERS[server].layers.get(kind, (True,))[0]:
                assert taken(server, kind, fit), (server, "the rest is taken")
            changed = {pattern(f"{layer}s") for layer in layers}
            assert not changed & {*ends, *refused}, "a name that is changed is not known"


ALONE = "several"
"""Where a layer's adapter ends in more than one module."""


def test_layers_that_a_server_takes_together_are_refused_alone():
    lessons = set()
    for server, facts in FACTS.items():
        for name, family in facts["families"].items():
            known = family.get("adapters", {}).get("layers", {})
            ends = {*known.get("ends", ())}
            if not ends or not taken(server, model_type_of(name), ends):
                continue
            for end in {one.rpartition(".")[2] for one in ends}:
                rest = {one for one in ends if not one.endswith(f".{end}")}
                needed = end in known.get("needs", {})
                assert taken(server, model_type_of(name), rest) != needed, (server, name, end)
                lessons.add((server, end, needed))
    assert {("sglang", "q_proj", True), ("vllm", "q_proj", False)} <= lessons


@pytest.mark.parametrize("name", FOR_SERVERS)
def test_an_export_for_a_server_has_its_names_and_the_same_weights(name, tmp_path):
    family, _, server = name.partition("@")
    folder = write_exported(name, tmp_path / "served")
    facts = FACTS[server]["families"]
    names = shapes_of(folder)
    assert facts[name].keys() <= {"ends", "skipped", "adapters"} and not unknown_names(
        names, facts[name]
    )
    assert "refused" in facts[family], "no lesson"
    assert unknown_names(shapes_of(write_exported(family, tmp_path / "plain")), facts[name])
    auto = AutoModelForImageTextToText
    served, plain = (
        auto.from_pretrained(str(tmp_path / one), dtype=torch.float32).state_dict()
        for one in ("served", "plain")
    )
    assert served.keys() == plain.keys()
    assert all(torch.equal(served[key], plain[key]) for key in plain)


def test_the_table_of_servers_is_what_the_facts_say():
    assert SERVERS.keys() == FACTS.keys()
    for name, server in SERVERS.items():
        facts = FACTS[name]
        assert server.title.lower() == f"{name} {facts['version']}"
        for family in FAMILIES:
            found = facts["families"][family]
            refused = model_type_of(family) in server.refused
            assert refused == bool({"unregistered", "fails"} & found.keys()), (name, family)
            assert ("refused" in found) == (family in server.renamed and not refused)


def test_converted_files_hold_every_number_of_the_export():
    assert GGUF.keys() == set(FAMILIES)
    whole = {}
    for name, found in GGUF.items():
        parts = [found[part] for part in ("model", "tower") if part in found]
        assert ("tower" in found) == (name not in TEXT_FAMILIES)
        if "fails" not in found["model"]:
            assert found["model"]["tokens"] and found["model"]["template"], name
        if not any("fails" in part for part in parts):
            whole[name] = sum(part["numbers"] for part in parts) - found["export"]
    assert {name: more for name, more in whole.items() if more} == ROPE_OF_LLAMA_3
    assert {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "qwen3", "deepseek_v3"} <= whole.keys()


ROPE_OF_LLAMA_3 = {"llama": 8}
"""Numbers more than the export has: frequencies that its config.json says."""


def test_every_family_has_facts_of_every_server():
    assert FACTS
    for server, facts in FACTS.items():
        served = {name for name in FOR_SERVERS if name.endswith(f"@{server}")}
        assert facts["families"].keys() == {*FAMILIES, *served}
        assert facts["version"] and len(facts["sha256"]) == 64
