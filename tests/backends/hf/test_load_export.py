"""Model folders in, model folders out, with every weight accounted for."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import make_engine
from support.families import tiny_family_folder
from support.runs import pack
from support.stock import StockProcessor, load_stock
from transformers import DeepseekV3ForCausalLM

from vlmpack.backends.export import save_model_folder
from vlmpack.backends.hf.load import load_model
from vlmpack.encode import Encoder
from vlmpack.errors import ModelError
from vlmpack.model_folder.content import PROCESSOR_FILES

ROUTERS_ARE_KEPT = "gate.weight" in DeepseekV3ForCausalLM._keep_in_fp32_modules_strict
"""From transformers 5.24 on its DeepSeek-V3 keeps the routers in float32, too."""


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy of the tiny model that a test may damage."""
    return shutil.copytree(tiny_folder, tmp_path / "model")


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(str(path))
    change(tensors)
    save_file(tensors, str(path), metadata={"format": "pt"})


def key_of(tensors, stem):
    """The file's name of a weight; transformers saves this family under an older prefix."""
    (key,) = [key for key in tensors if key.endswith(stem)]
    return key


def refused(folder):
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)
    assert "model.path" in str(caught.value)
    return str(caught.value)


def test_master_weights_are_float32_whatever_the_file_says(folder):
    model = load_model(folder)
    stored = load_file(str(folder / "model.safetensors"))
    assert torch.bfloat16 in {value.dtype for value in stored.values()}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for stem in ("layers.0.mlp.up_proj.weight", "visual.patch_embed.proj.weight"):
        (name,) = [name for name, _ in model.named_parameters() if name.endswith(stem)]
        assert torch.equal(model.get_parameter(name), stored[key_of(stored, stem)].float()), name


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    message = refused(folder)
    assert "has no weights" in message
    assert "model.safetensors" in message


def test_a_pickled_checkpoint_is_no_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has no weights" in refused(folder)


def test_a_missing_weight_is_refused(folder):
    stem = "layers.0.mlp.up_proj.weight"
    edit_weights(folder, lambda tensors: tensors.pop(key_of(tensors, stem)))
    assert f"missing keys: model.language_model.{stem}" in refused(folder)


def test_a_left_over_weight_is_refused(folder):
    edit_weights(folder, lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}))
    message = refused(folder)
    assert "unexpected keys: " in message
    assert "extra.weight" in message


def test_a_weight_of_another_shape_is_refused(folder):
    stem = "layers.1.mlp.up_proj.weight"
    edit_weights(
        folder, lambda tensors: tensors.update({key_of(tensors, stem): torch.ones(384, 64)})
    )
    message = refused(folder)
    assert "mismatched keys: " in message
    assert stem in message
    assert "384, 64" in message
    assert "384, 128" in message


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(folder, share):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert "cannot be loaded" in refused(folder)


@pytest.fixture
def exported(tiny_folder, encoder, tmp_path):
    """An engine whose weights were changed, and the folder that it wrote."""
    engine = make_engine(tiny_folder, encoder)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in engine.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=draw))
    target = tmp_path / "export"
    engine.export(target, processor_from=tiny_folder, dtype=None)
    return engine, target


@pytest.mark.slow
def test_an_exported_model_has_bit_equal_logits(exported, mixed):
    engine, target = exported
    loaded = load_stock(target).eval()
    processor = StockProcessor(target)
    compared = 0
    with engine.generation() as model, torch.no_grad():
        for sample in mixed:
            inputs = processor(sample)
            arguments = {
                "input_ids": inputs.input_ids,
                "mm_token_type_ids": inputs.mm_token_type_ids,
                **inputs.media,
            }
            assert torch.equal(loaded(**arguments).logits, model(**arguments).logits)
            compared += 1
    assert compared == 6
    theirs = dict(loaded.named_parameters())
    for name, parameter in engine.parameters():
        assert torch.equal(theirs[name], parameter), name


def test_an_export_has_its_processor_files_and_they_load(exported, tiny_folder, mixed):
    from transformers import AutoImageProcessor, AutoTokenizer

    _, target = exported
    present = [name for name in PROCESSOR_FILES if (tiny_folder / name).is_file()]
    assert {"tokenizer.json", "chat_template.jinja", "preprocessor_config.json"} <= set(present)
    for name in present:
        assert (target / name).read_bytes() == (tiny_folder / name).read_bytes(), name
    assert AutoTokenizer.from_pretrained(str(target)).chat_template
    assert AutoImageProcessor.from_pretrained(str(target)).patch_size == 14
    ours = Encoder(target).encode(mixed[0].cooked())
    assert torch.equal(ours.input_ids, Encoder(tiny_folder).encode(mixed[0].cooked()).input_ids)


