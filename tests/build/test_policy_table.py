"""The recipe's policy, and the table that a run prints."""

from __future__ import annotations

import pytest
from support.engines import make_engine
from support.recipes import MINIMAL

from vlmpack.build.engine import policy_of, policy_rows, policy_table
from vlmpack.recipe import load_recipe
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
