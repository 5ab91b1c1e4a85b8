"""A folder whose flags, names and weights contradict one another: both engines read it alike, and
an export of it says what was trained."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import layouts
from support.engines import make_engine
from support.families import tiny_family_folder
from support.stock import load_stock

from vlmpack.backends import skeleton as skeleton_module
from vlmpack.backends.export import save_model_folder
from vlmpack.backends.hf.load import check_weights, load_model, open_model
from vlmpack.backends.skeleton import model_skeleton
from vlmpack.backends.ties import ties_notes
from vlmpack.distributed import start_process_group
from vlmpack.encode import Encoder
from vlmpack.errors import ModelError
from vlmpack.families.registry import family_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.distributed.*is deprecated:FutureWarning",
    r"ignore:The \.grad attribute of a Tensor that is not a leaf",
)

HEAD = "lm_head.weight"
FLAG = "tie_word_embeddings"

FLAGS = {
    "tied": {FLAG: True},
    "untied": {FLAG: False},
    "silent": {},
    "outer": {FLAG: True, "text_config": {FLAG: False}},
    "inner": {FLAG: False, "text_config": {FLAG: True}},
    "inner-alone": {"text_config": {FLAG: True}},
}
"""What config.json says. Qwen2.5-VL's class takes either for a tied model."""


def embedding_of(tensors):
    return next(name for name in tensors if name.endswith("embed_tokens.weight"))


def own_head(tensors):
    tensors[HEAD] = tensors[embedding_of(tensors)].flip(0).contiguous()


def a_copy(tensors):
    tensors[HEAD] = tensors[embedding_of(tensors)].clone()


def head_alone(tensors):
    tensors[HEAD] = tensors.pop(embedding_of(tensors))


def one_number(tensors):
    a_copy(tensors)
    tensors[HEAD][-1, -1] += 1e-3


def no_head(tensors):
    tensors.pop(HEAD, None)


def expected(flags, heads):
    """The table of `vlmpack.backends.ties`: whether the model is tied; None where it is refused."""
    says_tied = flags in ("tied", "outer", "inner", "inner-alone")
    if heads in (head_alone, no_head):
        return True if says_tied else None
    return says_tied and heads is a_copy


def folder_with(base, target, flags, heads):
    """A copy of a tiny model with other flags and another head."""
    shutil.copytree(base, target)
    path = target / "config.json"
    config = json.loads(path.read_text())
    for section in (config, config.get("text_config", {})):
        section.pop(FLAG, None)
    if "text_config" in config:
        config["text_config"] |= FLAGS[flags].get("text_config", {})
    config |= {name: value for name, value in FLAGS[flags].items() if name == FLAG}
    path.write_text(json.dumps(config))
    weights = target / "model.safetensors"
    tensors = load_file(str(weights))
    heads(tensors)
    save_file(tensors, str(weights), metadata={"format": "pt"})
    return target


def flags_of(folder):
    """Every flag of a config.json."""
    config = json.loads((folder / "config.json").read_text())
    return [section[FLAG] for section in (config, config.get("text_config", {})) if FLAG in section]


def is_tied(model):
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def readings(folder):
    """Whether each reader takes the model for a tied one; None where it refuses the folder."""
    auto_class = family_of(folder).auto_class()

    def checked():
        check_weights(folder)
        return is_tied(model_skeleton(auto_class, folder))

    def opened():
        model = open_model(folder)
        assert model.config.tie_word_embeddings == is_tied(model)
        return is_tied(model)

    readers = {
        "check": checked,
        "load": lambda: is_tied(load_model(folder)),
        "open": opened,
        "mcore": lambda: megatron(folder).model.dims.tied,
    }
    found = {}
    for name, read in readers.items():
        try:
            found[name] = read()
        except ModelError as error:
            assert "tie_word_embeddings" in str(error), name
            assert "missing keys" in str(error), name
            found[name] = None
    return found


