"""Nemotron-H on the mcore engine, in one process: what is refused by name, what its files are
called, and buffers that no step changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import tiny_family_folder
from support.layouts import LAYOUTS, make_megatron
from support.stock import load_stock
from support.tiny_nemotron_h import nemotron_h

from vlmpack.backends.mcore import pretrained
from vlmpack.backends.mcore.config import transformer_config
from vlmpack.backends.mcore.weights import megatron_family
from vlmpack.backends.mcore.weights.language import language_dims
from vlmpack.distributed import start_process_group
from vlmpack.errors import CapabilityError
from vlmpack.recipe.schema import ModelSection, ParallelismSection

FAMILY = megatron_family("nemotron_h")
BIAS = "layers.3.mixer.gate.e_score_correction_bias"


def dims_with(**values):
    config = nemotron_h()
    for name, value in values.items():
        setattr(config, name, value)
    return language_dims(config, FAMILY)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"moe_latent_size": 16},
            r"moe_latent_size is 16\. .* only in Transformer Engine's layers",
        ),
        ({"n_group": 2}, r"n_group 2, .* two or more of all experts"),
        ({"norm_topk_prob": False}, "norm_topk_prob False"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok 1"),
        ({"mlp_bias": True}, "mlp_bias is True, the mcore engine knows False"),
        ({"use_bias": True}, "use_bias is True"),
        ({"mlp_hidden_act": "gelu"}, "mlp_hidden_act is 'gelu', the mcore engine knows 'relu2'"),
    ],
)
def test_what_megatrons_layers_do_not_have_is_refused_by_name(values, said):
    with pytest.raises(CapabilityError, match=said):
        dims_with(**values)


def test_what_experts_have_plays_no_part_without_them():
    kinds = ["linear_attention", "mlp", "full_attention"]
    dims = dims_with(layers_block_type=kinds, moe_latent_size=16, n_group=2)
    assert dims.experts is None and dims.layers == 3 and dims.mamba.layers == {0}
    dims = dims_with(layers_block_type=["linear_attention", "moe"])
    assert dims.intermediate == 0, "no MLP to divide"


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ({"tensor": 4, "sequence": True}, r"tensor: 4 does not divide n_groups 2 of the model"),
        ({"context": 3}, r"context: 3 .* mamba_num_heads 8 in n_groups 2 of the model"),
        ({"context": 16}, r"context: 16 processes .* mamba_num_heads 8"),
    ],
)
def test_heads_that_are_not_shared_out_evenly_are_refused(split, said):
    dims = dims_with(num_attention_heads=16, num_key_value_heads=16)
    with pytest.raises(CapabilityError, match=said):
        dims.check(ParallelismSection(**split))
    dims.check(ParallelismSection(context=8))
    dims.check(ParallelismSection(tensor=2, context=4, sequence=True))


def test_the_experts_have_no_load_balancing_loss():
    model = ModelSection(path="m", backend="mcore", router_aux_loss_coef=0.01)
    with pytest.raises(CapabilityError, match=r"router_aux_loss_coef: 0.01, but experts"):
        transformer_config(dims_with(), model, ParallelismSection(), dtype=torch.float32)


@pytest.mark.parametrize("place", ["mixer.gate", "mlp.gate", "block_sparse_moe.router"])
def test_a_routers_bias_is_found_wherever_a_class_has_it(place, monkeypatch):
    """By its layer: those of layers 1, 2 and 12 differ, and so does the tower's."""
    routers = {number: SimpleNamespace(expert_bias=torch.zeros(2)) for number in (1, 2, 12)}
    monkeypatch.setattr(pretrained, "biased_routers", lambda _: routers.items())
    stored = {
        f"model.layers.{number}.{place}.{BIAS.rpartition('.')[2]}": torch.tensor([number, 0.5])
        for number in routers
    }
    others = {f"tower.{name}": -value for name, value in stored.items()}
    kept = pretrained.KeptBuffers(others | stored)
    kept.fill([], lambda kind, box: (stored | others)[box.name], "model")
    for number, router in routers.items():
        assert router.expert_bias.tolist() == [number, 0.5]
    routers[3] = routers[1]
    with pytest.raises(CapabilityError, match=r"0 buffers model\.layers\.3\.\*\.e_score"):
        kept.fill([], lambda kind, box: stored[box.name], "model")
    twice = {name.replace(place, "other"): value for name, value in stored.items()}
    with pytest.raises(CapabilityError, match=r"2 buffers model\.layers\.1\."):
        pretrained.KeptBuffers(stored | twice).fill([], lambda *_: None, "model")


@pytest.mark.slow
def test_a_bias_of_the_files_reaches_the_router_and_the_model_that_generates(tmp_path):
    """Under the names that published files have."""
    folder = tiny_family_folder("nemotron_h", tmp_path)
    stored = folder / "model.safetensors"
    weights = load_file(str(stored))
    assert f"backbone.{BIAS}" in weights
    assert f"backbone.{BIAS.partition('gate')[0]}experts.3.up_proj.weight" in weights
    bias = torch.tensor([0.3, -0.1, 1e-9, 1 / 3])
    save_file(weights | {f"backbone.{BIAS}": bias}, str(stored), metadata={"format": "pt"})
    ranks = start_process_group()
    engine = make_megatron(LAYOUTS["one"], ranks, folder)
    (router,) = [part for part in engine.model.modules() if hasattr(part, "expert_bias")]
    assert torch.equal(router.expert_bias, bias)
    with engine.generation() as model:
        state, stock = model.state_dict(), load_stock(folder).state_dict()
        assert torch.equal(state[f"model.{BIAS}"], bias)
        assert state.keys() == stock.keys()
        assert all(torch.equal(value, stock[name]) for name, value in state.items())
