"""InternVL's videos, a tile each frame: those of a packed row against transformers' own processor
and model (support/video_worker.py runs the processor, on torchvision)."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from support.engines import make_engine
from support.families import tiny_family_folder
from support.runs import find_differences, pack, run_batch
from support.stock import load_stock, run_one_by_one
from support.tiny_internvl import with_videos
from support.videos import ProcessedInputs, Shot, Told, by_transformers

from vlmpack.encode import Encoder, Message, TextPart, VideoPart, VLMSample
from vlmpack.errors import CapabilityError
from vlmpack.packing.image_owners import RowOwners, SampleOwners

TILE = (32, 32)
SAMPLES = (
    Told("even", (Shot(TILE, 4, fps=2.0), "What happens?"), "qzkvbn"),
    Told("text", ("No picture at all.",), "wxxjpl"),
    Told(
        "mixed",
        ((64, 32), "before", Shot(TILE, 3, fps=3.0, seed=1), Shot(TILE, 3, fps=0.5), "and?"),
        "rtyuuv",
    ),
    Told("still", ((96, 64), "One image."), "mmnbdq"),
    Told("timed", (Shot(TILE, 3, times=(0.0, 0.5, 7.0), seed=2), "then", TILE, "?"), "ghjkaz"),
)
RESIZED = (
    Told("small", (Shot((20, 17), 3, fps=2.0, smooth=True), "?"), "abcq"),
    Told("large", (Shot((300, 120), 4, fps=2.0, smooth=True), "?"), "abcq"),
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Of the tiny model."""
    return Encoder(with_videos(tiny_family_folder("internvl", tmp_path_factory.mktemp("internvl"))))


@pytest.fixture(scope="module")
def theirs(encoder, tmp_path_factory):
    """Key -> what the stock processor returns."""
    told, models = (*SAMPLES, *RESIZED), {"internvl": encoder.folder}
    return by_transformers(told, models, tmp_path_factory.mktemp("processed"))["internvl"]


@pytest.mark.soak
def test_ids_and_pixels_are_those_of_the_stock_processor(encoder, theirs):
    for told in SAMPLES:
        ours, features = encoder.encode(told.cooked()), theirs[told.key]
        assert ours.input_ids.tolist() == features["input_ids"][0].tolist()
        if ours.media is None:
            assert "pixel_values" not in features
            continue
        given = encoder.family.image_arguments(ours.media)
        assert given.keys() == features.keys() - {"input_ids", "attention_mask"}
        assert torch.equal(given["pixel_values"], features["pixel_values"])
    text = encoder.tokenizer.decode(encoder.encode(SAMPLES[0].cooked()).input_ids)
    assert "\nFrame4: <img><IMG_CONTEXT>" in text and "Frame5" not in text


@pytest.mark.soak
def test_a_resized_frame_differs_by_rounding_alone(encoder, theirs):
    level = 1 / (255 * min(encoder.video_rule.pixels.image_std))
    largest = []
    for told in RESIZED:
        ours, features = encoder.encode(told.cooked()), theirs[told.key]
        assert ours.input_ids.tolist() == features["input_ids"][0].tolist()
        given = encoder.family.image_arguments(ours.media)["pixel_values"]
        difference = (given - features["pixel_values"]).abs()
        largest.append(float(difference.max()))
        assert largest[-1] < 2.01 * level and float(difference.mean()) < 0.05 * level
    assert max(largest) > 0.9 * level  # both did resize


@pytest.fixture(scope="module")
def runs(encoder, theirs):
    """(packed model, samples, the stock model one by one)."""
    inputs = {}
    for told in SAMPLES:
        ids = encoder.tokenizer(f"{told.answer}<|im_end|>", add_special_tokens=False).input_ids
        inputs[told.key] = ProcessedInputs.of(theirs[told.key], ids, has_rope_index=False)
    reference = run_one_by_one(load_stock(encoder.folder).train(), inputs)
    vlm = make_engine(encoder.folder, encoder).vlm.train()
    return vlm, [encoder.encode(told.cooked()) for told in SAMPLES], reference


