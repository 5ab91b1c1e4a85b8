"""What users get wrong: a clear message, a non-zero exit, nothing trained."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.recipes import changed, rewrite, write_recipe
from support.shards import TINY_MODEL

from vlmpack.api import _result
from vlmpack.cli import main
from vlmpack.cli.app import print_result
from vlmpack.training.run_dir import RunDir

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: Any, capsys: Any) -> Run:
    """Run `vlmpack finetune` on a mapping; (exit code, standard error)."""

    def run(settings: dict[str, Any], *overrides: str) -> tuple[int, str]:
        recipe = write_recipe(tmp_path / "recipe.yaml", settings)
        monkeypatch.setattr(sys, "argv", ["vlmpack", "finetune", str(recipe), *overrides])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), capsys.readouterr().err

    return run


@pytest.mark.slow
def test_the_settings_are_good_as_they_are(cli: Run, settings: dict[str, Any]) -> None:
    """Every case below changes one thing of a recipe that runs."""
    code, _ = cli(changed(settings, training__max_steps=1))
    assert code == 0


def test_mistyped_key_and_wrong_type_are_reported_together(
    cli: Run, settings: dict[str, Any], tmp_path: Path
) -> None:
    bad = changed(settings, training__micro_batch_sise=4, training__seq_length="long")
    code, message = cli(bad)
    assert code == 2
    assert "micro_batch_sise" in message
    assert "did you mean 'micro_batch_size'?" in message
    assert "seq_length" in message
    assert "recipe.yaml:" in message


def test_in_batch_packing_of_single_samples_says_why(cli: Run, settings: dict[str, Any]) -> None:
    code, message = cli(changed(settings, training__micro_batch_size=1))
    assert code == 2
    assert "micro_batch_size" in message
    assert "none" in message


def test_missing_shard(cli: Run, settings: dict[str, Any], tmp_path: Path) -> None:
    code, message = cli(changed(settings, data__train=str(tmp_path / "no-{0..3}.tar")))
    assert code != 0
    assert "data.train" in message
    assert "no-" in message


@pytest.mark.slow
def test_truncated_tar(cli: Run, settings: dict[str, Any], shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2 + 100])
    code, message = cli(settings)
    assert code != 0
    assert shard.name in message
    assert "truncated" in message or "ends" in message


def corrupt_first_image(shard: Path) -> str:
    """Cut the first JPEG of a shard in half; its key."""
    found: list[str] = []

    def change(name: str, data: bytes) -> bytes:
        if name.endswith(".jpg") and not found:
            found.append(name.partition(".")[0])
            return data[: len(data) // 2]
        return data

    rewrite(shard, change)
    return found[0]


@pytest.mark.slow
def test_corrupt_jpeg_stops_where_the_recipe_says_raise(
    cli: Run, settings: dict[str, Any], shard: Path
) -> None:
    key = corrupt_first_image(shard)
    bad = changed(settings, data__on_error={"decode": "raise"}, training__max_steps=6)
    code, message = cli(bad)
    assert code != 0
    assert key in message
    assert "image 0" in message


@pytest.mark.slow
def test_corrupt_jpeg_is_skipped_and_listed_by_default(
    cli: Run,
    settings: dict[str, Any],
    shard: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And said: in a line when it happens, in the last lines, and in the run folder."""
    key = corrupt_first_image(shard)
    code, _ = cli(changed(settings, training__max_steps=6))
    assert code == 0
    [line] = [text for text in caplog.messages if text.startswith("skipped ")]
    assert f"1 sample of this launch left out; the last is {key!r} in " in line
    assert "(decode): image 0 ('0." in line and "cannot be decoded" in line
    ledger = Path(settings["run_dir"], "data-errors.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in ledger] == [key]
    result = json.loads(Path(settings["run_dir"], "result.json").read_text())
    assert (result["samples"], result["skipped_samples"]) == (21, 1)
    print_result(_result(RunDir(Path(settings["run_dir"]))))
    assert "1 of the 22 samples that these steps asked for: data" in capsys.readouterr().out


@pytest.mark.slow
def test_unknown_keys_are_named_for_each_split(
    cli: Run, settings: dict[str, Any], shard: Path, tmp_path: Path, caplog: Any
) -> None:
    def with_source(name: str, data: bytes) -> bytes:
        if not name.endswith(".json"):
            return data
        return json.dumps(json.loads(data) | {"source": "web"}).encode()

    other = Path(shutil.copy(shard, tmp_path / "validation.tar"))
    rewrite(other, with_source)
    data = changed(settings, data__validation=str(other), training__max_steps=1)
    assert cli(data)[0] == 0
    [line] = [text for text in caplog.messages if text.startswith("unknown keys")]
    assert "not read in data.validation: 'source' (22 records) (data.unknown_keys: refuse" in line
    code, message = cli(changed(data, data__unknown_keys="refuse", run_dir=str(tmp_path / "no")))
    assert code == 1 and "data.validation: records have keys that are not read" in message


@pytest.mark.slow
def test_image_count_that_differs_from_the_placeholders(
    cli: Run, settings: dict[str, Any], shard: Path
) -> None:
    dropped: list[str] = []

    def drop_one_image(name: str, data: bytes) -> bytes | None:
        if name.endswith(".0.jpg") and not dropped:
            dropped.append(name)
            return None
        return data

    rewrite(shard, drop_one_image)
    code, message = cli(settings)
    assert code != 0
    assert dropped[0].partition(".")[0] in message
    assert "image" in message


@pytest.mark.slow
def test_sample_longer_than_seq_length(cli: Run, settings: dict[str, Any]) -> None:
    code, message = cli(changed(settings, training__seq_length=60))
    assert code != 0
    assert "seq_length" in message
    assert "over_long" in message


def test_empty_split(cli: Run, settings: dict[str, Any], shard: Path) -> None:
    shard.write_bytes(bytes(10240))
    code, message = cli(settings)
    assert code != 0
    assert "data.train" in message or shard.name in message


@pytest.mark.slow
def test_run_folder_of_another_run(cli: Run, settings: dict[str, Any]) -> None:
    assert cli(changed(settings, training__max_steps=1))[0] == 0
    code, message = cli(changed(settings, training__max_steps=1, training__seed=9))
    assert code != 0
    assert "training.seed: 3 in the run folder, 9 in the recipe" in message


@pytest.mark.slow
def test_model_folder_without_weights(cli: Run, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in TINY_MODEL.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    code, message = cli(changed(settings, model__path=str(folder)))
    assert code != 0
    assert "model.path" in message
    assert "no weights" in message


def test_model_folder_that_is_not_there(cli: Run, settings: dict[str, Any], tmp_path: Path) -> None:
    code, message = cli(changed(settings, model__path=str(tmp_path / "nowhere")))
    assert code != 0
    assert "model.path" in message


def test_run_folder_that_cannot_be_written(
    cli: Run, settings: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    code, message = cli(changed(settings, run_dir=str(tmp_path / "file" / "run")))
    assert code != 0
    assert "run_dir" in message
    assert "cannot be written" in message


@pytest.mark.slow
def test_half_of_the_samples_bad_stops_the_run(
    cli: Run, settings: dict[str, Any], shard: Path
) -> None:
    """More than ten in a window of 10,000 is over the budget."""

    def cut_every_image(name: str, data: bytes) -> bytes:
        return data[: len(data) // 2] if name.endswith(".jpg") else data

    rewrite(shard, cut_every_image)
    code, message = cli(changed(settings, training__max_steps=6))
    assert code != 0
    assert "too damaged" in message
    assert shard.name in message
