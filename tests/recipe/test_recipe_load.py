"""What loading reports: every problem, at its place, with the way out."""

from __future__ import annotations

import os
import re

import pytest
from support.shards import ROOT

from vlmpack.errors import RecipeError, VlmpackError
from vlmpack.recipe import Recipe, json_schema, load_recipe
from vlmpack.recipe.messages import all_keys, foreign_keys
from vlmpack.recipe.schema import FACTS


def load_problems(path, *args, **options):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, *args, **options)
    return caught.value.problems


def test_a_file_and_the_same_mapping_give_equal_recipes(write, good_text, minimal):
    assert load_recipe(write(good_text)) == load_recipe(minimal)


def test_a_recipe_is_frozen_and_hashable(minimal):
    recipe = load_recipe(minimal)
    with pytest.raises(ValueError, match="frozen"):
        recipe.training.max_steps = 5
    assert hash(recipe) == hash(load_recipe(minimal))


def test_loading_leaves_the_callers_mapping_alone(minimal):
    before = repr(minimal)
    load_recipe(minimal, ["training.max_steps=7", "evaluation.batch_size=1"])
    assert repr(minimal) == before


def test_all_problems_are_reported_at_once(write):
    path = write(
        "model: {path: 3, backend: hff}\n"
        "data:\n"
        "  train: [a.tar, {wieght: 1}]\n"
        "  on_error: {decode: ignore}\n"
        "training:\n"
        "  micro_batch_size: eight\n"
        "  micro_batch_size: 4\n"
        "optim: !!python/name:os.system {lr: -1}\n"
        "packing: {mode: offlin}\n"
        "parallelism: {tensor: 2}\n"
        "packin: 1\n"
    )
    problems = load_problems(path, ["optim.eps=small", "nonsense"])
    text = "\n".join(problems)
    for line, key in [
        (1, "model.path"),
        (1, "model.backend"),
        (3, r"data.train\[1\].wieght"),
        (3, r"data.train\[1\].path"),
        (4, "data.on_error.decode"),
        (5, "training.seq_length"),
        (5, "training.global_batch_size"),
        (7, "training.micro_batch_size"),
        (8, "optim"),
        (9, "packing.mode"),
        (11, "packin"),
    ]:
        assert re.search(rf"recipe\.yaml:{line}: {key}: ", text), (line, key, text)
    assert "override 'nonsense': expected key=value" in text
    assert "recipe.yaml: run_dir: required" in text


def test_problems_come_in_the_order_of_the_file(write, good_text):
    text = good_text.replace("lr: 1e-3", "lr: x").replace("path: models", "pat: models")
    lines = [
        int(match[1])
        for problem in load_problems(write(text + "zzz: 1\n"))
        if (match := re.search(r"yaml:(\d+):", problem))
    ]
    assert len(lines) >= 3
    assert lines == sorted(lines)


def test_unknown_key_names_line_and_suggestion(write, good_text):
    path = write(good_text.replace("micro_batch_size", "micro_batch_sizee"))
    expected = (
        f"{path}:6: training.micro_batch_sizee: unknown key; did you mean 'micro_batch_size'?"
    )
    assert expected in load_problems(path)


