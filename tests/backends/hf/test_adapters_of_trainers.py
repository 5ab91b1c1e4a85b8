"""Adapters as seven trainers write them: gone on with and merged, they are what peft runs unmerged.

A form is what a trainer's own saving code writes, with the version and the file that it was read
in. Where peft writes the folder, peft does so here, and what the trainer changes follows.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.engines import make_engine, single_rank
from support.families import tiny_family_folder
from support.peft_models import peft_model
from support.recipes import MINIMAL, changed
from support.shards import ROOT, mixed_samples
from support.stock import StockProcessor, load_stock

from vlmpack.backends import adapter_folder
from vlmpack.backends.adapter_folder import PREFIX, WEIGHTS, AdapterFolder
from vlmpack.backends.hf.adapters import merge_adapter
from vlmpack.backends.hf.load import load_model
from vlmpack.build.engine import go_on_with, open_adapter, policy_of, with_adapter_layers
from vlmpack.capabilities.adapter_config import AdapterConfig
from vlmpack.encode import Encoder
from vlmpack.errors import VlmpackError
from vlmpack.recipe import load_recipe

CONFIG = "adapter_config.json"
LANGUAGE = {"vision": "frozen", "projector": "frozen", "language": "lora"}
SEEN = {"vision": "lora", "projector": "frozen", "language": "lora"}
INNER = ["q_proj", "v_proj"]
BOTH = "merge and go on"
Change = Callable[[Path, Path], None]


def settings_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    return found


def configured(**settings: Any) -> Change:
    """What a trainer writes into adapter_config.json behind peft."""

    def change(folder: Path, _: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(settings_of(folder) | settings))

    return change


def renamed(*pairs: tuple[str, str]) -> Change:
    """Layers by the names that the model's class had before transformers 4.52; the first of the
    pairs that fits a name changes it."""

    def older(name: str) -> str:
        for new, old in pairs:
            if name.startswith(new):
                return old + name.removeprefix(new)
        return name

    def change(folder: Path, _: Path) -> None:
        held = load_file(folder / WEIGHTS)
        save_file({PREFIX + older(n.removeprefix(PREFIX)): v for n, v in held.items()},
                  folder / WEIGHTS)  # fmt: skip
        settings = settings_of(folder)
        for key in ("target_modules", "modules_to_save"):
            if isinstance(settings[key], list):
                settings[key] = [older(name) for name in settings[key]]
        (folder / CONFIG).write_text(json.dumps(settings))

    return change


QWEN2 = renamed(("model.language_model.", "model."), ("model.visual.", "visual."))
LLAVA = renamed(
    ("model.language_model.", "language_model.model."),
    ("model.vision_tower.", "vision_tower.vision_model."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("lm_head.", "language_model.lm_head."),
)


def with_residual(folder: Path, base: Path) -> None:
    """The model that PiSSA left, saved inside."""
    model = load_stock(base)
    start = load_file(folder / "pissa_init" / WEIGHTS)
    settings = settings_of(folder)
    scale = settings["lora_alpha"] / settings["r"]
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, a in start.items():
            if name.endswith(".lora_A.weight"):
                layer = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
                weights[f"{layer}.weight"] -= scale * start[name.replace("lora_A", "lora_B")] @ a
    shutil.rmtree(folder / "pissa_init")
    shutil.copytree(base, folder / "residual")
    model.save_pretrained(folder / "residual")


def without_start(folder: Path, _: Path) -> None:
    shutil.rmtree(folder / "pissa_init")


def of_another_start(folder: Path, _: Path) -> None:
    """What is called its start has other layers."""
    held = load_file(folder / "pissa_init" / WEIGHTS)
    save_file(dict(sorted(held.items())[2:]), folder / "pissa_init" / WEIGHTS)


def of_megatron_bridge(folder: Path, _: Path) -> None:
    """Its own dict of settings, with the ends of the names of what it saves."""
    settings, names = settings_of(folder), load_file(folder / WEIGHTS)
    ends = {name.split(".lora_")[0].rpartition(".")[2] for name in names}
    kept = ("peft_type", "bias", "init_lora_weights", "lora_alpha", "r", "use_dora")
    kept += ("base_model_name_or_path", "fan_in_fan_out", "inference_mode", "lora_dropout")
    written = {key: settings[key] for key in (*kept, "rank_pattern", "use_rslora")}
    parameters = settings["target_parameters"]
    written |= {"auto_mapping": None, "modules_to_save": None, "alpha_pattern": {}}
    written |= {"target_modules": [] if parameters else sorted(ends), "task_type": "CAUSAL_LM"}
    written |= {"target_parameters": parameters} if parameters else {}
    (folder / CONFIG).write_text(json.dumps(written))
    save_file({n: v for n, v in names.items() if "magnitude" not in n}, folder / WEIGHTS)


def as_a_checkpoint(folder: Path, _: Path) -> None:
    """Megatron's distributed checkpoint."""
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "run_config.yaml").touch()


