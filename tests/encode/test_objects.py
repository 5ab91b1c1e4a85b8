"""Boxes of records, written as each family's publisher says, and read back by what it says alone.

The reader (`support/box_reader.py`) knows the published forms and nothing of the package.
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.files.test_meant_alike import document_of
from encode.test_special_tokens import with_tokens
from PIL import Image
from support.box_reader import PUBLISHED, far_off, numbers_in, read_box, smart_resize
from support.families import tiny_family_folder
from support.shards import ROOT, TINY_MODEL

from vlmpack import encode_sample
from vlmpack.data.columns.chat import chat_turns
from vlmpack.data.shards.samples import cook_text
from vlmpack.encode import Encoder
from vlmpack.encode.coordinates import ObjectWriter, doubt_lines
from vlmpack.encode.objects import Objects, Shape, objects_of
from vlmpack.encode.sample import VLMSample
from vlmpack.encode.settings import EncoderSettings
from vlmpack.errors import CapabilityError, DataError
from vlmpack.evaluation.predictions import grounding_of
from vlmpack.families.coordinates import GENERIC
from vlmpack.families.generic_images import generic_image_rule
from vlmpack.families.registry import served_family
from vlmpack.recipe.data import CoordinatesSection, ImagesSection

W, H = 640, 428
GOLDEN = [146, 137, 615, 415]
OF_CLASSES = {name: GENERIC[name] for name in PUBLISHED if name in GENERIC}
FAMILIES = [name for name in PUBLISHED if name not in GENERIC]
THOUSANDTHS = [228, 320, 961, 970]
NUMBERS = dict.fromkeys(PUBLISHED, THOUSANDTHS) | {
    "qwen2_5_vl": [147, 134, 619, 407],
    "qwen2_5_omni_thinker": [147, 134, 619, 407],
    "gemma4": [320, 228, 970, 961],
    "paddleocr_vl": [228, 320, 961, 320, 961, 970, 228, 970],
    "deepseek_ocr2": [228, 320, 960, 969],
}
"""Of GOLDEN on an image of W x H; the publishers' own where they give some."""
ANSWERS = {
    "qwen2_vl": "<|object_ref_start|>a cat<|object_ref_end|>"
    "<|box_start|>(228,320),(961,970)<|box_end|>",
    "qwen2_5_vl": '```json\n[\n\t{"bbox_2d": [147, 134, 619, 407], "label": "a cat"}\n]\n```',
    "qwen3_vl": '```json\n[\n\t{"bbox_2d": [228, 320, 961, 970], "label": "a cat"}\n]\n```',
    "internvl": "<ref>a cat</ref><box>[[228, 320, 961, 970]]</box>",
    "gemma4": '```json\n[\n\t{"box_2d": [320, 228, 970, 961], "label": "a cat"}\n]\n```',
    "glm4v": "<|begin_of_box|>[{'label': \"a cat\", 'bbox_2d': [228,320,961,970]}]<|end_of_box|>",
    "hunyuan_vl": "a cat(228,320),(961,970)",
    "paddleocr_vl": "<|TEXT_START|>a cat<|TEXT_END|><|LOC_BEGIN|><|LOC_228|><|LOC_320|><|LOC_961|>"
    "<|LOC_320|><|LOC_961|><|LOC_970|><|LOC_228|><|LOC_970|><|LOC_END|>",
    "deepseek_ocr2": "<|ref|>a cat<|/ref|><|det|>[[228, 320, 960, 969]]<|/det|>",
}


def picture(size: tuple[int, int], orientation: int = 1) -> bytes:
    """A PNG that is shown at this size, after its EXIF rotation."""
    stored = size[::-1] if orientation >= 5 else size
    image, into = Image.new("RGB", stored, (90, 120, 30)), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(into, "png", exif=exif)
    return into.getvalue()


def record(objects: Any, answer: str, images: int = 1) -> dict[str, Any]:
    shown = [{"type": "image"}] * images
    return {
        "messages": [
            {"role": "user", "content": [*shown, {"type": "text", "text": "Where is it?"}]},
            {"role": "assistant", "content": answer},
        ],
        "objects": objects,
    }


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Encoder]:
    made: dict[Any, Encoder] = {}

    def encoder(name: str, **settings: Any) -> Encoder:
        key = name, repr(settings)
        if key not in made:
            folder = tiny_family_folder(name, tmp_path_factory.mktemp("model") / name)
            made[key] = Encoder(folder, EncoderSettings(**settings))
            if name in OF_CLASSES:  # the rule is all that these need of their class
                vars(made[key])["coordinates"] = OF_CLASSES[name]
        return made[key]

    return encoder


