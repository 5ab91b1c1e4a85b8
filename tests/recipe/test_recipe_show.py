"""The resolved recipe, the JSON schema, derived values and notes."""

from __future__ import annotations

import json

import pytest

from vlmpack.recipe import derive, derived_rows, dump_recipe, json_schema, load_recipe, notes
from vlmpack.recipe.schema import PackingSection, ParallelismSection

GRAPH_BOUND = "training.cuda_graph_max_sequences"
GRAPHS = [
    "training.cuda_graphs=decoder",
    "packing.mode=online",
    "training.micro_batch_size=1",
    "packing.max_tokens=2048",
]


def test_dump_loads_back_to_an_equal_recipe(write, minimal):
    minimal["data"] |= {
        "train": [{"path": "a-{0..9}.tar", "weight": 1, "name": "1e3"}, {"path": "b", "weight": 2}],
        "validation": "*.tar",
        "epoch_size": 50_000_000,
        "on_error": {"transport": "skip"},
    }
    minimal["optim"] |= {"eps": 1e-12, "betas": [0, 0.5], "max_grad_norm": None}
    minimal["export"] = {"enabled": False}
    recipe = load_recipe(minimal)
    again = load_recipe(write(dump_recipe(recipe)))
    assert again == recipe
    assert again != load_recipe(minimal, ["training.seed=1"])
    assert dump_recipe(again) == dump_recipe(recipe)


@pytest.mark.cases(quick=0.2, slow="*")
@pytest.mark.parametrize(
    "text",
    [
        "2e-3",
        "1_000",
        "null",
        "true",
        "yes",
        "010",
        "0x1F",
        "12:30",
        "2024-01-01",
        "<<",
        "*.tar",
        "&a",
        "!x",
        "- a",
        "a: b",
        "# no",
        "{a}",
        "[a]",
        " x ",
        "a\nb",
        "\t",
        "caf\u00e9",
        "'",
        '"',
        "=",
        "%",
        "@x",
        "`x`",
        "\x07",
        "1.",
        "-.5",
        "+1",
        ".inf",
        "a" * 300 + " b" * 100,
    ],
)
def test_any_text_survives_the_round_trip(write, minimal, text):
    minimal["run_dir"] = text
    recipe = load_recipe(minimal)
    assert recipe.run_dir == text
    assert load_recipe(write(dump_recipe(recipe))) == recipe


def test_dump_has_every_key(minimal):
    recipe = load_recipe(minimal)
    text = dump_recipe(recipe)
    for name, section in recipe.model_dump().items():
        assert f"\n{name}:" in text
        for key in section if isinstance(section, dict) else ():
            assert f"\n  {key}:" in text


def test_schema_describes_every_key():
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert set(schema["required"]) == {"model", "data", "training", "optim", "run_dir"}
    assert len(schema["$defs"]) >= 16
    for name, section in schema["$defs"].items():
        assert section["additionalProperties"] is False, name
        assert section["description"], name
        for key, node in section["properties"].items():
            assert node.get("description") or "$ref" in node, f"{name}.{key}"


def test_schema_allows_every_spelling_of_sources():
    train = json_schema()["$defs"]["DataSection"]["properties"]["train"]
    assert [option.get("type", "source") for option in train["anyOf"]] == [
        "string",
        "source",
        "array",
    ]


@pytest.mark.parametrize(
    ("sizes", "world_size", "data_parallel", "accumulation"),
    [
        ({}, 1, 1, 4),
        ({}, 4, 4, 1),
        ({"tensor": 2}, 4, 2, 2),
        ({"pipeline": 2, "context": 2}, 4, 1, 4),
    ],
)
def test_derived_batch_sizes(minimal, sizes, world_size, data_parallel, accumulation):
    recipe = load_recipe(minimal).model_copy(update={"parallelism": ParallelismSection(**sizes)})
    derived = derive(recipe, world_size)
    assert derived.data_parallel == data_parallel
    assert derived.gradient_accumulation_steps == accumulation
    micro = recipe.training.micro_batch_size
    assert micro * derived.data_parallel * accumulation == recipe.training.global_batch_size


@pytest.mark.parametrize(
    ("sizes", "alignment", "sequence", "row"),
    [
        ({}, 8, 1, 1),
        ({"context": 2}, 8, 4, 4),
        ({"context": 3}, 12, 6, 6),
        ({"context": 8}, 16, 16, 16),
        ({"tensor": 2}, 8, 1, 1),
        ({"tensor": 4, "sequence": True}, 8, 1, 4),
        ({"tensor": 3, "context": 2, "sequence": True}, 8, 4, 12),
        ({"tensor": 8, "context": 2, "sequence": True}, 8, 4, 16),
    ],
)
def test_derived_alignment(minimal, sizes, alignment, sequence, row):
    recipe = load_recipe(minimal).model_copy(update={"parallelism": ParallelismSection(**sizes)})
    derived = derive(recipe, 48)
    assert derived.alignment == alignment
    assert derived.sequence_multiple == sequence
    assert derived.row_multiple == row
    assert derived.row_multiple % derived.sequence_multiple == 0
    assert derived.max_row_tokens % derived.row_multiple == 0
    assert derived.max_row_tokens >= 4 * 512


def test_alignment_of_the_recipe_is_kept(minimal):
    recipe = load_recipe(minimal)
    aligned = recipe.model_copy(update={"packing": PackingSection(alignment=64)})
    assert derive(aligned, 1).alignment == 64


