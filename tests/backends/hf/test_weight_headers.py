"""The check of weight files by their headers says what loading them would say."""

from __future__ import annotations

import json
import re
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, tiny_family_folder

from vlmpack.backends.hf.load import check_weights, load_model
from vlmpack.errors import ModelError
from vlmpack.model_folder.weights import weight_files


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy of the tiny model that a test may damage."""
    return shutil.copytree(tiny_folder, tmp_path / "model")


def edit(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(str(path))
    change(tensors)
    save_file(tensors, str(path), metadata={"format": "pt"})


def message_of(check, folder):
    with pytest.raises(ModelError) as caught:
        check(folder)
    return str(caught.value)


@pytest.mark.cases(slow=("qwen2_5_vl", "gemma4", "nemotron_h", "internvl", "deepseek_v3"))
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_good_model_of_every_family_passes_and_every_missing_weight_does_not(name, tmp_path):
    """As transformers saves it: names in files differ from those in the model in many families."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_family_folder(name, tmp_path / "made"), folder)
    check_weights(folder)
    tensors = load_file(str(folder / "model.safetensors"))
    assert len(tensors) > 10
    for stems in (("down_proj",), ("norm.weight",), ("embed_tokens.weight", "embeddings.weight")):
        lost = next(key for key in tensors if any(stem in key for stem in stems))
        rest = {key: value for key, value in tensors.items() if key != lost}
        save_file(rest, str(folder / "model.safetensors"), metadata={"format": "pt"})
        # Experts that are stored one by one are stacked on load: one less is another shape.
        said = "mismatched keys: " if re.search(r"experts\.\d", lost) else "missing keys: "
        assert said in message_of(check_weights, folder), lost


@pytest.mark.slow
def test_published_experts_pass(tmp_path):
    """They are stored with their last two dimensions swapped."""
    folder = tiny_family_folder("qwen3_vl_moe", tmp_path)
    ends = ("experts.gate_up_proj", "experts.down_proj")
    swapped = []

    def swap(tensors):
        for name in [name for name in tensors if name.endswith(ends)]:
            tensors[name] = tensors[name].transpose(-1, -2).contiguous()
            swapped.append(name)

    edit(folder, swap)
    assert len(swapped) == 6
    check_weights(folder)


def drop(tensors):
    del tensors["model.layers.0.mlp.up_proj.weight"]


def add(tensors):
    tensors["model.extra.weight"] = torch.ones(2)


def reshape(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(384, 64)


@pytest.mark.parametrize("change", [drop, add, reshape], ids=lambda change: change.__name__)
def test_the_words_are_those_of_loading(folder, change):
    edit(folder, change)
    message = message_of(check_weights, folder)
    assert message == message_of(load_model, folder)
    assert "do not fit its config.json" in message


def write_holes(model, path):
    """A safetensors file with all of the model's tensors, whose values take no disk."""
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        size = 2 * tensor.numel()
        offsets = [end, end + size]
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + end)
    return end


@pytest.mark.slow
def test_no_values_are_read(folder):
    """A model of 7B parameters is checked in megabytes."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(str(folder))
    text = config.text_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = 3584, 18944, 28
    text.num_attention_heads, text.num_key_value_heads, text.vocab_size = 28, 4, 152064
    text.layer_types = ["full_attention"] * 28
    text.rope_parameters["mrope_section"] = [16, 24, 24]
    config.vision_config.out_hidden_size = 3584
    config.save_pretrained(str(folder))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    assert write_holes(model, folder / "model.safetensors") > 14e9
    del model
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check_weights(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_the_files_are_those_that_transformers_takes(folder):
    """An adapter or another format's file beside the weights is none of them."""
    shutil.copyfile(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert weight_files(folder) == [folder / "model.safetensors"]
    check_weights(folder)


def test_shards_are_checked_together(folder):
    tensors = load_file(str(folder / "model.safetensors"))
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": []}
    parts["model-00002-of-00002.safetensors"] = names[1::2]
    for file, keys in parts.items():
        save_file({k: tensors[k] for k in keys}, str(folder / file), metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    weight_map = {key: file for file, keys in parts.items() for key in keys}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    check_weights(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    message = message_of(check_weights, folder)
    assert "lacks 1 of the 2 weight files" in message
    index.write_text("[]")
    assert "is no index of weights" in message_of(check_weights, folder)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_cut_file_is_named(folder, share):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert f"{path} is damaged or cut off" in message_of(check_weights, folder)


def test_the_check_leaves_no_trace_in_transformers_logging(folder):
    from transformers.utils import logging

    before = logging.get_verbosity()
    check_weights(folder)
    assert logging.get_verbosity() == before