@dataclass(frozen=True)
class Form:
    """Adapters of one trainer.

    Args:
        source: package, version and file.
        change: what the trainer does to the folder that peft has written.
        refused: what is said where these are refused, by `merge` or `go on`; absent where taken.
        modes: of the recipe that goes on with them.
    """

    source: str
    settings: dict[str, Any] = field(default_factory=lambda: {"target_modules": INNER})
    family: str = "qwen3_vl"
    change: Change | None = None
    refused: dict[str, str] = field(default_factory=dict)
    modes: dict[str, str] = field(default_factory=lambda: LANGUAGE)
    folder: str = "adapter"


PEFT = "peft 0.21.2, tuners/lora/config.py"
LF = "llamafactory 0.9.5, model/adapter.py"
LF_VLM = "llamafactory 0.9.5, model/model_utils/visual.py: patch_target_modules"
LF_PISSA = "llamafactory 0.9.5, train/callbacks.py: PissaConvertCallback"
SWIFT = "ms_swift 4.6.0, swift/pipelines/train/tuner.py: prepare_adapter"
SWIFT_VLM = "ms_swift 4.6.0, swift/utils/transformers_utils.py: get_multimodal_target_regex"
UNSLOTH = "unsloth 2026.10.9, models/vision.py: get_peft_model"
ZOO = "unsloth_zoo 2026.10.9, peft_utils.py: get_peft_regex"
AXOLOTL = "axolotl 0.19.0, loaders/adapter.py: _build_peft_lora_config"
TRL = "trl 1.16.0, trainer/utils.py: get_peft_config"
BRIDGE = "megatron_bridge 0.6.2, models/conversion/peft_bridge.py: build_adapter_config_dict"