def test_derived_table_has_every_derived_value(minimal):
    recipe = load_recipe(minimal)
    derived = derive(recipe, 2)
    values = [row.value for row in derived_rows(recipe, 2)]
    assert sorted(values) == sorted(getattr(derived, name) for name in derived.__slots__)


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["data.test=t.tar"], "data.test is read only with evaluation.generate: true"),
        (["evaluation.max_samples=3"], "no effect without data.validation"),
        (["evaluation.generate_max_samples=3"], "no effect without evaluation.generate"),
        (["optim.schedule=constant", "optim.min_lr_ratio=0.1"], "optim.min_lr_ratio has no effect"),
        (["data.num_workers=0", "data.prefetch_batches=9"], "data.prefetch_batches has no effect"),
        (["parallelism.sharding=fsdp"], "shards nothing on one process"),
        (
            ["data.storage.credentials.access_key_id=${env:NOT_SET_ANYWHERE}"],
            "data.storage.credentials.access_key_id refers to the environment variable "
            "NOT_SET_ANYWHERE, which is not set here",
        ),
        (
            ["data.validation={path: 'https://host/v.tar?${env:NOT_SET_ANYWHERE}', name: v}"],
            "data.validation.v refers to the environment variable NOT_SET_ANYWHERE",
        ),
        (
            ["model.memory_gib=24", "model.activation_checkpointing=full"],
            "model.memory_gib has no effect without",
        ),
        (
            [*GRAPHS, "training.cuda_graph_max_sequences=3"],
            "training.cuda_graph_max_sequences 3: so few samples of training.seq_length fill at "
            "most 1,536 of a row's 2,048 tokens. Every fuller row runs eagerly. Use auto",
        ),
        (
            ["parallelism.distributed_optimizer=false"],
            "parallelism.distributed_optimizer has no effect with model.backend: hf",
        ),
        (
            ["parallelism.overlap=false"],
            "parallelism.overlap has no effect with model.backend: hf, where DDP and FSDP2 always",
        ),
    ],
)
def test_settings_without_effect_are_noted(minimal, tmp_path, overrides, note):
    (tmp_path / "config.json").write_text("{}")
    minimal["model"]["path"] = str(tmp_path)
    assert notes(load_recipe(minimal)) == []
    (found,) = notes(load_recipe(minimal, overrides))
    assert note in found


@pytest.mark.parametrize("bound", [["packing.max_sequences=3"], [f"{GRAPH_BOUND}=4"]])
def test_a_graph_that_full_rows_fit_is_not_noted(minimal, tmp_path, bound):
    (tmp_path / "config.json").write_text("{}")
    minimal["model"]["path"] = str(tmp_path)
    assert notes(load_recipe(minimal, [*GRAPHS, f"{GRAPH_BOUND}=3", *bound])) == []


def test_a_pipeline_without_enough_micro_batches_is_noted(minimal, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    minimal["model"]["path"] = str(tmp_path)
    pipeline = ["model.backend=mcore", "parallelism.pipeline=2", "parallelism.context=2"]
    assert notes(load_recipe(minimal, pipeline), 8) == []
    (found,) = notes(load_recipe(minimal, pipeline), 16)
    assert "parallelism.pipeline 2 is more than the 1 micro-batch(es) per optimizer step" in found


def test_steps_of_a_fixed_set_of_samples_have_no_number_of_micro_batches(minimal, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    minimal["model"]["path"] = str(tmp_path)
    minimal["training"] |= {"micro_batch_size": 1, "global_batch_size": 6}
    changes = ["packing.mode=online", "model.backend=mcore", "parallelism.pipeline=2"]
    batch = load_recipe(minimal, [*changes, "packing.scope=batch"], world_size=16)
    table = {row.name: row for row in derived_rows(batch, 16)}
    assert table["gradient accumulation"].value == "varies"
    assert table["gradient accumulation"].formula == "the rows of each step's 6 samples / 8"
    assert derive(batch, 16).gradient_accumulation_steps is None
    assert not [note for note in notes(batch, 16) if "micro-batch" in note]
    stream = load_recipe(minimal, [*changes, "training.global_batch_size=8"], world_size=16)
    table = {row.name: row for row in derived_rows(stream, 16)}
    assert table["gradient accumulation"].value == 1
    assert [note for note in notes(stream, 16) if "more than the 1 micro-batch(es)" in note]


def test_sizes_of_a_megatron_run(minimal):
    split = ["tensor=2", "sequence=true", "context=2", "pipeline=2"]
    recipe = load_recipe(
        minimal, ["model.backend=mcore", *(f"parallelism.{size}" for size in split)], world_size=16
    )
    derived = derive(recipe, 16)
    assert (derived.data_parallel, derived.gradient_accumulation_steps) == (2, 2)
    assert (derived.sequence_multiple, derived.row_multiple) == (4, 4)
    assert derived.max_row_tokens == 4 * 512


def test_what_cannot_be_checked_here_is_noted(minimal, tmp_path):
    chosen = {"model.backend": "mcore", "model.attention": "transformer_engine"}
    (engine,) = notes(load_recipe(minimal, chosen))
    rest = "so what the model's family can do, and heads, layers and experts, is unchecked"
    assert notes(load_recipe(minimal)) == [], "a folder that is not here is no note"
    assert engine.startswith("model.attention: transformer_engine is looked for at launch")
    there = {"model.backend": "mcore", "model.path": str(tmp_path)}
    (empty,) = notes(load_recipe(minimal, there))
    assert empty.startswith(f"model.path: {tmp_path} holds no config.json to read, {rest}")
    (of_hf,) = notes(load_recipe(minimal, {"model.path": str(tmp_path)}))
    assert of_hf == empty.replace(", and heads, layers and experts,", "")
    (tmp_path / "config.json").write_text("{}")
    assert notes(load_recipe(minimal, there)) == []
