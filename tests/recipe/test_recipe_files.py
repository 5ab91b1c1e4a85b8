"""The recipes that ship with the repository load, and say what they claim to say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.published_names import PUBLISHED_CONFIGS
from support.published_recipes import PUBLISHED

from vlmpack.recipe import derive, identity, identity_differences, load_recipe, notes

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes"
FILES = sorted(FOLDER.glob("*.yaml"))

QWEN = {
    "models/Qwen2.5-VL-3B-Instruct": {
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_hidden_layers": 36,
        "intermediate_size": 11008,
    },
    "models/Qwen2.5-VL-7B-Instruct": {
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 28,
        "intermediate_size": 18944,
    },
}
"""Sizes of the models that are not in the repository."""


def header(file: Path) -> str:
    """The comment at the top of a recipe."""
    text = file.read_text()
    return text[: text.index("\nmodel:")]


def place(file: Path) -> str:
    """The folder that its header's commands find it in: `recipe new` writes one beside the data."""
    return "" if file.name.startswith("my-folder") else "recipes/"


def world_size(file: Path) -> int:
    """Processes that the command in a recipe's header starts."""
    sizes = re.findall(r"--(?:nnodes|nproc-per-node) (\d+)", header(file))
    return int(sizes[0]) * int(sizes[-1] if len(sizes) == 2 else 1) if sizes else 1


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with the config.json of every model that a recipe names."""
    for name, sizes in QWEN.items():
        (tmp_path / name).mkdir(parents=True)
        config = {"model_type": "qwen2_5_vl"} | sizes
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    for entry in PUBLISHED.values():
        folder = tmp_path / entry.folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(PUBLISHED_CONFIGS[entry.model]))
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    return tmp_path


def test_there_are_recipes():
    assert {"digits-demo.yaml", "digits-padded.yaml", "qwen2_5_vl-3b-hf.yaml"} <= {
        file.name for file in FILES
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_recipe_loads_without_notes(file, models):
    processes = world_size(file)
    recipe = load_recipe(file, world_size=processes, base_dir=models)
    assert notes(recipe, processes) == []
    assert (Path(recipe.model.path) / "config.json").is_file() or recipe.model.backend == "hf"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_recipe_uses_all_its_processes(file):
    processes = world_size(file)
    recipe = load_recipe(file)
    sizes, layout = derive(recipe, processes), recipe.parallelism
    copy = layout.tensor * layout.pipeline * layout.context
    assert sizes.data_parallel * copy == processes
    if sizes.gradient_accumulation_steps is None:  # rows of a batch of samples: as many as it takes
        assert recipe.packing.scope == "batch"
        return
    micro = recipe.training.micro_batch_size
    assert (
        sizes.gradient_accumulation_steps * micro * sizes.data_parallel
        == recipe.training.global_batch_size
    )
    if steps := re.search(r"(\d+) accumulation steps", file.read_text()):
        assert sizes.gradient_accumulation_steps == int(steps[1])
    if copies := re.search(r"(\d+) model cop", file.read_text()):
        assert sizes.data_parallel == int(copies[1])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_commands_in_the_comments_work(file):
    commands = re.findall(rf"^#.* finetune {place(file)}(\S+)(.*)$", file.read_text(), re.MULTILINE)
    assert commands
    for name, overrides in commands:
        assert name == file.name
        load_recipe(FOLDER / name, overrides.split())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_recipes_for_gpus_say_that_they_have_not_run_on_any(file):
    if file.name.startswith(("digits", "text")):
        assert world_size(file) <= 2
    else:
        assert "NOT YET RUN ON GPUS" in header(file)
        assert f"--world-size {world_size(file)}`" in header(file)


def test_every_recipe_that_names_a_model_of_the_hub_says_how_to_get_it():
    found = 0
    for file in FILES:
        if not (model := load_recipe(file).model.path).startswith("models/"):
            continue
        command = re.search(r"^#   hf download (\S+) --local-dir (\S+)$", header(file), re.M)
        assert command is not None, file.name
        owner, _, name = command[1].partition("/")
        assert (owner, f"models/{name}", command[2]) in {
            ("Qwen", model, model),
            ("google", model, model),
        }
        assert command.end() < header(file).index(f"finetune {place(file)}{file.name}")
        found += 1
    assert found >= len(PUBLISHED)


def nowhere(pages: str) -> list[str]:
    """Recipes that these pages do not name."""
    return [file.stem for file in FILES if not re.search(rf"{file.stem}(?![\w-])", pages)]


def test_every_recipe_is_named_in_a_page():
    pages = "".join(page.read_text() for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")))
    assert nowhere(pages) == []
    cut = re.sub(r"digits-cp2|qwen2_5_vl-3b-mcore-8gpu", "-", pages)
    assert nowhere(cut) == ["digits-cp2", "qwen2_5_vl-3b-mcore-8gpu"]


def test_every_recipe_for_a_published_size_is_in_the_tests():
    named = {load_recipe(file).model.path: file.stem for file in FILES}
    assert {entry.folder for entry in PUBLISHED.values()} == {*named} - {*QWEN} - {
        path for path in named if not path.startswith("models/")
    }
    assert {*PUBLISHED} <= {file.stem for file in FILES}


def test_every_recipe_has_its_own_run_folder():
    folders = [load_recipe(file).run_dir for file in FILES]
    assert len(set(folders)) == len(folders)


def test_padded_twin_differs_in_packing_alone():
    demo, padded = (
        identity(load_recipe(FOLDER / name)) for name in ("digits-demo.yaml", "digits-padded.yaml")
    )
    assert identity_differences(demo, padded) == [
        "packing.mode: 'in_batch' in the run folder, 'none' in the recipe"
    ]


def test_the_hybrid_is_trained_as_the_demo():
    demo, hybrid = (
        identity(load_recipe(FOLDER / name)) for name in ("digits-demo.yaml", "digits-qwen3_5.yaml")
    )
    (difference,) = identity_differences(demo, hybrid)
    assert difference.startswith("model.path: 'assets/tiny-qwen2_5_vl' in the run folder,")


@pytest.mark.parametrize(
    ("name", "size"), [("tp2", "tensor"), ("cp2", "context"), ("pp2", "pipeline")]
)
def test_megatron_twins_are_the_demo_on_two_processes(name, size):
    file = FOLDER / f"digits-{name}.yaml"
    demo, twin = load_recipe(FOLDER / "digits-demo.yaml"), load_recipe(file)
    assert identity_differences(identity(demo), identity(twin)) == []
    assert world_size(file) == 2
    assert getattr(twin.parallelism, size) == 2
    assert derive(twin, 2).data_parallel == 1
    assert twin.evaluation == demo.evaluation


def test_more_nodes_are_the_same_run():
    for model in ("3b", "7b"):
        one, two = (
            load_recipe(FOLDER / f"qwen2_5_vl-{model}-mcore-{nodes}.yaml")
            for nodes in ("8gpu", "2x8gpu")
        )
        assert identity_differences(identity(one), identity(two)) == []


def test_memory_estimates_are_sums():
    """Comments count too: each estimate's parts add up to what it says."""
    found = 0
    for file in FILES:
        if "Memory per GPU" not in header(file):
            continue
        *parts, total = map(float, re.findall(r" ([\d.]+) GB$", header(file), re.MULTILINE))
        assert abs(sum(parts) - total) <= 0.5, file.name
        found += 1
    assert found == 3
