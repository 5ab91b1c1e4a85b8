"""Reading a model folder box by box."""

from __future__ import annotations

import json
from shutil import copyfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import tiny_family_folder
from support.shards import TINY_MODEL
from support.stock import load_stock

from vlmpack.backends.boxes import TensorSlice, whole
from vlmpack.backends.mcore.pretrained import PretrainedReader
from vlmpack.errors import ModelError

EMBEDDING = "model.language_model.embed_tokens.weight"
PATCHES = "model.visual.patch_embed.proj.weight"
MERGER = "model.visual.merger.mlp.0.weight"


@pytest.fixture(scope="module")
def parameters():
    """transformers' names and values, in float32."""
    return dict(load_stock(TINY_MODEL).named_parameters())


@pytest.fixture(scope="module")
def shapes(parameters):
    return {name: tuple(value.shape) for name, value in parameters.items()}


def test_published_names_are_transformers_names(parameters, shapes):
    reader = PretrainedReader(TINY_MODEL)
    reader.check(shapes)
    for name, value in parameters.items():
        found = reader("model", whole(name, shapes[name]))
        assert found.dtype == torch.float32
        assert torch.equal(found, value)


def test_a_box_and_no_moments(parameters):
    box = TensorSlice(name=EMBEDDING, shape=(576, 128), start=(3, 100), stop=(7, 128))
    reader = PretrainedReader(TINY_MODEL)
    assert torch.equal(reader("model", box), parameters[EMBEDDING][3:7, 100:])
    assert reader("exp_avg", box) is None
    assert reader("exp_avg_sq", box) is None
    with pytest.raises(ModelError, match="has no tensor nothing"):
        reader("model", whole("nothing", (1,)))
    with pytest.raises(ModelError, match="has no tensor nothing"):
        reader.check({"nothing": (1,)})
    with pytest.raises(
        ModelError, match=r"embed_tokens\.weight \(576, 128\) instead of \(9, 128\)"
    ):
        reader.check({EMBEDDING: (9, 128)})


def folder_with(tmp_path, tensors):
    save_file(tensors, str(tmp_path / "model.safetensors"))
    copyfile(TINY_MODEL / "config.json", tmp_path / "config.json")
    return tmp_path


def test_names_of_transformers_own_and_several_files(tmp_path, parameters, shapes):
    tensors = {name: value.detach().clone() for name, value in parameters.items()}
    names = sorted(tensors)
    listed = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}-of-2.safetensors"
        save_file({n: tensors[n] for n in part}, str(tmp_path / file))
        listed |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    save_file({"x": torch.zeros(1)}, str(tmp_path / "beside.safetensors"))  # no index lists it
    copyfile(TINY_MODEL / "config.json", tmp_path / "config.json")
    reader = PretrainedReader(tmp_path)
    reader.check(shapes)
    assert torch.equal(reader("model", whole(PATCHES, shapes[PATCHES])), tensors[PATCHES])


def test_everything_wrong_is_told_at_once(tmp_path):
    tensors = load_file(str(TINY_MODEL / "model.safetensors"))
    del tensors["visual.patch_embed.proj.weight"]
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:9].clone()
    tensors["extra.weight"] = torch.zeros(1)
    with pytest.raises(ModelError) as caught:
        PretrainedReader(folder_with(tmp_path, tensors))
    message = str(caught.value)
    assert message.startswith("model.path: the weights in ")
    assert f"missing keys: {PATCHES};" in message
    assert "unexpected keys: extra.weight;" in message
    assert f"mismatched keys: ('{EMBEDDING}', torch.Size([9, 128])" in message


def test_long_lists_are_cut(tmp_path):
    wanted = r"missing keys: ([^,]+, ){4}[^,]+ \.\.\.; unexpected keys: x"
    with pytest.raises(ModelError, match=wanted):
        PretrainedReader(folder_with(tmp_path, {"x": torch.zeros(1)}))


def test_a_dtype_that_is_never_read_is_named(tmp_path):
    tensors = load_file(str(TINY_MODEL / "model.safetensors"))
    name = "model.norm.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    with pytest.raises(ModelError, match=r"model\.norm\.weight as F8_E4M3; the mcore engine reads"):
        PretrainedReader(folder_with(tmp_path, tensors))


def test_a_tensor_that_is_not_read_may_have_any_dtype(tmp_path):
    folder = tiny_family_folder("nemotron_h", tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(str(file))
    tensors["mtp.layers.0.norm.weight"] = torch.zeros(4, dtype=torch.int32)
    save_file(tensors, str(file), metadata={"format": "pt"})
    final = "model.norm_f.weight"
    found = PretrainedReader(folder)("model", whole(final, (64,)))
    assert torch.equal(found, tensors["backbone.norm_f.weight"].float())
    tensors["backbone.norm_f.weight"] = tensors["backbone.norm_f.weight"].to(torch.int32)
    save_file(tensors, str(file), metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"backbone\.norm_f\.weight as I32; the mcore engine reads"
    ):
        PretrainedReader(folder)


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(ModelError, match=r"has no weights; expected model\.safetensors"):
        PretrainedReader(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 1000, 900_000])
def test_a_truncated_file(tmp_path, size):
    content = (TINY_MODEL / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:size])
    with pytest.raises(ModelError, match=r"model\.path: .* is damaged or cut off"):
        PretrainedReader(tmp_path)
