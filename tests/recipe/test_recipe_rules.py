"""Every rule refuses what it must, says how to correct it, and accepts the corrected twin."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module, metadata, util
from inspect import signature
from pathlib import Path

import pytest

from vlmpack.capabilities import versions
from vlmpack.errors import RecipeError
from vlmpack.recipe import (
    check_world,
    engine_rules,
    load_recipe,
    rules,
    run_rules,
)
from vlmpack.recipe.derived import smallest_world
from vlmpack.recipe.engine_rules import ModelConfig, mcore_version, read_model_config
from vlmpack.recipe.head_degrees import HeadDegrees
from vlmpack.recipe.load import SECTIONS
from vlmpack.recipe.rules import RULES
from vlmpack.recipe.schema import (
    ModelSection,
    PackingSection,
    ParallelismSection,
    TrainingSection,
)

MCORE = {"model.backend": "mcore"}
CP2 = MCORE | {"parallelism.context": 2}
SP2 = MCORE | {"parallelism.tensor": 2, "parallelism.sequence": True}

ONLINE = {
    "packing.mode": "online",
    "training.micro_batch_size": 1,
    "training.seq_length": 1020,
}
OFFLINE = ONLINE | {"packing.mode": "offline", "packing.path": "packs"}

TWO = [{"path": "a.tar", "weight": 1.0}, {"path": "b.tar", "weight": 3.0}]

# rule, overrides that break it, key and words of the message, overrides that keep it
LORA = {"trainable.language": "lora"}

CASES = [
    (
        "something_is_trained",
        {f"trainable.{name}": "frozen" for name in ("vision", "projector", "language")},
        "trainable: vision, projector and language are all frozen; set at least one",
        {"trainable.vision": "frozen", "trainable.language": "frozen"},
    ),
    (
        "lora_settings_are_used",
        {"trainable.lora.rank": 8},
        "trainable.lora.rank: 8, but no component has mode lora (vision: full, projector: full, "
        "language: full)",
        LORA | {"trainable.lora.rank": 8},
    ),
    (
        "targets_are_named",
        LORA | {"trainable.lora.targets": []},
        "trainable.lora.targets: an empty list",
        LORA | {"trainable.lora.targets": ["q_proj"]},
    ),
    (
        "targets_are_named",
        LORA | {"trainable.lora.targets": ["q_proj", "q_proj"]},
        "trainable.lora.targets: 'q_proj' is listed more than once",
        LORA | {"trainable.lora.targets": ["q_proj", "v_proj"]},
    ),
    (
        "adapters_of_experts_are_plain",
        LORA | {"trainable.lora.targets": ["q_proj", "experts"], "trainable.lora.dora": True},
        "trainable.lora.dora: true, which peft has no form of for experts; use false, or",
        LORA | {"trainable.lora.targets": ["q_proj"], "trainable.lora.dora": True},
    ),
    (
        "adapters_of_experts_are_plain",
        LORA | {"trainable.lora.expert_form": "matrices"},
        "trainable.lora.expert_form: 'matrices', but trainable.lora.targets has no experts",
        LORA | {"trainable.lora.expert_form": "matrices", "trainable.lora.targets": "experts"},
    ),
    (
        "adapters_of_experts_are_plain",
        LORA | {"trainable.lora.targets": "experts", "trainable.lora.dropout": 0.1},
        "trainable.lora.dropout: 0.1, which peft has no form of for experts; use 0, or",
        LORA | {"trainable.lora.targets": "experts"},
    ),
    (
        "adapters_fit_megatron",
        MCORE | LORA | {"trainable.lora.dropout": 0.1},
        "trainable.lora.dropout: 0.1, which each layout would draw otherwise",
        LORA | {"trainable.lora.dropout": 0.1},
    ),
    (
        "adapters_fit_megatron",
        MCORE | LORA | {"trainable.lora.quantize": "nf4"},
        "trainable.lora.quantize: 'nf4' needs model.backend: hf",
        MCORE | LORA,
    ),
    (
        "adapters_fit_megatron",
        MCORE | LORA | {"model.attention": "transformer_engine"},
        "model.attention: 'transformer_engine' has norms inside of its linear layers",
        MCORE | LORA,
    ),
    (
        "optimizers_are_whole",
        {"optim.name": "adamw_8bit", "parallelism.sharding": "fsdp"},
        "optim.name: 'adamw_8bit' cannot be sharded, but parallelism.sharding is fsdp; use adamw",
        {"optim.name": "adamw_8bit"},
    ),
    (
        "optimizers_are_whole",
        MCORE | {"optim.name": "paged_adamw"},
        "optim.name: 'paged_adamw' needs model.backend: hf; use adamw",
        MCORE,
    ),
    *(
        (
            "rounded_weights_are_whole",
            {"optim.master": "bfloat16_stochastic"} | broken,
            f"optim.master: 'bfloat16_stochastic' needs {needed}; or use float32",
            {"optim.master": "bfloat16_stochastic"},
        )
        for broken, needed in (
            ({"parallelism.sharding": "fsdp"}, "parallelism.sharding: none"),
            ({"optim.name": "adamw_8bit"}, "optim.name: adamw"),
            ({"model.dtype": "float32"}, "model.dtype: bfloat16"),
            (MCORE, "model.backend: hf"),
        )
    ),
    (
        "learning_rates_are_used",
        {"trainable.vision": "frozen", "optim.vision_lr": 1e-4},
        "optim.vision_lr: 0.0001, but trainable.vision is frozen",
        {"optim.vision_lr": 1e-4},
    ),
    ("one_length_of_run", {"training.max_steps": None}, "training: the length", {}),
    (
        "one_length_of_run",
        {"training.max_steps": 9, "training.num_epochs": 2},
        "training.num_epochs: 2, but max_steps is set too (9)",
        {"training.num_epochs": 2},
    ),
    (
        "shared_rows_need_samples",
        {"training.micro_batch_size": 1},
        "training.micro_batch_size: 1, but packing.mode 'in_batch'",
        {"training.micro_batch_size": 1, "packing.mode": "none"},
    ),
    (
        "planned_rows_are_micro_batches",
        ONLINE | {"training.micro_batch_size": 4},
        "training.micro_batch_size: 4, but packing.mode 'online' fills each row",
        ONLINE,
    ),
    (
        "rows_hold_a_sample",
        ONLINE | {"packing.max_tokens": 1023},
        "packing.max_tokens: 1023, but the longest sample takes 1024 tokens (training.seq_length "
        "1020, rounded up to packing.alignment 8)",
        ONLINE | {"packing.max_tokens": 1024},
    ),
    (
        "rows_hold_a_sample",
        ONLINE | {"packing.max_tokens": 1020},
        "1020, but the longest sample takes 1024 tokens",
        ONLINE | {"packing.max_tokens": 1020, "packing.alignment": 1},
    ),
    (
        "saved_rows_have_packs",
        OFFLINE | {"packing.path": None},
        "packing.path: missing, but packing.mode 'offline' trains on packs",
        OFFLINE,
    ),
    (
        "packs_need_offline",
        {"packing.path": "packs/x"},
        "packing.path: 'packs/x', but packing.mode 'in_batch' reads no saved packs; use",
        OFFLINE,
    ),
    (
        "row_fields_need_rows",
        {"packing.max_vision_patches": 100},
        "packing.max_vision_patches: 100, but packing.mode 'in_batch' plans no rows",
        ONLINE | {"packing.max_vision_patches": 100},
    ),
    (
        "row_fields_need_rows",
        {"packing.scope": "batch"},
        "packing.scope: batch, but packing.mode 'in_batch' plans no rows",
        ONLINE | {"packing.scope": "batch"},
    ),
    (
        "fixed_boundaries_need_fixed_rows",
        ONLINE | {"packing.pad_cu_seqlens": True},
        "packing.pad_cu_seqlens: true, but packing.pad_to_max_length is false",
        ONLINE | {"packing.pad_cu_seqlens": True, "packing.pad_to_max_length": True},
    ),
    (
        "fixed_rows_fit_the_layout",
        ONLINE | SP2 | {"packing.pad_to_max_length": True, "packing.max_tokens": 1025},
        "packing.pad_to_max_length: true, but rows of 1025 tokens (packing.max_tokens) are no "
        "multiple of 2, as parallelism needs; set packing.max_tokens: 1026",
        ONLINE | SP2 | {"packing.pad_to_max_length": True, "packing.max_tokens": 1026},
    ),
    (
        "pixel_bounds_leave_room",
        {"images.min_pixels": 900, "images.max_pixels": 800},
        "images.min_pixels: 900 is more than images.max_pixels 800; lower it, or raise max_pixels",
        {"images.min_pixels": 800, "images.max_pixels": 800},
    ),
    (
        "global_batch_is_whole",
        {"training.global_batch_size": 18},
        "training.global_batch_size: 18 is not a multiple of training.micro_batch_size 4; use 16",
        {"training.global_batch_size": 20},
    ),
    (
        "graphs_hold_whole_rows_on_hf",
        ONLINE | {"parallelism.context": 2, "training.cuda_graphs": "decoder"},
        "training.cuda_graphs: 'decoder', but parallelism.context is 2, and no graph has recorded",
        {"parallelism.context": 2},
    ),
    (
        "shared_rows_have_an_engine",
        ONLINE | {"parallelism.context": 2, "packing.share_prefix": True},
        "packing.share_prefix: true, but parallelism.context is 2",
        {"parallelism.context": 2},
    ),
    (
        "hf_keeps_layers_whole",
        {"parallelism.tensor": 2},
        "parallelism.tensor: 2 needs model.backend: mcore",
        {"parallelism.sharding": "fsdp"},
    ),
    (
        "hf_keeps_layers_whole",
        {"parallelism.expert": 4},
        "parallelism.expert: 4 needs model.backend: mcore",
        {"parallelism.expert": 1},
    ),
    (
        "hf_keeps_layers_whole",
        {"parallelism.sequence": True},
        "parallelism.sequence: true needs model.backend: mcore",
        MCORE | {"parallelism.sequence": True, "parallelism.tensor": 2},
    ),
    (
        "transformer_engine_needs_mcore",
        {"model.attention": "transformer_engine"},
        "model.attention: 'transformer_engine' needs model.backend: mcore",
        MCORE | {"model.attention": "transformer_engine"},
    ),
    (
        "selective_keeps_products",
        MCORE
        | {"model.attention": "transformer_engine", "model.activation_checkpointing": "selective"},
        "model.activation_checkpointing: 'selective' keeps what torch's matrix products make",
        MCORE | {"model.attention": "transformer_engine", "model.activation_checkpointing": 2},
    ),
    (
        "selective_keeps_products",
        MCORE | {"parallelism.tensor": 2, "model.activation_checkpointing": "selective"},
        "and without parallelism.sequence Megatron writes their sums over the tensor-parallel "
        "ranks into the same memory",
        MCORE | SP2 | {"model.activation_checkpointing": "selective"},
    ),
    *(
        (
            "layers_compile_alone",
            {"model.compile": "layers"} | broken,
            f"model.compile: 'layers' {why}",
            {"model.compile": "layers", "model.fused_layers": "none"},
        )
        for broken, why in (
            (MCORE, "needs model.backend: hf: Megatron's layers were never compiled"),
            ({"training.cuda_graphs": "decoder"} | ONLINE, "was never captured; use training."),
            ({"model.fused_layers": "compile"}, "needs model.fused_layers: auto or none"),
        )
    ),
    *(
        (
            "long_rows_take_less",
            {f"model.{name}": True} | broken,
            f"model.{name}: true {why}",
            mended,
        )
        for name in ("tiled_mlp", "activation_offloading")
        for broken, why, mended in (
            (MCORE, "needs model.backend: hf", {f"model.{name}": True}),
            ({"model.compile": "layers"}, "changes layers that are compiled whole", {}),
            ({"training.cuda_graphs": "decoder"} | ONLINE, "was never captured; use training.", {}),
        )
    ),
    (
        "long_rows_take_less",
        {"model.activation_offloading": True, "model.activation_checkpointing": "none"},
        "model.activation_offloading: true moves inputs of recomputed layers, and "
        "activation_checkpointing is none; or set it to false",
        {"model.tiled_mlp": True, "model.activation_checkpointing": "none"},
    ),
    (
        "fsdp_needs_hf",
        MCORE | {"parallelism.sharding": "fsdp"},
        "parallelism.sharding: 'fsdp' needs model.backend: hf. With 'mcore' use none. "
        "There parallelism.distributed_optimizer",
        MCORE | {"parallelism.distributed_optimizer": True},
    ),
    (
        "fsdp_fields_need_fsdp",
        {"parallelism.replicate": 2},
        "parallelism.replicate: 2, but parallelism.sharding is none; use fsdp (model.backend: hf)",
        {"parallelism.replicate": 2, "parallelism.sharding": "fsdp"},
    ),
    (
        "fsdp_fields_need_fsdp",
        {"parallelism.gradient_sync": "micro_batch"},
        "parallelism.gradient_sync: micro_batch, but parallelism.sharding is none; use fsdp",
        {"parallelism.gradient_sync": "micro_batch", "parallelism.sharding": "fsdp"},
    ),
    (
        "sequence_needs_tensor",
        MCORE | {"parallelism.sequence": True},
        "parallelism.sequence: true, but parallelism.tensor is 1",
        MCORE | {"parallelism.sequence": False},
    ),
    (
        "seq_length_splits_over_context",
        CP2 | {"training.seq_length": 510},
        "training.seq_length: 510 is not a multiple of 2 x parallelism.context = 4; use 512",
        MCORE | {"training.seq_length": 510},
    ),
    (
        "alignment_splits_over_context",
        CP2 | {"packing.alignment": 6},
        "packing.alignment: 6 is not a multiple of 2 x parallelism.context = 4; use 8",
        CP2 | {"packing.alignment": 12},
    ),
    (
        "shared_rows_need_samples",
        CP2 | {"training.micro_batch_size": 1},
        "training.micro_batch_size: 1, but packing.mode 'in_batch'",
        CP2 | {"training.micro_batch_size": 1, "packing.mode": "none"},
    ),
    (
        "weights_are_complete",
        {"data.train": [TWO[0], "b.tar"]},
        "data.train: 1 of 2 sources have no weight (b)",
        {"data.train": TWO},
    ),
    (
        "weights_are_for_training",
        {"data.validation": {"path": "v.tar", "weight": 2}},
        "data.validation.weight: 2, but weights blend data.train only",
        {"data.validation": {"path": "v.tar"}},
    ),
    (
        "epoch_size_needs_weights",
        {"data.epoch_size": 10},
        "data.epoch_size: 10, but without weights",
        {"data.epoch_size": 10, "data.train": TWO},
    ),
    (
        "tokens_need_weights",
        {"data.weights": "tokens"},
        "data.weights: tokens, but no source of data.train has a weight",
        {"data.weights": "tokens", "data.train": TWO},
    ),
    (
        "variables_are_plain",
        {"data.chat_template_kwargs": {"a": {"b": 1}}},
        "data.chat_template_kwargs.a: {'b': 1}; expected true or false, a number, a text, or a",
        {"data.chat_template_kwargs": {"a": [1, "x", False], "b": 0.5, "c": "low"}},
    ),
    (
        "variables_are_plain",
        {"data.chat_template_kwargs": {"a": []}},
        "data.chat_template_kwargs.a: []; expected",
        {"data.chat_template_kwargs": {"a": None}},
    ),
    (
        "source_names_differ",
        {"data.train": ["x/a.tar", "x/a.tar"]},
        "data.train[1]: 'x-a' is also the name of source 1",
        {"data.train": ["x/a.tar", "y/a.tar"]},
    ),
    (
        "evaluation_has_data",
        {"evaluation.interval_steps": 5},
        "evaluation.interval_steps: 5, but data.validation is not set",
        {"evaluation.interval_steps": 5, "data.validation": "v.tar"},
    ),
    (
        "evaluation_has_data",
        {"evaluation.generate": True},
        "evaluation.generate: true, but data.test is not set",
        {"evaluation.generate": True, "data.test": "t.tar"},
    ),
    (
        "metrics_differ",
        {"evaluation.metrics": ["exact_match", "exact_match"]},
        "evaluation.metrics: 'exact_match' is listed more than once",
        {"evaluation.metrics": ["exact_match", "characters"]},
    ),
    (
        "trackers_differ",
        {"logging.trackers": ["wandb", "wandb"]},
        "logging.trackers: 'wandb' is listed more than once",
        {"logging.trackers": ["wandb", "mlflow"]},
    ),
    (
        "model_is_local",
        {"model.path": "hf://Qwen/Qwen2.5-VL"},
        "model.path: 'hf://' addresses are for shards alone",
        {"model.path": "Qwen/Qwen2.5-VL"},
    ),
    (
        "sources_are_readable",
        {"data.train": "data/train-*.jsonl.gz"},
        "data.train: 'data/train-*.jsonl.gz' is compressed, and compressed shards are not read",
        {"data.train": "data/train-*.jsonl"},
    ),
    (
        "sources_are_readable",
        {"data.validation": "data/validation.txt"},
        "data.validation: 'data/validation.txt' is no tar shard, and no file of records (.jsonl",
        {"data.validation": "data/validation.parquet"},
    ),
    (
        "sources_are_readable",
        {"data.image_root": "pipe:photos"},
        "data.image_root: 'pipe:' is not allowed",
        {"data.image_root": "s3://bucket/photos"},
    ),
    (
        "sources_are_readable",
        {"data.train": {"path": "x.jsonl", "image_root": "https://user:word@host/photos"}},
        "data.train.image_root: a https:// address",
        {"data.train": {"path": "x.jsonl", "image_root": "https://host/photos"}},
    ),
    (
        "sources_are_readable",
        {"data.train": "pipe:cat x.tar"},
        "data.train: 'pipe:' is not allowed",
        {"data.train": "pipe/x.tar"},
    ),
    (
        "sources_are_readable",
        {"data.test": "https://user:canary@host/x.tar"},
        "data.test: a https:// address holds a user name or password",
        {"data.test": "https://${env:NAME}:${env:WORD}@host/x.tar"},
    ),
    (
        "sources_are_readable",
        {"data.test": "https://host/x.tar?X-Amz-Signature=canary"},
        "data.test: a https:// address has a query that may hold a secret",
        {"data.test": "https://host/x.tar?${env:SIGNATURE}"},
    ),
    (
        "sources_are_readable",
        {"data.test": "s3://bucket/${HOME}/x.tar"},
        "data.test: '$' references in addresses are '${env:NAME}'",
        {"data.test": "s3://bucket/{a,b}/x-*.tar"},
    ),
    (
        "stores_are_safe",
        {"data.storage.endpoint": "http://127.0.0.1:9000"},
        "data.storage.endpoint: http:// is for stores in a private network",
        {"data.storage.endpoint": "http://127.0.0.1:9000", "data.storage.allow_private": True},
    ),
    (
        "stores_are_safe",
        {"data.storage.endpoint": "http://10.0.0.5", "data.storage.allow_private": ["10.0.0.6"]},
        "data.storage.endpoint: http:// is for stores in a private network",
        {"data.storage.endpoint": "http://[FD00::5]", "data.storage.allow_private": ["fd00::5"]},
    ),
    (
        "stores_are_safe",
        {
            "data.storage.endpoint": "https://host",
            "data.train": "s3://a/x.tar",
            "data.test": "az://a/x.tar",
        },
        "data.storage.endpoint: one endpoint for s3:// and az://",
        {"data.storage.endpoint": "https://host", "data.train": "s3://a/x.tar"},
    ),
    (
        "stores_are_safe",
        {"data.storage.credentials": {"access_key_id": "canary"}},
        "data.storage.credentials.access_key_id: must name an environment variable",
        {"data.storage.credentials.access_key_id": "${env:KEY}"},
    ),
    (
        "index_dir_is_local",
        {"data.index_dir": "${env:HOME}/index"},
        "data.index_dir: '$' references are not expanded",
        {"data.index_dir": "index"},
    ),
    (
        "packs_are_local",
        OFFLINE | {"packing.path": "s3://bucket/packs"},
        "packing.path: 's3://' addresses are for shards alone",
        OFFLINE,
    ),
    (
        "run_dir_is_local",
        {"run_dir": "~/runs"},
        "run_dir: '~' is not expanded",
        {"run_dir": "runs~"},
    ),
]


@pytest.mark.cases(quick=0.3, slow="*")
@pytest.mark.parametrize(
    ("broken", "message", "kept"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_rule_refuses_and_its_twin_passes(problems_of, broken, message, kept):
    assert problems_of(kept) == []
    (problem,) = problems_of(broken)
    assert message in problem
    assert "canary" not in problem


# Rules that look at what is installed.
DIRECT = {
    "context_heads_need_hf",
    "four_bits_have_their_package",
    "optimizers_have_their_package",
    "mcore_is_installed",
}


KNOWN = {"adapter", "config", "served", "world_size", "sections"}
"""What a rule may need beside sections; such rules have test files of their own."""


ELSEWHERE = {
    "adapters_start_without_effect",
    "best_is_evaluated",
    "bounds_of_graphs_need_graphs",
    "graphs_drop_nothing",
    "graphs_have_no_router_loss",
    "graphs_hold_layers_of_ours",
    "graphs_hold_one_row_at_a_time",
    "graphs_need_plain_weights",
    "graphs_need_whole_weights",
    "graphs_read_boundaries",
    "graphs_replay_planned_rows",
    "graphs_share_no_prefixes",
    "graphs_train_no_pairs",
    "longer_ends_come_first",
    "questions_are_asked",
    "shared_rows_have_a_mode",
    "shared_rows_have_an_engine",
    "shared_rows_have_any_shape",
    "shared_rows_have_no_router_loss",
}
"""In test_graph_rules.py, test_sharing_rules.py, test_adapter_rules.py,
test_trainable_rules.py and, those of evaluations, tests/training/test_evaluations.py. All rules
of objectives are in test_objective_rules.py."""


def test_every_rule_has_a_test():
    of_installed = {"peft_is_installed"}  # in test_capability_rules.py
    here = {
        rule.__name__
        for rule in RULES
        if not KNOWN & {*signature(rule).parameters}
        and not rule.__module__.endswith("objective_rules")
    }
    cases = {case[0] for case in CASES} | DIRECT | of_installed
    assert here == cases | ELSEWHERE


def test_every_rule_names_what_is_known():
    """A parameter that nobody fills would leave its rule out for ever."""
    needed = {name for rule in RULES for name in signature(rule).parameters}
    assert needed <= {*SECTIONS, "run_dir"} | KNOWN


def test_whatever_looks_for_problems_is_run():
    """A new module of rules, or a rule that says otherwise what it returns, is not left out."""
    folder = Path(rules.__file__).parent
    modules = [import_module(f"vlmpack.recipe.{path.stem}") for path in folder.glob("*_rules.py")]
    found = [
        value
        for module in modules
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        if "Problem" in str(getattr(value, "__annotations__", {}).get("return"))
    ]
    assert len(modules) == 7
    assert {*found} == {*RULES} and len(found) == len(RULES)


def rule(name):
    (check,) = [rule for rule in RULES if rule.__name__ == name]
    return check


def training(**changes):
    return TrainingSection.model_validate(
        {"micro_batch_size": 4, "global_batch_size": 8, "seq_length": 1024, "max_steps": 3}
        | changes
    )


def test_seq_length_is_a_multiple_of_twice_the_context_size():
    check = rule("seq_length_splits_over_context")
    assert check(training(seq_length=1024), ParallelismSection(context=2)) == []
    assert check(training(seq_length=1023), ParallelismSection(context=1)) == []
    (problem,) = check(training(seq_length=1022), ParallelismSection(context=2))
    assert problem.path == ("training", "seq_length")
    assert "1022 is not a multiple of 2 x parallelism.context = 4; use 1024" in problem.message


def test_alignment_is_a_multiple_of_twice_the_context_size():
    check = rule("alignment_splits_over_context")
    assert check(PackingSection(alignment=6), ParallelismSection(context=3)) == []
    assert check(PackingSection(alignment=1), ParallelismSection(context=1)) == []
    assert check(PackingSection(), ParallelismSection(context=3)) == []
    (problem,) = check(PackingSection(alignment=6), ParallelismSection(context=2))
    assert "6 is not a multiple of 2 x parallelism.context = 4; use 8" in problem.message


def test_hf_shares_rows_by_heads(tiny_folder):
    model = ModelSection(path=str(tiny_folder))
    config, check = read_model_config(model), rule("hf_shares_rows_by_heads")
    for context in (1, 2, 3, 4):  # of 3 each has all heads
        assert check(config, model, ParallelismSection(context=context)) == []
    odd = ParallelismSection(context=6, context_heads=3)
    (problem,) = check(config, model, odd)
    assert problem.path == ("parallelism", "context_heads")
    assert problem.message.startswith(f"{tiny_folder}/config.json: 3 processes cannot")
    assert "share out the num_attention_heads 4 in num_key_value_heads 2. Sizes that can: 1, 2" in (
        problem.message
    )
    (problem,) = check(config, model, ParallelismSection(context_heads=2))
    assert "2 does not divide parallelism.context 1. Use one of 1" in problem.message
    on_mcore = ModelSection(path=str(tiny_folder), backend="mcore")
    assert check(config, on_mcore, odd) == []
    (problem,) = rule("context_heads_need_hf")(on_mcore, odd)
    assert problem.message == "3 needs model.backend: hf; leave it out"


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({}, True),
        ({"mlp_only_layers": [1]}, False),
        ({"decoder_sparse_step": 2}, False),
        ({"shared_expert_intermediate_size": 48}, False),
        ({"decoder_sparse_step": None}, False),  # what other configs leave unsaid, the launch sees
        ({"num_experts": 0}, False),
    ],
)
def test_tiles_are_of_mlps_beside_experts(tmp_path, changes, is_refused):
    text = {"num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []} | changes
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"} | text))
    model = ModelSection(path=str(tmp_path), tiled_mlp=True)
    config, check = read_model_config(model), rule("tiles_are_of_mlps")
    problems = check(config, model)
    assert len(problems) == is_refused
    for problem in problems:
        assert problem.path == ("model", "tiled_mlp")
        assert problem.message.startswith(f"true, but each layer of {tmp_path} has 8 experts and")
        assert problem.message.endswith("Set it to false")
    assert check(config, ModelSection(path=str(tmp_path))) == []


def test_models_whose_rows_a_ring_cannot_cut_exchange_all_heads():
    latent = HeadDegrees(((4, 4),), "has latent attention")
    assert latent.chosen(ParallelismSection(context=4)) == 4
    with pytest.raises(
        ValueError, match=r"each by all, since the model has latent attention.*: 1, 2, 4$"
    ):
        latent.chosen(ParallelismSection(context=3))
    with pytest.raises(
        ValueError, match=r"since the model has latent attention\. Sizes that can: 4$"
    ):
        latent.chosen(ParallelismSection(context=4, context_heads=2))


@pytest.mark.parametrize(
    ("heads", "context", "degree"),
    [
        ([(32, 8)], 4, 4),
        ([(32, 8)], 8, 8),
        ([(32, 8)], 16, 8),
        ([(32, 4)], 8, 4),
        ([(16, 1)], 4, 1),
        ([(16, 8), (16, 1)], 4, 1),
        ([(16, 8), (16, 2)], 4, 2),
        ([(28, 4)], 8, 4),
        ([(24, 8)], 16, 8),
        ([(32, 16)], 32, 32),
    ],
)
def test_ranks_exchange_heads_up_to_the_fewest_keys(heads, context, degree):
    """But for the last: 32 copies of 16 heads send less than two ranks of a ring do."""
    assert HeadDegrees(tuple(heads)).chosen(ParallelismSection(context=context)) == degree


def test_layers_that_are_computed_again_may_choose_a_ring():
    """Of 32 query heads and 16 of keys, by 32 ranks: copies send 248 + 124 r heads of a slot, and a
    ring of two sends 252 + 114 r, where r is the share of these layers."""
    split = ParallelismSection(context=32)
    chosen = [HeadDegrees(((32, 16),)).chosen(split, kind) for kind in ("none", 8, 2, "full")]
    assert chosen == [32, 32, 16, 16]


@pytest.mark.parametrize("again", [0, 0.5, 1])
def test_what_a_ring_sends_by_hand(again):
    """Of 8 query heads and 2 of keys, by 4 ranks: alone, in pairs, and with 4 heads of keys."""
    degrees, passes = HeadDegrees(((8, 2),)), 2 + again
    assert degrees.sent(4, 1, again) == (passes + 1) * (2 * 2) * 3 * 3 / 4
    pairs = passes * 2 * (8 + 2) / 2 + (passes + 1) * (2 * 2) * 3 / 4
    assert degrees.sent(4, 2, again) == pairs
    assert degrees.sent(4, 4, again) == passes * 2 * (8 + 4) * 3 / 4


@pytest.mark.parametrize(
    ("state", "said", "fitting"),
    [
        (
            {"linear_num_value_heads": 8, "linear_num_key_heads": 4},
            "3 processes cannot share out the linear_num_value_heads 8 in 4 groups",
            "1, 2, 4, 8",
        ),
        (
            {"mamba_num_heads": 6, "n_groups": 2},
            "3 processes cannot share out the mamba_num_heads 6 in 2 groups",
            "1, 2, 6",
        ),
    ],
)
def test_hf_shares_heads_of_layers_that_carry_state(state, said, fitting):
    values = {"num_attention_heads": 12, **state}
    config, model = ModelConfig("folder", values, values), ModelSection(path="folder")
    check = rule("hf_shares_rows_by_heads")
    (problem,) = check(config, model, ParallelismSection(context=3))
    assert problem.message == f"folder/config.json: {said}. Sizes that can: {fitting}"
    assert check(config, model, ParallelismSection(context=2)) == []


@pytest.mark.parametrize("size", ["tensor", "pipeline"])
def test_mcore_takes_every_size_that_hf_refuses(problems_of, size):
    split = {f"parallelism.{size}": 2}
    (problem,) = problems_of(split)
    assert f"parallelism.{size}: 2 needs model.backend: mcore" in problem
    assert problems_of(MCORE | split) == []


@pytest.mark.parametrize(
    "version", ["0.16.1", "0.16.1rc0", "0.16.10+cu13", "0.17.1", "0.18.2", "0.19.99"]
)
def test_these_versions_of_megatron_core_are_taken(problems_of, monkeypatch, version):
    monkeypatch.setattr(engine_rules, "mcore_version", lambda: version)
    monkeypatch.setattr(versions, "find_spec", {"triton": object()}.__getitem__)
    assert problems_of(MCORE) == []


@pytest.mark.parametrize(("version", "wants"), [("0.16.1", 0), ("0.17.1", 0), ("0.18.0", 1)])
def test_triton_is_asked_for_where_megatron_core_imports_it(
    problems_of, monkeypatch, version, wants
):
    monkeypatch.setattr(engine_rules, "mcore_version", lambda: version)
    monkeypatch.setattr(versions, "find_spec", {"triton": None}.__getitem__)
    problems = problems_of(MCORE)
    assert len(problems) == wants
    for problem in problems:
        assert f"needs triton, which megatron-core {version} imports" in problem
        assert "which is not installed" in problem and "pip install 'triton>=3'" in problem
    assert problems_of({}) == []


@pytest.mark.parametrize("version", ["0.16", "0.16.0", "0.9.3", "0.20.0rc1", "0.20", "1.0", "dev"])
def test_other_versions_of_megatron_core_are_refused(problems_of, monkeypatch, version):
    monkeypatch.setattr(engine_rules, "mcore_version", lambda: version)
    (problem,) = problems_of(MCORE)
    assert (
        f"model.backend: 'mcore' needs megatron-core >= 0.16.1 and < 0.20, found {version}; "
        "pip install 'megatron-core>=0.16.1,<0.20'"
    ) in problem
    assert problems_of({}) == []


def test_absent_megatron_core_is_one_problem_with_its_remedy(problems_of, monkeypatch):
    monkeypatch.setattr(engine_rules, "mcore_version", lambda: None)
    (problem,) = problems_of(MCORE)
    assert "model.backend: 'mcore' needs megatron-core, which is not installed" in problem
    assert "pip install 'megatron-core>=0.16.1,<0.20'" in problem


def test_megatron_core_is_looked_up_and_not_imported(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    loaded = set(sys.modules)
    monkeypatch.setattr(metadata, "version", {"megatron-core": "0.16.1"}.__getitem__)
    monkeypatch.setattr(util, "find_spec", {"megatron": object()}.__getitem__)
    assert mcore_version() == "0.16.1"
    monkeypatch.setattr(metadata, "version", absent)
    assert mcore_version() is None
    monkeypatch.setattr(util, "find_spec", {"megatron": None}.__getitem__)
    assert mcore_version() is None
    assert not any(name.startswith("megatron") for name in set(sys.modules) - loaded)


def test_world_size_must_divide_the_global_batch(minimal):
    recipe = load_recipe(minimal)
    for world_size in (1, 2, 4):
        check_world(recipe, world_size)
    with pytest.raises(RecipeError) as caught:
        check_world(recipe, 8)
    assert caught.value.problems == (
        "training.global_batch_size: 16 is not a multiple of training.micro_batch_size 4 x "
        "data-parallel size 8 = 32 (world size 8); use 32, or micro_batch_size: 2",
    )
    with pytest.raises(RecipeError, match="or a data-parallel size that divides 16"):
        check_world(recipe, 3)
    wide = load_recipe(minimal, ["training.micro_batch_size=16", "training.global_batch_size=48"])
    with pytest.raises(RecipeError, match=r"use 64, or micro_batch_size: 2 or 3 or 4 or 6 or 12$"):
        check_world(wide, 4)
    in_one_row = load_recipe(minimal, ["training.global_batch_size=8"])
    with pytest.raises(RecipeError, match=r"use 32, or a packing.mode whose micro-batch may be o"):
        check_world(in_one_row, 8)
    padded = load_recipe(minimal, ["training.global_batch_size=8", "packing.mode=none"])
    with pytest.raises(RecipeError, match=r"use 32, or micro_batch_size: 1$"):
        check_world(padded, 8)


@pytest.mark.parametrize(
    ("layout", "processes"),
    [
        ({}, 1),
        ({"tensor": 2, "context": 2, "pipeline": 3}, 12),
        ({"expert": 8}, 8),
        ({"tensor": 4, "expert": 6, "pipeline": 2}, 24),
        ({"sharding": "fsdp", "replicate": 2}, 4),
    ],
)
def test_the_fewest_processes_are_found(layout, processes):
    split = ParallelismSection(**layout)

    def fits(number):
        return not (
            run_rules.world_splits_into_copies(split, number)
            or run_rules.experts_split_over_processes(split, number)
            or run_rules.copies_split_the_world(split, number)
        )

    assert smallest_world(split) == processes
    assert [n for n in range(1, processes + 1) if fits(n)] == [processes]


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (2, "2 sharded copies over 2 processes, but .* two or more; use 1$"),
        (5, "2 sharded copies over 5 processes, but .* two or more; use 1$"),
        (1, "2 sharded copies over 1 process, but .* two or more; use 1$"),
        (9, "2 sharded copies over 9 processes, but .* two or more; use 1 or 3$"),
    ],
)
def test_sharded_copies_split_the_world(minimal, world_size, words):
    fsdp = {"parallelism.sharding": "fsdp", "training.global_batch_size": 40}
    recipe = load_recipe(minimal, {**fsdp, "parallelism.replicate": 2})
    check_world(recipe, 10)
    with pytest.raises(RecipeError) as caught:
        check_world(recipe, world_size)
    (problem,) = (each for each in caught.value.problems if "parallelism.replicate: " in each)
    assert re.search(words, problem)


def test_world_size_must_hold_whole_model_copies(minimal):
    recipe = load_recipe(minimal)
    split = recipe.model_copy(update={"parallelism": ParallelismSection(tensor=2, context=2)})
    check_world(split, 4)
    check_world(split, 8)
    with pytest.raises(RecipeError, match="= 4 processes per model copy, which does not divide"):
        check_world(split, 6)


def test_experts_are_shared_out_over_the_processes_of_a_stage(minimal):
    recipe = load_recipe(minimal)
    split = recipe.model_copy(update={"parallelism": ParallelismSection(pipeline=2, expert=4)})
    check_world(split, 8)
    with pytest.raises(RecipeError, match="4 does not divide the 2 processes of a pipeline stage"):
        check_world(split, 4)


def test_world_problems_join_the_others_with_their_line(write, good_text):
    path = write(good_text.replace("lr: 1e-3", "lr: x"))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, world_size=8)
    assert len(caught.value.problems) == 2
    assert f"{path}:7: training.global_batch_size: 16 is not a multiple" in str(caught.value)
