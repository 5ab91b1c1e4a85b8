"""Adapters of every kind that peft makes, merged and written: the model that peft runs unmerged."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig
from safetensors.torch import load_file, save_file
from support.engines import make_engine, policy
from support.families import TINY, write_tiny
from support.peft_models import peft_model
from support.shards import mixed_samples
from support.stock import StockProcessor, load_stock

from vlmpack.backends.adapter_folder import WEIGHTS
from vlmpack.backends.hf import adapters as merging
from vlmpack.encode import Encoder
from vlmpack.errors import ModelError
from vlmpack.run.export import merge_folders

INNER = ["q_proj", "v_proj", "o_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": INNER},
    "all-linear": {"target_modules": "all-linear"},
    "tower": {"target_modules": r".*visual.*(patch_embed\.proj|qkv)$"},
    "embedding": {"target_modules": [*INNER, "embed_tokens"]},
    "head": {"target_modules": [*INNER, "lm_head"]},
    "both": {"target_modules": [*INNER, "embed_tokens", "lm_head"]},
    "both-as-one": {"target_modules": [*INNER, "embed_tokens"], "ensure_weight_tying": True},
    "full-embedding": {"target_modules": INNER, "modules_to_save": ["embed_tokens"]},
    "full-head": {"target_modules": INNER, "modules_to_save": ["lm_head"]},
    "full-both": {"target_modules": INNER, "modules_to_save": ["embed_tokens", "lm_head"]},
    "full-as-one": {
        "target_modules": INNER,
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "full-norms": {"target_modules": INNER, "modules_to_save": ["norm"]},
    "full-layer": {"target_modules": INNER, "modules_to_save": ["layers.1"]},
    "full-embedding-beside-head": {
        "target_modules": [*INNER, "lm_head"],
        "modules_to_save": ["embed_tokens"],
    },
    "dora": {"target_modules": [*INNER, "embed_tokens", "lm_head"], "use_dora": True},
    "patterns": {
        "target_modules": INNER,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2, "layers.1.self_attn.v_proj": 8, "v_proj": 6},
        "alpha_pattern": {"o_proj": 32},
    },
    "some-layers": {
        "target_modules": INNER,
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "rows": {"target_modules": INNER, "trainable_token_indices": [5, 9, 100]},
    "rows-of-the-head": {
        "target_modules": INNER,
        "trainable_token_indices": {"lm_head": [5, 9, 100]},
    },
    "parameters": {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "o_proj.weight"],
    },
    "biases": {"target_modules": r".*visual.*\.qkv", "lora_bias": True},
    "biases-beside-none": {"target_modules": ["q_proj"], "lora_bias": True},
    "switched-on": {"target_modules": INNER, "alora_invocation_tokens": [5, 9]},
    "mica": {"target_modules": INNER, "init_lora_weights": "mica"},
    "velora": {"target_modules": INNER, "velora_config": VeloraConfig(num_groups=4)},
    "monteclora": {"target_modules": INNER, "monteclora_config": MontecloraConfig()},
    "kasa": {"target_modules": INNER, "kasa_config": KasaConfig()},
    "blocks": {
        "target_modules": INNER,
        "use_bdlora": BdLoraConfig(
            target_modules_bd_a=["q_proj"], target_modules_bd_b=["v_proj", "o_proj"], nblocks=2
        ),
    },
}
REFUSED = {
    "biases-beside-none": r"they have biases \(lora_bias\), and 4 layers .* none \(model\.",
    "switched-on": r"no weight can hold its adapters: some tokens switch them on \(aLoRA\)",
}
APART = {name for name in KINDS if re.search("head|embedding|both$|dora", name)}
"""Those after which head and embedding of a tied model differ."""
DENSE, MIXTURE = "qwen3_vl", "qwen3_vl_moe"
MODELS = [f"{name}-{how}" for name in (DENSE, MIXTURE) for how in ("tied", "untied")]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @cache
    def made(model):
        name, _, how = model.partition("-")

        def config():
            found = TINY[name].config()
            found.tie_word_embeddings = found.text_config.tie_word_embeddings = how == "tied"
            return found

        return write_tiny(replace(TINY[name], config=config), tmp_path_factory.mktemp(model))

    return made


def drawn(base, kind, folder, seed=0):
    """Adapters of that kind that do something, as peft saves them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        settings = {"r": 4, "lora_alpha": 8, **KINDS[kind]}
        model = get_peft_model(load_stock(base), LoraConfig(**settings))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def logits(model, folder):
    model.eval()
    processor = StockProcessor(folder)
    with torch.no_grad():
        found = [model(**processor(sample).arguments()).logits for sample in mixed_samples()[:2]]
    return torch.cat([each.flatten() for each in found])