@pytest.mark.cases(quick=0.2, slow="*")
@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("data.lr", "'lr' belongs to 'optim'"),
        ("seq_length", "'seq_length' belongs to 'training'"),
        ("optim.learning_rate", "did you mean 'lr'?"),
        ("training.learning_rate", "did you mean 'optim.lr'?"),
        ("training.gradient_accumulation_steps", "not set but derived: global_batch_size /"),
        ("data.interval_steps", "'evaluation' or 'checkpoint' or 'logging'"),
        ("packing.weight_decy", "did you mean 'optim.weight_decay'?"),
        ("packing.qqqq", "known keys here: mode, max_tokens"),
        ("data.on_error.decoding", "did you mean 'decode'?"),
        ("trainable.lora.r", "did you mean 'rank'?"),
        ("trainable.lora.lora_alpha", "did you mean 'alpha'?"),
        ("trainable.lora.target_modules", "did you mean 'targets'?"),
        ("lora_r", "did you mean 'trainable.lora.rank'?"),
        ("packing.packing", "did you mean 'mode'? It is none, in_batch, online or offline"),
        ("optim.warmup_ratio", "did you mean 'warmup_steps'? It is optimizer steps: the ratio ti"),
        ("training.warmup_ratio", "did you mean 'optim.warmup_steps'? It is optimizer steps: the"),
        ("optim.min_lr", "did you mean 'min_lr_ratio'? It is a share of the peak, min_lr / lr"),
        ("training.eval_steps", "did you mean 'evaluation.interval_steps'?"),
        ("trainable.freeze_vit", "did you mean 'vision'? It is frozen, full or lora"),
        ("trainable.lora.dim", "did you mean 'rank'?"),
        ("peft.dim", "did you mean 'trainable.lora.rank'?"),
        ("peft.alpha", "did you mean 'trainable.lora.alpha'?"),
        ("peft.target_modules", "did you mean 'trainable.lora.targets'?"),
        ("dataset.pack_sequences_in_batch", "did you mean 'packing.mode'? It is in_batch for true"),
        ("dataset.enable_in_batch_packing", "did you mean 'packing.mode'? It is in_batch for true"),
        ("dataset.seq_length", "'seq_length' belongs to 'training'"),
        ("dataset.qqqq", "no knob of that name; data has most of what is in dataset"),
        ("train.train_iters", "did you mean 'training.max_steps'?"),
        ("train.exit_signal_handler", "it is not there: always: SIGTERM saves"),
        ("comm_overlap.tp_comm_overlap", "it is not there: collectives of tensor parallelism run"),
        ("parallelism.virtual_pipeline_model_parallel_size", "it is not there: parallelism.pipel"),
        ("parallelism.virtual_pipeline", "it is not there: parallelism.pipeline has one stage"),
        ("parallelism.expert_tensor_parallel_size", "it is not there: experts are whole"),
        ("ddp.overlap_grad_reduce", "did you mean 'parallelism.overlap'?"),
        ("ddp.use_distributed_optimizer", "did you mean 'parallelism.distributed_optimizer'?"),
        ("ddp.average_in_collective", "it is not there: always false"),
        ("mixed_precision", "did you mean 'model.dtype'? It is bfloat16 or float32"),
        ("checkpoint.save", "did you mean 'run_dir'? It is the folder of the run"),
        ("checkpoint.load", "did you mean 'run_dir'? It is the folder of the run that goes on"),
        ("optimizer.lr", "did you mean 'optim.lr'?"),
        ("optimizer.adam_beta1", "did you mean 'optim.betas'? It is the pair"),
        ("rng.seed", "did you mean 'training.seed'?"),
        ("validation.eval_interval", "did you mean 'evaluation.interval_steps'?"),
        ("model.cross_entropy_loss_fusion", "it is not there: head and loss are one function"),
    ],
)
def test_unknown_key_advice(problems_of, key, advice):
    (problem,) = problems_of({key: 1})
    assert f"{key}: unknown key; " in problem
    assert advice in problem


def test_each_key_of_a_foreign_section_has_its_line(write, good_text):
    lines = good_text.count("\n")
    path = write(f"{good_text}peft:\n  dim: 1\n  alpha: 2\n")
    assert [line.partition(": unknown key")[0] for line in load_problems(path)] == [
        f"{path}:{lines + 2}: peft.dim",
        f"{path}:{lines + 3}: peft.alpha",
    ]


def test_a_source_in_the_wrong_place_is_no_foreign_section(problems_of):
    (problem,) = problems_of({"train.path": "a.tar"})
    assert "train: unknown key; 'train' belongs to 'data'" in problem


def test_no_key_is_both_absent_and_elsewhere(problems_of):
    foreign = foreign_keys()
    assert not foreign.unsupported.keys() & (foreign.fields.keys() | foreign.derived.keys())
    known = {name for names in all_keys(json_schema()).values() for name in names}
    assert set(foreign.sections.values()) <= known
    assert not {name.rpartition(".")[2] for name in known} & foreign.unsupported.keys()


def test_every_advised_key_exists():
    """A renamed field would leave advice to a key that is none."""
    known = set()

    def collect(node, schema, prefix):
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        for name, inner in node.get("properties", {}).items():
            known.add(f"{prefix}{name}")
            collect(inner, schema, f"{prefix}{name}.")

    schema = json_schema()
    collect(schema, schema, "")
    assert len(known) > 80
    foreign = foreign_keys()
    assert set(foreign.fields.values()) <= known
    assert foreign.values.keys() <= foreign.fields.keys()


def test_dotted_key_in_a_file_is_explained(write, good_text):
    (problem,) = load_problems(write(good_text + "training.seed: 3\n"))
    assert "write 'seed' below 'training:'" in problem


