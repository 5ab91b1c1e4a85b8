"""An engine's dtype and attention, its policy's table, and adapters that training goes on with.

Adapters are compared with peft's own reading of the same folder.
"""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import make_engine, policy, single_rank
from support.peft_models import peft_model
from support.recipes import MINIMAL
from support.stock import StockProcessor

from vlmpack.backends.adapter_folder import WEIGHTS
from vlmpack.build.engine import (
    go_on_with,
    open_adapter,
    policy_of,
    policy_rows,
    policy_table,
    resolved_compute,
)
from vlmpack.errors import CapabilityError, ModelError
from vlmpack.recipe import load_recipe
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.recipe.trainable import COMPONENTS

RECIPE = MINIMAL | {
    "training": MINIMAL["training"] | {"seed": 3},
    "optim": MINIMAL["optim"] | {"weight_decay": 0.1},
}


def test_a_plain_recipe_trains_everything():
    made = policy_of(load_recipe(RECIPE))
    for component in COMPONENTS:
        assert (made.mode(component), made.lr_scale(component)) == ("full", 1.0)
    assert made.lora is None


def test_modes_rates_and_adapters_come_from_the_recipe():
    made = policy_of(
        load_recipe(
            RECIPE,
            {
                "trainable.vision": "frozen",
                "trainable.language": "lora",
                "trainable.lora.targets": ["q_proj"],
                "trainable.lora.rslora": True,
                "optim.language_lr": 4e-3,
            },
        )
    )
    assert [made.mode(component) for component in COMPONENTS] == ["frozen", "full", "lora"]
    assert made.lr_scale("projector") == 1.0
    assert made.lr_scale("language") == pytest.approx(4.0)
    assert made.lora.targets == ("q_proj",)
    assert made.lora.rslora
    assert made.seed == 3, "the run's seed"


def test_the_table_adds_up(tiny_folder, encoder):
    recipe = load_recipe(
        RECIPE,
        {"trainable.vision": "frozen", "trainable.language": "lora", "trainable.lora.dora": True},
    )
    engine = make_engine(tiny_folder, encoder, policy=policy_of(recipe))
    rows = policy_rows(engine.components, policy_of(recipe))
    real = {
        component: [p for n, p in engine.vlm.model.named_parameters() if where(n) == component]
        for component in ("vision", "projector", "language")
    }
    for row in rows:
        mine = real[row["component"]]
        assert row["parameters"] == sum(p.numel() for p in mine)
        assert row["trained"] == sum(p.numel() for p in mine if p.requires_grad)
    text = policy_table(rows)
    assert text[1].split()[:2] == ["vision", "frozen"]
    assert "lora r=16 alpha=32 dora" in text[3]
    assert text[-1].split()[:3] == [
        "all",
        f"{sum(row['parameters'] for row in rows):,}",
        f"{sum(row['trained'] for row in rows):,}",
    ]


def where(name):
    """By the tiny model's own prefixes."""
    if name.startswith("model.visual.merger."):
        return "projector"
    return "vision" if name.startswith("model.visual.") else "language"


def test_groups_have_their_rate_and_decay(tiny_folder, encoder):
    recipe = load_recipe(RECIPE, {"optim.vision_lr": 5e-4, "optim.projector_lr": 2e-3})
    engine = make_engine(tiny_folder, encoder, policy=policy_of(recipe))
    engine.zero_gradients()
    engine.step(1e-3)
    names = {id(p): name for name, p in engine.parameters()}
    rates = {"vision": 5e-4, "projector": 2e-3, "language": 1e-3}
    seen = set()
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            component = where(names[id(parameter)])
            assert group["lr"] == pytest.approx(rates[component])
            assert bool(group["weight_decay"]) == (parameter.ndim >= 2)
            seen.add(id(parameter))
    assert seen == names.keys()


LANGUAGE = policy("frozen", "full", "lora")


def trained_folder(folder, tiny_folder, encoder, chosen):
    """Adapters that have learnt something, and a projector that has, as an engine writes them."""
    engine = make_engine(tiny_folder, encoder, policy=chosen)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in engine.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    engine.export_adapter(folder, base=str(tiny_folder))
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, tiny_folder, encoder):
    """Rank 4 beside every linear layer of the language model; the projector in full."""
    return trained_folder(tmp_path_factory.mktemp("adapter"), tiny_folder, encoder, LANGUAGE)


def logits(model, folder, sample):
    arguments = StockProcessor(folder)(sample).arguments()
    with torch.no_grad():
        return model.eval()(**arguments).logits


@pytest.mark.cases(slow="True")
@pytest.mark.parametrize("dora", [False, True])
def test_the_engine_begins_as_pefts_model_of_the_folder(
    tmp_path, tiny_folder, encoder, mixed, dora
):
    chosen = policy("lora", "full", "lora", dora=dora)
    folder = trained_folder(tmp_path / "adapter", tiny_folder, encoder, chosen)
    theirs = logits(peft_model(tiny_folder, folder), tiny_folder, mixed[0])
    engine = make_engine(tiny_folder, encoder, policy=chosen)
    with engine.generation() as model:
        fresh = logits(model, tiny_folder, mixed[0])
    go_on_with(engine, open_adapter(folder, chosen, encoder), single_rank())
    with engine.generation() as model:
        ours = logits(model, tiny_folder, mixed[0])
    assert (fresh - theirs).norm() > 0.05 * theirs.norm(), "adapters that do nothing"
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    assert engine.description["goes on with"].endswith(str(folder))
    again = tmp_path / "again"
    engine.export_adapter(again, base=str(tiny_folder))
    mine, given = (load_file(at / WEIGHTS) for at in (again, folder))
    assert mine.keys() == given.keys() and len(mine) > 20
    assert all(torch.equal(mine[name], given[name]) for name in mine)


