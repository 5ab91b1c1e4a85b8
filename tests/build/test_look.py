"""A look at a recipe: places that are not there, and a run there that cannot go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.recipes import changed, run_settings, small_settings
from typer.testing import CliRunner

from vlmpack.api import resolve
from vlmpack.build.look import missing_places, resume_note
from vlmpack.cli.app import app
from vlmpack.data.plan.state import DataState, Era, alignment_words, check_identity
from vlmpack.errors import RunIdentityError
from vlmpack.recipe import load_recipe
from vlmpack.training.checkpoint.folders import (
    COMPLETE,
    MANIFEST,
    STATE,
    complete_text,
    step_folder,
    write_synced,
)


def test_each_split_has_its_line(tmp_path: Path) -> None:
    recipe = resolve(run_settings(tmp_path), {})
    assert missing_places(recipe) == []
    gone = {"data__train": f"{tmp_path}/no.tar", "data__validation": f"{tmp_path}/none-*.tar"}
    train, validation = missing_places(resolve(run_settings(tmp_path, **gone), {}))
    assert train.startswith(f"data.train: '{tmp_path}/no.tar' matches no file")
    assert validation.startswith(f"data.validation: '{tmp_path}/none-*.tar' matches no file")


OFFLINE = {
    "packing__mode": "offline",
    "packing__max_tokens": 2048,
    "training__micro_batch_size": 1,
}
LORA = {"trainable__language": "lora"}


@pytest.mark.parametrize(
    ("changes", "key", "made", "near"),
    [
        ({"model__path": "{}/modls/tiny"}, "model.path", "models/tiny", "models/tiny"),
        ({"model__path": "{}/modls/tinny"}, "model.path", "Models/Tiny", "Models/Tiny"),
        ({**LORA, "model__adapter": "{}/adapter"}, "model.adapter", "adapters", "adapters"),
        ({"data__image_root": "{}/photo"}, "data.image_root", "photos", "photos"),
        ({**OFFLINE, "packing__path": "{}/pack"}, "packing.path", "packs", "packs"),
        ({"data__train": "{}/tran-*.jsonl"}, "data.train", "train-0.jsonl", "train-0.jsonl"),
        ({"data__train": "{}/dta/x.jsonl"}, "data.train", "data/x.jsonl", "data/x.jsonl"),
        (
            {"data__validation": {"path": "python:own", "name": "v", "image_root": "{}/photo"}},
            "data.validation.v.image_root",
            "photos",
            "photos",
        ),
    ],
)
def test_each_place_has_its_line_and_a_name_like_it(
    tmp_path: Path, changes: dict[str, Any], key: str, made: str, near: str
) -> None:
    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: placed(each) for name, each in value.items()}
        return value.replace("{}", str(tmp_path / "here")) if isinstance(value, str) else value

    (tmp_path / "here").mkdir()
    recipe = resolve(run_settings(tmp_path, **placed(changes)), {})
    (line,) = [line for line in missing_places(recipe) if line.startswith(f"{key}: ")]
    assert "did you mean" not in line, "nothing is there"
    (tmp_path / "here" / made).mkdir(parents=True)
    (line,) = [line for line in missing_places(recipe) if line.startswith(f"{key}: ")]
    assert line.endswith(f"; did you mean '{tmp_path}/here/{near}'?")


def state_of(alignment: int) -> DataState:
    return DataState(0, 0, 3, 3, (3,), (Era(0, {"packing.alignment": alignment, "seed": 1}),))


def saved(run_dir: Path, alignment: int) -> None:
    """A checkpoint of a run that was planned so, of which the data state alone is read."""
    folder = step_folder(run_dir / "checkpoints", 3)
    folder.mkdir(parents=True)
    totals = {"data_state": state_of(alignment).to_json()}
    digest = write_synced(folder / STATE, json.dumps({"totals": totals}))
    listed = {STATE: {"bytes": digest.num_bytes, "sha256": digest.sha256}}
    manifest = write_synced(folder / MANIFEST, json.dumps({"files": listed}))
    write_synced(folder / COMPLETE, complete_text(3, manifest))


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return small_settings(
        tmp_path,
        model__backend="mcore",
        packing__mode="online",
        training__micro_batch_size=1,
        training__global_batch_size=4,
        training__seq_length=240,
    )


@pytest.mark.parametrize(
    ("planned", "context", "said"),
    [
        (
            8,
            8,
            ("of 8, and", "launch to 16", "context 1, 2 or 4.", "packing.alignment: 16", "4 or 8"),
        ),
        (6, 2, ("of 6, and", "launch to 8", "context 1 or 3.", "packing.alignment: 8")),
        (8, 4, ()),
        (8, 1, ()),
        (16, 8, ()),
    ],
)
def test_a_layout_that_a_run_cannot_take_is_said_beforehand(
    settings: dict[str, Any], planned: int, context: int, said: tuple[str, ...]
) -> None:
    recipe = load_recipe(changed(settings, parallelism__context=context))
    assert resume_note(recipe) is None, "no run there"
    saved(Path(recipe.run_dir), planned)
    note = resume_note(recipe)
    assert (note is None) == (not said)
    assert all(part in str(note) for part in said), note


def test_what_begins_anew_or_plans_no_rows_has_no_note(settings: dict[str, Any]) -> None:
    settings = changed(settings, parallelism__context=8)
    saved(Path(settings["run_dir"]), 8)
    assert resume_note(load_recipe(settings)) is not None
    for name, value in (
        ("checkpoint__resume", "never"),
        ("checkpoint__on_data_change", "new_era"),
        ("packing__mode", "none"),
    ):
        assert resume_note(load_recipe(changed(settings, **{name: value}))) is None


def test_check_says_it(settings: dict[str, Any], tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps(changed(settings, parallelism__context=8)))
    arguments = ["recipe", "check", str(recipe), "--world-size", "8"]
    words = alignment_words(8, 16)
    assert words not in CliRunner().invoke(app, arguments).output
    saved(Path(settings["run_dir"]), 8)
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0, told.output
    assert words in told.output


def test_the_refusal_names_the_knob_and_the_layouts() -> None:
    now = {"packing.alignment": 16, "seed": 1}
    with pytest.raises(RunIdentityError) as caught:
        check_identity(state_of(8), now, key="data.train")
    message = str(caught.value)
    assert alignment_words(8, 16) in message
    assert "new_era goes on with rows of the new alignment" in message
    with pytest.raises(RunIdentityError) as caught:
        check_identity(state_of(8), {"packing.alignment": 8, "seed": 2}, key="data.train")
    assert "rounded up" not in str(caught.value)
