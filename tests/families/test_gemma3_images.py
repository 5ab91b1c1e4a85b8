"""Gemma 3's images: what its processor class writes and cuts, and the folders that are refused."""

from __future__ import annotations

import json
import random
import shutil
from io import BytesIO

import pytest
import torch
from PIL import Image
from support.engines import make_engine
from support.families import tiny_family_folder
from support.images import conversation, file_of, picture
from support.runs import find_differences, pack, run_batch
from support.shards import RawSample
from support.stock import StockProcessor, load_stock, run_one_by_one
from support.tiny_gemma3 import BREAKS, TILE_TOKENS, TOKENS
from transformers import AutoImageProcessor, AutoTokenizer, Gemma3Processor

from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError, ModelError
from vlmpack.recipe.data import ImagesSection

CUTS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 16,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.3,
}
SIZES = [(120, 40), (64, 64), (40, 200), (33, 47)]
"""Three crops, none, three, two."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_family_folder("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def cutting(folder, tmp_path_factory):
    """The same model; its processor pans and scans."""
    return changed(folder, tmp_path_factory.mktemp("cutting") / "model", **CUTS)


def changed(folder, to, **values):
    """A copy with other values in preprocessor_config.json."""
    shutil.copytree(folder, to)
    path = to / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return to


def stock_processor(folder):
    """The family's processor class."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    start, end, soft = TOKENS
    tokenizer.boi_token, tokenizer.eoi_token, tokenizer.image_token = start, end, soft
    tokenizer.boi_token_id, tokenizer.image_token_id = tokenizer.convert_tokens_to_ids(
        [start, soft]
    )
    images = AutoImageProcessor.from_pretrained(str(folder))
    return Gemma3Processor(images, tokenizer, image_seq_length=TILE_TOKENS)


def raw_sample(sizes=SIZES):
    """Images in a row, with words between some of them."""
    files = tuple(file_of(picture(*size, seed=n)) for n, size in enumerate(sizes))
    content = [{"type": "text", "text": "Compare"}]
    for place in range(len(sizes)):
        content.append({"type": "image", "image": str(place)})
        if place % 2:
            content.append({"type": "text", "text": "with"})
    answer = [{"type": "text", "text": "kqzxv"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return RawSample("cut", messages, files)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "pan-and-scan"])
def test_ids_types_and_pixels_are_those_of_the_processor_class(folder, cutting, mixed, cut):
    """It pans and scans only where the call says so, with the call's values."""
    chosen = cutting if cut else folder
    processor, encoder = stock_processor(chosen), Encoder(chosen)
    options = CUTS if cut else {}
    for sample in [*mixed, raw_sample()]:
        text = processor.tokenizer.apply_chat_template(sample.messages, tokenize=False)
        images = [Image.open(BytesIO(data)).convert("RGB") for data in sample.images] or None
        theirs = processor(
            text=text, images=images, add_special_tokens=False, return_tensors="pt", **options
        )
        ours = encoder.encode(sample.cooked())
        assert ours.input_ids.tolist() == theirs["input_ids"][0].tolist()
        types = encoder.family.token_arguments(ours.input_ids == encoder.placeholder_id)
        assert torch.equal(types["token_type_ids"], theirs["token_type_ids"][0])
        if images:
            pixels = encoder.family.image_arguments(ours.media)["pixel_values"]
            assert torch.equal(pixels, theirs["pixel_values"])
            runs = [run for image in ours.media.blocks for run in image]
            assert runs == [TILE_TOKENS] * len(pixels)
            assert len(runs) >= len(images)
    assert len(runs) == (12 if cut else 4)
    assert "num_crops" not in theirs
    text = processor.tokenizer.apply_chat_template(sample.messages, tokenize=False)
    uncut = processor(text=text, images=images, add_special_tokens=False, return_tensors="pt")
    assert len(uncut["pixel_values"]) == 4, "the folder alone does not make the class cut"


# Text around images


def test_line_breaks_around_images_merge_with_their_neighbours(folder):
    """A turn's own break joins the two before an image, and those of two images are one token."""
    encoder = Encoder(folder)
    sample = conversation(
        ("user", [None, None, "What?"]), ("assistant", ["x"]), images=(file_of(picture()),) * 2
    )
    ids = encoder.encode(sample).input_ids.tolist()
    two, three, four = encoder.tokenizer.convert_tokens_to_ids(list(BREAKS))
    start, end, soft = encoder.tokenizer.convert_tokens_to_ids(list(TOKENS))
    image = [start, *[soft] * TILE_TOKENS, end]
    first = ids.index(start)
    assert ids[first - 1 : first + 2 * len(image) + 2] == [three, *image, four, *image, two]
    pieces = encoder.tokenizer(["user\n", "\n\n"], add_special_tokens=False)["input_ids"]
    assert pieces[0][-1] != three and pieces[1] == [two], "written as ids nothing would merge"


def test_the_marker_in_the_words_of_a_user_stays_text(folder):
    encoder = Encoder(folder)
    sample = conversation(("user", [None, f"Is {TOKENS[0]} a token?"]), ("assistant", ["yes"]))
    (tokens,) = encoder._tokens(sample, encoder.layouts([(48, 32)]))
    assert tokens.ids.count(encoder.tokenizer.convert_tokens_to_ids(TOKENS[0])) == 1


# Pan-and-scan


@pytest.fixture(scope="module")
def cut_encoder(cutting):
    return Encoder(cutting)


