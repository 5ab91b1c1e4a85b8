"""Which changes make another run, and which may happen between launches of one."""

from __future__ import annotations

import json

import pytest

from vlmpack.recipe import (
    identity,
    identity_differences,
    identity_hint,
    identity_notes,
    load_recipe,
)

REFUSED = [
    "model.path=other",
    "model.dtype=float32",
    "data.train=other.tar",
    "data.train=[data/train-*.tar, more.tar]",
    "data.train={path: data/train-*.tar, weight: 2.0}",
    "data.shuffle=window",
    "data.over_long=drop",
    "data.max_image_pixels=1000",
    "data.chat_template_kwargs={enable_thinking: false}",
    "data.special_tokens=[<|box_start|>]",
    "data.coordinates={space: norm}",
    "data.boxes_in_text=refuse",
    "packing.mode=none",
    "training.seq_length=1024",
    "training.global_batch_size=32",
    "training.seed=1",
    "training.max_steps=99",
    "training.num_epochs=5",
    "optim.lr=2e-3",
    "optim.schedule=linear",
    "optim.warmup_steps=3",
    "optim.betas=[0.9, 0.99]",
    "optim.max_grad_norm=null",
]
ALLOWED = [
    "data.unknown_keys=refuse",
    "model.backend=mcore",
    "model.attention=segments",
    "model.recurrence=torch",
    "model.fused_layers=none",
    "model.compile=layers",
    "model.activation_checkpointing=full",
    "model.activation_checkpointing=selective",
    "model.activation_checkpointing=2",
    "model.memory_gib=80.0",
    "model.activation_offloading=true",
    "model.tiled_mlp=true",
    "data.train={path: data/train-*.tar, name: renamed}",
    "data.num_workers=0",
    "data.prefetch_batches=1",
    "data.pixels=levels",
    "data.on_error.decode=raise",
    "data.validation=v.tar",
    "data.index_dir=elsewhere",
    "data.cache.directory=elsewhere",
    "data.cache.max_bytes=0",
    "data.storage.endpoint=https://elsewhere.example.org",
    "packing.alignment=64",
    "packing.balance=none",
    "packing.share_prefix=true",
    "parallelism.sharding=fsdp",
    "parallelism={sharding: fsdp, replicate: 2, gradient_sync: micro_batch}",
    "training.micro_batch_size=8",
    "training.max_steps=101",
    "training.verify=true",
    "evaluation.batch_size=1",
    "checkpoint.keep=1",
    "logging.interval_steps=1",
    "export.enabled=false",
    "run_dir=elsewhere",
]


ROWS = ("packing.mode=online", "training.micro_batch_size=1")
ROWS_REFUSED = [
    "packing.max_tokens=9000",
    "packing.max_vision_patches=4000",
    "packing.max_sequences=16",
    "packing.scope=batch",
]
ROWS_ALLOWED = [
    "packing.alignment=16",
    "packing.balance=none",
    "packing.pad_to_max_length=true",
]


@pytest.mark.parametrize(
    ("override", "is_refused"),
    [(text, True) for text in ROWS_REFUSED] + [(text, False) for text in ROWS_ALLOWED],
)
def test_planned_rows_keep_their_budgets(minimal, override, is_refused):
    old, new = (
        identity(load_recipe(minimal, [*ROWS])),
        identity(load_recipe(minimal, [*ROWS, override])),
    )
    assert bool(identity_differences(old, new)) == is_refused


def test_fields_of_planned_rows_are_no_part_of_other_runs(minimal):
    """A run folder of a version that did not have them stays resumable."""
    assert {key for key in identity(load_recipe(minimal)) if key.startswith("packing.")} == {
        "packing.mode"
    }


IMAGES = ["images.min_pixels=900", "images.max_pixels=90000", "images.max_tiles=4"]

TRAINABLE = [
    "trainable.vision=frozen",
    "trainable.projector=frozen",
    "trainable.language=lora",
    "trainable.lora.rank=8",
    "optim.vision_lr=1e-4",
    "optim.projector_lr=1e-4",
    "optim.language_lr=1e-4",
    "optim.name=adamw_8bit",
    "optim.master=bfloat16_stochastic",
]


@pytest.mark.parametrize("override", TRAINABLE)
def test_what_is_trained_is_identity(minimal, override):
    lora = ["trainable.language=lora"] if ".lora." in override else []
    old = identity(load_recipe(minimal, lora))
    new = identity(load_recipe(minimal, [*lora, override]))
    assert identity_differences(old, new)
    assert identity_differences(new, old)


def test_how_adapters_of_experts_are_written_is_no_part_of_an_identity(minimal):
    lora = ["trainable.language=lora", "trainable.lora.targets=experts"]
    old = identity(load_recipe(minimal, lora))
    assert identity(load_recipe(minimal, [*lora, "trainable.lora.expert_form=matrices"])) == old
    assert "trainable.lora.rank" in old and "trainable.lora.targets" in old


