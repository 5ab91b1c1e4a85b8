"""Idefics3 and SmolVLM: what the suite of all families does not see."""

from __future__ import annotations

import json
import random
import shutil
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from support.engines import make_engine
from support.families import tiny_family_folder
from support.images import conversation, file_of, one_image, picture
from support.stock import load_stock
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError, ModelError
from vlmpack.families.idefics3 import Idefics3ImageRule, _bounded
from vlmpack.recipe.data import ImagesSection

SQUARE, WIDE, TALL = (300, 300), (300, 90), (50, 210)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """model_type -> tiny model folder."""
    return {
        name: tiny_family_folder(name, tmp_path_factory.mktemp(name))
        for name in ("idefics3", "smolvlm")
    }


@pytest.fixture(scope="module")
def encoder(folders):
    """Of the tiny Idefics3."""
    return Encoder(folders["idefics3"])


@pytest.fixture
def folder_with(folders, tmp_path):
    """A copy of the tiny Idefics3's folder with other keys in preprocessor_config.json."""

    def make(**keys):
        shutil.copytree(folders["idefics3"], tmp_path / "model")
        path = tmp_path / "model" / "preprocessor_config.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**content, **keys}), encoding="utf-8")
        return tmp_path / "model"

    return make


def stock_processor(folder):
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(str(folder), local_files_only=True)


def stock_tiles(processor, size):
    """(rows, columns) that the processor of a folder cuts an image of that size into."""
    features = processor(images=[picture(*size)], return_row_col_info=True, return_tensors="pt")
    return features["rows"][0][0], features["cols"][0][0]


def test_ids_and_tiles_are_those_of_the_processor_class(folders, encoder):
    from transformers import AutoTokenizer

    folder = folders["idefics3"]
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    processor = Idefics3Processor(stock_processor(folder), tokenizer, image_seq_len=4)
    sizes = [(90, 90), (20, 31), (128, 30)]
    sample = conversation(
        ("user", ["a", None, "b", None]),
        ("assistant", ["one"]),
        ("user", [None, "?"]),
        ("assistant", ["two"]),
        images=tuple(file_of(picture(*size)) for size in sizes),
    )
    messages = [
        {
            "role": message.role,
            "content": [
                {"type": "text", "text": part.text} if hasattr(part, "text") else {"type": "image"}
                for part in message.parts
            ],
        }
        for message in sample.messages
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    images = [[Image.open(BytesIO(data)).convert("RGB") for data in sample.images]]
    theirs = processor(text=[text], images=images, return_tensors="pt")
    ours = encoder.encode(sample)
    assert torch.equal(ours.input_ids, theirs["input_ids"][0])
    arguments = encoder.family.image_arguments(ours.media)
    assert torch.equal(arguments["pixel_values"], theirs["pixel_values"])
    assert len({tuple(grid) for grid in ours.media.grid_thw}) == 3


def test_pixels_beside_whole_patches_are_seen_by_nobody(folders):
    """A tile of 28 pixels has 3 patches of 8; the stock model gets all 28."""
    folder = folders["smolvlm"]
    encoder, size = Encoder(folder), (60, 80)
    media = encoder.encode(one_image(file_of(picture(*size)))).media
    features = stock_processor(folder)(images=[picture(*size)], return_tensors="pt")
    assert features["pixel_values"].shape[-1] == 28
    with torch.no_grad():
        vlm = make_engine(folder, encoder).vlm
        ours = vlm.image_features(media, torch.device("cpu")).features
        theirs = load_stock(folder).get_image_features(**features).pooler_output[0]
    assert ours.shape[0] == 10
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("edge", "tile"), [(1456, 364), (2048, 512), (1536, 384), (1000, 364), (6000, 500), (333, 111)]
)
def test_rows_and_columns_of_published_settings(monkeypatch, tmp_path, edge, tile):
    """Against the processor's own methods on images without pixels."""

    def sized(self, image, size, **options):
        return np.broadcast_to(np.uint8(0), (3, size.height, size.width))

    monkeypatch.setattr(PilBackend, "resize", sized)
    stock = Idefics3ImageProcessorPil()
    rule = Idefics3ImageRule(tmp_path, 14, 1, tile, edge, splits=True)
    draw, seen = random.Random(0), set()
    for _ in range(300):
        width, height = (round(2 ** draw.uniform(0, 13)) for _ in range(2))
        image = np.broadcast_to(np.uint8(0), (3, height, width))
        resized = stock.resize(image, SizeDict(longest_edge=edge))
        fitted = stock.resize_for_vision_encoder(resized, tile)
        frames, rows, columns = stock.split_images(fitted, {"longest_edge": tile})
        layout = rule.layout(width, height)
        assert rule.rows_and_columns(width, height) == (rows, columns), (width, height)
        assert layout.grid[0] == len(layout.runs) == len(frames)
        seen.add((rows, columns))
    assert len(seen) > 4


