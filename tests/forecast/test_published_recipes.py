"""The recipes for models of published sizes: checked, planned, and in the table of docs/gpu.md."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from support.published_gemma4 import CONFIGS
from support.published_recipes import PUBLISHED, placed, published_model
from support.shards import ROOT
from typer.testing import CliRunner

from vlmpack.cli.app import app

GIB = 1 << 30


def said(*arguments):
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert found.exit_code == 0, (found.output, found.exception)
    return found.output


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """A recipe's published model."""
    made = {}

    def folder(name):
        entry = PUBLISHED[name]
        if entry.model not in made:
            made[entry.model] = published_model(entry, tmp_path_factory.mktemp("m") / "model")
        return made[entry.model]

    return folder


LEAST_MEMORY = "model.activation_checkpointing=full"


def plan_of(name, model, tmp_path, *more):
    """What `vlmpack plan --full-rows --json` says of a recipe."""
    entry, file = PUBLISHED[name], tmp_path / "plan.json"
    given = placed(entry, model, tmp_path)
    recipe = ROOT / f"recipes/{name}.yaml"
    said("plan", recipe, *given, LEAST_MEMORY, "--full-rows", "--json", file, *more)
    return json.loads(file.read_text(encoding="utf-8"))


def without_weights(model, folder):
    """What is there after `hf download --exclude '*.safetensors'`."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


@pytest.mark.cases(slow=("qwen3_6-27b-mcore-8gpu", "qwen3_5-0.8b-captured-8gpu"))
@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_checked_and_planned(tmp_path, model_of, name):
    entry, recipe = PUBLISHED[name], ROOT / f"recipes/{name}.yaml"
    world = ("--world-size", entry.processes)
    given = placed(entry, model_of(name), tmp_path)
    assert "OK" in said("recipe", "check", recipe, *given, *world)
    bare = without_weights(model_of(name), tmp_path / "bare")
    content = plan_of(name, bare, tmp_path, *world)
    assert "as transformers builds it" in content["memory"]["counted_from"]
    assert content["world_size"] == entry.processes
    assert (content["traffic"] is None) == (entry.processes == 1)
    row = re.search(rf"^\| \[?`?{re.escape(name)}.*$", (ROOT / "docs/gpu.md").read_text(), re.M)
    memory = content["memory"]["total"] / GIB
    print(f"\n{name}: {memory:.1f} GiB")
    assert row is not None
    assert f"| {entry.processes} | {memory:.0f} GiB |" in row[0]
    assert memory < 75, "of 80 GB"


@pytest.mark.soak
@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_planned_without_its_weights(tmp_path, model_of, name):
    """As docs/plan.md says to repeat docs/gpu.md's table: the figures of the headers."""
    bare = without_weights(model_of(name), tmp_path / "bare")
    if PUBLISHED[name].twin == "gemma4":
        config = json.loads((bare / "config.json").read_text(encoding="utf-8"))
        config["audio_config"] = CONFIGS["E4B"]["audio_config"]
        (bare / "config.json").write_text(json.dumps(config), encoding="utf-8")
    whole, built = (
        plan_of(name, model, tmp_path, "--world-size", PUBLISHED[name].processes)
        for model in (model_of(name), bare)
    )
    headers, counted = whole["memory"].pop("counted_from"), built["memory"].pop("counted_from")
    assert "header" in headers and "as transformers builds it" in counted
    if PUBLISHED[name].twin == "gemma4":  # the headers here are without its audio tower
        audio = built["memory"]["total"] - whole["memory"]["total"]
        assert 0 < audio < 4 * 0.4e9, "its parameters, in float32"
        return
    assert built["memory"] == whole["memory"]
    assert built["traffic"] == whole["traffic"]


@pytest.mark.slow
def test_the_pages_of_long_rows_say_what_plan_says(tmp_path, model_of):
    """With half of the row frames, as the recipe bounds them, and with all of it."""
    name, kept = "qwen3_vl-8b-128k-cp8", "model.activation_checkpointing=selective"
    bare = without_weights(model_of(name), tmp_path / "bare")
    half, whole = (
        plan_of(name, bare, tmp_path, "--world-size", 8, kept, *more)["memory"]["total"] / GIB
        for more in ((), ("packing.max_vision_patches=524288",))
    )
    page = " ".join((ROOT / "docs/long-context.md").read_text().split())
    assert (
        f"`plan` says {half:.1f} GiB. If all tokens were frames, it would be {whole:.1f}." in page
    )
    assert f"`vlmpack plan` says {half:.1f} GiB" in (ROOT / f"recipes/{name}.yaml").read_text()


@pytest.mark.slow
def test_the_page_of_64_and_512_is_what_plan_says(tmp_path, model_of):
    """docs/megatron.md, by the command that stands there."""
    name, page = "qwen3_6-27b-mcore-8gpu", (ROOT / "docs/megatron.md").read_text()
    command = " ".join(re.search(r"vlmpack plan[^`]*?--world-size 64[^`]*", page)[0].split())
    more = [word for word in command.split() if re.match(r"(packing|training)\.", word)]
    assert len(more) == 2 and "--full-rows" in command and name in command
    bare = without_weights(model_of(name), tmp_path / "bare")
    found = []
    for world, batch in ((64, ()), (512, ("training.global_batch_size=512",))):
        traffic = plan_of(name, bare, tmp_path, *more, *batch, "--world-size", world)["traffic"]
        found.append(
            {
                (part["what"], part["kind"]): f"{part['calls']:,} | {part['sent'] / 1e9:.2f} GB"
                for part in traffic["parts"]
            }
        )
    few, many = found
    del few["norms", "all-reduce"]
    assert few
    for key, cells in few.items():
        both = rf"\| {re.escape(cells)} \| [\d,]+ \| {re.escape(many[key])} \|"
        assert re.search(both, page), key