def said(encoder: Encoder, given: dict[str, Any], images: dict[str, bytes]) -> str:
    """What the model learns to answer."""
    sample = encode_sample(encoder, given, images)
    ids = [token for token in sample.labels.tolist() if token >= 0]
    return str(encoder.tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("family", PUBLISHED)
def test_the_publishers_numbers(family: str, encoders: Callable[..., Encoder]) -> None:
    given = record({"bbox": [GOLDEN]}, "At {{box:0}}.")
    text = said(encoders(family), given, {"0.png": picture((W, H))})
    assert numbers_in(family, text) == NUMBERS[family]
    rule = encoders(family).coordinates
    assert rule is not None
    [ours] = rule.read(text)  # as answers are scored
    found = [
        rule.original(number, (W, H)[n % 2], (644, 420)[n % 2]) for n, number in enumerate(ours)
    ]
    assert found == pytest.approx(read_box(family, text, (W, H), (644, 420)))


def test_the_reader_is_held_to_the_publishers_numbers() -> None:
    """What publishers show of their own numbers, and of the sizes that a Qwen processor makes."""
    sizes = [(W, H), (1920, 1080), (4032, 3024), (30, 30), (1000, 98), (1000, 10)]
    helper = [smart_resize(size, 56 * 56, 1003520) for size in sizes]
    assert helper == [(644, 420), (1316, 728), (1148, 840), (56, 56), (1008, 112), (560, 28)]
    by_32 = [smart_resize(size, 4 * 1024, 16384 * 1024, 32) for size in sizes[:5]]
    assert by_32 == [(640, 416), (1920, 1088), (4032, 3008), (64, 64), (992, 96)]
    assert smart_resize((4032, 3024), 4 * 784, 16384 * 784) == (4032, 3024)
    for family, numbers in NUMBERS.items():
        said = re.sub(r"\((\\d\+)\)", "{}", PUBLISHED[family].form)
        text = re.sub(r"\\(.)", r"\1", said).format(*numbers)
        assert numbers_in(family, text) == numbers
        box = read_box(family, text, (W, H), (644, 420))
        assert all(abs(a - b) < 1 for a, b in zip(box, GOLDEN, strict=True)), (family, box)
        assert far_off(family, GOLDEN, text, (W, H), (644, 420)) <= 1
    edge = "[69, 135, 1315, 727]"
    given = [100, 200, 1920, 1080], edge, (1920, 1080), (1316, 728)
    assert far_off("qwen2_5_vl", *given) <= 1 + 1e-6
    assert far_off("qwen3_vl", *given) > 1


@pytest.mark.parametrize("family", ANSWERS)
def test_a_whole_answer(family: str, encoders: Callable[..., Encoder]) -> None:
    given = record({"bbox": [GOLDEN], "ref": ["a cat"]}, "{{objects}}")
    assert said(encoders(family), given, {"0.png": picture((W, H))}).startswith(ANSWERS[family])


def drawn(rng: random.Random, size: tuple[int, int]) -> list[float]:
    width, height = size
    edges = [0.0, 0.5, 1.0, rng.random(), rng.random()]
    (x1, x2), (y1, y2) = (sorted(rng.sample(edges, 2)) for _ in range(2))
    if x1 == x2 or y1 == y2:
        return drawn(rng, size)
    return [x1 * width, y1 * height, x2 * width, y2 * height]


SIZES = [(W, H), (4032, 3024), (30, 30), (1000, 98), (77, 1400), (201, 203), (1920, 1080)]


def written(family: Encoder, box: list[float], size: tuple[int, int]) -> tuple[str, Any]:
    rule = family.coordinates
    assert rule is not None
    shown = family.image_rule.shown_size(*size) if rule.space == "shown" else size
    objects = Objects(boxes=(Shape("box", tuple(box)),))
    return ObjectWriter(rule, objects, [size], [shown], "it").write("box", (0,)), shown


@pytest.mark.parametrize("family", PUBLISHED)
@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=pytest.mark.soak)], ids=["some", "all"]
)
def test_random_boxes_come_back(family: str, count: int, encoders: Callable[..., Encoder]) -> None:
    rng = random.Random(7)
    for _ in range(count):
        size = rng.choice(SIZES)
        box = drawn(rng, size)
        text, shown = written(encoders(family), box, size)
        assert far_off(family, box, text, size, shown) <= 1 + 1e-6, (box, size, text)


