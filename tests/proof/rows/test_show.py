"""What `data show` says of a batch is what the loader puts into it, down to the pixels."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.recipes import changed, small_settings, write_recipe
from support.shards import TINY_MODEL, read_shard
from typer.testing import CliRunner, Result

from vlmpack.build.look import open_train, planned_batch
from vlmpack.cli.app import app
from vlmpack.data.pipeline import TrainData
from vlmpack.encode import Encoder
from vlmpack.packing.batch import IGNORE_INDEX
from vlmpack.proof.rows.opening import _cost_model, load_bin, view_row
from vlmpack.proof.rows.view import RowView


@pytest.fixture(scope="module")
def settings(tmp_path_factory: Any) -> dict[str, Any]:
    return small_settings(tmp_path_factory.mktemp("show"), training__global_batch_size=8)


@pytest.fixture(scope="module")
def recipe(settings: dict[str, Any]) -> Path:
    return write_recipe(Path(settings["run_dir"]).parent / "recipe.json", settings)


@pytest.fixture(scope="module")
def opened(recipe: Path) -> tuple[TrainData, Encoder]:
    return open_train(recipe)


def shown(opened: tuple[TrainData, Encoder], batch: int, bin_: int) -> RowView:
    train, encoder = opened
    refs = [train.split.ref(number) for number in planned_batch(train, batch, None).bins[bin_]]
    return view_row(*load_bin(train, refs), encoder, "it")


@pytest.mark.parametrize("mode", ["in_batch", "none"])
def test_the_text_is_the_trained_batch(settings: dict[str, Any], tmp_path: Path, mode: str) -> None:
    """Joined again, the runs are the ids that training gets; learnt ones are its labels."""
    values = changed(settings, packing__mode=mode)
    opened = open_train(write_recipe(tmp_path / "r.json", values))
    train, encoder = opened
    steps = list(train.batches(train.start(), rank=0, dp=1, max_steps=2))
    num_images = 0
    for place, micro_batch in enumerate(steps[1].micro_batches):
        found = shown(opened, 1, place)
        batch = micro_batch.batch
        assert [s.key for s in found.samples] == [s.key for s in micro_batch.samples]
        assert (found.num_rows, found.num_columns) == tuple(batch.input_ids.shape)
        for sample in found.samples:
            row = slice(sample.start, sample.start + sample.num_tokens)
            ids, labels = batch.input_ids.flatten()[row], batch.labels.flatten()[row]
            text = "".join(run.text for run in sample.runs if run.kind != "image")
            plain = ids[ids != encoder.placeholder_id].tolist()
            assert text == encoder.tokenizer.decode(plain)
            assert sum(run.num_tokens for run in sample.runs) == sample.num_tokens
            learnt = "".join(run.text for run in sample.runs if run.kind == "learnt")
            targets = labels[labels != IGNORE_INDEX].tolist()
            assert targets and learnt == encoder.tokenizer.decode(targets)
            assert sample.num_labels == len(targets)
            num_images += len(sample.images)
    assert num_images > 4


def test_pictures_are_the_pixels_of_the_file(encoder: Encoder) -> None:
    """An image whose size needs no resizing comes back as it was; others as Pillow resizes them."""
    rule = encoder.image_rule
    grid = rule.grid(80, 48)
    side = rule.patch_size
    exact = (grid[2] * side, grid[1] * side)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (exact[1], exact[0], 3), dtype=np.uint8)
    ramp = np.linspace(0, 255, 90 * 50 * 3, dtype=np.uint8).reshape(50, 90, 3)
    media = rule.preprocess([Image.fromarray(pixels), Image.fromarray(ramp)])
    first, second = rule.pictures(media)
    assert rule.grid(*exact) == grid, "the size is not a fixed point of the rule"
    assert np.array_equal(np.asarray(first), pixels)
    _, h, w = media.grid_thw[1]
    resized = Image.fromarray(ramp).resize((w * side, h * side), Image.Resampling.BICUBIC)
    assert second.size == resized.size != (90, 50)
    difference = np.abs(np.asarray(second, dtype=int) - np.asarray(resized, dtype=int))
    assert difference.max() <= 1


def test_images_of_a_bin_belong_to_their_samples(opened: tuple[TrainData, Encoder]) -> None:
    train, encoder = opened
    files = {s.key: s for s in read_shard(Path(train.config.sources[0].path))}
    compared = 0
    for place in range(2):
        for sample in shown(opened, 0, place).samples:
            if sample.key not in files or not files[sample.key].images:
                continue
            originals = [Image.open(io.BytesIO(d)).convert("RGB") for d in files[sample.key].images]
            alone = encoder.image_rule.pictures(encoder.image_rule.preprocess(originals))
            assert len(alone) == len(sample.images)
            for one, two in zip(alone, sample.images, strict=True):
                assert np.array_equal(np.asarray(one), np.asarray(two))
                compared += 1
    assert compared >= 3


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["data", "show", *map(str, arguments)])


@pytest.mark.slow
def test_the_command_shows_rows_and_keys(recipe: Path, opened: tuple[TrainData, Encoder]) -> None:
    result = invoke(recipe, "--batch", 1, "--row", 1)
    assert result.exit_code == 0, result.output
    keys = [sample.key for sample in shown(opened, 1, 1).samples]
    assert len(keys) == 4
    lines = [line for line in result.output.splitlines() if line.startswith("segment")]
    assert [line.split()[2] for line in lines] == keys
    assert result.output.startswith("row 1 of global batch 1, epoch 0: 4 samples")
    alone = invoke(recipe, "--key", keys[2])
    assert alone.exit_code == 0 and f"segment 0  {keys[2]} " in alone.output
    both = invoke(recipe, "--batch", 1)
    assert both.output.count("of global batch 1") == 2


@pytest.mark.cases(quick=("*4-*", "*5-*"), slow="*1-*")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", 1, "--row", 2), "--row 2: batch 1 has 2 rows"),
        (("--batch", 3), "--batch 3: the run takes 3 steps (training.max_steps 3), so its last"),
        (
            ("--batch", 12, "training.max_steps=null", "training.num_epochs=2"),
            "(training.num_epochs 2), so its last global batch is",
        ),
        (("--key", "nobody"), "no sample 'nobody'"),
        ((), "expected one of --batch N and --key KEY"),
        (("--key", "x", "--row", 1), "--row goes with --batch"),
    ],
)
def test_what_is_not_there_is_named(recipe: Path, arguments: Any, message: str) -> None:
    result = invoke(recipe, *arguments)
    assert result.exit_code != 0 and message in str(result.exception)


def test_a_batch_far_into_the_run_is_that_of_its_epoch(opened: tuple[TrainData, Encoder]) -> None:
    train, _ = opened
    per_epoch = train.steps_per_epoch()
    planned = planned_batch(train, 2 * per_epoch + 1, None)
    assert (planned.position.epoch, planned.position.batch) == (2, 1)
    assert not torch.equal(
        torch.tensor(planned.bins[0]), torch.tensor(planned_batch(train, 1, None).bins[0])
    )


def test_a_model_without_a_size_is_shown_without_its_cost(tmp_path):
    """Training balances tokens there, so looking at a row must not fail."""
    folder = shutil.copytree(TINY_MODEL, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    for name in ("vocab_size", "num_key_value_heads"):
        text.pop(name, None)
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    assert _cost_model(Encoder(TINY_MODEL)) is not None
    assert _cost_model(Encoder(folder)) is None
