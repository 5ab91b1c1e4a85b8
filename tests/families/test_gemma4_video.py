"""Gemma 4's videos, an image each frame behind its time: those of a packed row against
transformers' own processor and model (support/video_worker.py runs the processor, on torchvision).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engines import make_engine
from support.families import tiny_family_folder, write_tiny
from support.runs import find_differences, pack, run_batch
from support.stock import load_stock, run_one_by_one
from support.tiny_gemma4 import DENSE, PER_LAYER, tiny_with_videos
from support.videos import ProcessedInputs, Shot, Told, by_transformers

from vlmpack.encode import Encoder, Message, TextPart, VideoPart, VLMSample
from vlmpack.errors import CapabilityError, DataError

WHOLE = (180, 126)
"""10 x 7 tokens of 18 pixels, the whole budget: nothing is resized."""

SAMPLES = (
    Told("even", (Shot(WHOLE, 3, fps=2.0), "What happens?"), "qzkvbn"),
    Told("text", ("No picture at all.",), "wxxjpl"),
    Told(
        "mixed",
        (WHOLE, "before", Shot(WHOLE, 2, fps=0.01, seed=1), Shot(WHOLE, 1, fps=0.5), "and?"),
        "rtyuuv",
    ),
    Told("still", (WHOLE, "One image."), "mmnbdq"),
    Told("timed", (Shot(WHOLE, 2, times=(59.5, 3725.0), seed=2), "then", WHOLE, "?"), "ghjkaz"),
)
RESIZED = (
    Told("small", (Shot((40, 57), 2, fps=2.0, smooth=True), "?"), "abcq"),
    Told("large", (Shot((400, 120), 3, fps=2.0, smooth=True), "?"), "abcq"),
)
SHAPES = {"per layer": (PER_LAYER, {"use_clipped_linears": True}), "blocks": (DENSE, {})}


def with_tokens(folder: Path) -> Path:
    """The names that transformers' processor knows tokens by."""
    path = folder / "tokenizer_config.json"
    tokens = {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": tokens}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Shape -> its tiny model."""
    return {
        name: with_tokens(
            write_tiny(tiny_with_videos(shape, **vision), tmp_path_factory.mktemp("g"))
        )
        for name, (shape, vision) in SHAPES.items()
    }


@pytest.fixture(scope="module")
def by_stock(folders, tmp_path_factory):
    """Shape -> key -> what the stock processor returns."""
    return by_transformers((*SAMPLES, *RESIZED), folders, tmp_path_factory.mktemp("processed"))


@pytest.fixture(scope="module", params=SHAPES)
def case(request, folders, by_stock):
    """(encoder, what the stock processor returns)."""
    return Encoder(folders[request.param]), by_stock[request.param]


def theirs_alone(features):
    """Patches without the processor's padding to its budget, by name."""
    found = {}
    for name, places in (
        ("pixel_values", "image_position_ids"),
        ("pixel_values_videos", "video_position_ids"),
    ):
        if name in features:
            found[name] = features[name][(features[places] >= 0).all(dim=-1)]
    return found


@pytest.mark.soak
def test_ids_and_pixels_are_those_of_the_stock_processor(case):
    encoder, theirs = case
    seen = 0
    for told in SAMPLES:
        ours, features = encoder.encode(told.cooked()), theirs[told.key]
        assert ours.input_ids.tolist() == features["input_ids"][0].tolist()
        if ours.media is None:
            continue
        given = encoder.family.image_arguments(ours.media)
        wanted = theirs_alone(features)
        for name, rows in theirs_alone(given).items():
            assert torch.equal(rows, wanted.pop(name)), (told.key, name)
            seen += name == "pixel_values_videos"
        assert not wanted
        if "num_frames_per_video" in features:
            counts = features["num_frames_per_video"].tolist()
            assert given["num_frames_per_video"].tolist() == counts
    assert seen == 3
    text = encoder.tokenizer.decode(encoder.encode(SAMPLES[4].cooked()).input_ids)
    assert "00:59 <|image>" in text and " 62:05 <|image>" in text


@pytest.mark.soak
def test_a_resized_frame_differs_by_rounding_alone(case):
    encoder, theirs = case
    largest = []
    for told in RESIZED:
        ours, features = encoder.encode(told.cooked()), theirs[told.key]
        assert ours.input_ids.tolist() == features["input_ids"][0].tolist()
        rows = theirs_alone(features)["pixel_values_videos"]
        difference = (ours.media.pixel_values - rows).abs()
        largest.append(float(difference.max()))
        assert largest[-1] < 2.01 / 255 and float(difference.mean()) < 0.05 / 255
        assert rows.std() > 0.1
    assert max(largest) > 0.9 / 255  # both did resize


@pytest.fixture(scope="module")
def runs(case):
    """(packed model, samples, the stock model one by one)."""
    encoder, theirs = case
    inputs = {}
    for told in SAMPLES:
        ids = encoder.tokenizer(f"{told.answer}<|im_end|>", add_special_tokens=False).input_ids
        inputs[told.key] = ProcessedInputs.of(theirs[told.key], ids, has_rope_index=False)
    reference = run_one_by_one(load_stock(encoder.folder).train(), inputs)
    vlm = make_engine(encoder.folder, encoder).vlm.train()
    return vlm, [encoder.encode(told.cooked()) for told in SAMPLES], reference


@pytest.mark.soak
def test_a_packed_row_equals_the_stock_model_one_by_one(runs):
    """Videos among images and text: boundaries, blocks, losses to 1e-6, gradients to 1e-5."""
    vlm, samples, reference = runs
    for row in (pack(samples), pack(samples, alignment=8), pack(samples[::-1])):
        assert find_differences(run_batch(vlm, row), reference) == []


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["frames in another order", "all frames as one"])
def test_wrong_frames_are_found(runs, fault):
    vlm, samples, reference = runs
    media = samples[0].media
    t, h, w = media.grid_thw[0]
    frames = media.pixel_values.split(h * w)
    changed = replace(media, pixel_values=torch.cat([frames[1], frames[0], *frames[2:]]))
    if fault == "all frames as one":  # attention of the tower over all of them
        changed = replace(media, grid_thw=((1, t * h, w),))
    wrong = [replace(samples[0], media=changed), *samples[1:]]
    found = find_differences(run_batch(vlm, pack(wrong)), reference)
    assert any("even" in line for line in found)
    assert not any("still" in line or "of text" in line for line in found)