@pytest.mark.cases(quick=0.2, slow="*")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.micro_batch_size=eight", "expected an integer >= 1, found 'eight'"),
        ("training.micro_batch_size='8'", "expected an integer >= 1, found '8'"),
        ("training.micro_batch_size=8.0", "expected an integer >= 1, found 8.0"),
        ("training.micro_batch_size=true", "expected an integer >= 1, found true"),
        ("training.micro_batch_size=0", "expected an integer >= 1, found 0"),
        ("training.micro_batch_size=", "expected an integer >= 1, found null"),
        ("training.seed=-1", "expected an integer >= 0 and <= 4.29497e+09, found -1"),
        ("data.num_workers=1.5", "expected an integer >= 0 or 'auto', found 1.5"),
        ("optim.lr=true", "expected a number > 0, found true"),
        ("optim.lr=.nan", "expected a number > 0, found '.nan'"),
        ("optim.lr=1e999", "expected a number > 0, found inf"),
        ("optim.betas=[0.9]", "expected a list of 2, each a number >= 0 and < 1"),
        ("optim.betas=[0.9, 1]", "expected a number >= 0 and < 1, found 1"),
        ("optim.max_grad_norm=0", "expected a number > 0 or null, found 0"),
        ("evaluation.generate=yes", "expected true or false, found 'yes'"),
        ("evaluation.generate=1", "expected true or false, found 1"),
        ("run_dir=3", "expected a string that is not empty, found 3"),
        ("run_dir=''", "expected a string that is not empty, found ''"),
        ("export=true", "expected a mapping (enabled, weights, dtype), found true"),
        ("packing.max_sequences=0", "max_sequences: expected an integer >= 1 or 'auto', found 0"),
        ("packing.max_sequences=many", "expected an integer >= 1 or 'auto', found 'many'"),
        ("packing.max_sequences=Auto", "'auto', found 'Auto'; did you mean 'auto'?"),
        ("model.activation_checkpointing=ful", "found 'ful'; did you mean 'full'?"),
        (
            "packing=in_batch",
            "expected a mapping (mode, max_tokens, max_vision_patches,",
        ),
        (
            "data.train=[]",
            "(path, columns, image_root, weight, name) or a list of these, found an empty list",
        ),
        ("data.validation=[]", "or a list of these or null, found an empty list"),
        ("data.train=[3]", "found 3"),
        ("data.train={path: a.tar, name: 'a b'}", "expected a name of letters, digits"),
        ("data.train={path: a.tar, weight: 0}", "expected a number > 0 or null, found 0"),
    ],
)
def test_wrong_values_are_not_coerced(problems_of, override, message):
    (problem,) = problems_of([override])
    assert message in problem


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("optim.lr=1", 1),
        ("optim.lr=2e-3", 0.002),
        ("optim.lr=1.5E-4", 0.00015),
        ("optim.lr=.5", 0.5),
        ("optim.lr=1_000.0", 1000.0),
    ],
)
def test_numbers_may_be_written_the_usual_ways(minimal, override, found):
    assert load_recipe(minimal, [override]).optim.lr == found


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("packing.mode=inbatch", f"'inbatch' is not one of {', '.join(FACTS)}; did"),
        ("packing.mode=In-Batch", "did you mean 'in_batch'?"),
        ("model.dtype=bf16", "did you mean 'bfloat16'?"),
        ("logging.trackers=[tensorbord]", "did you mean 'tensorboard'?"),
        ("data.on_error.decode=warn", "'warn' is not one of raise, skip"),
        ("packing.mode=null", "null is not one of none, in_batch"),
    ],
)
def test_allowed_values_are_listed(problems_of, override, message):
    (problem,) = problems_of([override])
    assert message in problem


@pytest.mark.parametrize(
    ("section", "key", "example"),
    [
        ("model", "path", "models/Qwen2.5-VL-3B-Instruct"),
        ("data", "train", "data/train-*.tar"),
        ("training", "seq_length", "4096"),
        ("optim", "lr", "1e-05"),
    ],
)
def test_missing_key_says_what_to_add(minimal, section, key, example):
    del minimal[section][key]
    (problem,) = load_problems(minimal)
    assert problem == (
        f"{section}.{key}: required, but missing; add '{key}: {example}' below '{section}:'"
    )


def test_missing_section_names_its_missing_keys(minimal):
    del minimal["optim"], minimal["run_dir"]
    problems = load_problems(minimal)
    assert problems == (
        "optim.lr: required, but missing; add 'lr: 1e-05' below 'optim:'",
        "run_dir: required, but missing; add 'run_dir: runs/first' at the top",
    )


def test_section_without_keys_has_its_defaults(write, good_text):
    assert load_recipe(write(good_text + "evaluation:\n")) == load_recipe(write(good_text))


def test_one_mistake_is_one_problem(write, good_text):
    """A value that the YAML stage refused is not reported again by the types or the rules."""
    assert len(load_problems(write(good_text.replace("100", "*steps")))) == 1
    assert len(load_problems(write(good_text.replace("100", "!!str 100")))) == 1


