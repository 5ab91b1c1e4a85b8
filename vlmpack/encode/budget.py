"""Bounds on what an image costs: refused where a family has none, and written into an exported
folder, so that inference resizes images as training did."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmpack.errors import CapabilityError
from vlmpack.families.base import Family
from vlmpack.recipe.data import ImagesSection
from vlmpack.whole_file import read_json

_FILES = (("preprocessor_config.json", None), ("processor_config.json", "image_processor"))
"""Where transformers looks for an image processor: a file, or a section of one."""


def refuse_budget(budget: ImagesSection, family: Family, folder: Path) -> None:
    """Refuses bounds that a family's images do not have.

    Args:
        budget: the recipe's.
        family: of the model.
        folder: the model's, for the message.

    Raises:
        CapabilityError: with the knobs that there are.
    """
    has = family.pixel_knobs
    for name, value in budget.set_values().items():
        if name in has:
            continue
        if family.modules.vision is None:
            what = "has no vision tower, so images have no budget; leave it out"
        elif not has:
            what = f"is of family {family.name}, whose images have no bounds; leave it out"
        else:
            knobs = " and ".join(f"images.{knob}" for knob in has)
            what = f"is of family {family.name}, which has {knobs}"
        raise CapabilityError(f"images.{name}: {value}, but the model in {folder} {what}")


def write_settings(settings: Mapping[str, Any], folder: Path) -> None:
    """Puts bounds into the processor files of an exported folder.

    Args:
        settings: of the image rule that the model was trained with.
        folder: a copy of its model folder.
    """
    for name, section in _FILES:
        path = folder / name
        if not path.is_file():
            continue
        content: dict[str, Any] = read_json(path)
        if section is not None and section not in content:
            continue
        (content if section is None else content[section]).update(settings)
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
