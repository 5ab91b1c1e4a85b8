"""Tensors that stay in their files: any box of what operators make of them is the values'."""

from __future__ import annotations

import logging
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, tiny_family_folder
from torch import nn

from vlmpack.backends.hf import deferred as module
from vlmpack.backends.hf.deferred import Deferred, deferred, read_box, read_whole
from vlmpack.backends.hf.load import load_model, open_model
from vlmpack.errors import ModelError
from vlmpack.model_folder.safetensors_read import tensors_of

DRAW = torch.Generator().manual_seed(0)
VALUES = {
    "a": torch.randn(6, 4, generator=DRAW).bfloat16(),
    "b": torch.randn(6, 4, generator=DRAW).bfloat16(),
    "wide": torch.randn(6, 8, generator=DRAW),
    "cube": torch.randn(4, 6, 2, generator=DRAW).half(),
    "convolution": torch.randn(6, 2, 1, 2, 2, generator=DRAW),
    "vector": torch.randn(8, generator=DRAW),
    "one": torch.randn((), generator=DRAW),
    "counts": torch.arange(12).view(3, 4),
}
LAID_OUT = {
    "as it is": lambda v: v["wide"],
    "cast": lambda v: v["a"].float(),
    "rounded on the way": lambda v: v["wide"].bfloat16().float(),
    "stacked": lambda v: torch.stack([v["a"], v["b"], v["a"]]),
    "stacked last": lambda v: torch.stack([v["a"], v["b"]], dim=-1),
    "side by side": lambda v: torch.cat([v["a"].float(), v["wide"], v["b"].float()], dim=1),
    "gate and up of experts": lambda v: torch.cat(
        [torch.stack([v["a"], v["b"]]), torch.stack([v["b"], v["a"]])], dim=1
    ).float(),
    "a chunk": lambda v: torch.chunk(v["wide"], 3)[1].contiguous(),
    "a split": lambda v: torch.split(v["wide"], [1, 4, 3], dim=1)[2],
    "a slice": lambda v: v["wide"][1:-2, 2:],
    "one of a stack": lambda v: v["cube"][-2],
    "unbound": lambda v: torch.unbind(v["cube"], dim=1)[4],
    "swapped": lambda v: v["cube"].transpose(-1, 0).contiguous(),
    "turned": lambda v: v["cube"].permute(2, 0, -2),
    "t": lambda v: v["wide"].t(),
    "flattened": lambda v: v["convolution"].reshape(6, -1).contiguous(),
    "unflattened": lambda v: v["wide"].reshape(6, 2, 4),
    "squeezed": lambda v: v["convolution"].squeeze(2).squeeze(0),
    "unsqueezed": lambda v: v["vector"].unsqueeze(-1),
    "a scalar": lambda v: v["one"].double(),
    "whole numbers": lambda v: v["counts"].clone(),
}
"""Boxes of these are read from the files that hold some of them."""
ROWS_ALONE = ("flattened", "unflattened")
"""Of these, boxes of whole rows are."""
COMPUTED = {
    "added": lambda v: v["wide"] + 1,
    "rotated": lambda v: v["wide"].view(2, 3, 8).transpose(0, 1).reshape(6, 8),
    "every other": lambda v: v["wide"][::2],
    "mixed": lambda v: torch.cat([v["a"], v["wide"]], dim=1),
    "one of several": lambda v: torch.sort(v["wide"], dim=0)[1],
    "of one with values": lambda v: torch.stack([v["wide"] * torch.arange(8), v["wide"]])[:, 1:],
}
"""Boxes of these are cut out of a result."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("deferred") / "w.safetensors"
    save_file(VALUES, str(path))
    return {tensor.name: deferred(tensor) for tensor in tensors_of(path)}


def boxes_of(shape, draw, count=6):
    """The whole, and some of its boxes, one of them empty."""
    yield tuple(slice(0, length) for length in shape)
    for number in range(count if shape else 0):
        ends = [sorted((draw.randrange(n + 1), draw.randrange(n + 1))) for n in shape]
        if number == 0:
            ends[-1] = (1, 1)
        yield tuple(slice(a, b) for a, b in ends)
    if shape:  # as FSDP2 shards
        yield (slice(1, 2), *(slice(0, length) for length in shape[1:]))


def wrong_boxes(made, expected, seed):
    draw, wrong = random.Random(seed), 0
    for dtype in (expected.dtype, torch.float64):
        for box in boxes_of(expected.shape, draw):
            wanted = expected[box].to(dtype)
            turned = torch.full(wanted.shape[::-1], 7, dtype=dtype)
            for found in (torch.empty_like(wanted), turned.permute([*range(wanted.ndim)][::-1])):
                read_box(made, box, found)
                wrong += not torch.equal(found, wanted)
    return wrong


@pytest.mark.parametrize("name", [*LAID_OUT, *COMPUTED])
def test_any_box_is_that_of_the_values(stored, name, monkeypatch):
    make, ran = (LAID_OUT | COMPUTED)[name], []
    run = module._run
    monkeypatch.setattr(module, "_run", lambda made: ran.append(made) or run(made))
    made, expected = make(stored), make(VALUES)
    assert isinstance(made, Deferred)
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(read_whole(made), expected)
    assert wrong_boxes(made, expected, seed=len(name)) == 0
    assert bool(ran) == (name in COMPUTED or name in ROWS_ALONE)
    del ran[:]
    rows = (slice(0, 2), *(slice(0, length) for length in made.shape[1:]))[: made.ndim]
    read_box(made, rows, torch.empty(expected[rows].shape, dtype=expected.dtype))
    assert bool(ran) == (name in COMPUTED)


def test_a_rule_that_forgets_where_a_part_begins_is_found(stored, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(module, "_moved", lambda source, dim, start, *rest: [(source, *rest)])
    for name in ("a split", "a slice", "a chunk"):
        made, expected = LAID_OUT[name](stored), LAID_OUT[name](VALUES)
        assert wrong_boxes(made, expected, seed=1) > 0, name


def test_a_parameter_is_one_that_was_not_read(stored):
    parameter = nn.Parameter(stored["wide"])
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, Deferred)
    assert torch.equal(read_whole(parameter), VALUES["wide"])


def test_equal_tensors_are_told_from_others_a_few_rows_at_a_time(stored, monkeypatch):
    monkeypatch.setattr(module, "_EQUAL_BYTES", 20)
    assert torch.equal(stored["a"], stored["a"].clone())
    assert not torch.equal(stored["a"], stored["b"])
    assert not torch.equal(stored["a"], stored["wide"])
    changed = VALUES["a"].clone()
    changed[-1, -1] += 1
    assert torch.equal(stored["a"], VALUES["a"])
    assert not torch.equal(stored["a"], changed)


def test_what_needs_values_or_writes_them_is_refused(stored):
    with pytest.raises(NotImplementedError, match="writes into a tensor that was not read yet"):
        stored["wide"].mul_(2)
    with pytest.raises((NotImplementedError, RuntimeError)):
        stored["one"].item()


def assert_same_model(ours, theirs):
    """Every tensor bit for bit, what is tied, and what an export writes of them."""
    assert type(ours) is type(theirs)
    mine, other = (dict(m.named_parameters(remove_duplicate=False)) for m in (ours, theirs))
    assert list(mine) == list(other)
    draw = random.Random(0)
    for name, value in mine.items():
        expected = other[name]
        assert isinstance(value, Deferred), name
        assert (value.shape, value.dtype) == (expected.shape, torch.float32), name
        assert value.requires_grad == expected.requires_grad
        start = draw.randrange(expected.shape[0]) if expected.ndim else 0
        rows = (slice(start, expected.shape[0]), *(slice(0, n) for n in expected.shape[1:]))
        found = torch.empty(expected[rows].shape)
        read_box(value, rows, found)
        assert torch.equal(found, expected[rows]), name
        assert torch.equal(read_whole(value), expected), name
    assert groups(mine) == groups(other)
    ours_buffers, theirs_buffers = (dict(m.named_buffers()) for m in (ours, theirs))
    assert list(ours_buffers) == list(theirs_buffers)
    for name, buffer in ours_buffers.items():
        assert type(buffer) is torch.Tensor
        assert torch.equal(buffer, theirs_buffers[name]), name
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.name_or_path == theirs.name_or_path
    assert ours.config.name_or_path == theirs.config.name_or_path
    assert ours.training is theirs.training is False
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()


def groups(parameters):
    """Names of one tensor, by tensor."""
    found = {}
    for name, value in parameters.items():
        found.setdefault(id(value), []).append(name)
    return sorted(found.values())


@pytest.mark.cases(slow=("qwen2_5_vl", "gemma4", "nemotron_h", "internvl", "deepseek_v3"))
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_opened_model_of_every_family_is_the_loaded_one(name, tmp_path, monkeypatch, caplog):
    """As transformers saves it: names in files differ from those in the model in many families."""
    folder, ran = tiny_family_folder(name, tmp_path), []
    run = module._run
    monkeypatch.setattr(module, "_run", lambda made: ran.append(made) or run(made))
    with caplog.at_level(logging.WARNING, "vlmpack"):
        assert_same_model(open_model(folder), load_model(folder))
    assert not caplog.records
    assert not ran, "a whole tensor was made for a box"


def changed(folder, change):
    """The folder with other tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(str(path))
    change(tensors)
    save_file(tensors, str(path), metadata={"format": "pt"})
    return folder