FAULTS: dict[str, Callable[[list[float], tuple[int, int]], list[float]]] = {
    "the map is not applied": lambda box, size: [v * 3 for v in box],
    "x and y are swapped": lambda box, size: [box[1], box[0], box[3], box[2]],
    "the rotation is forgotten": lambda box, size: [
        v * a / b for v, a, b in zip(box, size * 2, size[::-1] * 2, strict=True)
    ],
    "it is rounded up": lambda box, size: [v + size[0] / 700 for v in box],
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", PUBLISHED)
def test_the_reader_sees_faults(family: str, fault: str, encoders: Callable[..., Encoder]) -> None:
    size, box = (1920, 1080), [200.0, 100.0, 700.0, 500.0]
    wrong = [min(v, float(size[n % 2])) for n, v in enumerate(FAULTS[fault](box, size))]
    text, shown = written(encoders(family), wrong, size)
    assert far_off(family, box, text, size, shown) > 1


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "internvl"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_images_of_any_bounds_and_rotation(
    family: str, orientation: int, encoders: Callable[..., Encoder]
) -> None:
    """Of several images, each box is of its own."""
    rng = random.Random(orientation)
    bounds = {"min_pixels": 4 * 784, "max_pixels": 40_000}
    budget = ImagesSection(**bounds) if family == "qwen2_5_vl" else ImagesSection()
    encoder = encoders(family, budget=budget)
    sizes = [(300, 140), (640, 500)]
    boxes = [drawn(rng, size) for size in sizes]
    files = {f"{n}.png": picture(size, orientation) for n, size in enumerate(sizes)}
    for number, (box, size) in enumerate(zip(boxes, sizes, strict=True)):
        objects = {"bbox": [box], "image_id": [number]}
        text = said(encoder, record(objects, "{{box:0}}", images=2), files)
        shown = encoder.image_rule.shown_size(*size) if family == "qwen2_5_vl" else size
        assert far_off(family, box, text, size, shown) <= 1 + 1e-6


def test_a_plan_that_shrinks_images_moves_the_numbers(encoders: Callable[..., Encoder]) -> None:
    """Of the model that counts pixels; its length at planning is that of the encoding."""
    encoder, size, smaller = encoders("qwen2_5_vl"), (1400, 1000), (350, 250)
    given = record({"bbox": [[100, 200, 1395, 999]]}, "{{box:0}}")
    cooked = cook_text("a", "none", json.dumps(given).encode(), ("json", "0.png")).sample
    whole = replace(cooked, images=(picture(size),))
    encoded = encoder.encode(whole, [smaller])
    assert encoder.length(cooked, [smaller], [size]).num_tokens == encoded.length
    labels = [token for token in encoded.labels.tolist() if token >= 0]
    text = encoder.tokenizer.decode(labels)
    shown = encoder.image_rule.shown_size(*smaller)
    assert far_off("qwen2_5_vl", [100, 200, 1395, 999], text, size, shown) <= 1 + 1e-6
    unmoved = encoder.encode(whole)
    assert unmoved.labels.tolist() != encoded.labels.tolist()


def test_ms_swifts_places_and_named_ones_are_the_same(encoders: Callable[..., Encoder]) -> None:
    encoder, files = encoders("qwen3_5"), {"0.png": picture((W, H))}
    objects = {"ref": ["a", "b", "c"], "bbox": [GOLDEN, [1, 2]]}
    swift = record(objects, "<ref-object> <bbox> <ref-object> <bbox> <ref-object>")
    named = record(objects, "{{ref:0}} {{box:0}} {{ref:1}} {{box:1}} {{ref:2}}")
    text = said(encoder, swift, files)
    assert text == said(encoder, named, files)
    assert text.startswith("a [228, 320, 961, 970] b [2, 5] c")


@pytest.mark.parametrize(
    ("space", "box"),
    [
        ("norm1", [0.228125, 0.3200934579, 0.9609375, 0.9696261682]),
        ("norm1000", [228.125, 320.0934579, 960.9375, 969.6261682]),
    ],
)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_other_spaces_say_the_same(
    family: str, space: str, box: list[float], encoders: Callable[..., Encoder]
) -> None:
    given = record({"bbox": [box], "bbox_type": space}, "{{box:0}}")
    text = said(encoders(family), given, {"0.png": picture((W, H))})
    assert numbers_in(family, text) == NUMBERS[family]


def test_the_models_own_numbers_stay(encoders: Callable[..., Encoder]) -> None:
    given = record({"bbox": [[9, 8, 77, 66]], "bbox_type": "model"}, "{{box:0}}")
    assert "[9, 8, 77, 66]" in said(encoders("qwen2_5_vl"), given, {"0.png": picture((W, H))})


@pytest.mark.parametrize(
    ("family", "most"),
    [("qwen2_5_vl", (644, 420)), ("qwen3_5", (1000, 1000)), ("gemma4", (1000, 1000)),
     ("deepseek_ocr2", (999, 999)), ("idefics3", (W, H))],
)  # fmt: skip
def test_the_models_own_numbers_end_where_its_space_does(
    family: str, most: tuple[int, int], encoders: Callable[..., Encoder]
) -> None:
    rule = CoordinatesSection(space="pixels") if family == "idefics3" else None
    encoder = encoders(family, coordinates=rule)
    for side, last in enumerate(most):
        for end, is_beyond in ((last, False), (last + 1, True)):
            box = [1, 2, *most]
            box[2 + side] = end
            given = record({"bbox": [box], "bbox_type": "model"}, "{{box:0}}")
            if is_beyond:
                why = f"a box has {'xy'[side]} {end}.0, outside 0 to {last} .model. of image 0"
                with pytest.raises(DataError, match=why):
                    said(encoder, given, {"0.png": picture((W, H))})
            else:
                assert str(end) in said(encoder, given, {"0.png": picture((W, H))})


def test_a_recipe_can_say_the_form(encoders: Callable[..., Encoder]) -> None:
    rule = CoordinatesSection(space="norm", grid=1, decimals=3, order="yx", polygon="<{corners}>")
    encoder = encoders("idefics3", coordinates=rule)
    objects = {"bbox": [GOLDEN], "polygon": [[[0, 0], [W, 0], [W, H]]]}
    text = said(encoder, record(objects, "{{box:0}} {{polygon:0}}"), {"0.png": picture((W, H))})
    assert text.lstrip().startswith(
        "[0.320, 0.228, 0.970, 0.961] <[0.000, 0.000], [0.000, 1.000], [1.000, 1.000]>"
    )
    assert encoder.fingerprint != encoders("idefics3").fingerprint


def test_without_objects_places_are_text(encoders: Callable[..., Encoder]) -> None:
    given = record(None, "<bbox> and {{box:0}}")
    text = said(encoders("qwen2_5_vl"), given, {"0.png": picture((W, H))})
    assert text.startswith("<bbox> and {{box:0}}")


BEYOND = "[100, 200, 1395, 999]"
WITHIN = '"bbox_2d": [100, 200, 600, 400]'


def cooked(given: dict[str, Any], size: tuple[int, int], images: int = 1) -> VLMSample:
    names = tuple(f"{n}.png" for n in range(images))
    sample = cook_text("a", "none", json.dumps(given).encode(), ("json", *names)).sample
    return replace(sample, images=(picture(size),) * images)


@pytest.mark.parametrize(
    ("family", "answer", "found"),
    [
        ("qwen2_5_vl", f"It is at {BEYOND}.", ("box", BEYOND)),
        ("qwen2_5_vl", "It is at [100, 200, 600, 400].", None),
        ("qwen2_5_vl", f"{{{WITHIN}}}", ("box", WITHIN[1:-1])),
        ("qwen2_5_vl", '{"point_2d": [5, 6]}', ("box", 'point_2d": [5, 6')),
        ("qwen2_5_vl", "Sorted: [1395, 999, 200, 100].", None),
        ("qwen3_5", f"It is at {BEYOND}.", ("box", BEYOND)),
        ("qwen3_5", "In the years [1900, 1910, 1920, 1930].", None),
        ("qwen3_5", f"{{{WITHIN}}}", None),
        ("qwen2_vl", "<box>(1,2),(1001,4)</box>", ("box", "<box>(1,2),(1001,4")),
        ("qwen2_5_vl", "At (100, 200), (1395, 999).", ("box", "(100, 200), (1395, 999)")),
        ("qwen2_5_vl", "From (100, 200),(600, 400).", None),
        ("qwen3_5", "The points (1900, 1910), (1920, 1930).", None),
        ("qwen3_5", "<bbox>100,200,1395,999</bbox>", ("box", "<bbox>100,200,1395,999")),
        ("internvl", "<box>[[1, 2, 3, 4]]</box>", None),
        ("idefics3", f"It is at {BEYOND}.", None),
        ("qwen2_5_vl", "At <bbox>.", ("place", "<bbox>")),
        ("qwen3_5", "At {{box:0}}.", ("place", "{{box:0}}")),
    ],
)
def test_a_box_in_a_text_that_the_model_does_not_see_there(
    family: str, answer: str, found: tuple[str, str] | None, encoders: Callable[..., Encoder]
) -> None:
    """The tiny model shows 1,400 x 1,000 pixels as 1,036 x 756, and nobody moved the numbers."""
    size = (1400, 1000)
    sample = cooked(record(None, answer), size)
    encoder = encoders(family)
    assert encoder.doubt(sample) == encoder.doubt(replace(sample, images=()), [size]) == found
    moved = cooked(record({"bbox": [[100, 200, 1395, 999]]}, "{{box:0}}"), size)
    assert encoder.doubt(moved) is None
    if found is not None and found[0] == "box":
        with pytest.raises(DataError, match="an answer has the box"):
            encoder.replace(boxes_in_text="refuse").encode(sample)


@pytest.mark.parametrize(
    ("answer", "is_stray"),
    [(BEYOND, False), (f"{{{WITHIN}}}", False), ("[100, 200, 1401, 999]", True),
     ("<box>(1,2),(3,1001)</box>", True), ("Sorted: [1500, 1400, 200, 100].", False)],
)  # fmt: skip
def test_pixels_of_the_original_end_with_it(
    answer: str, is_stray: bool, encoders: Callable[..., Encoder]
) -> None:
    """Of a recipe's `space: pixels`, whatever the model sees."""
    rule, sample = CoordinatesSection(space="pixels"), cooked(record(None, answer), (1400, 1000))
    found = encoders("qwen2_5_vl", coordinates=rule).doubt(sample)
    refusing = encoders("qwen2_5_vl", coordinates=rule, boxes_in_text="refuse")
    if is_stray:
        assert found is not None and found[1] in answer
        with pytest.raises(DataError, match="an answer has the box"):
            refusing.encode(sample)
    else:
        assert found is None and refusing.encode(sample).length > 0


def test_an_image_that_is_not_resized_needs_no_note(encoders: Callable[..., Encoder]) -> None:
    sample = cooked(record(None, f"{{{WITHIN}}}"), (644, 420))
    assert encoders("qwen2_5_vl").doubt(sample) is None


def test_shares_that_are_given_as_pixels(encoders: Callable[..., Encoder]) -> None:
    encoder, given = encoders("qwen3_5"), {"bbox": [[0.1, 0.2, 0.5, 0.9]]}
    found = encoder.doubt(cooked(record(given, ONE), (W, H)))
    assert found == ("share", "[0.1, 0.2, 0.5, 0.9]")
    assert encoder.doubt(cooked(record({**given, "bbox_type": "norm1"}, ONE), (W, H))) is None
    line = doubt_lines({"share": (2, found[1])}, 5)[0]
    assert line.startswith("2 of 5 samples have boxes of at most one pixel, such as [0.1")


IN_TEXT = {
    "qwen2_5_vl": '```json\n[{"bbox_2d":[146,137,615,415],"label":"[1, 2]"},'
    '{"point_2d": [320, 214.0]}]\n``` [9, 8, 7]',
    "qwen3_5": f"[146, {137 + 1 / 3}, 615.00000000000003, 415] or [ 1.4,2,30,4]",
    "gemma4": '[{"box_2d": [137, 146, 415, 615]}]',
    "internvl": "<ref>a</ref><box>[[146, 137, 615, 415]]</box>",
    "paddleocr_vl": "a<|LOC_BEGIN|><|LOC_146|><|LOC_137|><|LOC_615|><|LOC_137|><|LOC_615|>"
    "<|LOC_415|><|LOC_146|><|LOC_415|><|LOC_END|>",
}
"""Boxes of the original pixels in the form of a family."""
MOVED = {
    "qwen2_5_vl": '```json\n[{"bbox_2d":[147, 134, 619, 407],"label":"[1, 2]"},'
    '{"point_2d": [322, 210]}]\n``` [9, 8, 7]',
    "qwen3_5": "[228, 321, 961, 970] or [2, 5, 47, 9]",
    "gemma4": '[{"box_2d": [320, 228, 970, 961]}]',
    "internvl": "<ref>a</ref><box>[[228, 320, 961, 970]]</box>",
    "paddleocr_vl": "a<|LOC_BEGIN|><|LOC_228|><|LOC_320|><|LOC_961|><|LOC_320|><|LOC_961|>"
    "<|LOC_970|><|LOC_228|><|LOC_970|><|LOC_END|>",
}


@pytest.mark.parametrize("family", IN_TEXT)
def test_pixels_in_a_text_are_moved_where_asked(
    family: str, encoders: Callable[..., Encoder]
) -> None:
    """The lengths at planning are those of the encoding."""
    encoder = encoders(family, boxes_in_text="pixels_of_original")
    encoder.load()
    sample = cooked(record(None, IN_TEXT[family]), (W, H))
    text = encoder.written(sample).messages[-1].text
    assert text == MOVED[family]
    assert encoder.written(encoder.written(sample)).messages[-1].text == text
    planned = encoder.length(replace(sample, images=()), [(W, H)])
    assert planned.num_tokens == encoder.encode(sample).length
    kept = encoders(family)
    assert kept.written(sample) == sample
    assert len({kept.fingerprint, encoder.fingerprint}) == 2
    assert {*encoder.fingerprint_parts} - {*kept.fingerprint_parts} == {"boxes_in_text"}
    without = cooked(record(None, "[1, 2] and 3, 4"), (W, H))
    assert encoder.written(without).messages == without.messages


@pytest.mark.parametrize(
    ("family", "answer", "images", "why"),
    [
        ("qwen3_5", "<|box_start|>(1,2),(3,4)<|box_end|>", 1, "no box in the form of qwen3_5"),
        ("qwen3_5", '{"bbox_2d": [9, 9, 1, 1]}', 1, "9, 9, 1, 1]' is no box in pixels"),
        ("qwen3_5", "[9, 8, 7, 6]", 1, r"'\[9, 8, 7, 6\]' is no box in pixels .*x1 < x2"),
        ("qwen3_5", "[0.1, 0.2, 0.5, 0.7]", 1, "no box in pixels .*numbers above 1. Give shares"),
        ("qwen3_5", f"[1, 2, 3.{'3' * 21}, 4]", 1, r"'\[1, 2, 3.3+, 4\]' is no box in the form"),
        ("qwen3_5", "[1e2, 137, 2e2, 415]", 1, "no box in the form of qwen3_5"),
        ("qwen2_vl", "[1, 2, 3, 4]", 1, "no box in the form of qwen2_vl"),
        ("qwen3_5", "(1, 2), (3, 4)", 1, r"'\(1, 2\), \(3, 4\)' is no box in the form of qwen3_5"),
        ("paddleocr_vl", IN_TEXT["paddleocr_vl"].replace("615", "146"), 1, "no box in pixels"),
        ("qwen2_vl", '{"bbox_2d": [1, 2, 3, 4]}', 1, "no box in the form of qwen2_vl"),
        ("qwen3_5", "[1, 2, 641, 4]", 1, "a box has x 641.0, outside 0 to 640"),
        ("qwen3_5", "[1, 2, 3, 4]", 2, "a text has boxes, and the sample 2 images"),
    ],
)
def test_pixels_in_a_text_that_cannot_be_moved(
    family: str, answer: str, images: int, why: str, encoders: Callable[..., Encoder]
) -> None:
    encoder = encoders(family, boxes_in_text="pixels_of_original")
    sample = cooked(record(None, answer, images), (W, H), images)
    with pytest.raises(DataError, match=why):
        encoder.encode(sample)
    for policy in ("pixels_of_original", "refuse"):
        without = encoders("idefics3", boxes_in_text=policy)
        with pytest.raises(CapabilityError, match=f"{policy}, and no rule is known"):
            without.load()
        with pytest.raises(DataError, match="no rule is known"):
            without.encode(sample)
        assert without.written(replace(sample, images=(), messages=sample.messages[1:]))
    encoders("idefics3", boxes_in_text="keep").load()


def test_a_class_without_a_file_of_ours_says_what_it_shows() -> None:
    """By the grid of its processor; one that names none is refused."""
    rule = generic_image_rule(TINY_MODEL, "<|image_pad|>")
    own = Encoder(TINY_MODEL).image_rule
    for size in [(W, H), (1400, 1000), (30, 300), (57, 57)]:
        assert rule.shown_size(*size) == own.shown_size(*size) == smart_resize(size, 784, 802816)
    facts = rule.facts(*SIZES[0])
    rule._facts[7, 7] = replace(facts, others={})
    other = Encoder(TINY_MODEL, EncoderSettings(coordinates=CoordinatesSection(space="shown")))
    vars(other)["image_rule"] = rule
    try:
        with pytest.raises(DataError, match="shown is not known for images of qwen2_5_vl"):
            other.shown_sizes([(7, 7)])
        sample = cooked(record(None, "-"), (7, 7))
        with pytest.raises(DataError, match="shown is not known"):
            grounding_of(other, sample)
        vars(other)["coordinates"] = GENERIC["deepseek_ocr2"]
        assert grounding_of(other, sample).shown == ((7, 7),), "of no account for its numbers"
    finally:
        del rule._facts[7, 7]


def test_tokens_of_numbers_may_be_spelt(tmp_path: Path) -> None:
    """Where the tokenizer has them as special ones, and no others."""
    rule = PUBLISHED["paddleocr_vl"]
    names = ("LOC_BEGIN", "LOC_END", *(f"LOC_{n}" for n in (228, 320, 961, 970)))
    folder = with_tokens(tmp_path / "model", tuple(f"<|{name}|>" for name in names))
    encoder = Encoder(folder)
    vars(encoder)["coordinates"] = GENERIC["paddleocr_vl"]
    given = record({"bbox": [GOLDEN]}, ONE)
    text = said(encoder, given, {"0.png": picture((W, H))})
    assert re.fullmatch(rule.form, text.removesuffix("<|im_end|>"))
    learnt = encoder.tokenizer.convert_tokens_to_ids("<|LOC_961|>")
    assert (
        encode_sample(encoder, given, {"0.png": picture((W, H))}).labels.tolist().count(learnt) == 2
    )
    with pytest.raises(DataError, match=r"LOC_961"):
        said(encoder, record(None, "<|LOC_961|>"), {"0.png": picture((W, H))})


TITLES = {
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_5": "Qwen3.5, 3.6, 3.8",
    "qwen2_5_omni_thinker": "Qwen2.5-Omni",
    "qwen3_omni_moe_thinker": "Qwen3-Omni",
    "internvl": "InternVL",
    "gemma4": "Gemma 4",
    "glm4v": "GLM-4.1V, 4.5V, 4.6V",
    "hunyuan_vl": "HunyuanOCR",
    "paddleocr_vl": "PaddleOCR-VL 1.5",
    "deepseek_ocr2": "DeepSeek-OCR 2",
}


def test_the_page_has_the_rule_of_each_family() -> None:
    rows = []
    for family, title in TITLES.items():
        rule = GENERIC.get(family) or served_family(family).coordinates
        assert rule is not None
        space = "pixels of the resized image" if rule.space == "shown" else f"0 to {rule.grid:,}"
        first = ", y first" if rule.box.index("y1") < rule.box.index("x1") else ""
        box = rule.alone.format(shape=rule.box.format(x1="x1", y1="y1", x2="x2", y2="y2"))
        box = box.replace("|", "\\|")
        who = "second hand" if rule.second_hand else "publisher"
        rows.append(f"| {title} | {space}{first} | `{box}` | {who}: {rule.source} |")
    page = (ROOT / "docs/grounding.md").read_text()
    assert [
        line for line in page.splitlines() if re.match(r"\| .* \| (0 to|pixels of)", line)
    ] == rows, "\n".join(rows)
    assert {*TITLES} == {*PUBLISHED} and {*map(id, GENERIC.values())} <= {
        *(id(GENERIC[name]) for name in TITLES if name in GENERIC)
    }


@pytest.mark.parametrize(
    ("box", "numbers"),
    [
        ([1999, 0, 2000, 1], [1000, 0, 1000, 1]),  # a pixel, at the corner
        ([1000, 500, 1001, 501], [500, 500, 500, 501]),  # a pixel
        ([1000, 500, 1003.2, 501.6], [500, 500, 502, 502]),  # less than two steps
        ([0, 0, 2000, 1000], [0, 0, 1000, 1000]),
    ],
)
def test_small_boxes_and_borders_are_kept(
    box: list[float], numbers: list[int], encoders: Callable[..., Encoder]
) -> None:
    """Corners of one that is smaller than a step may be written alike."""
    text, _ = written(encoders("qwen3_5"), box, (2000, 1000))
    assert numbers_in("qwen3_5", text) == numbers


class Counted(list[Any]):
    """A list that knows how many of its items were read."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.read += 1
            yield item


@pytest.mark.parametrize("named", [True, False])
def test_a_million_boxes_are_refused_at_once(named: bool) -> None:
    """Before they are looked at one by one."""
    shapes = Counted([[0, 0, 1, 1] if named else {"bbox_2d": [0, 0, 1, 1]}] * 10**6)
    with pytest.raises(DataError, match="1,000,000 shapes; at most 1,000"):
        objects_of({"bbox": shapes} if named else shapes)
    assert shapes.read <= 1_000


@pytest.mark.parametrize("nothing", [None, {}, [], "", {"ref": [], "bbox": []}])
def test_a_row_without_any_has_none(nothing: Any, encoders: Callable[..., Encoder]) -> None:
    """Not even where no rule is known."""
    text = said(encoders("idefics3"), record(nothing, "There is none."), {"0.png": picture((W, H))})
    assert text.lstrip().startswith("There is none.")


def test_what_models_write_is_read_as_objects() -> None:
    """In each form of a record; a table's struct has null where a key is not."""
    written = [{"bbox_2d": GOLDEN, "label": "a cat"}, {"point_2d": [1, 2], "label": "its eye"}]
    wanted = objects_of({"bbox": [GOLDEN, [1, 2]], "ref": ["a cat", "its eye"]})
    padded = [{"bbox_2d": None, "point_2d": None, **each} for each in written]
    assert objects_of(written) == objects_of(padded) == wanted
    given = record(written, "{{objects}}")
    assert (
        chat_turns(given | {"objects": json.dumps(written)} | {"images": ["0.png"]}).objects
        == wanted
    )


ONE = "{{box:0}}"
REFUSED = [
    (
        "idefics3",
        {"bbox": [GOLDEN]},
        ONE,
        "no rule is known here by which idefics3 .*data.coord",
    ),
    ("internvl", {"point": [[1, 2]]}, "{{point:0}}", "no form of a point is known for internvl"),
    ("internvl", {"bbox": [GOLDEN]}, "{{objects}}", "no form of a whole answer without labels"),
    ("qwen3_5", {"bbox": [[float("nan"), 1, 2, 3]]}, ONE, "has nan; expected numbers up to 10,000"),
    ("qwen3_5", {"bbox": [[10**400, 1, 2, 3]]}, ONE, "expected numbers up to 10,000,000"),
    ("qwen3_5", {"bbox": [GOLDEN]}, "{{box:" + "9" * 5000 + "}}", "is no place"),
    ("qwen3_5", {"bbox": []}, "{{objects}}", "nothing to write: 'objects' has no shape"),
    ("qwen3_5", {"bbox": [GOLDEN]}, ONE + "{{bbox:0}}", r"{{bbox:0}} is no place; expected"),
    ("qwen3_5", {"bbox": [GOLDEN]}, "{{ box:0 }}", "is no place; expected .* without spaces"),
    ("qwen3_5", {"bbox": [GOLDEN], "ref": ["a"]}, ONE, "no turn has a place for ref 0"),
    ("qwen3_5", {"bbox": []}, "<bbox>", "<bbox> 1 time, objects.bbox has 0 entries"),
    ("qwen3_5", {"bbox": [[0, 0, 1, 1]] * 999}, "{{objects}}" * 9, "more than 5,000 shapes"),
    ("qwen3_5", {"bbox": [[5, 1, 2, 3]]}, ONE, "expected x1 < x2 and y1 < y2"),
    ("qwen3_5", {"bbox": [[1, 1, 1, 3]]}, ONE, "without an area is a point"),
    (
        "qwen3_5",
        {"bbox": [[1, 1, 641, 3]]},
        ONE,
        "has x 641.0, outside 0 to 640 .*640 x 428",
    ),
    ("qwen3_5", {"bbox": [[-1, 1, 6, 3]]}, ONE, "has x -1.0, outside"),
    ("qwen3_5", {"bbox": [GOLDEN], "image_id": [1]}, ONE, "is on image 1, the sample has 1 image"),
    ("qwen3_5", {"bbox": [[1, 2, 3]]}, ONE, "is 3 numbers; expected x1, y1, x2, y2, or x, y"),
    ("qwen3_5", {"bbox": [[0, 0, 1, 1]] * 1001}, ONE, "1,001 shapes; at most 1,000"),
    (
        "qwen3_5",
        [{"bbox": GOLDEN, "label": "a"}],
        ONE,
        r"objects\[0\] has 'bbox'; expected 'bbox_2d'",
    ),
    ("qwen3_5", [GOLDEN], ONE, r"objects\[0\] has a list; expected 'bbox_2d'"),
    ("qwen3_5", [{"bbox_2d": [1, 2, 3]}], ONE, r"objects.bbox\[0\] is 3 numbers"),
    ("qwen3_5", {"box": [GOLDEN]}, ONE, "'objects' has 'box'; expected bbox"),
    ("qwen3_5", {"bbox": [GOLDEN], "bbox_type": "cm"}, ONE, "bbox_type is 'cm'; expected real"),
    ("qwen3_5", {"bbox": [GOLDEN, GOLDEN]}, ONE, "no turn has a place for box 1"),
    ("qwen3_5", {"bbox": [GOLDEN]}, "{{box:1}}", "names box 1, 'objects' has 1 box"),
    ("qwen3_5", {"bbox": [GOLDEN]}, "{{box}}", "{{box}} names no entry"),
    ("qwen3_5", {"bbox": [GOLDEN]}, "<bbox><bbox>", "<bbox> 2 times, objects.bbox has 1 entry"),
    ("qwen3_5", {"bbox": [GOLDEN], "ref": ["a"]}, "<bbox>", "<ref-object> 0 times"),
    ("qwen3_5", {"bbox": [GOLDEN]}, "<bbox> {{box:0}}", "either ms-swift's places or named"),
    ("qwen3_5", {"bbox": [GOLDEN], "ref": ["a", "b"]}, "{{objects}}", "1 shape and 2 labels"),
]


@pytest.mark.parametrize(("family", "objects", "answer", "why"), REFUSED)
def test_what_is_refused(
    family: str, objects: Any, answer: str, why: str, encoders: Callable[..., Encoder]
) -> None:
    with pytest.raises(DataError, match=why) as error:
        said(encoders(family), record(objects, answer), {"0.png": picture((W, H))})
    assert error.value.error_class == "schema"


def test_every_form_of_a_record_says_the_same(tmp_path: Path) -> None:
    """JSONL, a list of JSON, CSV cells, parquet, and the shard that `data convert` writes."""
    objects = {"ref": ["a cat"], "bbox": [GOLDEN, [3, 4]], "polygon": [[[0, 0], [9, 0], [9, 9]]]}
    answer = "{{ref:0}} {{box:0}} {{box:1}} {{polygon:0}}"
    turns = (("user", "<image>Where is it?"), ("assistant", answer))
    messages = [{"role": role, "content": text} for role, text in turns]
    given = {"messages": messages, "images": ["0.png"], "objects": objects}
    (tmp_path / "0.png").write_bytes(picture((W, H)))
    (tmp_path / "a.jsonl").write_text(json.dumps(given) + "\n")
    (tmp_path / "a.json").write_text(json.dumps([given]))
    pq.write_table(pa.Table.from_pylist([given]), tmp_path / "a.parquet")
    cells = {name: json.dumps(value) for name, value in given.items()}
    with (tmp_path / "a.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, cells)
        writer.writeheader()
        writer.writerow(cells)
    documents = [
        document_of(tmp_path / f"a.{kind}") for kind in ("jsonl", "json", "parquet", "csv")
    ]
    assert documents[0]["objects"] == {**objects, "polygon": [[0, 0, 9, 0, 9, 9]]}
    assert documents == [documents[0]] * 4
    text = json.dumps(documents[0]).encode()
    ours = cook_text("a", "none", text, ("json", "0.png")).sample.objects
    assert ours is not None and ours.document() == documents[0]["objects"]


@pytest.mark.parametrize(
    "rule",
    [{"box": "{x1:f} {y1} {x2} {y2}"}, {"point": "{x!r} {y}"}, {"grid": 10**9}, {"box": "{x1}"}],
)
def test_a_form_of_a_recipe_is_checked(rule: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"each of|less than or equal"):
        CoordinatesSection(space="norm", **rule)


def test_floor_takes_no_step_for_what_binary_cannot_say(encoders: Callable[..., Encoder]) -> None:
    rule = CoordinatesSection(space="norm", grid=1, decimals=2, rounding="floor")
    encoder = encoders("qwen3_5", coordinates=rule)
    text, _ = written(encoder, [29, 57, 58, 100], (100, 100))
    assert text == "[0.29, 0.57, 0.58, 1.00]"
    assert written(encoder, [-0.0, 0, 1, 1], (100, 100))[0].startswith("[0.00, 0.00,")