def test_the_default_policy_is_no_part_of_an_identity(minimal):
    found = identity(load_recipe(minimal))
    assert not [key for key in found if key.startswith("trainable") or key.endswith("_lr")]
    assert found["optim.name"] == "adamw"
    assert found["optim.max_grad_norm"] == 1.0
    assert (
        identity(load_recipe(minimal, ["optim.max_grad_norm=null"]))["optim.max_grad_norm"] is None
    )


WEIGHTED = "data.train={path: data/train-*.tar, weight: 2.0}"


def test_what_weights_count_is_identity_where_it_is_not_the_default(minimal):
    old = identity(load_recipe(minimal, [WEIGHTED]))
    new = identity(load_recipe(minimal, [WEIGHTED, "data.weights=tokens"]))
    assert "data.weights" not in old, "a run folder of a version without it stays resumable"
    assert len(identity_differences(old, new)) == 1


@pytest.mark.parametrize(
    ("override", "default", "value"),
    [
        ("data.learn=last_turn", "'all_turns'", "'last_turn'"),
        ("data.learn=each_answer", "'all_turns'", "'each_answer'"),
        ("data.weights=tokens", "'samples'", "'tokens'"),
        ("data.boxes_in_text=refuse", "'keep'", "'refuse'"),
        ("trainable.vision=frozen", "'full'", "'frozen'"),
    ],
)
def test_a_field_that_one_side_lacks_is_named_with_its_default(minimal, override, default, value):
    """Run folders leave out what is as by default, and those of earlier versions have no more."""
    old, new = identity(load_recipe(minimal)), identity(load_recipe(minimal, [WEIGHTED, override]))
    key = override.partition("=")[0]
    assert key not in old and key in new
    line = f"{key}: {default}, by default, in the run folder, {value} in the recipe"
    assert line in identity_differences(old, new)
    back = f"{key}: {value} in the run folder, {default}, by default, in the recipe"
    assert back in identity_differences(new, old)


def test_a_field_that_does_not_apply_on_one_side_is_absent_there(minimal):
    """Its default says nothing: without planned rows there is no scope of them."""
    old, new = identity(load_recipe(minimal)), identity(load_recipe(minimal, [*ROWS]))
    lines = [line for line in identity_differences(old, new) if line.startswith("packing.")]
    assert any(line.startswith("packing.scope: missing in the run folder") for line in lines)
    assert not any("by default" in line for line in lines)


@pytest.mark.parametrize("override", IMAGES)
def test_pixel_budgets_are_identity_where_they_are_set(minimal, override):
    old, new = identity(load_recipe(minimal)), identity(load_recipe(minimal, [override]))
    assert not [key for key in old if key.startswith("images")], "old run folders stay resumable"
    key, _, value = override.partition("=")
    assert identity_differences(old, new) == [
        f"{key}: missing in the run folder, {value} in the recipe"
    ]
    assert len(new) == len(old) + 1


@pytest.mark.parametrize("override", REFUSED)
def test_changes_of_objective_or_order_are_refused(minimal, override):
    old, new = identity(load_recipe(minimal)), identity(load_recipe(minimal, [override]))
    assert identity_differences(old, new)
    assert identity_differences(old, old) == []


DATES = ("2026-11-22", "2026-11-23")


@pytest.mark.parametrize("override", ALLOWED)
def test_other_changes_are_allowed(minimal, override):
    old, new = identity(load_recipe(minimal)), identity(load_recipe(minimal, [override]))
    assert identity_differences(old, new) == []


def test_another_date_is_another_run(minimal):
    old, new = (identity(load_recipe(minimal, [f"data.date={day}"])) for day in DATES)
    assert identity_differences(old, new) == [
        "data.date: '2026-11-22' in the run folder, '2026-11-23' in the recipe"
    ]
    assert "data.date" not in identity(load_recipe(minimal))


@pytest.mark.parametrize("other", ["1", "1.0"])
def test_values_that_a_template_writes_otherwise_are_others(minimal, other):
    key = "data.chat_template_kwargs.enable_thinking"
    old, new = (identity(load_recipe(minimal, [f"{key}={value}"])) for value in ("true", other))
    assert old == new and type(old[key]) is not type(new[key])
    assert identity_differences(old, new) == [
        f"{key}: true in the run folder, {other} in the recipe"
    ]


@pytest.mark.parametrize("item", ["data.columns=vqa", "data.columns={question: q, answer: a}"])
def test_columns_are_identity_of_the_data_and_of_a_source(minimal, item):
    old, new = identity(load_recipe(minimal)), identity(load_recipe(minimal, [item]))
    assert len(identity_differences(old, new)) in (1, 2)
    source = item.replace("data.columns=", "data.train={path: data/train-*.tar, columns: ") + "}"
    assert identity_differences(old, identity(load_recipe(minimal, [source])))