def apart(found, reference):
    return ((found - reference).norm() / reference.norm()).item()


def merged(base, adapters, out, dtype="float32"):
    merge_folders(base, adapters, out, dtype=dtype)
    return out


@pytest.mark.cases(
    quick=("head-qwen3_vl-tied", "full-embedding-qwen3_vl-tied", "switched-on-qwen3_vl-tied"),
    slow=(
        "both-qwen3_vl_moe-tied",
        "both-as-one-qwen3_vl-tied",
        "full-both-qwen3_vl-tied",
        "dora-qwen3_vl-untied",
        "rows-qwen3_vl-tied",
        "parameters-qwen3_vl_moe-untied",
        "biases-qwen3_vl-untied",
        "biases-beside-none-qwen3_vl-tied",
    ),
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_what_peft_runs_unmerged(folder_of, tmp_path, kind, model):
    base = folder_of(model)
    adapter = drawn(base, kind, tmp_path / "adapter")
    if kind in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[kind]):
            merged(base, [adapter], tmp_path / "out")
        assert not list(tmp_path.glob("out*"))
        return
    reference = logits(peft_model(base, adapter), base)
    assert apart(logits(load_stock(base), base), reference) > 0.02, "adapters that do nothing"
    out = merged(base, [adapter], tmp_path / "out")
    assert apart(logits(load_stock(out), out), reference) < 1e-5
    config = json.loads((out / "config.json").read_text())
    has_head = "lm_head.weight" in load_file(out / "model.safetensors")
    assert has_head == (model.endswith("untied") or kind in APART)
    for section in (config, config["text_config"]):
        assert section.get("tie_word_embeddings", not has_head) == (not has_head)


@pytest.mark.filterwarnings("ignore")
def test_a_weight_that_two_share_would_be_merged_into_both(folder_of, tmp_path, monkeypatch):
    """The control: without a tensor of its own the embedding gets what is beside the head."""
    base = folder_of(f"{DENSE}-tied")
    adapter = drawn(base, "head", tmp_path / "adapter")
    reference = logits(peft_model(base, adapter), base)
    monkeypatch.setattr(merging, "untie", lambda _: None)
    out = merged(base, [adapter], tmp_path / "out")
    assert apart(logits(load_stock(out), out), reference) > 0.1


@pytest.mark.cases(slow="both-qwen3_vl-tied")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["both", "rows", "full-both", "parameters"])
def test_bfloat16_is_the_float32_merge_rounded_once(folder_of, tmp_path, kind, model):
    base = folder_of(model)
    adapter = drawn(base, kind, tmp_path / "adapter")
    whole, rounded = (
        load_file(merged(base, [adapter], tmp_path / dtype, dtype) / "model.safetensors")
        for dtype in ("float32", "bfloat16")
    )
    assert whole.keys() == rounded.keys()
    for name, value in whole.items():
        assert torch.equal(value.bfloat16(), rounded[name]), name


