"""Tensors that are added to a model folder: the same bytes, and an index that names them."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlmpack.errors import ModelError
from vlmpack.model_folder.extra_shards import add_tensors, rename_tensors
from vlmpack.model_folder.safetensors_read import tensors_of
from vlmpack.model_folder.weights import weight_files

OWN = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.int8)}
EXTRA = {
    "half": torch.randn(3, 5, dtype=torch.bfloat16),
    "single": torch.tensor([float("nan"), -0.0, 1e-45]),
    "eight": torch.randn(7, 2).to(torch.float8_e4m3fn),
    "none": torch.zeros(0, 4),
    "scalar": torch.tensor(3, dtype=torch.int64),
}


@pytest.fixture
def extra(tmp_path):
    path = tmp_path / "source.safetensors"
    save_file(EXTRA, str(path))
    return tensors_of(path)


def folder_of(tmp_path, *parts):
    """A model folder of one file, or of several with their index."""
    folder = tmp_path / "model"
    folder.mkdir()
    if len(parts) == 1:
        save_file(parts[0], str(folder / "model.safetensors"), metadata={"format": "pt"})
        return folder
    listed = {}
    for number, part in enumerate(parts):
        name = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, str(folder / name), metadata={"format": "pt"})
        listed |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def content(tensor):
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.contiguous().view(-1).view(torch.uint8).tolist(),
    )


@pytest.mark.parametrize("split", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("most", [10, 10**9], ids=["small files", "one file"])
def test_all_bytes_arrive_and_the_index_names_them(tmp_path, extra, split, most):
    parts = ({"a": OWN["a"]}, {"b": OWN["b"]}) if split else (OWN,)
    folder = folder_of(tmp_path, *parts)
    before = [path.read_bytes() for path in weight_files(folder)]
    add_tensors(folder, extra, max_shard_bytes=most)
    files = weight_files(folder)
    assert [path.read_bytes() for path in files[: len(parts)]] == before, "written anew"
    assert len(files) == len(parts) + (1 if most > 10 else len(EXTRA) - 1)
    total = f"-of-{len(files):05d}.safetensors"
    assert all(path.name.endswith(total) for path in files)
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors.index.json",
        *(path.name for path in files),
    }
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for path in files:
        for name, tensor in load_file(str(path)).items():
            assert index["weight_map"][name] == path.name
            found[name] = tensor
    wanted = {**OWN, **EXTRA}
    assert set(index["weight_map"]) == set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert content(found[name]) == content(tensor), name
    assert index["metadata"] == {
        "total_parameters": sum(math.prod(tensor.shape) for tensor in wanted.values()),
        "total_size": sum(tensor.nbytes for tensor in wanted.values()),
    }


def test_nothing_to_add_changes_nothing(tmp_path):
    folder = folder_of(tmp_path, OWN)
    add_tensors(folder, [])
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def test_a_name_that_is_there_is_never_written_over(tmp_path, extra):
    folder = folder_of(tmp_path, {**OWN, "half": torch.zeros(1)})
    with pytest.raises(ModelError, match="has half already"):
        add_tensors(folder, extra)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def test_a_source_that_ends_early_is_named(tmp_path, extra):
    folder = folder_of(tmp_path, OWN)
    (tmp_path / "source.safetensors").write_bytes(b"cut off")
    with pytest.raises(ModelError, match=r"source\.safetensors cannot be read: it ends within"):
        add_tensors(folder, extra)


@pytest.mark.parametrize("split", [False, True], ids=["single", "sharded"])
def test_names_change_and_bytes_stay(tmp_path, split):
    folder = folder_of(tmp_path, *(({"a": OWN["a"]}, {"b": OWN["b"]}) if split else (OWN,)))
    before = {path.name: path.read_bytes() for path in weight_files(folder)}
    files = {path.name for path in folder.iterdir()}
    rename_tensors(folder, lambda name: f"tower.{name}" if name == "b" else name)
    assert {path.name for path in folder.iterdir()} == files
    found = {}
    for path in weight_files(folder):
        found |= {name: (path.name, tensor) for name, tensor in load_file(str(path)).items()}
    assert found.keys() == {"a", "tower.b"}
    assert content(found["a"][1]) == content(OWN["a"])
    assert content(found["tower.b"][1]) == content(OWN["b"])
    if split:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for name, (file, _) in found.items()}
        first = found["a"][0]
        assert (folder / first).read_bytes() == before[first], "a file without them is left"
