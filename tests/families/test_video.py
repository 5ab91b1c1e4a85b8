"""Videos as stored frames: those of a packed row against transformers' own processor and model.

The processor runs in a process of its own, since transformers has video processors on torchvision
alone (support/video_worker.py).
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engines import make_engine
from support.families import tiny_family_folder
from support.runs import find_differences, pack, run_batch
from support.stock import load_stock, run_one_by_one
from support.videos import ProcessedInputs, Shot, Told, by_transformers

from vlmpack.encode import Encoder, Message, TextPart, VideoPart, VLMSample
from vlmpack.errors import DataError

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen2_vl", "qwen3_5")

WHOLE = (112 * 2, 112)
"""Frames of this size are whole tokens of patches of 14 and of 16, within the bounds of both, so no
pixel is resized."""

SAMPLES = (
    Told("even", (Shot(WHOLE, 4, fps=2.0), "What happens?"), "qzkvbn"),
    Told("text", ("No picture at all.",), "wxxjpl"),
    Told(
        "mixed",
        (WHOLE, "before", Shot(WHOLE, 5, fps=3.0, seed=1), Shot(WHOLE, 2, fps=0.5, seed=3), "and?"),
        "rtyuuv",
    ),
    Told("still", ((224, 224), "One image."), "mmnbdq"),
    Told(
        "timed",
        (Shot(WHOLE, 3, times=(0.0, 0.5, 1.0), seed=2), "then", WHOLE, "What?"),
        "ghjkaz",
    ),
)
RESIZED = (
    Told("small", (Shot((50, 37), 3, fps=2.0, smooth=True), "?"), "abcq"),
    Told("large", (Shot((700, 420), 4, fps=2.0, smooth=True), "?"), "abcq"),
    Told("long", (Shot((600, 33), 7, fps=2.0, smooth=True), "?"), "abcq"),
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """model_type -> its tiny model."""
    return {name: tiny_family_folder(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def by_stock(folders, tmp_path_factory):
    """Model -> key -> what the stock processor returns."""
    told = (*SAMPLES, *RESIZED)
    return by_transformers(told, folders, tmp_path_factory.mktemp("processed"))


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, folders, by_stock):
    """(name, encoder, what the stock processor returns)."""
    return request.param, Encoder(folders[request.param]), by_stock[request.param]


def stock_features(media, family):
    """The arguments of the transformers class."""
    return family.image_arguments(media) if media is not None else {}


def test_ids_positions_and_pixels_are_those_of_the_stock_processor(case):
    _, encoder, theirs = case
    seen = 0
    for told in SAMPLES:
        ours, features = encoder.encode(told.cooked()), theirs[told.key]
        assert ours.input_ids.tolist() == features["input_ids"][0].tolist()
        given = stock_features(ours.media, encoder.family)
        assert given.keys() == features.keys() - {
            "input_ids",
            "attention_mask",
            "mm_token_type_ids",
        }
        for key, value in given.items():
            if key == "second_per_grid_ts" and told.key == "timed":
                assert value.tolist() == pytest.approx([1.0])  # told one rate of one a second
                continue
            assert torch.equal(value, features[key]), (told.key, key)
            seen += key == "pixel_values_videos"
        kinds = encoder.family.token_arguments(
            (ours.input_ids == encoder.placeholder_id).int()
            + 2 * (ours.input_ids == encoder.video_id)
        )
        assert torch.equal(kinds["mm_token_type_ids"], features["mm_token_type_ids"][0].int())
    assert seen == 3


def test_a_resized_frame_differs_by_rounding_alone(case):
    """Pillow resizes here, torchvision there, one side after the other, and each rounds to one of
    256 levels twice. At an edge, where a bicubic filter swings beyond black or white, what they cut
    off in between differs by more: these frames have none."""
    _, encoder, theirs = case
    settings = encoder.video_rule.pixels
    grids, largest = set(), []
    for told in RESIZED:
        ours, features = encoder.encode(told.cooked()), theirs[told.key]
        assert ours.input_ids.tolist() == features["input_ids"][0].tolist()
        given = stock_features(ours.media, encoder.family)
        assert torch.equal(given["video_grid_thw"], features["video_grid_thw"])
        grids.add(ours.media.grid_thw[0])
        difference = (given["pixel_values_videos"] - features["pixel_values_videos"]).abs()
        level = 1 / (255 * min(settings.image_std))
        largest.append(float(difference.max()))
        assert largest[-1] < 2.01 * level
        assert float(difference.mean()) < 0.05 * level
    assert max(largest) > 0.9 * level  # both did resize
    assert len(grids) == 3


@pytest.fixture(scope="module")
def runs(case):
    """(name, encoder, packed model, samples, the stock model one by one)."""
    name, encoder, theirs = case
    model = load_stock(encoder.folder).train()
    inputs = {}
    for told in SAMPLES:
        ids = encoder.tokenizer(f"{told.answer}<|im_end|>", add_special_tokens=False).input_ids
        features = dict(theirs[told.key])
        if told.key == "timed" and "second_per_grid_ts" in features:
            features["second_per_grid_ts"] = torch.tensor([1.0])  # 2 frames a second
        inputs[told.key] = ProcessedInputs.of(features, ids)
    reference = run_one_by_one(model, inputs)
    vlm = make_engine(encoder.folder, encoder).vlm.train()
    samples = [encoder.encode(told.cooked()) for told in SAMPLES]
    return name, encoder, vlm, samples, reference


@pytest.mark.cases(slow=("qwen2_5_vl-8", "qwen3_5-1"))
@pytest.mark.parametrize("alignment", [1, 8])
def test_a_packed_row_equals_the_stock_model_one_by_one(runs, alignment):
    """Videos among images and text: boundaries, positions, losses to 1e-6, gradients to 1e-5."""
    _, _, vlm, samples, reference = runs
    assert find_differences(run_batch(vlm, pack(samples, alignment=alignment)), reference) == []
    assert find_differences(run_batch(vlm, pack(samples[::-1])), reference) == []


def test_times_that_are_ignored_are_found(runs):
    """Positions as if each patch along time were one further (2.5), or each frame's text were of
    another rate (3)."""
    name, encoder, vlm, _, reference = runs
    if name == "qwen2_vl":
        pytest.skip("its videos have no time")
    told = [
        replace(
            each,
            asked=tuple(
                replace(p, fps=24.0, times=()) if isinstance(p, Shot) else p for p in each.asked
            ),
        )
        for each in SAMPLES
    ]
    wrong = [encoder.encode(each.cooked()) for each in told]
    found = find_differences(run_batch(vlm, pack(wrong)), reference)
    assert any("even" in line for line in found)
    assert not any("still" in line or "of text" in line for line in found)


@pytest.mark.cases(slow=("qwen2_5_vl-two videos as one", "qwen3_5-frames as one"))
@pytest.mark.parametrize("fault", ["frames as one", "two videos as one", "frames in other order"])
def test_wrong_borders_in_the_tower_are_found(runs, fault):
    _, _, vlm, samples, reference = runs
    wrong = []
    for one in samples:
        media = one.media
        if media is None:
            wrong.append(one)
            continue
        if fault == "frames as one":  # attention over all frames of a video
            grids = tuple((1, t * h, w) if t > 1 else (t, h, w) for t, h, w in media.grid_thw)
            changed = replace(media, grid_thw=grids)
        elif fault == "two videos as one" and one.key == "mixed":
            a, h, w = media.grid_thw[1]
            # The last patch along time of one video and the first of the next are one.
            rows = media.pixel_values.clone()
            first, size = h * w + (a - 1) * h * w, h * w
            rows[first : first + size, :588] = rows[first + size : first + 2 * size, :588]
            changed = replace(media, pixel_values=rows)
        elif fault == "frames in other order":
            parts = list(media.pixel_values.split(media.grid_thw[0][1] * media.grid_thw[0][2]))
            changed = replace(media, pixel_values=torch.cat(parts[::-1]))
        else:
            changed = media
        wrong.append(replace(one, media=changed))
    found = find_differences(run_batch(vlm, pack(wrong)), reference)
    assert any("mixed" in line for line in found)


@pytest.mark.cases(slow=("qwen2_vl", "qwen3_5"))
def test_lengths_follow_from_the_sizes_of_frames_alone(case):
    """No pixel is looked at; and the encoder finds the same."""
    _, encoder, _ = case
    draw = random.Random(0)
    counts = set()
    for number in range(48):
        size = (draw.randint(20, 900), draw.randint(20, 900))
        shot = Shot(size, draw.randint(2, 9), fps=draw.choice([0.5, 2.0, 3.0, 29.97]))
        told = Told("one", (Shot((28, 32), 2, fps=1.0), "x", shot, "?"), "abc")
        part = VideoPart(2, tuple(n / shot.fps for n in range(shot.count)), shot.fps)
        asked = (VideoPart(0, (0.0, 1.0), 1.0), TextPart("x"), part, TextPart("?"))
        answer = Message("assistant", (TextPart("abc"),))
        blank = VLMSample(key="one", url="", messages=(Message("user", asked), answer))
        sizes = [(28, 32)] * 2 + [size] * shot.count
        length = encoder.length(blank, sizes)
        if number % 8 == 0:
            encoded = encoder.encode(told.cooked())
            assert encoded.length == length.num_tokens
            assert len(encoded.media_positions) == length.num_image_tokens
            assert encoded.media.pixel_values.shape[0] == length.num_patches
        counts.add(length.num_tokens)
    assert len(counts) > 20


def test_frames_of_several_sizes_are_refused(case):
    _, encoder, _ = case
    sample = SAMPLES[0].cooked()
    with pytest.raises(DataError, match=r"frames of a video differ in size: 0 \('f0.png'\) is 224"):
        encoder.length(replace(sample, images=()), [WHOLE, WHOLE, (100, 50), WHOLE])


BOUNDS = {
    # ceiling of a frame: 40 * 32 * 32 pixels; share of many frames: 262144 // 12; least: 9216
    "qwen3_vl": ("Qwen3VLVideoProcessor", 40, {"shortest_edge": 9216, "longest_edge": 262144}),
    # all frames together: 0.9 * 100 * 28 * 28 pixels; least: 6272 * 1.05
    "qwen2_5_vl": ("Qwen2VLVideoProcessor", 100, {"shortest_edge": 6272, "longest_edge": 50176}),
}
CAPPED = tuple(
    Told(f"{wide}x{count}", (Shot((wide, high), count, fps=2.0, smooth=True), "?"), "abcq")
    for wide, high in ((450, 250), (200, 140), (60, 40))
    for count in (2, 5, 9)
)


@pytest.mark.soak
def test_frames_capped_by_tokens_are_those_of_the_stock_processor(folders, tmp_path):
    """`cap_pixels_per_frame`: sizes of few and of many frames, above and below each bound."""
    models = {}
    for name, (kind, most, size) in BOUNDS.items():
        models[name] = Path(shutil.copytree(folders[name], tmp_path / name))
        content = json.loads((models[name] / "preprocessor_config.json").read_text())
        own = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std")
        video = {key: content[key] for key in own} | {
            "video_processor_type": kind,
            "size": size,
            "cap_pixels_per_frame": True,
            "max_video_tokens": most,
        }
        for capped in (True, False):
            folder = models[name] if capped else tmp_path / f"{name}-free"
            if not capped:
                shutil.copytree(models[name], folder)
            settings = video | {"cap_pixels_per_frame": capped}
            (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    theirs = by_transformers(CAPPED, models, tmp_path)
    for name, folder in models.items():
        capped, free = Encoder(folder), Encoder(tmp_path / f"{name}-free")
        grids, smaller = set(), 0
        for told in CAPPED:
            ours, features = capped.encode(told.cooked()), theirs[name][told.key]
            assert ours.input_ids.tolist() == features["input_ids"][0].tolist()
            assert [*ours.media.grid_thw[0]] == features["video_grid_thw"][0].tolist()
            grids.add(ours.media.grid_thw)
            smaller += ours.length < free.encode(told.cooked()).length
        assert len(grids) > 4 and smaller > 1, (name, grids, smaller)
