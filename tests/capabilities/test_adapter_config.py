"""What is read out of adapter_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from vlmpack.capabilities.adapter_config import AdapterConfig
from vlmpack.errors import ModelError


def written(folder: Path, **settings: Any) -> AdapterConfig:
    """What peft itself writes of such settings."""
    LoraConfig(**settings).save_pretrained(str(folder))
    return AdapterConfig.read(folder)


def test_settings_are_those_of_a_recipe(tmp_path: Path) -> None:
    plain = written(tmp_path / "plain", r=8, lora_alpha=4, target_modules=["q_proj"])
    assert dict(plain.settings()) == {"rank": 8, "alpha": 4, "dora": False, "rslora": False}
    assert (plain.refusal, plain.unknown_here) == (None, None)
    other = written(tmp_path / "other", use_dora=True, use_rslora=True, target_modules=["q_proj"])
    assert dict(other.settings()) == {"rank": 8, "alpha": 8, "dora": True, "rslora": True}


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"lora_bias": True}, "biases beside B"),
        ({"trainable_token_indices": [3]}, "rows of embeddings"),
        (
            {"target_parameters": ["experts.down_proj"], "rank_pattern": {"q_proj": 3}},
            "ranks or scales that differ by layer beside adapters of parameters",
        ),
    ],
)
def test_what_a_recipe_cannot_say_is_named(
    tmp_path: Path, settings: dict[str, Any], what: str
) -> None:
    found = written(tmp_path / "adapter", target_modules=["q_proj"], **settings)
    assert found.refusal is None, "peft merges them"
    assert found.unknown_here is not None and found.unknown_here.startswith(what)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"alora_invocation_tokens": [3]}, "no weight can hold its adapters: some tokens switch"),
        ({"use_qalora": True}, "no weight can hold its adapters: they are those of quantised"),
        ({"lora_alpha": float("nan")}, "its lora_alpha is nan; expected a finite number"),
        ({"lora_alpha": 10**400}, "its lora_alpha is 100000000; expected a finite number"),
        ({"alpha_pattern": {"q": -1e39}}, "its alpha_pattern of q is -1e+39; expected a finite"),
    ],
)
def test_what_cannot_be_merged_is_no_advice_to_merge(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    settings |= {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    found = written(tmp_path / "adapter", **settings)
    assert str(found.refusal).startswith(said)


def test_the_first_pattern_that_a_name_ends_in_is_its_alpha(tmp_path: Path) -> None:
    pattern = {r"layers\.[01]\.self_attn\.q_proj": 3, "q_proj": 5}
    found = written(tmp_path, r=8, lora_alpha=4, target_modules=["q_proj"], alpha_pattern=pattern)
    names = ("model.layers.1.self_attn.q_proj", "model.layers.2.self_attn.q_proj", "sq_proj")
    assert [found.alpha_of(name) for name in names] == [3, 5, 4]
    broken = written(tmp_path / "broken", target_modules=["q_proj"], alpha_pattern={"((": 3})
    with pytest.raises(ModelError, match="its alpha_pattern cannot be read: missing"):
        broken.alpha_of(names[0])


def test_a_start_that_changed_the_base_is_refused(tmp_path: Path) -> None:
    found = written(tmp_path / "adapter", target_modules=["q_proj"], init_lora_weights="olora")
    assert "started as 'olora', which changes the weights" in str(found.refusal)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_files_that_say_nothing_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"adapter_config\.json (is not valid|holds no) JSON"):
        AdapterConfig.read(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    assert AdapterConfig.read(tmp_path).refusal is None
