"""Mistral 3 and Pixtral: what the suite of all families does not see."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from support.engines import make_engine
from support.families import tiny_family_folder
from support.images import conversation, file_of, one_image, picture
from support.runs import relative_l2
from support.stock import StockProcessor, load_stock
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.image_utils import ChannelDimension
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError, ModelError
from vlmpack.families import pixtral
from vlmpack.families.pixtral import PixtralImageRule, PixtralTowerRule, tower_output
from vlmpack.families.registry import family_of
from vlmpack.recipe.data import ImagesSection

SIZES = [(120, 64), (40, 24), (64, 120), (120, 64), (9, 9)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """model_type -> tiny model folder."""
    return {
        name: tiny_family_folder(name, tmp_path_factory.mktemp(name))
        for name in ("mistral3", "llava")
    }


@pytest.fixture(scope="module", params=["mistral3", "llava"])
def shown(request, folders):
    """(family, packed model, stock model, five images of four sizes)."""
    folder = folders[request.param]
    encoder = Encoder(folder)
    images = [picture(*size, seed=seed) for seed, size in enumerate(SIZES)]
    vlm = make_engine(folder, encoder).vlm
    return encoder.family, vlm, load_stock(folder), encoder.image_rule.preprocess(images)


@pytest.fixture
def folder_with(folders, tmp_path):
    """A copy of a tiny folder with other keys in one of its files."""

    def make(name, file, **keys):
        shutil.copytree(folders[name], tmp_path / "model")
        path = tmp_path / "model" / file
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**content, **keys}), encoding="utf-8")
        return tmp_path / "model"

    return make


# The tower on all images of a batch at once


def patches_of(media):
    return [t * h * w for t, h, w in media.grid_thw]


def output_of(tower, media):
    return tower_output(tower, media, PixtralTowerRule()(media.grid_thw))


def test_one_call_is_the_stock_tower_image_by_image(shown):
    family, vlm, stock, media = shown
    with torch.no_grad():
        ours = output_of(vlm.vision, media)
        alone = []
        for rows, grid in zip(
            media.pixel_values.split(patches_of(media)), media.grid_thw, strict=True
        ):
            image = family.image_arguments(replace(media, pixel_values=rows, grid_thw=(grid,)))
            alone.append(stock.model.vision_tower(**image).last_hidden_state[0])
    assert len(alone) == len(SIZES)
    assert relative_l2(ours, torch.cat(alone)) < 1e-6


def test_images_do_not_see_each_other(shown):
    _, vlm, _, media = shown
    counts = patches_of(media)
    with torch.no_grad():
        before = output_of(vlm.vision, media).split(counts)
        pixels = media.pixel_values.clone()
        pixels.split(counts)[2].neg_()
        after = output_of(vlm.vision, replace(media, pixel_values=pixels)).split(counts)
        one_image = replace(media, grid_thw=((1, sum(counts), 1),))
        mixed = output_of(vlm.vision, one_image).split(counts)
    same = [torch.equal(a, b) for a, b in zip(after, before, strict=True)]
    assert same == [True, True, False, True, True]
    assert relative_l2(mixed[0], before[0]) > 1e-2, "the control sees other images"


class Largest(TorchDispatchMode):
    """The largest tensor that an operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_memory_grows_with_the_patches_and_not_with_their_square(shown):
    family, vlm, stock, media = shown
    many = replace(media, pixel_values=media.pixel_values.repeat(4, 1), grid_thw=media.grid_thw * 4)
    square = many.pixel_values.shape[0] ** 2
    arguments = family.image_arguments(many)
    with torch.no_grad(), Largest() as ours:
        output_of(vlm.vision, many)
    with torch.no_grad(), Largest() as theirs:
        stock.model.vision_tower(**arguments)
    assert ours.numel < square / 5
    assert theirs.numel >= square, "the stock tower has a mask"


def test_the_stock_forward_still_works_on_the_same_model(shown):
    """Generation uses it after training has told the tower where images end."""
    family, vlm, stock, media = shown
    with torch.no_grad():
        ours = vlm.image_features(media, torch.device("cpu")).features
        arguments = family.image_arguments(media)
        outputs = [model.model.get_image_features(**arguments) for model in (vlm.model, stock)]
    again, theirs = (torch.cat(list(output.pooler_output)) for output in outputs)
    assert relative_l2(ours, theirs) < 1e-6
    assert relative_l2(again, theirs) < 1e-6


# Sizes


