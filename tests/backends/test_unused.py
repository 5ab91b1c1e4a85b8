"""Multi-token prediction of a model folder: kept in exports bit for bit, never trained."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import layouts
from support.engines import make_engine
from support.families import tiny_family_folder
from support.stock import load_stock

from vlmpack.backends import export as export_module
from vlmpack.backends.hf.load import check_weights, load_model
from vlmpack.backends.unused import load_by_headers, stems
from vlmpack.distributed import start_process_group
from vlmpack.encode import Encoder
from vlmpack.errors import ModelError
from vlmpack.model_folder.safetensors_read import tensors_of
from vlmpack.model_folder.weights import weight_files

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.distributed.*is deprecated:FutureWarning",
    r"ignore:The \.grad attribute of a Tensor that is not a leaf",
)

DRAW = torch.Generator().manual_seed(0)
PREDICTION = {
    "mtp.fc.weight": torch.randn(64, 128, generator=DRAW).bfloat16(),
    "mtp.layers.0.input_layernorm.weight": torch.randn(64, generator=DRAW),
    "model.layers.4.eh_proj.weight": torch.randn(64, 128, generator=DRAW),
    "model.layers.4.norm.weight": torch.randn(64, generator=DRAW).bfloat16(),
}
"""In both dtypes, and as both spellings have it: layers 0 to 3 are the model's own."""

Bytes = dict[str, tuple[str, tuple[int, ...], bytes]]


def stored(folder: Path, prediction: bool) -> Bytes:
    """dtype, shape and bytes of the prediction layers' tensors, or of the others."""
    found: Bytes = {}
    for path in weight_files(folder):
        data = path.read_bytes()
        for tensor in tensors_of(path):
            if (tensor.name in PREDICTION) is prediction:
                assert tensor.name not in found
                found[tensor.name] = (tensor.dtype, tensor.shape, data[tensor.start : tensor.stop])
    return found


def write_prediction(folder: Path, sharded: bool) -> Path:
    """Adds them to a folder of one file: in the same file, or spread over two more."""
    path = folder / "model.safetensors"
    own = load_file(str(path))
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    if not sharded:
        save_file({**own, **PREDICTION}, str(path), metadata={"format": "pt"})
        return folder
    path.unlink()
    names, listed = sorted(own), {}
    first, *others = PREDICTION
    parts = [{name: own[name] for name in names[::2]} | {first: PREDICTION[first]}]
    parts += [
        {name: own[name] for name in names[1::2]},
        {name: PREDICTION[name] for name in others},
    ]
    for number, part in enumerate(parts):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        save_file(part, str(folder / file), metadata={"format": "pt"})
        listed |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": listed})
    )
    return folder


@pytest.fixture(scope="module", params=["single", "sharded"])
def folder(request, tmp_path_factory):
    """A Qwen3 that also predicts the token after the next."""
    made = tiny_family_folder("qwen3", tmp_path_factory.mktemp(request.param))
    return write_prediction(made, request.param == "sharded")


def changed_engine(name, folder):
    """An engine whose trained weights were changed by 0.5."""
    if name == "hf":
        engine = make_engine(folder, Encoder(folder))
        parameters = [parameter for _, parameter in engine.parameters()]
    else:
        engine = layouts.make_megatron(layouts.Layout(), start_process_group(), folder)
        held = [local.parameter for local in engine.layout.parameters]
        parameters = [engine.optimizer.main_parameter(parameter).weight for parameter in held]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.5)
    return engine


