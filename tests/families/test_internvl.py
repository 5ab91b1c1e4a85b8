"""InternVL's own: the tiling rule, the processor class's text, decoders, what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.engines import make_engine
from support.families import tiny_family_folder
from support.images import conversation, file_of, picture
from support.processor_classes import processed, processor_of
from support.runs import find_differences, pack, run_batch
from support.stock import StockProcessor, load_stock, run_one_by_one
from support.tiny_internvl import TILE_TOKENS, TOKENS, config, decoder

from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError, ModelError
from vlmpack.families.internvl import InternVLImageRule
from vlmpack.recipe.data import ImagesSection

EXTREME = [(1, 1), (1, 4000), (4000, 1), (2, 2), (31, 33), (32, 32), (64, 64), (65, 64), (12000, 9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_family_folder("internvl", tmp_path_factory.mktemp("internvl"))


def copied(folder: Path, to: Path, name: str, **changes) -> Path:
    """The folder with other values in one of its files."""
    for path in folder.iterdir():
        (to / path.name).symlink_to(path)
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    (to / name).unlink()
    (to / name).write_text(json.dumps(content | changes), encoding="utf-8")
    return to


@pytest.mark.parametrize(
    ("tile", "least", "most"), [(448, 1, 12), (32, 3, 7), (32, 1, 1), (30, 1, 40)]
)
def test_tiles_are_those_of_the_stock_processor(tile, least, most):
    from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as stock

    processor = stock.GotOcr2ImageProcessorPil(
        size={"height": tile, "width": tile}, min_patches=least, max_patches=most
    )
    rule = InternVLImageRule(Path(), tile, 2, 1, least, most)
    draw = random.Random(0)
    sizes = [*EXTREME, *((tile * n, tile * m) for n in (1, 2, 3) for m in (1, 2, 3))]
    while len(sizes) < 200:
        sizes.append(tuple(round(2 ** draw.uniform(0, 12)) for _ in range(2)))
    counts = set()
    for width, height in sizes:
        count = processor.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        assert rule.layout(width, height).grid[0] == count, (width, height)
        if most > 1:
            canvas = stock.get_optimal_tiled_canvas((height, width), (tile, tile), least, most)
            assert rule.canvas(width, height) == canvas, (width, height)
        counts.add(count)
    assert len(counts) > (3 if most > 1 else 0)


def test_ids_and_pixels_are_those_of_the_processor_class(folder, mixed, monkeypatch):
    from transformers import InternVLProcessor

    tokens = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    processor = processor_of(
        monkeypatch, InternVLProcessor, folder, tokens=tokens, image_seq_length=TILE_TOKENS
    )
    assert not processor.image_processor.crop_to_patches, "the class cuts all the same"
    encoder, counts = Encoder(folder), set()
    for sample in mixed:
        theirs, ours = processed(processor, sample), encoder.encode(sample.cooked())
        assert ours.input_ids.tolist() == theirs["input_ids"][0].tolist()
        if ours.media is not None:
            pixels = encoder.family.image_arguments(ours.media)["pixel_values"]
            assert torch.equal(pixels, theirs["pixel_values"])
            counts.add(len(pixels))
    assert len(counts) > 2


@pytest.mark.cases(slow="qwen3*")
@pytest.mark.parametrize(("model_type", "layer"), [("qwen3", -1), ("llama", -2)])
def test_other_decoders_and_layers_pack_as_well(folder, tmp_path, mixed, model_type, layer):
    from transformers import AutoModelForImageTextToText

    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors", "generation_config.json"):
            (tmp_path / path.name).symlink_to(path)
    torch.manual_seed(1)
    text = decoder(model_type, head_dim=24)
    changed = config(text, vision_feature_layer=layer)
    AutoModelForImageTextToText.from_config(changed).save_pretrained(str(tmp_path))
    encoder, stock, processor = Encoder(tmp_path), load_stock(tmp_path), StockProcessor(tmp_path)
    assert type(stock.model.language_model).__name__.lower() == f"{model_type}model"
    some = mixed[:4]
    assert any(sample.images for sample in some)
    reference = run_one_by_one(stock.train(), {sample.key: processor(sample) for sample in some})
    vlm = make_engine(tmp_path, encoder).vlm.train()
    run = run_batch(vlm, pack([encoder.encode(sample.cooked()) for sample in some], alignment=8))
    assert find_differences(run, reference) == []


def test_the_canvas_shows_the_whole_image(folder):
    rule = Encoder(folder).image_rule
    original = picture(100, 60)
    (shown,) = rule.pictures(rule.preprocess([original]))
    columns, rows = rule.canvas(100, 60)
    assert columns > rows > 1 and shown.size == (32 * columns, 32 * rows)
    resized = original.resize(shown.size, Image.Resampling.BICUBIC)
    assert np.abs(np.asarray(shown, int) - np.asarray(resized, int)).max() <= 1


def test_a_budget_of_tiles_is_kept(folder):
    plain, small = Encoder(folder), Encoder(folder).replace(budget=ImagesSection(max_tiles=3))
    sample = conversation(
        ("user", [None, "?"]), ("assistant", ["x"]), images=(file_of(picture(200, 90)),)
    )
    assert plain.encode(sample).media.grid_thw == ((9, 4, 4),)
    assert small.encode(sample).media.grid_thw == ((3, 4, 4),)
    assert small.length(sample, [(200, 90)]).num_image_tokens == 3 * TILE_TOKENS
    assert small.image_rule.settings() == {"min_patches": 1, "max_patches": 3}


@pytest.mark.parametrize("knob", ["min_pixels", "max_pixels"])
def test_a_budget_in_pixels_is_refused(folder, knob):
    with pytest.raises(CapabilityError, match=f"{knob}.*max_tiles"):
        Encoder(folder).replace(budget=ImagesSection(**{knob: 4096})).load()


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            "processor_config.json",
            {"image_seq_length": 256},
            "256, but .* 4 tokens of a tile of 32 x 32",
        ),
        ("preprocessor_config.json", {"size": {"height": 32, "width": 64}}, "that are equal"),
        (
            "preprocessor_config.json",
            {"size": {"height": 40, "width": 40}},
            "whole number of tokens",
        ),
        ("preprocessor_config.json", {"min_patches": 13}, "at least 13 tiles"),
        ("config.json", {"vision_feature_select_strategy": "full"}, "class token"),
        ("config.json", {"vision_feature_layer": [-2, -1]}, "expected False and one layer"),
    ],
)
def test_folders_that_contradict_themselves_are_refused(folder, tmp_path, file, changes, message):
    changed = copied(folder, tmp_path, file, **changes)
    with pytest.raises(ModelError, match=message):
        _ = Encoder(changed).image_rule


def test_a_tokenizer_without_the_tokens_of_images_is_refused(folder):
    class Bare:
        def get_added_vocab(self):
            return {TOKENS[0]: 1}

    with pytest.raises(ModelError, match="no special token </img>, <IMG_CONTEXT>"):
        Encoder(folder).family.placeholder(Bare())
