"""Rules that read the model's config.json: what does not divide."""

from __future__ import annotations

import json

import pytest

SIZES = {
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "intermediate_size": 96,
}


@pytest.fixture
def model(tmp_path):
    """Write a config.json; the overrides that choose its folder and the mcore engine."""

    def write(config: object) -> dict:
        (tmp_path / "config.json").write_text(
            config if isinstance(config, str) else json.dumps(config), encoding="utf-8"
        )
        return {"model.path": str(tmp_path), "model.backend": "mcore"}

    return write


@pytest.mark.parametrize("section", [None, "text_config", "llm_config", "language_config"])
def test_heads_divide_over_tensor_parallel_processes(problems_of, model, section):
    chosen = model(SIZES if section is None else {section: SIZES, "num_attention_heads": 3})
    assert problems_of(chosen | {"parallelism.tensor": 4}) == []
    (problem,) = problems_of(chosen | {"parallelism.tensor": 8})
    assert "parallelism.tensor: 8 does not divide num_attention_heads 28 and" in problem
    assert "num_key_value_heads 4 of " in problem
    assert "config.json; sizes that do: 1, 2, 4" in problem


def test_intermediate_size_divides_too(problems_of, model):
    chosen = model(SIZES | {"intermediate_size": 90})
    (problem,) = problems_of(chosen | {"parallelism.tensor": 4})
    assert "parallelism.tensor: 4 does not divide intermediate_size 90" in problem
    assert problems_of(chosen | {"parallelism.tensor": 2}) == []


def test_absent_key_value_heads_are_the_attention_heads(problems_of, model):
    chosen = model({"num_attention_heads": 6, "num_key_value_heads": None})
    (problem,) = problems_of(chosen | {"parallelism.tensor": 4})
    assert "num_attention_heads 6 and num_key_value_heads 6" in problem
    assert problems_of(chosen | {"parallelism.tensor": 3}) == []


@pytest.mark.parametrize("stages", [4, 7, 12])
def test_layers_divide_over_stages(problems_of, model, stages):
    chosen = model(SIZES)
    (problem,) = problems_of(chosen | {"parallelism.pipeline": stages})
    assert f"parallelism.pipeline: {stages} does not divide num_hidden_layers 6 of" in problem
    assert "sizes that do: 1, 2, 3, 6" in problem
    assert problems_of(chosen | {"parallelism.pipeline": 3}) == []


def test_the_vocabulary_need_not_divide(problems_of, model):
    chosen = model(SIZES | {"vocab_size": 577})
    assert problems_of(chosen | {"parallelism.tensor": 4, "parallelism.pipeline": 2}) == []


def test_a_relative_folder_starts_at_the_base_directory(problems_of, model, tmp_path):
    chosen = model(SIZES) | {"model.path": tmp_path.name, "parallelism.tensor": 8}
    assert problems_of(chosen) == []
    (problem,) = problems_of(chosen, base_dir=tmp_path.parent)
    assert f"of {tmp_path.name}/config.json" in problem


@pytest.mark.parametrize("config", ["", "{", "[]", "3", "{}", '{"text_config": 5}', "\x00"])
def test_an_unreadable_folder_is_left_to_whoever_loads_it(problems_of, model, config):
    assert problems_of(model(config) | {"parallelism.tensor": 8}) == []


def test_a_missing_folder_is_left_to_whoever_loads_it(problems_of, tmp_path):
    chosen = {"model.path": str(tmp_path / "none"), "model.backend": "mcore"}
    assert problems_of(chosen | {"parallelism.tensor": 8, "parallelism.pipeline": 5}) == []


def test_experts_need_a_mixture_of_experts(problems_of, model):
    asked = {"parallelism.expert": 2, "model.router_aux_loss_coef": 0.01}
    split, loss = problems_of(model(SIZES) | asked)
    assert "parallelism.expert: 2, but " in split
    assert "model.router_aux_loss_coef: 0.01, but " in loss
    for problem in (split, loss):
        assert "has no experts" in problem
        assert "num_experts, num_local_experts, n_routed_experts" in problem
    assert problems_of(model(SIZES) | {"parallelism.expert": 1}) == []
    assert problems_of(model(SIZES | {"num_experts": 8}) | asked) == []
    asked = {"model.backend": "hf", "model.router_aux_loss_coef": 0.01}
    assert problems_of(model(SIZES) | asked) == [loss]
    assert problems_of(model(SIZES | {"num_experts": 8}) | asked) == []