@pytest.mark.cases(slow="head-rows")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("one", "other"),
    [("head", "rows"), ("rows", "rows"), ("both-as-one", "head"), ("full-both", "both-as-one")],
)
def test_the_next_adapters_find_head_and_embedding_as_they_were_written(
    folder_of, tmp_path, one, other
):
    """Rows of a tied model go into head and embedding, those of an untied one into one of them."""
    base = folder_of(f"{DENSE}-tied")
    first = drawn(base, one, tmp_path / "first")
    between = merged(base, [first], tmp_path / "between")
    second = drawn(between, other, tmp_path / "second", seed=1)
    reference = logits(peft_model(between, second), base)
    out = merged(base, [first, second], tmp_path / "out")
    assert apart(logits(load_stock(out), out), reference) < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_language_model_in_full_beside_a_towers_adapters(folder_of, tmp_path):
    """A run's own adapters hold the tied embedding twice; its export is the reference."""
    base = folder_of(f"{DENSE}-tied")
    engine = make_engine(base, Encoder(base), policy=policy("lora", "full", "full"))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in engine.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    engine.export_adapter(tmp_path / "adapter", base=str(base))
    engine.export(tmp_path / "export", processor_from=base, dtype=torch.float32)
    out = merged(base, [tmp_path / "adapter"], tmp_path / "out")
    ours, theirs = (load_file(at / "model.safetensors") for at in (out, tmp_path / "export"))
    assert ours.keys() == theirs.keys()
    assert "lm_head.weight" not in ours
    for name, value in theirs.items():
        assert apart(ours[name], value) < 1e-6, name
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"]


def tensors_changed(change):
    def damage(folder):
        held = load_file(folder / WEIGHTS)
        save_file(change(held, sorted(held)[0]), folder / WEIGHTS)

    return damage


def header_changed(change):
    def damage(folder):
        data = (folder / WEIGHTS).read_bytes()
        stop = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:stop])
        names = sorted(header.keys() - {"__metadata__"})
        alike = [name for name in names if header[name]["shape"] == header[names[0]]["shape"]]
        change(header, *alike[:2])
        text = json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[stop:])

    return damage


def settings_changed(**settings):
    def damage(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return damage


HOSTILE = {
    "two-of-one": (
        tensors_changed(
            lambda held, name: held | {name.replace("_A.", "_A.default."): 2 * held[name]}
        ),
        r"has 25 tensors for 24 of the model's; expected one for each \(model\..*lora_A.default",
    ),
    "integers": (
        tensors_changed(lambda held, name: held | {name: (100 * held[name]).long()}),
        "1 of whole numbers",
    ),
    "overlap": (
        header_changed(lambda header, one, other: header[one].update(header[other])),
        "invalid offset for tensor",
    ),
    "alpha": (settings_changed(lora_alpha=float("inf")), "its lora_alpha is inf; expected a fin"),
    "alpha-of-one": (
        settings_changed(alpha_pattern={"q_proj": float("nan")}),
        "its alpha_pattern of q_proj is nan; expected a finite number",
    ),
    "alpha-in-words": (settings_changed(lora_alpha="8"), "its lora_alpha is 8; expected a finite"),
    "alphas-expression": (
        settings_changed(alpha_pattern={"((": 3}),
        "do not fit the model: (missing|unterminated)",
    ),
    "rank": (settings_changed(r=0), "do not fit the model: `r` should be a positive integer"),
    "pattern": (settings_changed(rank_pattern=["q_proj"]), "do not fit the model: 'list' object"),
    "expression": (settings_changed(target_modules="(("), "do not fit the model: missing"),
    "token": (settings_changed(trainable_token_indices=[10**6]), "do not fit the model: index"),
    "head-alone": (settings_changed(modules_to_save=["lm_head"]), "KeyError: .*lm_head.weight"),
    "megatron": (settings_changed(megatron_config={"a": 1}), "those of Megatron's parallel layers"),
}


@pytest.mark.cases(slow=("two-of-one", "integers", "overlap", "expression"))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_merged_is_refused_by_name(folder_of, tmp_path, name):
    damage, said = HOSTILE[name]
    base = folder_of(f"{DENSE}-tied")
    adapter = drawn(base, "plain", tmp_path / "adapter")
    damage(adapter)
    with pytest.raises(ModelError, match=f"(?s){re.escape(str(adapter))}.*{said}"):
        merged(base, [adapter], tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
