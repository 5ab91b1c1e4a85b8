"""Pixel budgets: kept by every image, counted exactly, part of what was measured, exported."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from pathlib import Path

import pytest
from support.families import tiny_family_folder
from support.images import conversation, file_of, one_image, picture

from vlmpack.encode import Encoder
from vlmpack.encode.fingerprint import hashed
from vlmpack.errors import CapabilityError
from vlmpack.model_folder.content import PROCESSOR_FILES
from vlmpack.recipe.data import ImagesSection

BUDGETS = [
    ImagesSection(max_pixels=60_000),
    ImagesSection(min_pixels=30_000),
    ImagesSection(min_pixels=20_000, max_pixels=24_000),
]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl"])
def family_folder(request, tmp_path_factory):
    return tiny_family_folder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def as_published(tiny_folder, tmp_path):
    """Bounds as Qwen2.5-VL's own files have them: without `size`."""
    for name in ("config.json", *PROCESSOR_FILES):
        if (tiny_folder / name).is_file():
            shutil.copyfile(tiny_folder / name, tmp_path / name)
    path = tmp_path / "preprocessor_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content |= {"min_pixels": 3136, "max_pixels": 12845056}
    del content["size"]
    path.write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


def sizes(count: int) -> list[tuple[int, int]]:
    draw = random.Random(1)
    return [tuple(round(8 * 2 ** draw.uniform(0, 6)) for _ in range(2)) for _ in range(count)]


def stock_grid(folder: Path, size: tuple[int, int]) -> list[int]:
    """By the folder's processor, as transformers loads it."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(str(folder), local_files_only=True)
    features = processor(images=[picture(*size)], return_tensors="pt")
    return list(features["image_grid_thw"][0].tolist())


@pytest.mark.cases(slow="qwen2_vl")
def test_predicted_lengths_are_exact_within_a_budget(family_folder):
    counts: set[int] = set()
    unbound = Encoder(family_folder)
    changed = 0
    for budget in BUDGETS:
        encoder = Encoder(family_folder).replace(budget=budget)
        for size in sizes(60)[:: len(BUDGETS)] if budget is BUDGETS[0] else sizes(20):
            sample = one_image(file_of(picture(*size), compress_level=1))
            actual, predicted = encoder.encode(sample), encoder.length(sample, [size])
            assert predicted.num_tokens == actual.length, (size, budget)
            assert predicted.num_image_tokens == len(actual.media_positions)
            assert predicted.num_patches == actual.media.pixel_values.shape[0]
            counts.add(predicted.num_image_tokens)
            changed += predicted != unbound.length(sample, [size])
    assert len(counts) > 10
    assert changed > 20, "the budgets bound nothing"


def test_images_keep_the_bounds_to_the_pixel(family_folder):
    """Areas as the rule of the family's paper has them, images of extreme ratios aside."""
    patch = Encoder(family_folder).image_rule.patch_size
    rules = {b: Encoder(family_folder).replace(budget=b).image_rule for b in BUDGETS[:2]}
    shrunk = grown = 0
    for width, height in (size for size in sizes(300) if 0.5 < size[0] / size[1] < 2):
        areas = {}
        for budget in BUDGETS[:2]:
            _, rows, columns = rules[budget].layout(width, height).grid
            areas[budget] = rows * columns * patch**2
        assert areas[BUDGETS[0]] <= 60_000
        assert areas[BUDGETS[1]] >= 30_000
        shrunk += width * height > 80_000
        grown += width * height < 25_000
    assert shrunk > 3
    assert grown > 20


def test_what_is_not_set_stays_as_the_processor_says(tiny_folder):
    plain, none = Encoder(tiny_folder), Encoder(tiny_folder).replace(budget=ImagesSection())
    assert plain.fingerprint == none.fingerprint
    assert plain.image_rule == none.image_rule
    one = Encoder(tiny_folder).replace(budget=ImagesSection(max_pixels=50_000))
    assert one.image_rule.min_pixels == plain.image_rule.min_pixels
    assert one.image_rule.max_pixels == 50_000 != plain.image_rule.max_pixels


def test_a_budget_wins_over_bounds_spelt_the_old_way(as_published):
    size = (700, 500)
    plain = Encoder(as_published)
    assert list(plain.image_rule.layout(*size).grid) == stock_grid(as_published, size)
    encoder = Encoder(as_published).replace(budget=ImagesSection(max_pixels=50_000))
    sample = one_image(file_of(picture(*size)))
    assert encoder.encode(sample).length == encoder.length(sample, [size]).num_tokens
    assert encoder.length(sample, [size]).num_patches < plain.length(sample, [size]).num_patches