@pytest.mark.soak
@pytest.mark.parametrize("alignment", [1, 8])
def test_a_packed_row_equals_the_stock_model_one_by_one(runs, alignment):
    """Videos among images and text: boundaries, positions, losses to 1e-6, gradients to 1e-5."""
    vlm, samples, reference = runs
    assert find_differences(run_batch(vlm, pack(samples, alignment=alignment)), reference) == []
    assert find_differences(run_batch(vlm, pack(samples[::-1])), reference) == []


@pytest.mark.soak
def test_frames_in_another_order_are_found(runs):
    vlm, samples, reference = runs
    video = samples[0].media
    tiles = video.pixel_values.split(16)
    swapped = replace(video, pixel_values=torch.cat([tiles[1], tiles[0], *tiles[2:]]))
    wrong = [replace(samples[0], media=swapped), *samples[1:]]
    found = find_differences(run_batch(vlm, pack(wrong)), reference)
    assert any("even" in line for line in found)
    assert not any("still" in line or "of text" in line for line in found)


def test_lengths_follow_from_the_sizes_of_frames_alone(encoder):
    draw = random.Random(0)
    counts = set()
    for number in range(24):
        size = (draw.randint(20, 300), draw.randint(20, 300))
        shot = Shot(size, draw.randint(1, 12), fps=2.0)
        times = tuple(n / 2 for n in range(shot.count))
        asked = (VideoPart(0, times, 2.0), TextPart("?"))
        answer = Message("assistant", (TextPart("abc"),))
        blank = VLMSample(key="one", url="", messages=(Message("user", asked), answer))
        length = encoder.length(blank, [size] * shot.count)
        if number % 6 == 0:
            encoded = encoder.encode(Told("one", (shot, "?"), "abc").cooked())
            assert encoded.length == length.num_tokens
            assert len(encoded.media_positions) == length.num_image_tokens == 4 * shot.count
            assert encoded.media.pixel_values.shape[0] == length.num_patches
        counts.add(length.num_tokens)
    assert len(counts) > 8


def test_processes_of_a_replica_make_whole_videos(encoder):
    """Together they make what one process makes alone, and each knows the size of each item."""
    sample = SAMPLES[2].cooked()
    alone = encoder.encode(sample).media
    made = []
    for rank in range(2):
        share = SampleOwners(RowOwners(rank, 2), before=0, total=sum(alone.patches_here))
        media = encoder.encode(sample, owners=share).media
        assert (media.grid_thw, media.seconds) == (alone.grid_thw, alone.seconds)
        assert media.image_sizes == alone.image_sizes == ((64, 32), TILE, TILE)
        made.append(dict(zip(*_own(media), strict=True)))
    assert all(made) and made[0].keys().isdisjoint(made[1])
    rows = [(made[0] | made[1])[number] for number in range(3)]
    assert torch.equal(torch.cat(rows), alone.pixel_values)


def _own(media):
    numbers = [number for number, mine in enumerate(media.owners.mine) if mine]
    counts = [count for count in media.patches_here if count]
    return numbers, media.pixel_values.split(counts)


@pytest.mark.cases(quick="settings3*", slow="settings0*")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"video_processor_type": "Qwen2VLVideoProcessor"}, "expected InternVLVideoProcessor"),
        ({"size": {"height": 48, "width": 48}}, "a height and a width of 32"),
        ({"do_center_crop": True}, "do_center_crop is True"),
        ({"do_resize": False}, "do_resize is False"),
    ],
)
def test_another_video_processor_is_refused(tmp_path, settings, words):
    folder = with_videos(tiny_family_folder("internvl", tmp_path))
    path = folder / "video_preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    encoder = Encoder(folder)
    assert encoder.encode(SAMPLES[3].cooked()).media is not None
    with pytest.raises(CapabilityError, match=words):
        encoder.encode(SAMPLES[0].cooked())