def test_rules_run_beside_type_errors_of_other_sections(problems_of):
    problems = problems_of({"optim.lr": "x", "training.micro_batch_size": 1, "run_dir": "~/x"})
    assert [problem.split(": ")[1] for problem in problems] == [
        "optim.lr",
        "training.micro_batch_size",
        "run_dir",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"# only a comment\n", "the file is empty"),
        (b"- a\n- b\n", "expected sections at the top (model, data,"),
        (b"hello\n", "found 'hello'"),
        (b"a: \xff\n", "recipe.yaml:1: not UTF-8 text"),
        (b"a: [1\nb: 2\n", "recipe.yaml:2: not valid YAML"),
        (b"a: b: c\n", "recipe.yaml:1: not valid YAML"),
        (b"x" * 1_000_001, "larger than 1000000 bytes"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    (problem,) = load_problems(path)
    assert message in problem
    assert str(path) in problem


def test_missing_file_and_folder(tmp_path):
    assert "no such file" in load_problems(tmp_path / "none.yaml")[0]
    assert "cannot be read" in load_problems(tmp_path)[0]


def test_byte_order_mark_is_skipped(tmp_path, good_text):
    path = tmp_path / "recipe.yaml"
    path.write_text(good_text, encoding="utf-8-sig")
    assert load_recipe(path).training.max_steps == 100


def test_keys_that_are_not_strings(write, good_text, minimal):
    assert "recipe.yaml:13: 7: unknown key" in load_problems(write(good_text + "7: 1\n"))[0]
    assert any("7" in problem for problem in load_problems({**minimal, 7: 1}))


def test_recipe_error_is_a_user_error_with_its_own_exit_code(tmp_path):
    with pytest.raises(VlmpackError) as caught:
        load_recipe(tmp_path / "none.yaml")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("written", "paths", "names"),
    [
        ("a/train-*.tar", ["a/train-*.tar"], ["a-train"]),
        ({"path": "x.tar", "name": "mine"}, ["x.tar"], ["mine"]),
        (["coco/{000..009}.tar", {"path": "charts/*.tar"}], None, ["coco", "charts"]),
    ],
)
def test_sources_have_one_form(minimal, written, paths, names):
    minimal["data"]["train"] = written
    train = load_recipe(minimal).data.train
    assert [source.name for source in train] == names
    assert paths is None or [source.path for source in train] == paths


def test_a_recipe_can_be_loaded_again_with_overrides(minimal):
    recipe = load_recipe(minimal)
    changed = load_recipe(recipe, ["training.max_steps=5"])
    assert isinstance(changed, Recipe)
    assert changed.training.max_steps == 5
    assert load_recipe(recipe) == recipe


def test_base_dir_moves_relative_paths_only(minimal, tmp_path):
    minimal["data"] |= {"train": ["a-*.tar", "/abs/b.tar"], "validation": "v.tar"}
    assert load_recipe(minimal).model.path == "models/tiny"
    moved = load_recipe(minimal, base_dir=tmp_path)
    assert moved.model.path == str(tmp_path / "models/tiny")
    assert [source.path for source in moved.data.train] == [str(tmp_path / "a-*.tar"), "/abs/b.tar"]
    assert moved.data.validation is not None
    assert moved.data.validation[0].path == str(tmp_path / "v.tar")
    assert (moved.data.test, moved.data.index_dir) == (None, None)
    assert moved.run_dir == str(tmp_path / "runs/test")


@pytest.mark.parametrize(
    ("cores", "ranks", "workers"), [(1, 1, 1), (2, 1, 1), (6, 2, 2), (128, 8, 8), (4, 8, 1)]
)
def test_workers_follow_the_cores_of_a_rank(minimal, monkeypatch, cores, ranks, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert load_recipe(minimal).data.workers == workers
    for given in (0, 5):
        assert load_recipe(minimal, [f"data.num_workers={given}"]).data.workers == given


def test_workers_that_are_no_number_are_refused(minimal):
    (problem,) = load_problems(minimal, ["data.num_workers=many"])
    assert "data.num_workers: expected an integer >= 0 or 'auto'" in problem


@pytest.mark.parametrize(
    ("box", "said"),
    [
        ("({x1},{y1})", r"expected each of {x1}, {y1}, {x2}, {y2} once"),
        ("{x1},{y1},{x2},{x2}", r"expected each of"),
        ("{x1.__class__},{y1},{x2},{y2}", r"expected each of"),
        ("{x1}{y1}{x2}{y2}", r"expected a text between {x1}.*found '{x1}{y1}"),
        ("{x1", r"expected a text with {x1}, {y1}, {x2}, {y2}: expected '}'"),
    ],
)
def test_a_form_of_boxes_says_what_it_lacks(box: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe(
            ROOT / "recipes/digits-lora.yaml",
            ["data.coordinates.space=norm", f"data.coordinates.box='{box}'"],
        )