# Budgets


@pytest.mark.parametrize(("most", "square"), [(1, 1), (3, 1), (4, 4), (8, 4), (9, 9), (30, 25)])
def test_a_budget_of_tiles_is_kept_and_exported(folders, tmp_path, most, square):
    budget = ImagesSection(max_tiles=most)
    encoder = Encoder(folders["idefics3"]).replace(budget=budget)
    shutil.copytree(folders["idefics3"], tmp_path / "export")
    encoder.write_settings(tmp_path / "export")
    export = stock_processor(tmp_path / "export")
    for size in (SQUARE, WIDE, TALL):
        rows, columns = encoder.image_rule.rows_and_columns(*size)
        assert rows * columns <= most
        assert stock_tiles(export, size) == (rows, columns)
        sample = one_image(file_of(picture(*size)))
        assert encoder.encode(sample).length == encoder.length(sample, [size]).num_tokens
        if size == SQUARE:
            assert max(1, rows * columns) == square, "fewer tiles than the budget allows"


def test_odd_tiles_keep_the_budget():
    """The shorter edge is rounded up to an even length, so an odd square would grow by a tile."""
    rule = Idefics3ImageRule(None, 7, 1, 35, 35 * 8, splits=True)
    bounded = _bounded(rule, ImagesSection(max_tiles=9))
    assert bounded.rows_and_columns(100, 100) == (3, 3)
    assert rule.rows_and_columns(100, 100) == (8, 8)


def test_a_budget_in_pixels_is_refused(folders):
    with pytest.raises(CapabilityError, match=r"images.max_pixels: 900, .*images.max_tiles"):
        Encoder(folders["idefics3"]).replace(budget=ImagesSection(max_pixels=900)).load()


# Processors


def test_without_splitting_an_image_is_one_tile(folder_with):
    folder = folder_with(do_image_splitting=False)
    encoder = Encoder(folder)
    sample = one_image(file_of(picture(*WIDE)))
    encoded = encoder.encode(sample)
    assert encoded.media.grid_thw == ((1, 4, 4),)
    assert encoded.length == encoder.length(sample, [WIDE]).num_tokens
    features = stock_processor(folder)(images=[picture(*WIDE)], return_tensors="pt")
    arguments = encoder.family.image_arguments(encoded.media)
    assert torch.equal(arguments["pixel_values"], features["pixel_values"])
    with pytest.raises(CapabilityError, match="cuts no tiles"):
        Encoder(folder).replace(budget=ImagesSection(max_tiles=4)).load()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"max_image_size": {"longest_edge": 40}}, "5 patches of 8 .* a multiple of .* 2"),
        ({"size": {"height": 128, "width": 128}}, "expected a longest_edge"),
        ({"do_resize": False}, "do_resize is False"),
    ],
)
def test_a_processor_that_does_not_fit_is_refused(folder_with, keys, reason):
    with pytest.raises(ModelError, match=reason):
        _ = Encoder(folder_with(**keys)).image_rule


@pytest.mark.parametrize("size", [SQUARE, WIDE, TALL])
def test_pictures_show_the_tiles_in_their_places(folders, encoder, size):
    image = picture(*size)
    (shown,) = encoder.image_rule.pictures(encoder.image_rule.preprocess([image]))
    rows, columns = encoder.image_rule.rows_and_columns(*size)
    assert shown.size == (columns * 32, rows * 32)
    wanted = np.asarray(image.resize(shown.size, Image.Resampling.LANCZOS), dtype=float)
    assert np.abs(np.asarray(shown, dtype=float) - wanted).mean() < 3
    mirrored = np.asarray(shown, dtype=float)[:, ::-1]
    assert np.abs(mirrored - wanted).mean() > 20, "the picture is the same everywhere"
