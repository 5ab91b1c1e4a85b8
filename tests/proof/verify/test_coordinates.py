"""verify reads boxes back from a sample's tokens, and holds them against its objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from encode.test_objects import picture, record
from support.shards import TINY_MODEL

from vlmpack.data.shards.samples import cook_text
from vlmpack.encode import Encoder, VLMSample
from vlmpack.families.generic_images import generic_image_rule
from vlmpack.families.qwen_vl import IMAGE_TOKEN
from vlmpack.proof.verify.samples import Chosen, check_coordinates, misfit_of

Found = Callable[..., str | None]
SIZES = ((1400, 1000), (112, 196))
"""The tiny model shows the first as 1,036 x 756."""
BOXES = [[200, 100, 700, 500], [10, 10, 60, 90]]
OBJECTS = {"bbox": [*BOXES, [30, 40]], "image_id": [0, 1, 1]}
ANSWER = "[1, 2, 3, 4] {{box:1}} {{box:0}} {{box:2}} [1, 2, 3, 4]"


def sample(objects: Any) -> VLMSample:
    given = json.dumps(record(objects, ANSWER, images=2)).encode()
    cooked = cook_text("a", "none", given, ("json", "0.png", "1.png")).sample
    return replace(cooked, images=tuple(picture(size) for size in SIZES))


@pytest.fixture(params=["its family's", "a class without a file of ours"])
def found(request: pytest.FixtureRequest) -> Found:
    """Finds misfits by an encoder whose image rule is the family's or a generic one."""
    encoder = Encoder(TINY_MODEL)
    if request.param != "its family's":
        vars(encoder)["image_rule"] = generic_image_rule(TINY_MODEL, IMAGE_TOKEN)
    return lambda said, sizes=None: misfit(encoder, said, sizes)


def misfit(encoder: Encoder, said: Any, sizes: Any) -> str | None:
    return misfit_of(encoder, sample(OBJECTS), encoder.encode(sample(said), sizes))


@pytest.mark.parametrize("space", [None, "norm1"])
def test_what_the_encoder_writes_fits(space: str | None, found: Found) -> None:
    assert found(OBJECTS) == ""
    assert found(OBJECTS, [(350, 250), (112, 196)]) == "", "of a plan that shrinks images"
    encoder = Encoder(TINY_MODEL)
    shares = [[0.25, 0.3, 0.5, 0.75], [0.2, 0.1, 0.9, 0.4], [0.5, 0.5]]
    given = {"bbox": shares, "image_id": [0, 1, 1], "bbox_type": space or "norm1000"}
    assert misfit_of(encoder, sample(given), encoder.encode(sample(given))) == ""


@pytest.mark.parametrize(
    ("fault", "box"),
    [
        ("the map is not applied", [200 * 1400 / 1036, 100 * 1000 / 756, 946, 661]),
        ("sides are swapped", [100, 200, 500, 700]),
        ("two steps off", [203, 100, 703, 500]),
    ],
)
def test_faults_are_found(fault: str, box: list[float], found: Found) -> None:
    message = found(OBJECTS | {"bbox": [box, *OBJECTS["bbox"][1:]]})  # type: ignore[misc]
    assert message is not None and "[200.0, 100.0, 700.0, 500.0]" in message, fault
    assert "(1036, 756)" in message


def test_the_box_of_the_other_image_is_found(found: Found) -> None:
    assert found({"bbox": [*BOXES[::-1], [30, 40]], "image_id": [1, 0, 1]}) not in ("", None)


def test_the_check() -> None:
    encoder = Encoder(TINY_MODEL)
    encoded = encoder.encode(sample(OBJECTS))
    none, fits, misfit = (Chosen(None, encoded, None, each) for each in (None, "", "k: far"))  # type: ignore[arg-type]
    assert check_coordinates([none]) is None
    passed, failed = check_coordinates([none, fits]), check_coordinates([fits, misfit])
    assert passed is not None and failed is not None
    assert (passed.status, passed.detail[:8]) == ("pass", "1 sample")
    assert failed.fails and failed.detail == "k: far"