def megatron(folder):
    return layouts.make_megatron(layouts.Layout(), start_process_group(), folder)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Tiny folders by family."""
    made = {}

    def base(name):
        if name not in made:
            made[name] = tiny_family_folder(name, tmp_path_factory.mktemp(name))
        return made[name]

    return base


HEADS = (own_head, one_number, a_copy, head_alone, no_head)


@pytest.mark.megatron
@pytest.mark.cases(
    quick=("own_head-tied", "head_alone-outer", "no_head-untied"),
    slow=("one_number-inner", "a_copy-inner-alone", "no_head-silent", "a_copy-untied"),
)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: heads.__name__)
def test_both_engines_read_it_alike(bases, tmp_path, flags, heads):
    folder = folder_with(bases("qwen2_5_vl"), tmp_path / "model", flags, heads)
    wanted = expected(flags, heads)
    assert readings(folder) == dict.fromkeys(("check", "load", "open", "mcore"), wanted)


@pytest.mark.megatron
@pytest.mark.cases(slow=("own_head-qwen3", "a_copy-qwen3_vl", "head_alone-qwen3_5"))
@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: heads.__name__)
def test_of_other_families_too(bases, tmp_path, name, heads):
    folder = folder_with(bases(name), tmp_path / "model", "tied", heads)
    wanted = expected("tied", heads)
    assert readings(folder) == dict.fromkeys(("check", "load", "open", "mcore"), wanted)


def logits_of(model):
    """Of a few tokens."""
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits


@pytest.mark.cases(quick="hf-own_head", slow="mcore-own_head")
@pytest.mark.parametrize("heads", [own_head, one_number, a_copy], ids=lambda heads: heads.__name__)
@pytest.mark.parametrize("engine", ["hf", pytest.param("mcore", marks=pytest.mark.megatron)])
def test_an_export_is_the_model_that_was_trained(bases, tmp_path, engine, heads):
    """For whoever believes the flags too, as servers do: they drop the head of a tied model."""
    folder = folder_with(bases("qwen2_5_vl"), tmp_path / "model", "outer", heads)
    made = make_engine(folder, Encoder(folder)) if engine == "hf" else megatron(folder)
    target = tmp_path / "export"
    made.export(target, processor_from=folder, dtype=None)
    wanted = logits_of(load_stock(folder))
    with made.generation() as model:
        assert torch.equal(logits_of(model), wanted)
    tied = heads is a_copy
    assert set(flags_of(target)) == {tied}
    if tied:
        drop_head(target)
    assert (HEAD in load_file(str(target / "model.safetensors"))) != tied
    again = load_stock(target)
    assert again.config.tie_word_embeddings is tied
    assert torch.equal(logits_of(again), wanted)
    assert not check_weights(target).notes


def drop_head(folder):
    path = folder / "model.safetensors"
    tensors = load_file(str(path))
    no_head(tensors)
    save_file(tensors, str(path), metadata={"format": "pt"})


def test_without_the_settling_a_server_gets_another_model(bases, tmp_path):
    """The negative control: the flag stays, and whoever believes it drops the head."""
    folder = folder_with(bases("qwen2_5_vl"), tmp_path / "model", "tied", own_head)
    model = load_model(folder)
    model.config.tie_word_embeddings = True
    target = tmp_path / "export"
    save_model_folder(
        model, dict(model.state_dict()), target, processor_from=folder, dtype=torch.float32
    )
    assert flags_of(target)[0] is True
    drop_head(target)
    assert (logits_of(load_stock(target)) - logits_of(load_stock(folder))).abs().max() > 1


def test_what_contradicts_is_said(bases, tmp_path):
    base = bases("qwen2_5_vl")
    notes = {
        heads: check_weights(
            folder_with(base, tmp_path / f"{heads.__name__}", "outer", heads)
        ).notes
        for heads in (own_head, no_head)
    }
    (own,) = notes[own_head]
    assert f"{FLAG}: true, but the head of the weights has values of its own" in own
    assert own.endswith("an export says false")
    (nested,) = notes[no_head]
    assert f"text_config.{FLAG}: false, but the head of the weights is the embedding" in nested
    for flags, heads in (("tied", no_head), ("tied", a_copy), ("untied", own_head)):
        folder = folder_with(base, tmp_path / f"{flags}-{heads.__name__}", flags, heads)
        assert not check_weights(folder).notes


def test_a_usual_folder_is_not_opened_for_it(bases, monkeypatch):
    """Nor is one without weights, of which sizes alone are wanted."""
    opened = []
    monkeypatch.setattr(skeleton_module, "deferred_model", opened.append)
    folder = bases("qwen2_5_vl")
    assert is_tied(model_skeleton(family_of(folder).auto_class(), folder))
    assert not opened


def test_a_folder_without_weights_is_built_as_its_flags_say(bases, tmp_path):
    folder = folder_with(bases("qwen2_5_vl"), tmp_path / "model", "tied", own_head)
    auto_class = family_of(folder).auto_class()
    assert not is_tied(model_skeleton(auto_class, folder))
    assert not is_tied(open_model(folder)), "of which mcore makes the copy that answers"
    (folder / "model.safetensors").unlink()
    assert is_tied(model_skeleton(auto_class, folder))


def test_no_flag_no_note(bases):
    folder = bases("qwen2_5_vl")
    assert ties_notes(folder, object()) == []


def step_of(engine, folder):
    """The gradient's norm of one step, and the embedding after it."""
    stepper = layouts.stepper_with(engine, "sgd")
    ((_, norm, *_),) = layouts.train(stepper, layouts.Layout(), 1, folder)
    weights = engine.parameters() if hasattr(engine, "vlm") else layouts.whole_weights(engine)[0]
    return norm, dict(weights)[EMBEDDING].detach()


