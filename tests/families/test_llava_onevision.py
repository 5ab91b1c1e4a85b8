"""LLaVA-OneVision's own: any-resolution counts and features, one image against several."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.families import tiny_family_folder
from support.images import conversation, file_of, picture
from support.processor_classes import processed, processor_of
from support.stock import load_stock
from support.tiny_llava_onevision import MAX_TILES, PINPOINTS, SEEN, TILE

from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError, ModelError
from vlmpack.families.llava_onevision import AnyRes

PUBLISHED = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
EXTREME = [(1, 1), (1, 9000), (9000, 1), (3, 2), (384, 384), (385, 384), (20000, 37), (2304, 2304)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_family_folder("llava_onevision", tmp_path_factory.mktemp("llava_onevision"))


def config_of(tile, patch, pinpoints, aspect):
    return SimpleNamespace(
        vision_aspect_ratio=aspect,
        vision_config=SimpleNamespace(image_size=tile, patch_size=patch),
        image_grid_pinpoints=pinpoints,
    )


def sizes(count=200):
    draw = random.Random(0)
    found = list(EXTREME)
    while len(found) < count:
        found.append(tuple(round(2 ** draw.uniform(0, 12)) for _ in range(2)))
    return found


@pytest.mark.parametrize(
    ("tile", "patch", "pinpoints", "aspect"),
    [
        (384, 14, PUBLISHED, "anyres_max_9"),
        (384, 14, PUBLISHED[:14], "anyres_max_4"),
        (32, 8, [[32, 32], [32, 192], [192, 32]], "anyres_max_9"),
    ],
    ids=["published", "fewer grids", "even side"],
)
def test_counts_are_those_of_the_processor_class(tile, patch, pinpoints, aspect):
    from transformers import LlavaOnevisionProcessor
    from transformers.models.llava_onevision import modeling_llava_onevision as stock

    own = object.__new__(LlavaOnevisionProcessor)
    own.image_processor = SimpleNamespace(image_grid_pinpoints=pinpoints)
    own.num_image_tokens, own.vision_aspect_ratio = (tile // patch) ** 2, aspect
    anyres = AnyRes.of(config_of(tile, patch, pinpoints, aspect))
    counts, smaller = set(), 0
    for width, height in sizes():
        found = anyres.token_map(width, height)
        theirs = own._get_number_of_features(height, width, tile, tile)
        assert anyres.side**2 + found.num_tokens == theirs, (width, height)
        rows, columns = anyres.grid(width, height)
        tiles = stock.image_size_to_num_patches((height, width), pinpoints, tile)
        assert 1 + rows * columns == tiles, (width, height)
        counts.add(theirs)
        smaller += found.is_smaller
    assert len(counts) > (10 if len(pinpoints) < 5 else 20)
    assert (smaller > 8) == (len(pinpoints) > 5)
    if len(pinpoints) < 5:  # a map may lose all of its rows
        assert anyres.token_map(9000, 1).num_tokens == 0
        assert anyres.token_map(1, 9000).num_tokens == anyres.token_map(1, 9000).rows > 0


def test_ids_and_pixels_are_those_of_the_processor_class(folder, mixed, monkeypatch):
    from transformers import LlavaOnevisionProcessor

    processor = processor_of(
        monkeypatch,
        LlavaOnevisionProcessor,
        folder,
        num_image_tokens=9,
        vision_feature_select_strategy="full",
        vision_aspect_ratio=MAX_TILES,
    )
    encoder, seen = Encoder(folder), set()
    for sample in mixed:
        theirs, ours = processed(processor, sample), encoder.encode(sample.cooked())
        assert ours.input_ids.tolist() == theirs["input_ids"][0].tolist()
        if ours.media is not None:
            arguments = encoder.family.image_arguments(ours.media)
            pixels = theirs["pixel_values"][..., :SEEN, :SEEN]
            assert torch.equal(arguments["pixel_values"], pixels)
            for name in ("image_sizes", "batch_num_images"):
                assert torch.equal(arguments[name], theirs[name])
            seen.add(tuple(arguments["batch_num_images"].tolist()))
    assert {(1,), (2,), (3,)} <= seen


@pytest.mark.parametrize("layers", [-1, [-2, -1]], ids=str)
def test_features_are_those_of_the_stock_model(folder, tmp_path, layers):
    if layers != -1:
        from transformers import AutoConfig, AutoModelForImageTextToText

        config = AutoConfig.from_pretrained(str(folder), vision_feature_layer=layers)
        model = AutoModelForImageTextToText.from_config(config).eval()
    else:
        model = load_stock(folder).eval()
    rule, family = Encoder(folder).image_rule, Encoder(folder).family
    samples = [
        [(200, 150)],
        [(40, 30), (300, 20), (30, 30)],
        [(8, 1600)],
        [(1600, 8)],
        [(1, 1)],
        [(1, 200), (90, 90)],
        [(64, 250)],
    ]
    smaller = 0
    for shown in samples:
        images = [picture(*size) for size in shown]
        raw = rule.processor(images=[images], return_tensors="pt")
        media = rule.preprocess(images)
        with torch.no_grad():
            theirs = torch.cat(model.model.get_image_features(**raw).pooler_output)
            ours = family.image_features(model, media).features
        assert ours.shape[0] == sum(media.num_tokens)
        assert torch.equal(ours, theirs), shown
        smaller += len(shown) == 1 and rule.anyres.token_map(*shown[0]).is_smaller
    assert smaller > 1


def test_an_image_costs_less_among_several(folder):
    encoder = Encoder(folder)
    (alone,) = encoder.layouts([(200, 150)])
    among = encoder.layouts([(200, 150)] * 2)
    assert [layout.num_tokens for layout in among] == [10, 10]
    assert [layout.grid for layout in among] == [(1, 3, 3)] * 2
    assert alone.num_tokens > 30 and alone.grid[0] > 5


def test_a_tile_alone_is_never_taken_for_one_of_several(folder):
    encoder = Encoder(folder)
    sample = conversation(
        ("user", [None, None, "?"]),
        ("assistant", ["x"]),
        images=tuple(file_of(picture(*size)) for size in ((20, 30), (40, 10))),
    )
    media = encoder.encode(sample).media
    lone = type(media)(
        pixel_values=media.pixel_values[:9],
        grid_thw=media.grid_thw[:1],
        num_tokens=media.num_tokens[:1],
        image_sizes=media.image_sizes[:1],
    )
    with pytest.raises(CapabilityError, match="stands alone"):
        encoder.family.image_arguments(lone)


def test_pictures_show_the_grid_with_its_padding(folder):
    rule = Encoder(folder).image_rule
    original = picture(120, 40)
    (shown,) = rule.pictures(rule.preprocess([original]))
    rows, columns = rule.anyres.grid(120, 40)
    assert (rows, columns) == (2, 4) and shown.size == (SEEN * columns, SEEN * rows)
    pixels = np.asarray(shown, int)
    assert not pixels[:5].any(), "the padding is black"
    own = np.asarray(original, int)
    top = (TILE * rows - 40) // 2
    assert np.abs(pixels[top:SEEN, :SEEN] - own[: SEEN - top, :SEEN]).max() <= 1
    several = rule.pictures(rule.preprocess([original, original]))
    assert [image.size for image in several] == [(SEEN, SEEN)] * 2


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("preprocessor_config.json", {"image_grid_pinpoints": PINPOINTS[:3]}, "grid_pinpoints is"),
        ("preprocessor_config.json", {"size": {"height": 60, "width": 60}}, r"size is \(60, 60\)"),
        ("processor_config.json", {"num_image_tokens": 729}, "num_image_tokens is 729"),
        ("processor_config.json", {"vision_aspect_ratio": "anyres_max_9"}, "is anyres_max_9, but"),
        ("config.json", {"vision_aspect_ratio": "square"}, "expected anyres_max_<n>"),
        ("config.json", {"vision_feature_select_strategy": "default"}, "expected 'siglip"),
        ("config.json", {"image_grid_pinpoints": [[30, 50]]}, "expected multiples"),
    ],
)
def test_folders_that_contradict_themselves_are_refused(folder, tmp_path, file, changes, message):
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    content = json.loads((folder / file).read_text(encoding="utf-8"))
    (tmp_path / file).unlink()
    (tmp_path / file).write_text(json.dumps(content | changes), encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        _ = Encoder(tmp_path).image_rule