@pytest.mark.cases(quick="single-hf-torch.float32", slow="sharded-mcore-torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("engine", ["hf", pytest.param("mcore", marks=pytest.mark.megatron)])
def test_an_export_has_them_bit_for_bit(folder, tmp_path, caplog, engine, dtype):
    wanted = stored(folder, prediction=True)
    assert {dtype for dtype, _, _ in wanted.values()} == {"F32", "BF16"}
    made = changed_engine(engine, folder)
    assert not any(name.startswith(("mtp", "model.layers.4")) for name in made.parameter_shapes())
    target = tmp_path / "export"
    with caplog.at_level(logging.INFO, "vlmpack"):
        made.export(target, processor_from=folder, dtype=dtype)
    said = "model.layers.4.*, mtp.* (4 tensors, 0.0 MB)"
    assert f"{said} are in the export as in {folder}" in caplog.text
    assert stored(target, prediction=True) == wanted
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == {*wanted, *stored(target, prediction=False)}
    config = json.loads((target / "config.json").read_text())
    assert (config["num_nextn_predict_layers"], config["mtp_num_hidden_layers"]) == (1, 1)

    before, after = (dict(load_stock(path).named_parameters()) for path in (folder, target))
    assert before.keys() == after.keys()
    for name, value in after.items():
        assert torch.equal(value, (before[name] + 0.5).to(dtype).float()), name
    again = stored(target, prediction=False)
    assert {saved for saved, _, _ in again.values()} == {
        "F32" if dtype == torch.float32 else "BF16"
    }
    assert {tensor.name for tensor in check_weights(target).unused} == set(wanted)


def test_without_the_copy_they_are_missed(folder, tmp_path, monkeypatch):
    """The negative control: one is dropped, one is changed, all are left out."""
    engine, wanted = changed_engine("hf", folder), stored(folder, prediction=True)
    copy = export_module.add_tensors
    lost = "mtp.fc.weight"

    def exported(number, change):
        monkeypatch.setattr(
            export_module, "add_tensors", lambda target, tensors: copy(target, change(tensors))
        )
        target = tmp_path / f"{number}"
        engine.export(target, processor_from=folder, dtype=None)
        return stored(target, prediction=True)

    dropped = exported(0, lambda tensors: [one for one in tensors if one.name != lost])
    assert dropped != wanted
    assert set(wanted) - set(dropped) == {lost}
    assert exported(1, lambda tensors: ()) == {}
    save_file({**PREDICTION, lost: PREDICTION[lost] + 1}, str(tmp_path / "other.safetensors"))
    other = exported(2, lambda tensors: tensors_of(tmp_path / "other.safetensors"))
    assert other != wanted
    assert [name for name in wanted if wanted[name] != other[name]] == [lost]


@pytest.mark.parametrize("check", [load_model, check_weights])
def test_what_config_json_does_not_count_is_left_over(folder, tmp_path, check):
    """Without a count they are as foreign to the model as any other tensor."""
    other = tmp_path / "model"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    check(other)
    config = json.loads((other / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 0, "mtp_num_hidden_layers": 0}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"unexpected keys: model\.layers\.4\.eh_proj.*mtp"):
        check(other)


def test_a_folder_that_is_read_whole_has_none(tmp_path):
    folder = tiny_family_folder("qwen3", tmp_path)
    loaded = check_weights(folder)
    assert loaded.unused == ()
    assert loaded.unused_words == ""


def test_of_a_class_that_passes_names_over_those_that_it_reads_are_not_kept(tmp_path):
    """GLM-4.5 passes over layer 46, which is the last of the small model's and one in the midst of
    the large one."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "first_k_dense_replace": 99}
    config = Glm4MoeConfig(**sizes, **heads, num_hidden_layers=48, num_nextn_predict_layers=1)
    model = Glm4MoeForCausalLM(config)
    model.save_pretrained(str(tmp_path))
    path = tmp_path / "model.safetensors"
    extra = {"model.layers.92.eh_proj.weight": torch.ones(2)}
    save_file({**load_file(str(path)), **extra}, str(path), metadata={"format": "pt"})
    assert [tensor.name for tensor in load_by_headers(tmp_path).unused] == list(extra)
    assert len(load_file(str(path))) > 48 * 8


def test_names_in_few_words():
    assert stems(["mtp.a.b", "mtp.c", "lm_head.weight"]) == ["lm_head.weight", "mtp.*"]
    assert stems(["model.layers.61.a", "model.layers.61.b.c"]) == ["model.layers.61.*"]
    assert stems([]) == []
