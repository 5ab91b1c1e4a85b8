"""Which rows a captured decoder can replay, and what is refused with which knob."""

from __future__ import annotations

import json
import re

import pytest

from vlmpack.build.data import evaluation_mode, packing_mode
from vlmpack.capabilities.limits import FEATURES
from vlmpack.capabilities.served import SERVED, generic_line
from vlmpack.capabilities.table import row_of
from vlmpack.recipe import identity, load_recipe
from vlmpack.recipe.capability_rules import family_has_the_features

GRAPHS = ["training.cuda_graphs=decoder"]
ONLINE = ["packing.mode=online", "training.micro_batch_size=1"]
LORA = ["trainable.language=lora"]
MCORE = ["model.backend=mcore"]


def _about_graphs(problems: list[str]) -> list[str]:
    return [each for each in problems if "cuda_graph" in each]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["packing.mode=none"], "the rows of packing.mode 'none' share no width"),
        (["packing.mode=in_batch"], "the rows of packing.mode 'in_batch' share no width"),
        ([*ONLINE, "model.attention=segments"], "a loop over each row's own lengths"),
        (
            [*ONLINE, *MCORE, "model.attention=transformer_engine"],
            "the layers of model.attention: transformer_engine were never captured",
        ),
        ([*ONLINE, *MCORE, "parallelism.pipeline=2"], "pipeline: 2 has several rows under way"),
        ([*ONLINE, "parallelism.sharding=fsdp"], "gathers the weights of each layer"),
        ([*ONLINE, "packing.share_prefix=true"], "packing.share_prefix: true"),
        (
            [*ONLINE, "packing.scope=batch", "objective.name=dpo"],
            "'dpo' have no fixed shape yet",
        ),
        ([*ONLINE, *LORA, "trainable.lora.dropout=0.1"], "dropout 0.1 draws random numbers"),
        ([*ONLINE, *LORA, "trainable.lora.quantize=nf4"], "quantize 'nf4' was never captured"),
        ([*ONLINE, "model.router_aux_loss_coef=0.1"], "needs the routers' logits"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(overrides, words, problems_of):
    found = _about_graphs(problems_of([*GRAPHS, *overrides]))
    assert len(found) == 1 and re.search(words, found[0])
    assert re.search(r"(or|use) training\.cuda_graphs: none$", found[0])
    assert _about_graphs(problems_of(overrides)) == []


def test_planned_rows_are_captured(problems_of):
    assert problems_of([*GRAPHS, *ONLINE]) == []
    assert problems_of([*GRAPHS, *ONLINE, *LORA, "model.attention=torch_varlen"]) == []
    assert problems_of([*GRAPHS, *ONLINE, *LORA, *MCORE]) == []
    assert _about_graphs(problems_of([*GRAPHS, *ONLINE, *MCORE, "parallelism.tensor=2"])) == []
    offline = ["packing.mode=offline", "packing.path=p", "training.micro_batch_size=1"]
    assert problems_of([*GRAPHS, *offline]) == []


def test_a_bound_without_graphs_is_refused(problems_of):
    bound = "training.cuda_graph_max_sequences=16"
    assert problems_of([*GRAPHS, *ONLINE, bound]) == []
    (found,) = problems_of([*ONLINE, bound])
    assert "16, but training.cuda_graphs is none" in found


def _about_the_family(minimal, model_type, *overrides):
    recipe = load_recipe(minimal, [*GRAPHS, *ONLINE, *overrides])
    line = SERVED.get(model_type) or generic_line(model_type)
    sections = {name: getattr(recipe, name) for name in type(recipe).model_fields}
    return family_has_the_features(recipe.model, line, sections)


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4", "gemma4_text", "never_heard_of"])
def test_families_that_need_the_loop_are_refused(model_type, minimal):
    (found,) = _about_the_family(minimal, model_type)
    assert found.path == ("training", "cuda_graphs")


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen3_5_moe", "qwen3_vl"])
def test_experts_are_captured_on_both_engines(minimal, model_type):
    assert _about_the_family(minimal, model_type) == []
    assert _about_the_family(minimal, model_type, *MCORE) == []


def test_a_captured_row_shares_out_its_heads(problems_of, tmp_path):
    """Under context parallelism: queries evenly, and the keys that these need."""

    def about(heads, groups, *split):
        config = {"num_attention_heads": heads, "num_key_value_heads": groups}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        split = [f"parallelism.{each}" for each in split]
        asked = [*GRAPHS, *ONLINE, *MCORE, f"model.path={tmp_path}", *split]
        return _about_graphs(problems_of(asked))

    assert about(8, 2, "context=2") == about(8, 2, "context=4") == []
    assert about(8, 4, "tensor=2", "context=4") == []
    (found,) = about(8, 2, "context=16")
    assert (
        "context: 16 with tensor: 1 cannot share out in a graph the num_attention_heads 8" in found
    )
    (found,) = about(12, 4, "context=3")
    assert "num_key_value_heads 4 of" in found and found.endswith("training.cuda_graphs: none")


def test_the_table_says_where_graphs_are():
    assert "CUDA graphs" in FEATURES
    versions = {"transformers": "5.23.0", "megatron-core": "0.16.1", "peft": "0.18.0"}
    cells = {name: row_of(name, versions).cells for name in ("qwen2_5_vl", "qwen3_5", "gemma3")}
    assert cells["qwen2_5_vl"]["hf"]["CUDA graphs"] is None
    assert cells["qwen3_5"]["hf"]["CUDA graphs"] is None
    assert cells["gemma3"]["hf"]["CUDA graphs"] is not None
    assert cells["qwen2_5_vl"]["mcore"]["CUDA graphs"] is None
    experts = row_of("qwen3_vl_moe", versions).cells
    assert experts["hf"]["CUDA graphs"] is None
    assert experts["mcore"]["CUDA graphs"] is None


def test_graphs_are_no_part_of_a_run(minimal):
    graphs = [*GRAPHS, "training.cuda_graph_max_sequences=16"]
    with_graphs, without = (load_recipe(minimal, [*ONLINE, *more]) for more in (graphs, []))
    assert identity(with_graphs) == identity(without)
    assert packing_mode(with_graphs).budget == packing_mode(without).budget


def test_rows_of_a_graph_are_full_without_other_knobs(minimal):
    bound = "training.cuda_graph_max_sequences=16"
    recipe = load_recipe(minimal, [*ONLINE, *GRAPHS, bound, "packing.max_tokens=8192"])
    shape = packing_mode(recipe).fixed_shape()
    assert shape is not None and shape.overflows
    assert (shape.row_tokens, shape.max_sequences) == (8192, 16)
    assert evaluation_mode(recipe).fixed_shape() is None