@pytest.mark.parametrize(
    ("edges", "patch", "merge"), [((1540, 1540), 14, 2), ((1024, 1024), 16, 1), ((800, 500), 14, 1)]
)
def test_sizes_of_published_settings(tmp_path, edges, patch, merge):
    width, height = edges
    rule = PixtralImageRule(tmp_path, patch, merge, width, height)
    draw, refused = random.Random(0), 0
    for _ in range(2000):
        size = tuple(round(2 ** draw.uniform(0, 13)) for _ in "wh")
        image = np.broadcast_to(np.uint8(0), (3, size[1], size[0]))
        theirs = get_resize_output_image_size(
            image, (height, width), patch * merge, ChannelDimension.FIRST
        )
        if 0 in theirs:
            refused += 1
            with pytest.raises(ValueError, match="no pixel left across"):
                rule.layout(*size)
            continue
        layout = rule.layout(*size)
        assert layout.grid == (1, theirs[0] // patch, theirs[1] // patch), size
        assert len(layout.runs) * patch * merge == theirs[0]
        assert layout.text.count("[IMG_BREAK]") == len(layout.runs) - 1
    assert 0 < refused < 200


def test_a_budget_in_pixels_is_kept_and_exported(folders, tmp_path):
    budget = ImagesSection(max_pixels=9000)
    encoder, plain = (
        Encoder(folders["mistral3"]).replace(budget=budget),
        Encoder(folders["mistral3"]),
    )
    shutil.copytree(folders["mistral3"], tmp_path / "export")
    encoder.write_settings(tmp_path / "export")
    export = StockProcessor(tmp_path / "export")
    for size in [(300, 300), (30, 20), (100, 230)]:
        sample = one_image(file_of(picture(*size)))
        encoded = encoder.encode(sample)
        _, rows, columns = encoded.media.grid_thw[0]
        features = export.rules.call(export.images, [picture(*size)])
        assert rows * columns * 8**2 <= 9000
        assert features["image_sizes"].tolist() == [[8 * rows, 8 * columns]]
        assert encoded.length == encoder.length(sample, [size]).num_tokens
    assert (
        plain.image_rule.layout(300, 300).num_tokens
        > encoder.image_rule.layout(300, 300).num_tokens
    )
    with pytest.raises(CapabilityError, match=r"max_pixels: 200 is less than .* 16 x 16 = 256"):
        Encoder(folders["mistral3"]).replace(budget=ImagesSection(max_pixels=200)).load()


def test_pictures_are_the_resized_images(folders):
    rule, size = Encoder(folders["mistral3"]).image_rule, (150, 70)
    (shown,) = rule.pictures(rule.preprocess([picture(*size)]))
    wanted = np.asarray(picture(*size).resize(shown.size, Image.Resampling.BICUBIC), dtype=float)
    assert shown.size == (160, 80)
    assert np.abs(np.asarray(shown, dtype=float) - wanted).max() <= 1


def test_ids_are_those_of_the_processor_class(folders):
    pytest.importorskip("torchvision", reason="PixtralProcessor needs it")
    from transformers import AutoImageProcessor, AutoTokenizer, PixtralProcessor

    folder = str(folders["mistral3"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = AutoImageProcessor.from_pretrained(folder)
    processor = PixtralProcessor(images, tokenizer, patch_size=8, spatial_merge_size=2)
    sample = conversation(
        ("user", ["a", None, "b", None]),
        ("assistant", ["one"]),
        images=tuple(file_of(picture(*size)) for size in SIZES[:2]),
    )
    opened = [Image.open(BytesIO(data)).convert("RGB") for data in sample.images]
    theirs = processor(text="[INST]a[IMG]b[IMG][/INST]one<|im_end|>", images=[opened])
    assert torch.equal(
        Encoder(folders["mistral3"]).encode(sample).input_ids, theirs["input_ids"][0]
    )


# Configs


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2"),
        ({"vision_feature_layer": [-1]}, r"vision_feature_layer is \[-1\]"),
        ({"vision_feature_select_strategy": "default"}, "expected 'full'"),
    ],
)
def test_features_from_elsewhere_are_refused(folder_with, keys, reason):
    with pytest.raises(CapabilityError, match=reason):
        _ = Encoder(folder_with("llava", "config.json", **keys)).image_rule


def test_a_class_without_a_choice_of_layers_has_the_last_one(folders, monkeypatch):
    chosen = pixtral.whole_config_of(folders["mistral3"])
    left = {key: value for key, value in chosen.items() if key != "vision_feature_layer"}
    monkeypatch.setattr(pixtral, "whole_config_of", lambda folder: left)
    assert Encoder(folders["mistral3"]).image_rule.layout(64, 64).runs


def test_a_processor_that_crops_is_refused(folder_with):
    folder = folder_with("mistral3", "preprocessor_config.json", do_center_crop=True)
    with pytest.raises(ModelError, match="do_center_crop is true, expected false"):
        _ = Encoder(folder).image_rule


@pytest.mark.parametrize("vision", [{"model_type": "clip_vision_model"}, {}], ids=str)
def test_llava_with_another_tower_is_refused(folder_with, vision):
    folder = folder_with("llava", "config.json", vision_config=vision)
    with pytest.raises(
        CapabilityError, match=r"tower of model_type .* is not served, with pixtral"
    ):
        family_of(folder)


def test_dropout_in_the_tower_is_refused(shown):
    _, vlm, _, media = shown
    attention = vlm.vision.transformer.layers[0].attention
    attention.dropout = 0.1
    try:
        vlm.train()
        with pytest.raises(CapabilityError, match="attention_dropout of vision_config"):
            output_of(vlm.vision, media)
    finally:
        attention.dropout = 0.0
