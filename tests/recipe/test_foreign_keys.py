"""Keys of other frameworks point at the field that takes their place, or at none."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from vlmpack.errors import RecipeError
from vlmpack.recipe import json_schema, load_recipe, messages
from vlmpack.recipe.messages import all_keys, foreign_keys, suggest_key

FOREIGN = foreign_keys()
OURS = all_keys(json_schema())
ROOT = [name for names in OURS.values() for name in names if "." not in name]

FIELDS = {
    "Megatron-Bridge": {
        "packed_sequence_size": "packing.max_tokens",
        "enable_offline_packing": "packing.mode",
        "packing_buffer_size": "packing.mode",
        "offline_packing_specs": "packing.mode",
        "max_samples_per_sequence": "packing.max_sequences",
        "hf_validation_dataset": "data.validation",
        "adam_eps": "optim.eps",
        "moe_router_fusion": None,
        "shuffle_buffer_size": None,
        "max_single_sequence_length": None,
    },
    "LLaMA-Factory": {
        "cutoff_len": "training.seq_length",
        "template": "model.path",
        "media_dir": "data.image_root",
        "image_max_pixels": "images.max_pixels",
        "moe_aux_loss_coef": "model.router_aux_loss_coef",
        "pref_beta": "objective.beta",
        "mask_history": "data.learn",
        "skip_special_tokens": None,
        "split_special_tokens": None,
        "preprocessing_num_workers": None,
        "video_max_pixels": None,
    },
    "TRL": {
        "precompute_ref_log_probs": "objective.reference",
        "padding_free": "packing.mode",
        "truncation_mode": "data.over_long",
        "loss_type": "objective.loss",
        "lora_r": "trainable.lora.rank",
        "packing_strategy": None,
        "eval_packing": None,
        "pad_token": None,
        "disable_dropout": None,
    },
    "transformers": {
        "per_device_train_batch_size": "training.micro_batch_size",
        "load_best_model_at_end": "export.weights",
        "run_name": "logging.name",
        "label_smoothing_factor": None,
        "hub_token": None,
        "auto_find_batch_size": None,
    },
    "peft": {
        "lora_alpha": "trainable.lora.alpha",
        "target_parameters": None,
    },
    "Axolotl": {
        "base_model": "model.path",
        "sequence_len": "training.seq_length",
        "sample_packing": "packing.mode",
        "sample_packing_bin_size": "packing.max_sequences",
        "pad_to_sequence_len": "packing.pad_to_max_length",
        "test_datasets": "data.validation",
        "sequence_parallel_degree": "parallelism.context",
        "rl": "objective.name",
        "eval_sequence_len": None,
        "quantization": None,
        "group_by_length": None,
        "dataset_processes": None,
    },
}
"""Framework -> key -> field, read in their documentation by hand."""


def advice(key: str, parent: str = "") -> str:
    here = [name for names in OURS.values() for name in names if name.startswith(f"{parent}.")]
    here = [name.removeprefix(f"{parent}.") for name in here] if parent else ROOT
    return suggest_key(key, parent, [name for name in here if "." not in name], OURS)


@pytest.mark.parametrize(
    ("framework", "key", "field"),
    [(framework, *pair) for framework, keys in FIELDS.items() for pair in keys.items()],
)
@pytest.mark.parametrize("parent", ["", "packing"])
def test_a_foreign_key_points_at_its_field_or_at_none(framework, key, field, parent):
    found = advice(key, parent)
    if field is None:
        assert framework in found and "that nothing here takes the place of" in found
        assert "did you mean" not in found
    else:
        assert f"did you mean '{field.removeprefix(f'{parent}.')}'?" in found


def training_arguments() -> set[str]:
    """Fields of transformers' class, from its source."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("training_args.py").read_text(encoding="utf-8"))
    (one,) = [n for n in tree.body if getattr(n, "name", "") == "TrainingArguments"]
    assert isinstance(one, ast.ClassDef)
    targets = [n.target for n in one.body if isinstance(n, ast.AnnAssign)]
    return {t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("_")}


def guessed(keys: set[str]) -> set[str]:
    return {key for key in keys if "did you mean" in advice(key)}


def test_no_foreign_key_is_taken_for_one_that_is_spelt_alike(monkeypatch):
    listed = set().union(*FOREIGN.frameworks.values())
    theirs = training_arguments() | listed
    assert len(listed) > 900 and len(theirs - listed) > 30
    answered = FOREIGN.fields.keys() | FOREIGN.sections.keys()
    assert guessed(theirs - answered) == set()
    monkeypatch.setattr(messages, "foreign_keys", lambda: replace(FOREIGN, frameworks={}))
    assert len(guessed(listed)) > 150, "nothing but the list keeps them from being guessed"


def test_each_key_is_in_one_table():
    listed = set().union(*FOREIGN.frameworks.values())
    assert not listed & (
        FOREIGN.fields.keys() | FOREIGN.derived.keys() | FOREIGN.unsupported.keys() | OURS.keys()
    )
    assert FOREIGN.values.keys() <= FOREIGN.fields.keys()


@pytest.mark.parametrize(
    ("key", "parent", "field"),
    [
        ("trainig", "", "training"),
        ("max_token", "packing", "max_tokens"),
        ("max_pixel", "images", "max_pixels"),
        ("warmup_step", "optim", "warmup_steps"),
    ],
)
def test_a_slip_of_the_pen_is_still_guessed(key, parent, field):
    assert f"did you mean '{field}'?" in advice(key, parent)


def test_sections_inside_of_foreign_sections_have_a_line_a_key(write, good_text):
    path = write(
        f"{good_text}dataset:\n  offline_packing_specs:\n    packed_sequence_size: 4096\n"
        "    pad_cu_seqlens: true\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    found = [line.rpartition("unknown key; ")[::2] for line in caught.value.problems]
    lines = good_text.count("\n")
    place = "dataset.offline_packing_specs"
    assert found == [
        (
            f"{path}:{lines + 3}: {place}.packed_sequence_size: ",
            "did you mean 'packing.max_tokens'?",
        ),
        (f"{path}:{lines + 4}: {place}.pad_cu_seqlens: ", "did you mean 'packing.pad_cu_seqlens'?"),
    ]
