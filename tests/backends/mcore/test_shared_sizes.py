"""The sizes that `vlmpack recipe check` passes by config.json are those that the engine takes."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from support.published_hybrids import NEMOTRON_3_5_LIGHTNING, NEMOTRON_3_NANO
from support.tiny_nemotron_h import nemotron_h
from support.tiny_qwen3_5 import qwen3_5, qwen3_5_moe

from vlmpack.backends.mcore.weights import megatron_family
from vlmpack.backends.mcore.weights.language import language_dims
from vlmpack.errors import CapabilityError
from vlmpack.model_folder.load import load_config
from vlmpack.recipe.engine_rules import (
    experts_are_there,
    layers_split_over_processes,
    read_model_config,
)
from vlmpack.recipe.schema import ModelSection, ParallelismSection

SPLITS = [
    {"tensor": tensor, "context": context, "pipeline": stages, "expert": expert, "sequence": seq}
    for tensor, context, stages, expert, seq in product(
        (1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 16), (1, 2, 3, 5), (1, 2, 3, 4), (False, True)
    )
]


def nemotron(kinds: str = "M-*EM", **changes: Any) -> dict[str, Any]:
    """A config.json of published form; the tiny model's sizes."""
    content = nemotron_h().to_dict() | {"architectures": ["NemotronHForCausalLM"]}
    del content["layers_block_type"]
    heads = {"num_attention_heads": 24, "num_key_value_heads": 24, "intermediate_size": 96}
    return content | heads | {"hybrid_override_pattern": kinds} | changes


CASES: dict[str, Any] = {
    "tiny": lambda: nemotron_h().to_dict(),
    "by letters": nemotron,
    "six groups": lambda: nemotron(mamba_num_heads=48, n_groups=6),
    "six groups, by their older name": lambda: nemotron(mamba_num_heads=48, mamba_n_groups=6),
    "no experts": lambda: nemotron("M-*M"),
    "no MLP": lambda: nemotron("ME*M", intermediate_size=97),
    "no Mamba-2": lambda: nemotron("-*-*", n_groups=1, num_key_value_heads=12),
    "an odd shared expert": lambda: nemotron(n_groups=8, moe_shared_expert_intermediate_size=50),
    "a wrong number of layers": lambda: nemotron("M-*M", num_hidden_layers=7),
    "Nemotron 3 Nano": lambda: NEMOTRON_3_NANO,
    "Nemotron 3.5 Lightning": lambda: NEMOTRON_3_5_LIGHTNING,
    "Qwen3.5": lambda: qwen3_5().to_dict(),
    "Qwen3.5-MoE": lambda: qwen3_5_moe().to_dict(),
}


@pytest.mark.cases(quick=("tiny", "no experts", "Nemotron 3 Nano"), slow="Qwen3.5-MoE")
@pytest.mark.parametrize("case", CASES)
def test_the_rules_and_the_engine_allow_the_same_sizes(case: str, tmp_path) -> None:
    content = CASES[case]()
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    model = ModelSection(path=str(tmp_path), backend="mcore")
    read = read_model_config(model)
    assert read is not None
    dims = language_dims(load_config(tmp_path), megatron_family(content["model_type"]))
    refused: dict[str, int] = {"": 0}
    for sizes in SPLITS:
        split = ParallelismSection(**sizes)
        problems = layers_split_over_processes(read, model, split)
        problems += experts_are_there(read, model, split)
        try:
            dims.check(split)
        except CapabilityError as error:
            assert problems, f"{sizes}: the rules pass what the engine refuses: {error}"
            for problem in problems:
                refused[problem.path[-1]] = refused.get(problem.path[-1], 0) + 1
        else:
            assert not problems, f"{sizes}: the engine takes what the rules refuse: {problems}"
            refused[""] += 1
    assert all(refused.values()) and refused[""] < len(SPLITS)
    expected = {"tensor", "expert"} | ({"sequence"} if dims.experts is not None else set())
    assert expected <= refused.keys(), refused
    assert ("context" in refused) == bool(dims.state_kinds), refused