@pytest.mark.slow
def test_an_export_can_be_finetuned_again(exported, encoder, encoded):
    engine, target = exported
    again = make_engine(target, Encoder(target))
    batch = pack(encoded, alignment=8)
    with torch.no_grad():
        ours = engine.vlm(batch, batch.packed_seq_params())
        theirs = again.vlm(batch, batch.packed_seq_params())
    assert torch.equal(ours, theirs)


@pytest.mark.cases(quick="torch.float32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_config_and_file_agree_about_the_dtype(exported, tmp_path, tiny_folder, dtype):
    engine, _ = exported
    target = tmp_path / "typed"
    engine.export(target, processor_from=tiny_folder, dtype=dtype)
    stored = load_file(str(target / "model.safetensors"))
    assert {value.dtype for value in stored.values()} == {dtype}
    assert "lm_head.weight" not in stored, "tied to the embeddings, saved once"
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert "vlmpack" not in json.dumps(config), "our attention's name must not leave the process"


@pytest.mark.parametrize("change", ["left out", "left over", "cut"])
def test_an_export_that_would_not_load_whole_is_refused(
    session_engine, tiny_folder, tmp_path, change
):
    model = session_engine.vlm.model
    state = dict(model.state_dict())
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    changed = {
        "left out": state.keys() - {name},
        "left over": {**state, "model.extra.weight": torch.ones(2)},
        "cut": {**state, name: state[name][:-1]},
    }[change]
    state = {each: changed[each] if isinstance(changed, dict) else state[each] for each in changed}
    said = {"left out": "missing", "left over": "unexpected", "cut": "mismatched"}[change]
    with pytest.raises(ModelError, match=f"was not written whole: .*{said} keys: "):
        save_model_folder(model, state, tmp_path / "out", processor_from=tiny_folder, dtype=None)


@pytest.mark.parametrize("differ", [False, True])
def test_head_and_embedding_are_one_where_they_are_equal(tiny_folder, tmp_path, differ):
    model = load_model(tiny_folder)
    state = dict(model.state_dict())
    (head,) = model.all_tied_weights_keys
    state[head] = state[head] + (0.5 if differ else 0.0)
    save_model_folder(model, state, tmp_path, processor_from=tiny_folder, dtype=None)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["tie_word_embeddings"] is not differ
    loaded = load_stock(tmp_path)
    assert torch.equal(loaded.lm_head.weight, state[head])
    same = torch.equal(loaded.lm_head.weight, loaded.get_input_embeddings().weight)
    assert same is not differ


def test_what_transformers_keeps_in_float32_is_saved_in_it(tmp_path):
    """The bias by which DeepSeek-V3 chooses experts: rounded, it would choose others."""
    folder = tiny_family_folder("deepseek_v3", tmp_path / "model")
    edit_weights(
        folder,
        lambda tensors: tensors.update(
            {n: torch.linspace(0, 1, 4) / 3 for n in tensors if n.endswith("correction_bias")}
        ),
    )
    before = load_file(str(folder / "model.safetensors"))
    target = tmp_path / "export"
    make_engine(folder, Encoder(folder)).export(target, processor_from=folder, dtype=torch.bfloat16)
    after = load_file(str(target / "model.safetensors"))
    biases = [name for name in after if name.endswith("correction_bias")]
    assert len(biases) == 2
    kept = ("correction_bias", "mlp.gate.weight") if ROUTERS_ARE_KEPT else ("correction_bias",)
    for name, value in after.items():
        assert value.dtype == (torch.float32 if name.endswith(kept) else torch.bfloat16), name
    for name in biases:
        assert torch.equal(after[name], before[name])
        assert not torch.equal(before[name], before[name].bfloat16().float())
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"


def test_generation_has_stock_attention_and_gives_ours_back(vlm, session_engine):
    assert session_engine.vlm.training
    with session_engine.generation() as model:
        assert model.model.language_model.config._attn_implementation == "sdpa"
        assert not model.training
        assert not torch.is_grad_enabled()
        answer = model.generate(
            input_ids=torch.tensor([[562, 485, 198]]),
            attention_mask=torch.ones(1, 3, dtype=torch.int64),
            max_new_tokens=2,
            do_sample=False,
        )
        assert answer.shape[1] >= 4
    assert vlm.language.config._attn_implementation == "vlmpack_segments"
    assert session_engine.vlm.model.training
    assert torch.is_grad_enabled()
    with pytest.raises(RuntimeError, match="on purpose"), session_engine.generation():
        raise RuntimeError("on purpose")
    assert vlm.language.config._attn_implementation == "vlmpack_segments"


def test_the_description_names_what_was_chosen(session_engine):
    description = session_engine.description
    assert description["attention"].startswith("segments (as the recipe asks")
    assert description["compute dtype"] == "float32"
    assert "no replicas" in description["processes"]