LAYERS = "model.language_model.layers"
NO_LAYER = {"go on": "which is no linear layer of a component with mode lora that gets one"}
UNTIED = {"go on": "no longer tied, and the model ties"}
NO_WORDS = {"go on": "which a recipe cannot say; merge them first: vlmpack merge"}
PISSA = {"target_modules": INNER, "init_lora_weights": "pissa"}
EXPERTS = {
    "target_modules": ["o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}

FORMS = {
    "peft: list": Form(PEFT),
    "peft: all-linear": Form(PEFT, {"target_modules": "all-linear"}, modes={
        "vision": "lora", "projector": "lora", "language": "lora"}),
    "peft: expression": Form(PEFT, {"target_modules": r".*language_model.*\.(gate|up)_proj"}),
    "peft: dora, rslora": Form(PEFT, {"target_modules": [*INNER, "down_proj"], "use_dora": True,
        "use_rslora": True}),
    "peft: patterns": Form(PEFT, {"target_modules": INNER, "use_rslora": True,
        "rank_pattern": {r"layers\.[01]\.self_attn\.q_proj": 2, "q_proj": 6},
        "alpha_pattern": {"^model.*layers.2.*v_proj": 30}}),
    "peft: some layers": Form(PEFT, {"target_modules": [*INNER, "up_proj"],
        "layers_to_transform": [0, 2], "layers_pattern": "layers"}),
    "peft: without some": Form(PEFT, {"target_modules": INNER,
        "exclude_modules": r".*layers\.1\..*"}),
    "peft: head and embedding in full": Form(PEFT, {"target_modules": INNER,
        "modules_to_save": ["embed_tokens", "lm_head"]}, "qwen3_vl_moe"),
    "peft: untied in full": Form(PEFT, {"target_modules": INNER,
        "modules_to_save": ["embed_tokens", "lm_head"]}, refused=UNTIED),
    "peft: head alone": Form(PEFT, {"target_modules": INNER, "modules_to_save": ["lm_head"]},
        refused=UNTIED),
    "peft: a layer in full": Form(PEFT, {"target_modules": INNER,
        "modules_to_save": ["layers.1"]}),
    "peft: projector in full": Form(PEFT, {"target_modules": INNER, "modules_to_save": ["merger"]},
        modes={**LANGUAGE, "projector": "full"}),
    "peft: pissa": Form(PEFT, PISSA),
    "peft: pissa, patterns": Form(PEFT, {**PISSA, "use_rslora": True, "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"v_proj": 3}}),
    "peft: olora": Form(PEFT, {"target_modules": INNER, "init_lora_weights": "olora"}),
    "peft: pissa, dora": Form(PEFT, {**PISSA, "use_dora": True}),
    "peft: pissa, residual": Form(PEFT, PISSA, change=with_residual),
    "peft: pissa alone": Form(PEFT, PISSA, change=without_start,
        refused={BOTH: "started as 'pissa', which changes the weights of the model"}),
    "peft: pissa, another start": Form(PEFT, PISSA, change=of_another_start,
        refused={BOTH: "has other adapters than .*; expected these as they started"}),
    "peft: rows": Form(PEFT, {"target_modules": INNER, "trainable_token_indices": [5, 9]},
        refused=NO_WORDS),
    "peft: embedding": Form(PEFT, {"target_modules": [*INNER, "embed_tokens"]}, refused=NO_LAYER),
    "peft: head": Form(PEFT, {"target_modules": [*INNER, "lm_head"]}, "qwen3_vl_moe",
        refused=NO_LAYER),
    "peft: biases": Form(PEFT, {"target_modules": r".*visual.*\.qkv", "lora_bias": True},
        refused=NO_WORDS, modes=SEEN),
    "peft: alora": Form(PEFT, {"target_modules": INNER, "alora_invocation_tokens": [5, 9]},
        refused={BOTH: "no weight can hold its adapters: some tokens switch them on"}),
    "peft: experts": Form(PEFT, EXPERTS, "qwen3_vl_moe"),
    "peft: another parameter": Form(PEFT, {"target_modules": ["q_proj"],
        "target_parameters": ["o_proj.weight"]}),
    "peft: experts, patterns": Form(PEFT, EXPERTS | {"rank_pattern": {"o_proj": 2}}, "qwen3_vl_moe",
        refused=NO_WORDS),
    "LLaMA-Factory: names": Form(LF_VLM, {"target_modules": [
        f"{LAYERS}.{n}.self_attn.{kind}" for n in range(3) for kind in INNER]}),
    "LLaMA-Factory: older names": Form(LF_VLM, {"target_modules": [
        f"{LAYERS}.{n}.self_attn.{kind}" for n in range(3) for kind in INNER]}, "qwen2_vl",
        change=QWEN2),
    "LLaMA-Factory: additional_target": Form(LF, {"target_modules": INNER,
        "modules_to_save": ["embed_tokens"]}, refused=UNTIED),
    "LLaMA-Factory: additional_target, untied": Form(LF, {"target_modules": INNER,
        "modules_to_save": ["embed_tokens"]}, "llava_onevision", modes=SEEN),
    "LLaMA-Factory: llama pro": Form(LF, {"target_modules": [f"{LAYERS}.2.mlp.up_proj"],
        "use_rslora": True}),
    "LLaMA-Factory: pissa_init": Form(LF_PISSA, {**PISSA, "init_lora_weights": "pissa_niter_4"},
        "qwen2_vl"),
    "LLaMA-Factory: pissa_backup": Form(LF_PISSA, PISSA, folder="pissa_backup",
        change=configured(init_lora_weights=True),
        refused={BOTH: "fits the model that PiSSA left, and its config does not say so"}),
    "LLaMA-Factory: oft": Form(LF, change=configured(peft_type="OFT"),
        refused={BOTH: "its peft_type is 'OFT'; expected LORA"}),
    "ms-swift: expression": Form(SWIFT_VLM, {"target_modules":
        r"^(model\.language_model(?=\.).*\.(o_proj|k_proj)|"
        r"(?!(model\.visual\.merger|model\.visual\.deepstack_merger_list))model\.visual(?=\.).*\.(qkv|linear_fc1))$"},
        "qwen3_vl", modes=SEEN),
    "ms-swift: older expression": Form(SWIFT_VLM, {"target_modules":
        r"^(model\.language_model(?=\.).*\.(o_proj|k_proj))$"}, "llava_onevision", change=LLAVA),
    "ms-swift: all-norm": Form(SWIFT, {"target_modules": INNER,
        "modules_to_save": ["q_norm", "post_attention_layernorm"]}),
    "ms-swift: its own format": Form("ms_swift 4.6.0, swift/tuners/base.py: save_pretrained",
        change=configured(swift_type="LORA", use_qa_lora=False, lora_dtype=None),
        refused={BOTH: "it is in ms-swift's own format"}),
    "ms-swift: lora_bias": Form(SWIFT, {"target_modules": INNER}, change=configured(bias="all"),
        refused={BOTH: "it has trained biases"}),
    "ms-swift: adalora": Form(SWIFT, change=configured(peft_type="ADALORA"),
        refused={BOTH: "its peft_type is 'ADALORA'"}),
    "Unsloth: expression": Form(ZOO, {"target_modules":
        r".*?(?:vision|image|visual|patch|language|text).*?(?:self_attn|attention|attn|mlp).*?\."
        r"(?:qkv|q_proj|linear_fc1|down_proj)"}, modes=SEEN),
    "Unsloth: tied embedding": Form(UNSLOTH, {"target_modules": INNER,
        "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "Unsloth: older names": Form(UNSLOTH, {"target_modules": [*INNER, "fc1"],
        "modules_to_save": ["lm_head"]}, "llava_onevision", change=LLAVA, modes=SEEN),
    "Unsloth: experts": Form(UNSLOTH, EXPERTS, "qwen3_vl_moe"),
    "Axolotl: linear, patterns": Form(AXOLOTL, {"target_modules": ["down_proj", *INNER],
        "rank_pattern": {"down_proj": 7}, "alpha_pattern": {"down_proj": 7},
        "exclude_modules": ["layers.0.mlp.down_proj"]}),
    "Axolotl: layers": Form(AXOLOTL, {"target_modules": INNER, "layers_to_transform": [1],
        "layers_pattern": ["layers"], "use_dora": True}),
    "Axolotl: nvfp4_merge_aware": Form("axolotl 0.19.0, integrations/kernels/"
        "merge_aware_callback.py", change=configured(nvfp4_merge_aware={"encoder": None}),
        refused={BOTH: r"Unexpected keyword arguments \['nvfp4_merge_aware'\]"}),
    "Axolotl: layer_replication": Form(AXOLOTL, change=configured(layer_replication=[[0, 2]]),
        refused={BOTH: "they repeat layers of the model"}),
    "Axolotl: loftq": Form(AXOLOTL, change=configured(init_lora_weights="loftq"),
        refused={BOTH: "started as 'loftq', which changes the weights"}),
    "TRL: all-linear, dora": Form(TRL, {"target_modules": "all-linear", "use_dora": True,
        "task_type": "CAUSAL_LM"}, "qwen2_vl", modes={"vision": "lora", "projector": "lora",
        "language": "lora"}),
    "TRL: modules_to_save": Form(TRL, {"target_modules": ["gate_proj"], "use_rslora": True,
        "modules_to_save": ["embed_tokens", "lm_head"], "task_type": "CAUSAL_LM"},
        "llava_onevision"),
    "TRL: experts": Form(TRL, EXPERTS, "qwen3_vl_moe"),
    "Megatron-Bridge: ends": Form(BRIDGE, {"target_modules": r".*language_model.*\.[qv]_proj"},
        "gemma3", change=of_megatron_bridge),
    "Megatron-Bridge: ranks": Form(BRIDGE, {"target_modules": INNER, "rank_pattern":
        {f"{LAYERS}.1.self_attn.q_proj": 2}}, change=of_megatron_bridge),
    "Megatron-Bridge: dora": Form(BRIDGE, {"target_modules": INNER, "use_dora": True},
        change=of_megatron_bridge, refused={"merge": "without a tensor in the folder",
        "go on": "has adapters without a tensor"}),
    "Megatron-Bridge: experts": Form(BRIDGE, EXPERTS | {"target_modules": []}, "qwen3_vl_moe",
        change=of_megatron_bridge),
    "Megatron-Bridge: its checkpoint": Form("megatron_bridge 0.6.2, training/checkpointing.py",
        change=as_a_checkpoint, refused={BOTH: "has no adapter_config.json"}),
}  # fmt: skip
OFTEN = ("peft: patterns", "ms-swift: older expression")
SOMETIMES = (
    "peft: pissa, patterns",
    "peft: a layer in full",
    "peft: olora",
    "peft: pissa, residual",
    "peft: untied in full",
    "LLaMA-Factory: older names",
    "ms-swift: expression",
    "Unsloth: tied embedding",
    "Unsloth: older names",
    "Axolotl: nvfp4_merge_aware",
    "TRL: all-linear, dora",
    "Megatron-Bridge: ends",
    "Megatron-Bridge: dora",
)


@pytest.fixture(scope="module")
def base_of(tmp_path_factory):
    return cache(lambda family: tiny_family_folder(family, tmp_path_factory.mktemp(family)))


def written(form: Form, base: Path, folder: Path) -> tuple[Path, torch.Tensor | None]:
    """The folder as the trainer leaves it, and the logits of peft's model of it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = {"r": 4, "lora_alpha": 8, **form.settings}
        model = get_peft_model(load_stock(base), LoraConfig(**settings))
        if isinstance(settings.get("init_lora_weights"), str):
            saved = model.peft_config["default"].init_lora_weights
            model.peft_config["default"].init_lora_weights = True
            model.save_pretrained(str(folder / "pissa_init"))
            model.peft_config["default"].init_lora_weights = saved
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(str(folder), save_embedding_layers=False)
    runs = not form.refused.keys() & {BOTH, "merge"}
    reference = logits(model, base) if runs else None
    if form.change is not None:
        form.change(folder, base)
    return folder, reference


def logits(model: Any, base: Path) -> torch.Tensor:
    model.eval()
    processor = StockProcessor(base)
    with torch.no_grad():
        found = [model(**processor(sample).arguments()).logits for sample in mixed_samples()[:2]]
    return torch.cat([each.flatten() for each in found])


def apart(found: torch.Tensor, reference: torch.Tensor) -> float:
    return ((found - reference).norm() / reference.norm()).item()


def gone_on(base: Path, adapter: Path, modes: dict[str, str], **lora: Any) -> Any:
    """An engine with the adapters of a recipe that names their folder and nothing else of them."""
    model = {"path": str(base), "adapter": str(adapter), "dtype": "float32"}
    trainable = {**modes, **({"lora": lora} if lora else {})}
    recipe = with_adapter_layers(load_recipe(changed(MINIMAL, model=model, trainable=trainable)))
    policy, encoder = policy_of(recipe), Encoder(base)
    engine = make_engine(base, encoder, policy=policy)
    go_on_with(engine, open_adapter(adapter, policy, encoder), single_rank())
    return engine


def said_by(call: Callable[[], object]) -> str:
    with pytest.raises(VlmpackError) as error:
        call()
    return str(error.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.cases(quick=OFTEN, slow=SOMETIMES)
@pytest.mark.parametrize("name", FORMS)
def test_adapters_of_a_trainer_are_what_peft_runs_or_are_refused(base_of, tmp_path, name):
    form = FORMS[name]
    base = base_of(form.family)
    adapter, reference = written(form, base, tmp_path / form.folder)
    if (adapter / "residual").is_dir():
        for call in (lambda: merge_adapter(load_model(base), adapter),
                     lambda: gone_on(base, adapter, form.modes)):  # fmt: skip
            assert "Take that one as the model" in said_by(call)
        base = adapter / "residual"
    why = {what: form.refused.get(what, form.refused.get(BOTH)) for what in ("merge", "go on")}
    if why["merge"] is None:
        assert reference is not None
        assert apart(logits(load_stock(base), base), reference) > 0.01, "adapters that do nothing"
        assert apart(logits(merge_adapter(load_model(base), adapter), base), reference) < 1e-5
    else:
        assert re.search(why["merge"], said_by(lambda: merge_adapter(load_model(base), adapter)))
    if why["go on"] is None:
        engine = gone_on(base, adapter, form.modes)
        with engine.generation() as model:
            assert apart(logits(model, base), reference) < 1e-5
        engine.export_adapter(tmp_path / "again", base=str(base))
        assert apart(logits(peft_model(base, tmp_path / "again"), base), reference) < 1e-5
    else:
        assert re.search(why["go on"], said_by(lambda: gone_on(base, adapter, form.modes)))


def named_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of the trained parameters, under peft's names without its wrappers."""
    return {
        name.removeprefix(PREFIX).replace(".modules_to_save.default", ""): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["peft: patterns", "TRL: modules_to_save", "Axolotl: layers"])
def test_gradients_are_those_of_pefts_model(base_of, tmp_path, name):
    """Of adapters and of modules in full; each has one, and no other weight has."""
    form = FORMS[name]
    base = base_of(form.family)
    adapter, _ = written(form, base, tmp_path / "adapter")
    arguments = StockProcessor(base)(mixed_samples()[0]).arguments()

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        found = model.eval()(**arguments).logits
        draw = torch.Generator().manual_seed(1)
        (found * torch.randn(found.shape, generator=draw)).sum().backward()
        return named_gradients(model)

    trained = PeftModel.from_pretrained(load_stock(base), str(adapter), is_trainable=True)
    theirs = gradients(trained)
    with gone_on(base, adapter, form.modes).generation() as model, torch.enable_grad():
        ours = gradients(model)
    assert ours.keys() == theirs.keys() and len(ours) > 3
    for key, value in theirs.items():
        assert (ours[key] - value).norm() <= 1e-5 * value.norm(), key
        assert value.any(), key


def plain_alpha(monkeypatch):
    """A pattern of scales that nobody reads."""
    monkeypatch.setattr(AdapterConfig, "alpha_of", lambda self, _: self.values["lora_alpha"])


def added_start(monkeypatch):
    """What was to be subtracted is added."""
    whole = AdapterFolder.whole

    def wrong(self, name):
        value = whole(self, name)
        return torch.cat([value[:, :4], -value[:, 4:]], 1) if ".lora_B." in name else value

    monkeypatch.setattr(AdapterFolder, "whole", wrong)


def neighbours_names(monkeypatch):
    """Layers 0 and 1 by each other's names."""
    newer_names = adapter_folder._newer_names
    other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}

    def wrong(model):
        newer = newer_names(model)
        return lambda name: re.sub(r"layers\.[01]\.", lambda at: other[at[0]], newer(name))

    monkeypatch.setattr(adapter_folder, "_newer_names", wrong)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.cases(slow=("neighbours_names*", "added_start*"))
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (plain_alpha, "peft: patterns"),
        (added_start, "peft: pissa"),
        (neighbours_names, "LLaMA-Factory: older names"),
    ],
)
def test_a_wrong_scale_start_or_name_is_found(base_of, tmp_path, monkeypatch, fault, name):
    form = FORMS[name]
    base = base_of(form.family)
    adapter, reference = written(form, base, tmp_path / "adapter")
    fault(monkeypatch)
    with gone_on(base, adapter, form.modes).generation() as model:
        assert apart(logits(model, base), reference) > 0.01
    if fault is not plain_alpha:  # peft reads the pattern itself
        merged = merge_adapter(load_model(base), adapter)
        assert apart(logits(merged, base), reference) > 0.01


@pytest.mark.filterwarnings("ignore")
def test_a_recipe_names_what_the_folder_has(base_of, tmp_path) -> None:
    """Targets as short as they can be, and other ranks and scales by name."""
    base = base_of("qwen3_vl")
    adapter, _ = written(FORMS["Axolotl: linear, patterns"], base, tmp_path / "adapter")
    model = {"path": str(base), "adapter": str(adapter)}
    recipe = load_recipe(changed(MINIMAL, model=model, trainable=LANGUAGE))
    lora = with_adapter_layers(recipe).trainable.lora
    ends = (*(f"layers.{n}.mlp.down_proj" for n in (1, 2, 3)), "q_proj", "v_proj")
    assert (lora.targets, lora.rank, lora.alpha) == (ends, 4, 8)
    inside = [f"{LAYERS}.{n}.mlp.down_proj" for n in (1, 2, 3)]
    assert dict(lora.rank_pattern) == dict(lora.alpha_pattern) == dict.fromkeys(inside, 7)
    assert with_adapter_layers(with_adapter_layers(recipe)) == with_adapter_layers(recipe)
    every, _ = written(FORMS["peft: all-linear"], base, tmp_path / "every")
    whole = {
        "trainable": FORMS["peft: all-linear"].modes,
        "model": {**model, "adapter": str(every)},
    }
    lora = with_adapter_layers(load_recipe(changed(MINIMAL, **whole))).trainable.lora
    assert (lora.targets, lora.rank_pattern, lora.modules_to_save) == ("all-linear", {}, ())


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"targets": ["q_proj"]}, "4 layers of the folder alone"),
        ({"targets": ["q_proj", "v_proj"]}, "expected adapters of that model and rank"),
        ({"targets": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2}}, "alpha 3.0 at model"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_recipe_that_names_others_is_told(base_of, tmp_path, lora, said) -> None:
    form = Form(PEFT, {"target_modules": INNER, "rank_pattern": {"q_proj": 2},
                       "alpha_pattern": {"v_proj": 3}})  # fmt: skip
    base = base_of("qwen3_vl")
    adapter, _ = written(form, base, tmp_path / "adapter")
    found = said_by(lambda: gone_on(base, adapter, LANGUAGE, **lora))
    assert re.search(said, found)


def test_the_page_has_the_versions_that_were_read() -> None:
    page = (ROOT / "docs/trainable.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in page.splitlines()]
    read = {row[0]: row[1] for row in rows if len(row) == 2}
    for name, form in FORMS.items():
        assert read[name.partition(":")[0]] == form.source.split(",")[0].split()[1], name


def test_there_are_forty_forms_of_seven_trainers() -> None:
    taken = [name for name, form in FORMS.items() if not form.refused]
    assert len(FORMS) >= 40 and len(taken) >= 25
    assert len({name.partition(":")[0] for name in FORMS}) == 7
    assert {*OFTEN, *SOMETIMES} <= FORMS.keys()
    assert all(re.match(r"\w+ [\d.]+, [\w/]+\.py", form.source) for form in FORMS.values())
