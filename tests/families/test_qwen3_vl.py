"""What Qwen3-VL has beyond the other families, and that breaking it is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import make_engine
from support.families import tiny_family_folder
from support.runs import find_differences, pack, run_batch
from support.stock import StockProcessor, run_one_by_one
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding

from vlmpack.backends.hf.load import load_model
from vlmpack.backends.hf.model import ImageFeatures
from vlmpack.encode import Encoder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """model_type -> tiny model folder."""
    return {
        name: tiny_family_folder(name, tmp_path_factory.mktemp(name))
        for name in ("qwen3_vl", "qwen3_vl_moe")
    }


def stock_run(folder, mixed, **options):
    """The mixed samples one by one through the stock model."""
    processor = StockProcessor(folder)
    model = AutoModelForImageTextToText.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="sdpa", **options
    )
    inputs = {sample.key: processor(sample) for sample in mixed}
    return run_one_by_one(model.train(), inputs)


@pytest.fixture(scope="module")
def qwen3(folders, mixed):
    """(packed model, batch, reference) of the dense model."""
    folder = folders["qwen3_vl"]
    encoder = Encoder(folder)
    batch = pack([encoder.encode(sample.cooked()) for sample in mixed], alignment=8)
    vlm = make_engine(folder, encoder).vlm.train()
    reference = stock_run(folder, mixed)
    assert find_differences(run_batch(vlm, batch), reference) == []
    return vlm, batch, reference


def losses_found(differences):
    """Keys of the samples whose loss differs."""
    return {line.split()[2].rstrip(":") for line in differences if line.startswith("loss of")}


def keys_with_images(mixed):
    """Keys of the samples that have images."""
    return {sample.key for sample in mixed if sample.images}


# DeepStack


def test_the_tower_returns_features_for_the_first_layers(qwen3):
    vlm, batch, _ = qwen3
    merged = vlm.merge(batch)
    assert [tuple(deep.shape) for deep in merged.deep] == [(batch.num_slots, 64)] * 2
    for deep in merged.deep:
        assert torch.equal(deep.any(1).nonzero()[:, 0], batch.media_positions)
    assert not torch.equal(*merged.deep)


def test_dropped_deep_features_are_found(qwen3, mixed, monkeypatch):
    vlm, batch, reference = qwen3
    modules = replace(vlm.paths, deep_features=False)
    monkeypatch.setattr(vlm, "family", replace(vlm.family, modules=modules))
    broken = find_differences(run_batch(vlm, batch), reference)
    assert losses_found(broken) == keys_with_images(mixed)
    lost = [line for line in broken if "deepstack_merger_list" in line]
    assert len(lost) == 2 * 6, "no gradient reaches the mergers"


@pytest.mark.parametrize("how", ["other layers", "other placeholders"])
def test_deep_features_in_the_wrong_place_are_found(qwen3, mixed, monkeypatch, how):
    vlm, batch, reference = qwen3
    right = vlm.image_features

    def wrong(media, device):
        images = right(media, device)
        if how == "other layers":
            return ImageFeatures(images.features, images.deep[::-1])
        return ImageFeatures(images.features, tuple(deep.roll(1, 0) for deep in images.deep))

    monkeypatch.setattr(vlm, "image_features", wrong)
    broken = find_differences(run_batch(vlm, batch), reference)
    assert losses_found(broken) == keys_with_images(mixed)


# Interleaved MRoPE


def test_axes_in_blocks_are_found(qwen3, mixed, monkeypatch):
    vlm, batch, reference = qwen3
    rotary = vlm.language.rotary_emb

    def in_blocks(freq):
        return Qwen2_5_VLRotaryEmbedding.recomposition_frequencies(rotary, freq)

    monkeypatch.setattr(rotary, "recomposition_frequencies", in_blocks)
    broken = find_differences(run_batch(vlm, batch), reference)
    assert losses_found(broken) == keys_with_images(mixed), "text has three equal axes"


# Mixture of experts


def test_the_experts_implementation_is_exact(folders, mixed):
    """transformers' grouped matmul, which the engine uses, against its loop over the experts."""
    folder = folders["qwen3_vl_moe"]
    encoder = Encoder(folder)
    engine = make_engine(folder, encoder)
    assert engine.description["experts"].startswith("grouped_mm")
    batch = pack([encoder.encode(sample.cooked()) for sample in mixed], alignment=8)
    run = run_batch(engine.vlm.train(), batch)
    reference = stock_run(folder, mixed, experts_implementation="eager")
    assert find_differences(run, reference) == []


def test_every_expert_is_used_and_one_layer_is_dense(folders, mixed):
    gradients = stock_run(folders["qwen3_vl_moe"], mixed).gradients
    layers = [
        n for n in range(4) if f"model.language_model.layers.{n}.mlp.gate.weight" in gradients
    ]
    assert layers == [0, 2, 3]
    for n in layers:
        experts = gradients[f"model.language_model.layers.{n}.mlp.experts.down_proj"]
        assert [bool(expert.any()) for expert in experts] == [True] * 4


def test_experts_stored_as_published_load_the_same(folders, tmp_path):
    """Published files hold the experts transposed: (E, D, 2 F) and (E, F, D)."""
    ours = load_model(folders["qwen3_vl_moe"]).state_dict()
    for file in folders["qwen3_vl_moe"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = load_file(tmp_path / "model.safetensors")
    names = [name for name in stored if ".experts." in name]
    assert len(names) == 2 * 3
    for name in names:
        stored[name] = stored[name].transpose(1, 2).contiguous()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = load_model(tmp_path).state_dict()
    assert theirs.keys() == ours.keys()
    for name, value in ours.items():
        assert torch.equal(theirs[name], value), name


def test_a_config_that_asks_for_router_logits_changes_no_loss(folders, mixed):
    """The recipe says whether there is a load-balancing loss."""
    encoder = Encoder(folders["qwen3_vl_moe"])
    batch = pack([encoder.encode(sample.cooked()) for sample in mixed], alignment=8)
    losses = []
    for asked in (False, True):
        vlm = make_engine(folders["qwen3_vl_moe"], encoder).vlm
        vlm.language.config.output_router_logits = asked
        losses.append(vlm(batch, batch.packed_seq_params()))
    assert torch.equal(*losses)
