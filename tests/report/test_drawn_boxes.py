"""Boxes are drawn where they are in what the model sees: around the red block of each picture."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from support.families import tiny_family_folder
from support.recipes import small_settings, write_recipe
from support.shards import TINY_MODEL
from typer.testing import CliRunner

from vlmpack.cli.app import app
from vlmpack.data.loading.loader import MicroBatch, TrainedSample
from vlmpack.data.shards.samples import cook_text
from vlmpack.encode import Encoder, VLMSample
from vlmpack.encode.coordinates import ANSWER_COLOR, TRUTH_COLOR, draw_shapes
from vlmpack.encode.settings import EncoderSettings
from vlmpack.evaluation.predictions import Prediction, Question
from vlmpack.families.generic_images import generic_image_rule
from vlmpack.packing import PackCollator
from vlmpack.proof.rows.opening import view_row
from vlmpack.recipe.data import CoordinatesSection
from vlmpack.report.samples import is_right, pictures

BLOCK = (700, 250, 1100, 600)
"""In pixels of the upright picture, which has SIZE."""
SIZE = (1400, 1000)
RGB = {name: tuple(bytes.fromhex(name[1:])) for name in (TRUTH_COLOR, ANSWER_COLOR)}


def block_file(orientation: int = 1) -> bytes:
    """A red block on white; stored on its side for orientation 6."""
    image = Image.new("RGB", SIZE, "white")
    ImageDraw.Draw(image).rectangle((*BLOCK[:2], BLOCK[2] - 1, BLOCK[3] - 1), fill=(255, 0, 0))
    if orientation == 6:
        image = image.transpose(Image.Transpose.ROTATE_90)
    exif, into = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    image.save(into, "png", exif=exif)
    return into.getvalue()


def around(image: Image.Image, color: tuple[int, ...], slack: int = 60) -> list[float]:
    """x1, y1, x2, y2 around the pixels of a colour, in shares of the sides."""
    pixels = np.asarray(image.convert("RGB")).astype(int)
    rows, columns = np.nonzero((abs(pixels - np.array(color)) <= slack).all(axis=2))
    assert len(rows) > 50, color
    sides = (image.width, image.height) * 2
    edges = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    return [edge / side for edge, side in zip(edges, sides, strict=True)]


def record(box: tuple[int, ...] = BLOCK) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": "<image>Where is the block?"},
            {"role": "assistant", "content": "At <bbox>."},
        ],
        "images": ["block.png"],
        "objects": {"bbox": [list(box)]},
    }


def cooked(file: bytes) -> VLMSample:
    """The record with its image."""
    parts = [{"type": "image"}, {"type": "text", "text": "Where is the block?"}]
    given = record() | {"images": None}
    given["messages"][0]["content"] = parts
    text = cook_text("a", "none", json.dumps(given).encode(), ("json", "block.png"))
    return replace(text.sample, images=(file,))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "block.png").write_bytes(block_file(6))
    data = tmp_path / "records.jsonl"
    data.write_text("".join(json.dumps(record()) + "\n" for _ in range(2)))
    settings = small_settings(tmp_path, data__train=str(data), training__global_batch_size=2)
    settings["training"]["micro_batch_size"] = 2
    return write_recipe(tmp_path / "r.json", settings | {"images": {"max_pixels": 200_000}})


def test_data_show_and_inspect_draw_them(recipe: Path, tmp_path: Path) -> None:
    """On an image that is rotated and resized."""
    shown = ["data", "show", str(recipe), "--batch", "0", "--draw", str(tmp_path / "drawn")]
    said = CliRunner().invoke(app, shown)
    assert said.exit_code == 0, said.output
    files = sorted((tmp_path / "drawn").iterdir())
    assert len(files) == 2
    for file in files:
        image = Image.open(file)
        truth = around(image, RGB[TRUTH_COLOR])
        assert truth == pytest.approx(around(image, (255, 0, 0)), abs=0.012)
        assert truth == pytest.approx([0.5, 0.25, 0.786, 0.6], abs=0.012)
        assert image.width / image.height == pytest.approx(1.4, rel=0.1)
    ask = ["inspect", str(recipe), "--row", "0", "--output", str(tmp_path / "pages")]
    page = CliRunner().invoke(app, ask)
    assert page.exit_code == 0, page.output
    html = (tmp_path / "pages/row-0.html").read_text()
    stored = re.findall(r"data:image/(?:png|jpeg);base64,([\w+/=]+)", html)
    assert len(stored) == 2
    for data in stored:
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        truth = around(image, RGB[TRUTH_COLOR])
        assert truth == pytest.approx(around(image, (255, 0, 0)), abs=0.02)


@pytest.mark.parametrize(
    ("family", "on_the_original"),
    [
        ("llava_onevision", True),
        ("gemma3", True),
        ("a class without a file of ours", True),
        ("internvl", False),
        ("idefics3", False),
        ("qwen2_5_vl", False),
    ],
)
def test_they_lie_right_in_any_family(family: str, on_the_original: bool, tmp_path: Path) -> None:
    """Padding, crops beside the image and gray squares would move them."""
    folder = tiny_family_folder(family, tmp_path / "model")
    if family == "gemma3":
        file = folder / "preprocessor_config.json"
        cuts = {"pan_and_scan_min_crop_size": 64, "pan_and_scan_max_num_crops": 4}
        cuts |= {"do_pan_and_scan": True, "pan_and_scan_min_ratio_to_activate": 1.2}
        file.write_text(json.dumps(json.loads(file.read_text()) | cuts))
    space = "shown" if family.startswith("a class") else "norm"
    encoder = Encoder(folder, EncoderSettings(coordinates=CoordinatesSection(space=space)))
    if space == "shown":
        vars(encoder)["image_rule"] = generic_image_rule(TINY_MODEL, "<|image_pad|>")
    sample = cooked(block_file(6))
    encoded = encoder.encode(sample, [(700, 500)])  # of a plan that shrinks images
    batch = PackCollator(pad_token_id=0, num_position_axes=encoder.num_position_axes)([encoded])
    names = (TrainedSample(0, "a", "none"),)
    no_time = {"read_seconds": 0.0, "encode_seconds": 0.0}
    loaded = MicroBatch(batch=batch, samples=names, skipped=(), num_images=1, **no_time)
    view = view_row(loaded, [sample], encoder, "it")
    (image,) = view.samples[0].images
    truth = around(image, RGB[TRUTH_COLOR])
    assert truth == pytest.approx([0.5, 0.25, 0.786, 0.6], abs=0.02)
    assert truth == pytest.approx(around(image, (255, 0, 0), slack=100), abs=0.03)
    said = [line for line in view.lines() if "drawn on the original]" in line]
    assert bool(said) is on_the_original
    alone = view_row(loaded, [replace(sample, objects=None)], encoder, "it")
    assert not any("drawn on" in line for line in alone.lines())


def test_truth_and_answer_in_the_report() -> None:
    encoder = Encoder(TINY_MODEL)
    file = block_file(6)
    question = Question.from_sample(cooked(file), encoder)
    assert question.truth == "At [518, 189, 814, 454]."
    right = Prediction.of(question, "[518, 189, 814, 454]")
    swapped = Prediction.of(question, "[189, 518, 454, 814]")
    assert is_right(right) and not right.correct and not is_right(swapped)
    (image,) = pictures(swapped, {(swapped.shard, swapped.key): [file]})
    assert image is not None and image.size == (1036, 756)
    assert around(image, RGB[TRUTH_COLOR]) == pytest.approx(around(image, (255, 0, 0)), abs=0.01)
    wrong = [189 / 1036, 518 / 756, 454 / 1036, 1.0]  # beyond the lower edge
    assert around(image, RGB[ANSWER_COLOR]) == pytest.approx(wrong, abs=0.01)
    plain = replace(swapped, shapes=None)
    (image,) = pictures(plain, {(plain.shard, plain.key): [file]})
    assert image is not None and image.size == SIZE[::-1]


@pytest.mark.parametrize(
    ("shape", "inside", "outside"),
    [
        ([10, 20, 60, 70], [(10, 45), (60, 45), (35, 20), (35, 70)], [(35, 45), (5, 5)]),
        ([60, 70, 10, 20], [(10, 45), (60, 45)], [(35, 45)]),
        ([50, 50], [(50, 48), (52, 50)], [(50, 50), (80, 50)]),
        ([10, 10, 90, 10, 90, 90], [(50, 10), (90, 50), (50, 50)], [(20, 80)]),
        ([-1e9, 1e12, 1e9, 40], [(50, 40)], [(50, 20)]),
    ],
)
def test_shapes(
    shape: list[float], inside: list[tuple[int, int]], outside: list[tuple[int, int]]
) -> None:
    drawn = draw_shapes(Image.new("RGB", (100, 100), "white"), [shape])
    assert drawn.size == (400, 400)

    def has_color(at: tuple[int, int]) -> bool:
        x, y = (4 * value for value in at)
        near = drawn.crop((x - 4, y - 4, x + 5, y + 5)).getcolors()
        assert near is not None
        return any(color == RGB[TRUTH_COLOR] for _, color in near)

    assert all(map(has_color, inside)) and not any(map(has_color, outside))
    assert any(color == RGB[TRUTH_COLOR] for _, color in drawn.getcolors() or ())


def test_generate_draws_what_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, picture = tmp_path / "block.png", tmp_path / "new/drawn.png"
    file.write_bytes(block_file())
    monkeypatch.setattr(
        "vlmpack.evaluation.generation.answer_questions",
        lambda *_, **__: ["It is at [518, 189, 814, 454]."],
    )
    ask = ["generate", "Where?", "--model", str(TINY_MODEL), "--draw", str(picture)]
    said = CliRunner().invoke(app, [*ask, "--image", str(file)])
    assert said.exit_code == 0, said.output
    assert "1 shape in the form of qwen2_5_vl" in said.output
    image = Image.open(picture)
    assert around(image, RGB[ANSWER_COLOR]) == pytest.approx(around(image, (255, 0, 0)), abs=0.01)
    refused = CliRunner().invoke(app, [*ask, "--image", str(file), "--image", str(file)])
    assert refused.exit_code != 0 and "--draw: 2 images" in str(refused.exception)


def test_generate_draws_by_the_form_that_the_run_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export notes data.coordinates; without the note the family's form is read."""
    model, file, picture = tmp_path / "model", tmp_path / "block.png", tmp_path / "drawn.png"
    shutil.copytree(TINY_MODEL, model)
    file.write_bytes(block_file())
    monkeypatch.setattr(
        "vlmpack.evaluation.generation.answer_questions", lambda *_, **__: ["<500,250><786,600>"]
    )
    ask = ["generate", "Where?", "--model", str(model), "--draw", str(picture)]
    said = CliRunner().invoke(app, [*ask, "--image", str(file)])
    assert said.exit_code == 0 and "0 shapes" in said.output, said.output

    section = CoordinatesSection(space="norm", box="<{x1},{y1}><{x2},{y2}>")
    Encoder(TINY_MODEL, EncoderSettings(coordinates=section)).write_settings(model)
    assert Encoder(model).settings.coordinates == section
    other = CoordinatesSection(space="pixels")
    assert Encoder(model, EncoderSettings(coordinates=other)).settings.coordinates == other
    said = CliRunner().invoke(app, [*ask, "--image", str(file)])
    assert said.exit_code == 0 and "1 shape in the form of data.coord" in said.output, said.output
    image = Image.open(picture)
    assert around(image, RGB[ANSWER_COLOR]) == pytest.approx(around(image, (255, 0, 0)), abs=0.01)


def test_generate_refuses_what_it_cannot_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "block.png"
    file.write_bytes(block_file())
    model = tiny_family_folder("gemma3", tmp_path / "model")
    monkeypatch.setattr("vlmpack.backends.hf.load.load_model", lambda _: torch.nn.Identity())
    ask = ["generate", "Where?", "--image", str(file), "--model", str(model), "--draw"]
    refused = CliRunner().invoke(app, [*ask, "seen.png"])
    why = r"^--draw seen.png, and no rule is known here by which gemma3 writes boxes.*export"
    assert re.match(why, str(refused.exception)), refused.exception
    ask[ask.index(str(model))] = "nowhere"
    for name in ("seen", "seen.txt", "seen.psd"):
        refused = CliRunner().invoke(app, [*ask, name])
        assert f"--draw {name}: no image file" in str(refused.exception)
    assert "--draw" not in str(CliRunner().invoke(app, [*ask, "seen.JPG"]).exception)