def changed(adapter, folder, change):
    """A copy whose tensors went through `change`."""
    shutil.copytree(adapter, folder)
    save_file(change(load_file(adapter / WEIGHTS)), folder / WEIGHTS)
    return folder


def test_a_folder_without_the_projector_leaves_the_models_own(
    tmp_path, tiny_folder, encoder, adapter
):
    lean = changed(
        adapter, tmp_path / "lean", lambda held: {n: v for n, v in held.items() if ".lora_" in n}
    )
    engine = make_engine(tiny_folder, encoder, policy=LANGUAGE)
    before = {name: value.detach().clone() for name, value in engine.parameters()}
    go_on_with(engine, open_adapter(lean, LANGUAGE, encoder), single_rank())
    after = dict(engine.parameters())
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {name for name in before if ".lora_" not in name} and kept


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (policy("frozen", "full", "lora", rank=8), "expected adapters of that model and rank"),
        (
            policy("frozen", "full", "lora", targets=("q_proj", "v_proj")),
            r"layers of the folder alone \(.*The folder's are named down_proj, gate_proj, k_proj, "
            r"o_proj, q_proj, up_proj, v_proj \(trainable\.lora\.targets\)",
        ),
        (policy("lora", "full", "lora"), r"layers of the recipe alone \(.*visual"),
        (policy("frozen", "frozen", "lora"), "trainable.projector is frozen. Use full there"),
    ],
    ids=["rank", "fewer", "more", "projector"],
)
def test_other_adapters_than_the_recipe_trains_are_named(encoder, adapter, chosen, said):
    with pytest.raises(ModelError, match=rf"model\.adapter: (?s:.*){said}"):
        open_adapter(adapter, chosen, encoder)


def without_tensors(folder):
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"a pickle")


def cut_off(folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def without_config(folder):
    (folder / "adapter_config.json").unlink()


def of_a_run(folder):
    shutil.move(folder, folder.with_name("moved"))
    folder.mkdir()
    shutil.move(folder.with_name("moved"), folder / "adapter")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_tensors, f"has no {WEIGHTS}, and adapter_model.bin is a pickle, which is never"),
        (cut_off, "is damaged or cut off"),
        (without_config, "has no adapter_config.json; expected adapters in peft's format"),
        (of_a_run, r"has no adapter_config\.json.*\(a run's are in .*adapter\)"),
        (shutil.rmtree, "is not a folder; expected adapters in peft's format"),
    ],
)
def test_folders_that_are_none_are_named(tmp_path, encoder, adapter, damage, said):
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    damage(folder)
    with pytest.raises(ModelError, match=rf"model\.adapter: .*{said}"):
        open_adapter(folder, LANGUAGE, encoder)


def test_tensors_that_end_early_are_told_where_they_are_read(
    tmp_path, tiny_folder, encoder, adapter
):
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    stored = open_adapter(folder, LANGUAGE, encoder)
    cut_off(folder)
    with pytest.raises(ModelError, match=r"model\.adapter: .* cannot be read: .* ends early"):
        go_on_with(make_engine(tiny_folder, encoder, policy=LANGUAGE), stored, single_rank())


def test_a_head_under_its_second_name_is_the_embedding(tmp_path, tiny_folder, encoder):
    """peft's folder has both names of a tied weight where the language model is trained in full."""
    chosen = policy("lora", "full", "full")
    folder = trained_folder(tmp_path / "adapter", tiny_folder, encoder, chosen)
    config = json.loads((tiny_folder / "config.json").read_text())
    names = load_file(folder / WEIGHTS).keys()
    assert any("lm_head" in name for name in names) and any("embed_tokens" in n for n in names)
    stored = open_adapter(folder, chosen, encoder)
    engine = make_engine(tiny_folder, encoder, policy=chosen)
    go_on_with(engine, stored, single_rank())
    given = load_file(folder / WEIGHTS)
    held = dict(engine.parameters())
    name = next(name for name in held if name.endswith("embed_tokens.weight"))
    assert torch.equal(held[name], given[f"base_model.model.{name}"])
    assert config.get("tie_word_embeddings") or "lm_head.weight" in held


ENCODER: Any = SimpleNamespace(
    family=SimpleNamespace(
        modules=SimpleNamespace(image_blocks=False), largest_head=0, model_types=()
    )
)


def settled(device: str = "cpu", context: int = 1, **model: Any) -> Any:
    section = ModelSection(path="a", **model)
    split = ParallelismSection(context=context)
    return resolved_compute(section, split, ENCODER, torch.device(device))


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [
        ("cpu", "auto", torch.float32),
        ("cuda", "auto", torch.bfloat16),
        ("cpu", "bfloat16", torch.bfloat16),
        ("cuda", "float32", torch.float32),
    ],
)
def test_dtype(device: str, asked: str, expected: torch.dtype) -> None:
    assert settled(device, dtype=asked, attention="segments").dtype is expected


def test_attention_is_described_with_its_reason() -> None:
    assert settled(attention="segments").described() == {
        "compute dtype": "float32",
        "attention": "segments (as the recipe asks)",
    }
    chosen = settled("cuda", context=2, backend="mcore").described()
    assert chosen["attention"] == "segments (with context parallelism; or transformer_engine)"


def test_what_knows_no_context_parallelism_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr("vlmpack.attention.varlen.why_unavailable", lambda *_, **__: None)
    with pytest.raises(CapabilityError, match=r"flash_attn knows no context parallelism.*is 2"):
        settled("cuda", context=2, backend="mcore", attention="flash_attn")


def test_transformer_engine_is_refused_without_a_gpu() -> None:
    with pytest.raises(CapabilityError, match="transformer_engine needs a CUDA device"):
        settled(backend="mcore", attention="transformer_engine")
