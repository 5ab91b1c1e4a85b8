"""What a recipe says of adapters that training goes on with, against their adapter_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.recipes import MINIMAL, changed

from vlmpack.errors import RecipeError
from vlmpack.recipe import load_recipe
from vlmpack.recipe.identity import identity, identity_differences

DEFAULTS = {"rank": 16, "alpha": 32.0, "dora": False, "rslora": False}
OURS = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "bias": "none"}


def problems(tmp_path: Path, said: dict[str, Any], **changes: Any) -> str:
    """What is wrong with a recipe that goes on with adapters whose config says that; empty where
    nothing is."""
    folder = tmp_path / "adapter"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**OURS, **said}))
    wanted = {"trainable__language": "lora", **changes}
    settings = changed(MINIMAL, model__adapter=str(folder), **wanted)
    try:
        load_recipe(settings)
    except RecipeError as error:
        return str(error)
    return ""


def test_adapters_that_the_recipe_describes_have_no_problem(tmp_path: Path) -> None:
    assert problems(tmp_path, {}) == ""
    said = {"r": 8, "lora_alpha": 4.5, "use_dora": True, "use_rslora": True}
    lora = {"rank": 8, "alpha": 4.5, "dora": True, "rslora": True}
    assert problems(tmp_path, said, trainable__lora=lora) == ""


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"r": 8}, "trainable.lora.rank: 16, but model.adapter {at} has 8; use 8 to go on with it"),
        ({"lora_alpha": 16}, "trainable.lora.alpha: 32.0, but model.adapter {at} has 16"),
        ({"use_dora": True}, "lora.dora: False, but model.adapter {at} has True; use true to go"),
        ({"use_rslora": True}, "trainable.lora.rslora: False, but model.adapter {at} has True"),
        ({"peft_type": "IA3"}, "model.adapter: {at}: its peft_type is 'IA3'; expected LORA"),
        ({"bias": "all"}, "{at}: it has trained biases (bias: 'all'); expected none"),
        ({"lora_bias": True}, "model.adapter: {at}: it has biases beside B"),
        ({"alora_invocation_tokens": [3]}, "no weight can hold its adapters: some tokens switch"),
        ({"lora_alpha": float("nan")}, "its lora_alpha is nan; expected a finite number"),
        ({"init_lora_weights": "pissa_niter_4"}, "its adapters started as 'pissa_niter_4', which"),
    ],
)  # fmt: skip
def test_what_differs_is_told_with_the_knob(
    tmp_path: Path, said: dict[str, Any], message: str
) -> None:
    found = problems(tmp_path, said, trainable__lora=DEFAULTS)
    assert message.format(at=tmp_path / "adapter") in found


def test_what_the_recipe_leaves_out_is_the_folders(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({**OURS, "r": 8, "lora_alpha": 4.5, "use_dora": True})
    )
    settings = changed(MINIMAL, model__adapter=str(tmp_path), trainable__language="lora")
    lora = load_recipe(settings).trainable.lora
    assert (lora.rank, lora.alpha, lora.dora, lora.targets) == (8, 4.5, True, "adapter")
    lora = load_recipe(settings, ["trainable.lora.targets=[q_proj]"]).trainable.lora
    assert (lora.rank, lora.alpha, lora.targets) == (8, 4.5, ("q_proj",))
    again = load_recipe(load_recipe(settings), ["training.seed=3"])
    assert again.trainable.lora.rank == 8
    with pytest.raises(RecipeError, match=r"lora\.targets: 'adapter' is the layers of model\.adap"):
        load_recipe(changed(settings, model__adapter=None, trainable__lora={"targets": "adapter"}))


def test_adapters_whose_start_is_subtracted_have_twice_the_rank(tmp_path: Path) -> None:
    said = {**OURS, "init_lora_weights": "pissa"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    (tmp_path / "pissa_init").mkdir()
    (tmp_path / "pissa_init/adapter_config.json").write_text(json.dumps(OURS))
    settings = changed(MINIMAL, model__adapter=str(tmp_path), trainable__language="lora")
    lora = load_recipe(settings).trainable.lora
    assert (lora.rank, lora.alpha) == (32, 64)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**said, "use_rslora": True}))
    lora = load_recipe(settings).trainable.lora
    assert (lora.rank, lora.scaling_of("q_proj")) == (32, pytest.approx(32 / 16**0.5))


def test_adapters_without_a_component_or_with_a_reference_without_them(tmp_path: Path) -> None:
    found = problems(tmp_path, {}, trainable__language="full")
    assert "but no component has mode lora. Set trainable.language: lora" in found
    found = problems(tmp_path, {"peft_type": "IA3"}, trainable__language="full")
    assert "its peft_type is 'IA3'" in found and "vlmpack merge" not in found
    found = problems(
        tmp_path,
        {},
        trainable__vision="frozen",
        trainable__projector="frozen",
        objective={"name": "dpo", "reference": "adapters_off"},
    )
    assert "objective.reference: 'adapters_off', but the run begins with the adapters of" in found


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no adapter_config.json"), ("{", "is not valid JSON"), ("[]", "no JSON object")],
)
@pytest.mark.parametrize("lora", [{}, {"targets": ["q_proj"]}])
def test_a_folder_that_cannot_be_read_is_a_problem(
    tmp_path: Path, content: str | None, message: str, lora: dict[str, Any]
) -> None:
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)
    settings = changed(MINIMAL, model__adapter=str(tmp_path), trainable__language="lora")
    with pytest.raises(RecipeError, match=rf"1 problem.*\n.*model\.adapter: .*{message}"):
        load_recipe(changed(settings, trainable__lora=lora))


def test_a_folder_that_is_not_there_is_left_to_the_launch(tmp_path: Path) -> None:
    settings = changed(MINIMAL, model__adapter=str(tmp_path / "none"), trainable__language="lora")
    assert load_recipe(settings).model.adapter == str(tmp_path / "none")
    assert load_recipe(settings).trainable.lora.targets == "adapter"
    with pytest.raises(RecipeError, match="none, but no component has mode lora"):
        load_recipe(changed(settings, trainable__language="full"))
    with pytest.raises(RecipeError, match=r"model\.adapter: 's3://' addresses are for shards"):
        load_recipe(changed(settings, model__adapter="s3://adapters/one"))


def test_a_relative_folder_starts_where_the_recipe_is_checked(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({**OURS, "r": 8}))
    settings = changed(
        MINIMAL, model__adapter="adapter", trainable__language="lora", trainable__lora=DEFAULTS
    )
    with pytest.raises(RecipeError, match="has 8"):
        load_recipe(settings, base_dir=tmp_path)


def test_adapters_are_of_a_runs_identity() -> None:
    lora = {"targets": "all-linear"}
    plain = changed(MINIMAL, trainable__language="lora", trainable__lora=lora)
    ours, others = (
        identity(load_recipe(changed(plain, model__adapter=at))) for at in ("one", "two")
    )
    without = identity(load_recipe(plain))
    assert "model.adapter" not in without, "older run folders have none"
    for old, new in ((ours, others), (without, ours), (ours, without)):
        (line,) = identity_differences(old, new)
        assert line.startswith("model.adapter: ")
    assert identity_differences(ours, ours) == []