def test_every_key_is_either_identity_or_free(minimal):
    """A new key has to be put on one side here."""
    recipe = load_recipe(minimal)
    texts = REFUSED + ALLOWED + ROWS_REFUSED + ROWS_ALLOWED
    texts += ["packing.path=elsewhere", "packing.pad_cu_seqlens=true"]
    texts += [
        "data.weights=tokens",
        "data.date=2026-11-22",
        "data.learn=last_turn",
        "data.group_by=image",
        "data.columns=vqa",
        "model.adapter=runs/lora/adapter",  # identity: test_adapter_rules
        "data.image_root=photos",  # free: every sample's checksum holds its images
        "data.ignore_columns=[thumbnail]",  # and what its record says
        "training.cuda_graphs=decoder",  # free: test_graph_rules
        "training.cuda_graph_max_sequences=8",
        "training.sentinel_interval=500",  # a run is the same with it
        "training.on_sentinel=warn",
        "training.on_non_finite=skip",  # free: as the limits of bad samples are
        "training.max_skipped_steps=9",
        "training.dump_pixels=true",
        *IMAGES,
        *TRAINABLE,
    ]
    decided = {text.split("=")[0] for text in texts}
    leaves = {
        f"{section}.{key}"
        for section, values in recipe.model_dump().items()
        if isinstance(values, dict)
        for key in values
    }
    of_identity = {".".join(key.split(".")[:2]) for key in identity(recipe)}
    assert {key for key in decided if key.count(".") == 1} <= leaves
    free = {"evaluation", "checkpoint", "logging", "export", "parallelism"}
    undecided = {
        key
        for key in leaves - of_identity
        if key.split(".")[0] not in free and not any(d.startswith(key) for d in decided)
    }
    undecided = {key for key in undecided if not key.startswith("objective.")}
    assert undecided == {"data.test"}, "an objective: test_recipe_objective, test_objective_rules"


def test_engine_and_layout_may_change_together(minimal):
    split = [
        "model.backend=mcore",
        "model.attention=transformer_engine",
        "parallelism.tensor=2",
        "parallelism.sequence=true",
        "parallelism.context=2",
        "parallelism.pipeline=2",
        "parallelism.distributed_optimizer=false",
        "parallelism.overlap=true",
    ]
    hf, mcore = identity(load_recipe(minimal)), identity(load_recipe(minimal, split))
    assert identity_differences(hf, mcore) == []
    assert identity_differences(mcore, hf) == []


def test_identity_is_flat_and_survives_json(minimal):
    mapping = identity(load_recipe(minimal))
    assert mapping["training.seed"] == 0
    assert mapping["data.train.0.path"] == "data/train-*.tar"
    assert mapping["optim.betas.1"] == 0.95
    assert all(value is None or isinstance(value, str | int | float) for value in mapping.values())
    assert json.loads(json.dumps(mapping)) == mapping


def test_differences_are_readable(minimal):
    old = identity(load_recipe(minimal))
    new = identity(
        load_recipe(minimal, ["training.seed=3", "data.train=[data/train-*.tar, b.tar]"])
    )
    assert identity_differences(old, new) == [
        "training.seed: 0 in the run folder, 3 in the recipe",
        "data.train.1.path: missing in the run folder, 'b.tar' in the recipe",
        "data.train.1.weight: missing in the run folder, null in the recipe",
    ]


def test_longer_run_is_allowed_with_a_note_on_the_schedule(minimal):
    old = identity(load_recipe(minimal))
    longer = identity(load_recipe(minimal, ["training.max_steps=200"]))
    assert identity_differences(old, longer) == []
    (note,) = identity_notes(old, longer)
    assert "training.max_steps grows from 100 to 200" in note
    assert identity_notes(old, old) == []


def test_longer_run_at_a_constant_rate_needs_no_note(minimal):
    old = identity(load_recipe(minimal, ["optim.schedule=constant"]))
    longer = {**old, "training.max_steps": 200}
    assert identity_differences(old, longer) == []
    assert identity_notes(old, longer) == []


def test_the_advice_fits_what_differs() -> None:
    run = {"training.max_steps": 60, "training.seed": 1, "data.train.0.path": "a"}
    shorter = identity_hint(run, {**run, "training.max_steps": 1})
    assert shorter == " training.max_steps may only grow: 60 or more."
    other_data = identity_hint(run, {**run, "data.train.0.path": "b"})
    assert "on_data_change: new_era" in other_data and "grow" not in other_data
    assert identity_hint(run, {**run, "training.max_steps": 61, "training.seed": 2}) == ""
