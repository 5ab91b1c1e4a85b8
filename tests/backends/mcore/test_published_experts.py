"""Experts in weight files, which are published with their last two dimensions swapped."""

from __future__ import annotations

from shutil import copyfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import tiny_family_folder
from support.stock import load_stock

from vlmpack.backends.boxes import TensorSlice, whole
from vlmpack.backends.mcore.pretrained import PretrainedReader
from vlmpack.errors import ModelError

ENDS = ("experts.gate_up_proj", "experts.down_proj")
GATE_UP = "model.language_model.layers.2.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_family_folder("qwen3_vl_moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def parameters(folder):
    return dict(load_stock(folder).named_parameters())


@pytest.fixture(scope="module")
def shapes(parameters):
    return {name: tuple(value.shape) for name, value in parameters.items()}


def rewritten(folder, to, change):
    """The folder's weights with the experts changed."""
    tensors = load_file(str(folder / "model.safetensors"))
    changed = {
        name: change(value).contiguous() if name.endswith(ENDS) else value
        for name, value in tensors.items()
    }
    assert sum(name.endswith(ENDS) for name in tensors) == 6
    save_file(changed, str(to / "model.safetensors"))
    copyfile(folder / "config.json", to / "config.json")
    return to


@pytest.fixture(scope="module")
def published(folder, tmp_path_factory):
    """[E, D, 2F] and [E, F, D]."""
    return rewritten(folder, tmp_path_factory.mktemp("published"), lambda v: v.transpose(-1, -2))


def test_the_files_differ_from_transformers_own(published, shapes):
    stored = load_file(str(published / "model.safetensors"))
    assert shapes[GATE_UP] == (4, 80, 64)
    assert tuple(stored[GATE_UP].shape) == (4, 64, 80)


def test_both_layouts_hold_the_same_values(folder, published, parameters, shapes):
    for path in (folder, published):
        reader = PretrainedReader(path)
        reader.check(shapes)
        for name, value in parameters.items():
            assert torch.equal(reader("model", whole(name, shapes[name])), value), name


@pytest.mark.parametrize(
    ("start", "stop"),
    [((1, 0, 0), (2, 80, 64)), ((2, 0, 0), (4, 80, 64)), ((1, 3, 10), (2, 4, 64))],
)
def test_a_box_of_some_experts(published, parameters, shapes, start, stop):
    box = TensorSlice(name=GATE_UP, shape=shapes[GATE_UP], start=start, stop=stop)
    reader = PretrainedReader(published)
    found = reader("model", box)
    assert torch.equal(found, parameters[GATE_UP][box.index])
    assert tuple(found.shape) == box.lengths


def test_other_shapes_are_refused(folder, shapes, tmp_path):
    rewritten(folder, tmp_path, lambda value: value.transpose(0, 1))
    with pytest.raises(ModelError, match=r"mismatched keys: .*experts\.down_proj.*\[64, 40, 4\]"):
        PretrainedReader(tmp_path)


def test_only_experts_may_be_swapped(folder, shapes, tmp_path):
    tensors = load_file(str(folder / "model.safetensors"))
    name = "model.language_model.layers.0.mlp.gate.weight"
    tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, str(tmp_path / "model.safetensors"))
    copyfile(folder / "config.json", tmp_path / "config.json")
    with pytest.raises(
        ModelError, match=r"mlp\.gate\.weight', torch\.Size\(\[64, 4\]\), torch\.Size\(\[4, 64\]\)"
    ):
        PretrainedReader(tmp_path)


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A folder whose files have experts one by one, and what transformers makes of it."""
    folder = tiny_family_folder("qwen3_5_moe", tmp_path_factory.mktemp("apart"))
    return folder, dict(load_stock(folder).named_parameters())


def test_experts_that_lie_one_by_one_are_read_box_by_box(apart):
    folder, parameters = apart
    stored = load_file(str(folder / "model.safetensors"))
    assert not any(name.endswith(ENDS) for name in stored)
    stem = "model.language_model.layers.1.mlp.experts"
    assert stored[f"{stem}.3.up_proj.weight"].shape == (40, 64)
    reader = PretrainedReader(folder)
    reader.check({name: tuple(value.shape) for name, value in parameters.items()})
    for name in (f"{stem}.gate_up_proj", f"{stem}.down_proj"):
        value, shape = parameters[name], tuple(parameters[name].shape)
        # One expert; rows of both halves, or of one; some columns.
        for start, stop in (
            ((2, 0, 0), (3, *shape[1:])),
            ((0, 30, 0), (4, shape[1] - 15, shape[2])),
            ((1, 41, 7), (3, 43, 30)),
            ((0, 0, 0), shape),
        ):
            box = TensorSlice(name=name, shape=shape, start=start, stop=stop)
            assert torch.equal(reader("model", box), value[box.index]), (name, start)


def test_an_expert_that_is_missing_is_named(apart, tmp_path, caplog):
    """In the report of transformers, which the error points to."""
    folder, _ = apart
    stored = load_file(str(folder / "model.safetensors"))
    del stored["model.language_model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(stored, str(tmp_path / "model.safetensors"))
    copyfile(folder / "config.json", tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"cannot be loaded: .* above report"):
        PretrainedReader(tmp_path)
    assert "layers.1.mlp.experts.gate_up_proj" in caplog.text