def test_crops(cut_encoder):
    layouts = cut_encoder.layouts([*SIZES, (48, 32), (200, 15), (1, 9)])
    assert [layout.grid for layout in layouts] == [(n, 8, 8) for n in (4, 1, 4, 3, 3, 1, 1)]
    assert [len(layout.runs) for layout in layouts] == [4, 1, 4, 3, 3, 1, 1]
    assert "here are some crops to help you see better" in layouts[0].text


@pytest.mark.slow
def test_predicted_lengths_are_exact_with_crops(cut_encoder):
    draw = random.Random(0)
    sizes = [tuple(round(8 * 2 ** draw.uniform(0, 5)) for _ in range(2)) for _ in range(96)]
    seen = set()
    for start in range(0, len(sizes), 4):
        some = sizes[start : start + 4]
        images = tuple(file_of(picture(*size), compress_level=1) for size in some)
        sample = conversation(
            ("user", ["a", None, None, "b", None, None]), ("assistant", ["c"]), images=images
        )
        actual, predicted = cut_encoder.encode(sample), cut_encoder.length(sample, some)
        assert predicted.num_tokens == actual.length, some
        assert predicted.num_image_tokens == len(actual.media_positions), some
        assert predicted.num_patches == actual.media.pixel_values.shape[0], some
        seen |= {len(runs) for runs in actual.media.blocks}
    assert seen == {1, 3, 4}


@pytest.mark.slow
def test_packed_equals_unpacked_with_crops(cutting, cut_encoder, mixed):
    """Each crop is a block of its own."""
    samples = [*mixed[:2], raw_sample(), mixed[2]]
    processor = StockProcessor(cutting)
    reference = run_one_by_one(
        load_stock(cutting).train(), {sample.key: processor(sample) for sample in samples}
    )
    batch = pack([cut_encoder.encode(sample.cooked()) for sample in samples], alignment=8)
    assert len(batch.image_blocks) > batch.media.num_images
    vlm = make_engine(cutting, cut_encoder).vlm.train()
    assert find_differences(run_batch(vlm, batch), reference) == []


def test_pictures_show_the_image_and_its_crops(cut_encoder):
    image = picture(120, 40)
    (shown,) = cut_encoder.image_rule.pictures(cut_encoder.image_rule.preprocess([image]))
    assert shown.size == (4 * 64, 64)
    for place, box in enumerate([(0, 0, 120, 40), (0, 0, 40, 40), (40, 0, 80, 40)]):
        wanted = image.crop(box).resize((64, 64), Image.Resampling.BILINEAR)
        tile = shown.crop((64 * place, 0, 64 * place + 64, 64))
        wanted, tile = (
            torch.frombuffer(bytearray(i.tobytes()), dtype=torch.uint8) for i in (wanted, tile)
        )
        assert (wanted.int() - tile.int()).abs().max() <= 1


def test_the_budget_bounds_the_crops(cutting, folder):
    encoder = Encoder(cutting).replace(budget=ImagesSection(max_tiles=2))
    (layout,) = encoder.layouts([(120, 40)])
    assert layout.grid[0] == 3
    media = encoder.image_rule.preprocess([picture(120, 40)])
    assert media.grid_thw == (layout.grid,)
    with pytest.raises(CapabilityError, match=r"images\.max_tiles: 2, but .*do_pan_and_scan"):
        Encoder(folder).replace(budget=ImagesSection(max_tiles=2)).load()
    with pytest.raises(CapabilityError, match=r"images\.max_pixels: 9, but"):
        Encoder(folder).replace(budget=ImagesSection(max_pixels=9)).load()


def test_nulls_are_the_defaults_of_the_processor_class(folder, tmp_path):
    values = dict.fromkeys(CUTS) | {"do_pan_and_scan": True}
    rule = Encoder(changed(folder, tmp_path / "model", **values)).image_rule
    theirs = Gemma3Processor.images_kwargs
    assert rule.settings() == {name: theirs[name] for name in CUTS} | {"do_pan_and_scan": True}
    assert [rule.layout(*size).grid[0] for size in ((1000, 400), (255, 800), (512, 430))] == [
        4,
        1,
        1,
    ]
    assert rule.preprocess([picture(1000, 400)]).grid_thw == ((4, 8, 8),)


# Folders


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"size": {"height": 32, "width": 64}},
            r"size is .32, 64., but the tower takes .* 64 x 64",
        ),
        ({"do_resize": False}, "do_resize is False"),
        ({"image_processor_type": "Qwen2VLImageProcessor"}, "expected Gemma3ImageProcessor"),
    ],
    ids=["size", "resize", "other"],
)
def test_a_processor_that_does_not_fit_is_named(folder, tmp_path, values, message):
    with pytest.raises(ModelError, match=message):
        Encoder(changed(folder, tmp_path / "model", **values)).load()


def test_a_count_of_tokens_that_does_not_fit_is_named(folder, tmp_path):
    chosen = changed(folder, tmp_path / "model")
    (chosen / "processor_config.json").unlink()  # the class's default is 256
    file = chosen / "processor_config.json"
    for content, found in (
        (None, "processor_config.json is missing, which means image_seq_length 256"),
        ("{}", "processor_config.json has no image_seq_length, which means 256"),
        ('{"image_seq_length": 256}', "processor_config.json writes image_seq_length 256"),
    ):
        if content is not None:
            file.write_text(content)
        with pytest.raises(ModelError, match=rf'{found}, .* makes 16 .*"image_seq_length": 16 '):
            Encoder(chosen).load()
