"""The sweep's parts: small configs, samples with every number of images, words and reasons."""

from __future__ import annotations

import json
import tarfile

import pytest

from tools.sweep.classes import CLASSES, LANGUAGE_MODELS, REASONS
from tools.sweep.folder import LAYERS, tiny_config, write_folder
from tools.sweep.one import COUNTS, try_class, write_shard, wrong_numbers
from tools.sweep.run import KINDS, everyone, sweep
from vlmpack.backends.hf.recurrence import recurrent_modules
from vlmpack.capabilities.refused import IMAGES, TEXT, kind_of, registered
from vlmpack.capabilities.served import SERVED
from vlmpack.families.registry import family_of
from vlmpack.proof.verify import Check, Verification


def test_sizes_of_every_section_are_small():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = CONFIG_MAPPING["glm4v"]().to_dict()
    tiny = tiny_config(whole, 300)
    text, vision = tiny["text_config"], tiny["vision_config"]
    assert (text["num_hidden_layers"], vision["depth"]) == (LAYERS, LAYERS)
    assert text["vocab_size"] == 300 < whole["text_config"]["vocab_size"]
    assert vision["out_hidden_size"] == text["hidden_size"] != vision["hidden_size"]
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    assert sum(text["rope_parameters"]["mrope_section"]) == half


def test_a_shard_has_samples_with_every_number_of_images(tmp_path):
    assert set(COUNTS) == {0, 1, 2, 3}
    write_shard(tmp_path / "a.tar", images=True)
    write_shard(tmp_path / "b.tar", images=False)
    with tarfile.open(tmp_path / "a.tar") as tar:
        names = tar.getnames()
        messages = json.load(tar.extractfile("000000.json"))["messages"]
    assert sum(name.endswith(".png") for name in names) == sum(COUNTS)
    assert [part["type"] for part in messages[0]["content"]].count("image") == COUNTS[0]
    with tarfile.open(tmp_path / "b.tar") as tar:
        assert len(tar.getnames()) == len(COUNTS)


def test_classes_are_registered_ones():
    assert set(CLASSES) | set(REASONS) <= {n for kind in KINDS for n in registered(kind)}
    assert set(LANGUAGE_MODELS) <= registered("text")
    assert kind_of("aria") == "image-text-to-text" and kind_of("llama") == "text"
    assert kind_of("zebra") is None


def test_classes_of_ours_and_those_with_a_reason_are_not_tried():
    found = sweep(["qwen2_vl", "chameleon"])
    assert found["qwen2_vl"].word == "served" and not found["qwen2_vl"].reason
    assert found["chameleon"].word == "refused" and "VQ-VAE" in found["chameleon"].reason


def test_what_cannot_be_made_is_refused_with_the_fact_that_is_missing():
    assert "for torchvision alone" in try_class("llama4").reason
    assert "cross attention" in try_class("t5gemma2").reason
    assert "names no image_token" in try_class("git").reason


@pytest.mark.parametrize(
    ("name", "status", "measured", "noise", "said"),
    [
        ("loss of each sample", "pass", 9e-7, 1e-3, ""),
        ("loss of each sample", "pass", 2e-6, 1e-3, "2.0e-06, and 1e-06 is the bound"),
        ("gradients: tower", "pass", 9e-6, 1e-3, ""),
        ("gradients: tower", "pass", 2e-5, 1e-3, "2.0e-05, and 1e-05 is the bound"),
        ("leak test", "fail", 0.5, None, "leak test: some sample"),
        ("leak test", "pass", 3e-5, None, ""),
    ],
)
def test_a_class_is_held_to_the_bounds_that_verify_states(name, status, measured, noise, said):
    """verify raises them for a model whose unpacked run differs from itself by as much."""
    check = Check(
        name=name,
        status=status,
        measured=measured,
        bound=1e-3,
        noise=noise,
        detail="some sample",
    )
    found = wrong_numbers(Verification(checks=(check,), facts={}))
    assert said in found and bool(said) == bool(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        *("bamba", "granitemoehybrid", "lfm2", "lfm2_moe", "lfm3", "lfm3_vl", "olmo_hybrid"),
        *("falcon_h1", "mamba2", "qwen3_next", "zamba2"),
    ],
)
def test_a_tiny_hybrid_has_layers_with_a_state_and_such_with_attention(model_type, tmp_path):
    """A class's defaults may have one kind alone, of which nothing would be proven then."""
    model = family_of(write_folder(model_type, tmp_path)).skeleton.model
    assert recurrent_modules(model)
    attention = [name for name, _ in model.named_modules() if name.endswith("q_proj")]
    assert bool(attention) is (model_type != "mamba2")


def test_the_tables_have_the_classes_that_are_swept():
    assert list(IMAGES) == everyone("image-text-to-text")
    text = [name for name in everyone("text") if name in TEXT or name not in SERVED]
    assert list(TEXT) == text, "what is served is served, swept or not"
    assert set(LANGUAGE_MODELS) <= set(TEXT)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_the_sweep_finds_what_its_table_says(kind):
    words = {"image-text-to-text": IMAGES, "text": TEXT}[kind]
    assert sweep(everyone(kind)) == words
