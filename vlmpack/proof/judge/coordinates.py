"""Whether the boxes in the samples' answers lie in the images that the model sees."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from vlmpack.capabilities.served import SERVED
from vlmpack.encode.coordinates import Size, beyond_images
from vlmpack.errors import VlmpackError
from vlmpack.families.coordinates import GENERIC, CoordinateRule
from vlmpack.families.registry import served_family
from vlmpack.model_folder.load import load_tokenizer
from vlmpack.proof.judge.alone import Sample
from vlmpack.proof.judge.findings import Finding, failed
from vlmpack.proof.measure import Check
from vlmpack.words import counted

NAME = "coordinates"


def check_coordinates(model: Any, samples: Sequence[Sample]) -> list[Finding]:
    """Numbers of boxes in what is taught, beyond the last number that the model's family has.

    Boxes that were not moved with a smaller image and still fit it are not seen. [] where no
    sample has a box, the model's family no rule, or the folder that it came from no tokenizer.
    """
    config = getattr(model, "config", None)
    rule = _rule_of(str(getattr(config, "model_type", "")))
    tokenizer = None if rule is None else _tokenizer_of(getattr(model, "name_or_path", ""))
    if rule is None or tokenizer is None:
        return []
    number_of_boxes = 0
    for number, sample in enumerate(samples):
        shown = _shown_sizes(config, sample)
        if rule.space != "norm" and not shown:
            continue
        text = tokenizer.decode(sample.ids[sample.taught])
        boxes, stray = beyond_images(text, rule, shown)
        number_of_boxes += boxes
        if stray is not None:
            images = ", ".join(f"{width} x {height}" for width, height in shown) or "resized"
            seen = f"0 to {rule.grid}" if rule.space == "norm" else f"images shown as {images}"
            detail = f"sample {number}: {stray[:80]!r} is beyond the numbers of its model, {seen}"
            look_at = "whether boxes follow the image when it is resized"
            return [failed(NAME, "coordinates beyond the image", detail, look_at)]
    if not number_of_boxes:
        return []
    detail = f"{counted(number_of_boxes, 'box', 'boxes')} inside what the model sees"
    return [Finding(Check(name=NAME, status="pass", detail=detail))]


def _rule_of(model_type: str) -> CoordinateRule | None:
    if model_type in SERVED:
        return served_family(model_type).coordinates
    return GENERIC.get(model_type)


@cache
def _tokenizer_of(folder: str) -> Any:
    """The tokenizer of a model folder; None where it has none that loads."""
    if not folder or not Path(folder).is_dir():
        return None
    try:
        return load_tokenizer(Path(folder))
    except VlmpackError:
        return None


def _shown_sizes(config: Any, sample: Sample) -> list[Size]:
    """(width, height) of each still image, where grids of patches say so."""
    patch = getattr(getattr(config, "vision_config", None), "patch_size", None)
    grids = sample.media.get("image_grid_thw")
    if not isinstance(patch, int) or grids is None:
        return []
    return [(patch * width, patch * height) for _, height, width in grids.tolist()]