@pytest.mark.parametrize("nested", [False, True], ids=["own file", "in processor_config.json"])
def test_an_exported_folder_resizes_as_training_did(as_published, tmp_path_factory, nested):
    encoder = Encoder(as_published).replace(
        budget=ImagesSection(min_pixels=20_000, max_pixels=50_000)
    )
    export = tmp_path_factory.mktemp("export")
    for name in ("config.json", *PROCESSOR_FILES):
        if (as_published / name).is_file():
            shutil.copyfile(as_published / name, export / name)
    if nested:
        own = export / "preprocessor_config.json"
        nest = {"image_processor": json.loads(own.read_text(encoding="utf-8"))}
        (export / "processor_config.json").write_text(json.dumps(nest), encoding="utf-8")
        own.unlink()
    encoder.write_settings(export)
    for size in [(700, 500), (40, 30), (200, 200)]:
        grid = list(encoder.image_rule.layout(*size).grid)
        assert (
            stock_grid(export, size) == grid == list(Encoder(export).image_rule.layout(*size).grid)
        )
    assert stock_grid(export, (700, 500)) != stock_grid(as_published, (700, 500))


def test_without_a_budget_an_exported_folder_keeps_its_files(as_published):
    before = (as_published / "preprocessor_config.json").read_bytes()
    Encoder(as_published).write_settings(as_published)
    assert (as_published / "preprocessor_config.json").read_bytes() == before


def test_lengths_and_packs_of_another_budget_are_other_ones(tiny_folder):
    encoders = [
        Encoder(tiny_folder).replace(budget=budget) for budget in (ImagesSection(), *BUDGETS)
    ]
    assert len({encoder.fingerprint for encoder in encoders}) == len(encoders)
    parts = [encoder.fingerprint_parts for encoder in encoders]
    assert "images" not in parts[0]
    assert parts[3]["images"] == "min_pixels 20000, max_pixels 24000"
    assert pickle.loads(pickle.dumps(encoders[3])).fingerprint == encoders[3].fingerprint


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        (
            ImagesSection(max_tiles=4),
            r"images.max_tiles: 4, .*images.min_pixels and images.max_pi",
        ),
        (ImagesSection(max_pixels=700), r"images.max_pixels: 700 is less than .* 28 x 28 = 784"),
        (
            ImagesSection(min_pixels=2_000_000),
            r"images.min_pixels: 2000000 is more than the 80281",
        ),
    ],
)
def test_a_budget_that_the_model_cannot_keep_is_refused_at_once(tiny_folder, budget, reason):
    with pytest.raises(CapabilityError, match=reason):
        Encoder(tiny_folder).replace(budget=budget).load()


def test_a_bound_below_the_processors_own_other_one_is_refused(as_published):
    with pytest.raises(CapabilityError, match=r"images.max_pixels: 1000 .*3136 .*min_pixels too"):
        Encoder(as_published).replace(budget=ImagesSection(max_pixels=1000)).load()
    both = Encoder(as_published).replace(budget=ImagesSection(min_pixels=784, max_pixels=1000))
    assert both.image_rule.layout(500, 500).num_tokens == 1


def test_a_language_model_has_no_budget(tmp_path):
    folder = tiny_family_folder("llama", tmp_path)
    with pytest.raises(CapabilityError, match=r"images.max_pixels: 9000.*no vision tower"):
        Encoder(folder).replace(budget=ImagesSection(max_pixels=9000)).load()


def test_images_in_an_answer_are_counted_but_not_learnt(encoder):
    """Of the predicted label tokens too."""
    sample = conversation(
        ("system", ["See: ", None]),
        ("user", ["Show me.", None]),
        ("assistant", ["Here", None, "it is."]),
        images=tuple(file_of(picture(48 + 40 * n, 60)) for n in range(3)),
    )
    actual = encoder.encode(sample)
    predicted = encoder.length(sample, [(48 + 40 * n, 60) for n in range(3)])
    targets = actual.labels[actual.labels != -100]
    assert encoder.tokenizer.decode(targets) == "Hereit is.<|im_end|>"
    assert predicted.num_label_tokens == len(targets)
    assert predicted.num_tokens == actual.length
    assert len(actual.media.grid_thw) == 3


def test_a_budget_is_named_as_it_always_was():
    """Lengths on disk and states of runs bear this text's digest."""
    text = "PixelBudget(min_pixels=None, max_pixels=50000, max_tiles=None)"
    assert hashed(ImagesSection(max_pixels=50_000)) == text