EMBEDDING = "model.language_model.embed_tokens.weight"
END = 570
"""<|im_end|>, which every conversation has."""


@pytest.mark.megatron
def test_a_pad_token_that_samples_use_learns_alike(bases, tmp_path):
    """transformers trains no embedding of its `padding_idx`, wherever that token stands."""
    folder = folder_with(bases("qwen2_5_vl"), tmp_path / "model", "untied", a_copy)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["pad_token_id"] = END
    path.write_text(json.dumps(config))
    before = load_file(str(folder / "model.safetensors"))
    norm, stock = step_of(make_engine(folder, Encoder(folder)), folder)
    assert torch.equal(stock[END], before[embedding_of(before)][END].float())
    found = step_of(megatron(folder), folder)
    assert found[0] == pytest.approx(norm, rel=1e-5)
    torch.testing.assert_close(found[1], stock, rtol=0, atol=1e-6)
    trained = megatron(folder)
    trained.model.dims = replace(trained.model.dims, padding=None)  # the negative control
    assert step_of(trained, folder)[0] != pytest.approx(norm, rel=1e-2)


BUILDABLE = {
    "num_hidden_layers": (5, "num_hidden_layers"),
    "pad_token_id": (10**6, "Padding_idx"),
    "num_attention_heads": (10**6, "ZeroDivisionError"),
    "rope_parameters": (None, r"mrope_section: \[2, 2\], which is 4 in all; a head of 32 has 16"),
}


@pytest.mark.parametrize("name", BUILDABLE)
def test_sizes_that_contradict_one_another_are_named(bases, tmp_path, name):
    """Each ended in an error of transformers, or at the first step."""
    folder = tmp_path / "model"
    shutil.copytree(bases("qwen2_5_vl"), folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    value, said = BUILDABLE[name]
    text = config["text_config"]
    text[name] = text[name] | {"mrope_section": [2, 2]} if value is None else value
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said):
        check_weights(folder)
    if value is not None:
        auto_class = family_of(bases("qwen2_5_vl")).auto_class()
        for load in (load_model, open_model, partial(model_skeleton, auto_class)):
            with pytest.raises(ModelError, match=said):
                load(folder)