def test_experts_split_evenly(problems_of, model):
    (problem,) = problems_of(
        model({"text_config": {"num_local_experts": 8}}) | {"parallelism.expert": 3}
    )
    assert "parallelism.expert: 3 does not divide num_experts 8 of " in problem
    assert "sizes that do: 1, 2, 4, 8" in problem


def test_experts_over_tensor_parallel_processes_need_sequence_parallelism(problems_of, model):
    chosen = model(SIZES | {"num_experts": 8}) | {"parallelism.tensor": 2}
    (problem,) = problems_of(chosen)
    assert "parallelism.sequence: false, but " in problem
    assert "has experts and parallelism.tensor is 2; use true, or tensor: 1" in problem
    assert problems_of(chosen | {"parallelism.sequence": True}) == []


def test_hf_reads_no_sizes(problems_of, model):
    chosen = model(SIZES)
    sizes = {"parallelism.tensor": 3, "parallelism.pipeline": 4}
    assert len(problems_of(chosen | sizes)) == 2
    problems = problems_of(chosen | sizes | {"model.backend": "hf"})
    assert len(problems) == 2
    assert all("needs model.backend: mcore" in problem for problem in problems)


def test_all_problems_of_a_model_come_together(problems_of, model):
    chosen = model({"model_type": "qwen3_next"} | SIZES)
    sizes = {"parallelism.tensor": 3, "parallelism.pipeline": 4, "parallelism.expert": 2}
    assert len(problems_of(chosen | sizes)) == 4


def test_heads_of_layers_that_carry_state_are_shared_out_twice(problems_of, model):
    """Over tensor and then over context parallelism."""
    chosen = model(SIZES | {"linear_num_key_heads": 4})
    assert problems_of(chosen | {"parallelism.tensor": 2, "parallelism.context": 2}) == []
    (problem,) = problems_of(chosen | {"parallelism.tensor": 2, "parallelism.context": 4})
    assert "parallelism.context: 4 processes share the heads of layers" in problem
    assert "linear_num_key_heads 4 of " in problem
    assert "not divided by parallelism.tensor 2 x context 4" in problem
    assert problem.endswith(". Sizes that do, with this tensor: 1, 2")
    chosen = model(SIZES | {"linear_num_key_heads": 2})
    (problem,) = problems_of(chosen | {"parallelism.tensor": 4})
    assert "parallelism.tensor: 4 does not divide linear_num_key_heads 2 of" in problem


def test_groups_of_mamba_2_are_shared_out_over_tensor_and_then_context_parallelism(
    problems_of, model
):
    """Where a process has fewer groups than context parallelism has processes, parts of them."""
    sizes = {"num_attention_heads": 24, "num_key_value_heads": 24, "num_hidden_layers": 6}
    chosen = model(sizes | {"mamba_num_heads": 48, "n_groups": 6})
    chosen |= {"training.seq_length": 576}
    for tensor, context in [(1, 1), (1, 3), (2, 3), (3, 4), (6, 8), (2, 6)]:
        split = {"parallelism.tensor": tensor, "parallelism.context": context}
        assert problems_of(chosen | split) == [], (tensor, context)
    (problem,) = problems_of(chosen | {"parallelism.context": 4})
    assert "parallelism.context: 4 processes share the heads of layers" in problem
    assert "mamba_num_heads 48 in n_groups 6 of" in problem
    (problem,) = problems_of(chosen | {"parallelism.tensor": 6, "parallelism.context": 16})
    assert "not divided by parallelism.tensor 6 x context 16" in problem
    (problem,) = problems_of(chosen | {"parallelism.tensor": 4})
    assert "parallelism.tensor: 4 does not divide n_groups 6 of" in problem