def swap(tensors):
    """Experts as Qwen3-VL-MoE is published: with their last two dimensions swapped."""
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[name] = tensors[name].transpose(-1, -2).contiguous()


def tie(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def untie(tensors):
    tie(tensors)
    tensors["lm_head.weight"][-1, -1] += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "tied"),
    [("qwen3_vl_moe", swap, False), ("qwen2_vl", tie, True), ("qwen2_vl", untie, False)],
    ids=["swapped", "tied and stored twice", "said to be tied and stored differently"],
)
def test_folders_that_transformers_did_not_save_are_opened_as_they_are_loaded(
    name, change, tied, tmp_path
):
    folder = tiny_family_folder(name, tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    changed(folder, change)
    assert (folder / "model.safetensors").read_bytes() != before
    opened = open_model(folder)
    assert_same_model(opened, load_model(folder))
    weights = [opened.get_input_embeddings().weight, opened.get_output_embeddings().weight]
    assert (weights[0] is weights[1]) == tied


WEIGHT = "model.layers.0.mlp.up_proj.weight"
MISFITS = {
    "missing": lambda tensors: tensors.pop(WEIGHT),
    "left over": lambda tensors: tensors.update(other=torch.ones(2)),
    "reshaped": lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT][:-1].contiguous()}),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_told_in_the_words_of_loading(tiny_folder, tmp_path, misfit):
    folder = changed(shutil.copytree(tiny_folder, tmp_path / "model"), MISFITS[misfit])
    said = []
    for load in (open_model, load_model):
        with pytest.raises(ModelError, match=r"do not fit its config\.json") as caught:
            load(folder)
        said.append(str(caught.value))
    assert said[0] == said[1]
    (folder / "model.safetensors").write_bytes(b"12345")
    with pytest.raises(ModelError, match="damaged or cut off"):
        open_model(folder)


def test_what_cannot_be_read_by_boxes_is_loaded_whole_and_a_line_says_why(
    tiny_folder, tmp_path, caplog
):
    def eighth(tensors):
        tensors[WEIGHT] = tensors[WEIGHT].to(torch.float8_e5m2)

    folder = changed(shutil.copytree(tiny_folder, tmp_path / "model"), eighth)
    with caplog.at_level(logging.WARNING, "vlmpack"):
        opened = open_model(folder)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"every process loads the whole model in float32 on its host: {WEIGHT} is of dtype F8_E5M2"
    )
    loaded = load_model(folder).state_dict()
    assert loaded.keys() == opened.state_dict().keys()
    for name, value in opened.state_dict().items():
        assert not isinstance(value, Deferred)
        assert torch.equal(value, loaded[name]), name