def test_lengths_follow_from_the_sizes_of_frames_alone(tmp_path):
    encoder = Encoder(write_tiny(tiny_with_videos(DENSE), tmp_path))
    for size, count in ((WHOLE, 3), ((400, 120), 2), ((50, 300), 1)):
        part = VideoPart(0, tuple(n / 2 for n in range(count)), 2.0)
        turns = (Message("user", (part, TextPart("?"))), Message("assistant", (TextPart("abc"),)))
        length = encoder.length(VLMSample(key="one", url="", messages=turns), [size] * count)
        encoded = encoder.encode(Told("one", (Shot(size, count, fps=2.0), "?"), "abc").cooked())
        assert encoded.length == length.num_tokens
        assert len(encoded.media_positions) == length.num_image_tokens
        assert encoded.media.pixel_values.shape[0] == length.num_patches


def test_what_cannot_be_followed_is_refused(tmp_path):
    folder = write_tiny(tiny_with_videos(DENSE), tmp_path)
    path = folder / "processor_config.json"
    content = json.loads(path.read_text())
    for change, words in (
        ({"video_processor_type": "Qwen2VLVideoProcessor"}, "expected Gemma4VideoProcessor"),
        ({"patch_size": 8}, "patch_size is 8, expected 6"),
        ({"max_soft_tokens": 100}, "max_soft_tokens is 100, expected one of 70, 140"),
    ):
        changed = content | {"video_processor": content["video_processor"] | change}
        path.write_text(json.dumps(changed))
        with pytest.raises(CapabilityError, match=words):
            Encoder(folder).encode(SAMPLES[0].cooked())
    other = tmp_path / "unified"
    other.mkdir()
    unified = Encoder(tiny_family_folder("gemma4_unified", other))
    with pytest.raises(DataError, match="videos of the family gemma4_unified are not made ready"):
        unified.encode(SAMPLES[0].cooked())
