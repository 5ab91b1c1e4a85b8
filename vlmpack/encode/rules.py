"""The rules of a family for the images and videos of one model folder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from vlmpack.encode.budget import refuse_budget
from vlmpack.errors import CapabilityError, ModelError
from vlmpack.families.base import Family, ImageRule, VideoRule
from vlmpack.recipe.data import ImagesSection


class Rules(NamedTuple):
    """How a family turns pixels into patches.

    Args:
        images: of still ones.
        videos: of videos; None where a sample has none.
    """

    images: ImageRule
    videos: VideoRule | None = None


def image_rule_of(family: Family, folder: Path, budget: ImagesSection) -> ImageRule:
    """The family's rule with a folder's sizes, or the budget's.

    Raises:
        CapabilityError: the model has no vision tower; or a budget it cannot keep.
        ModelError: the folder has no usable image processor.
    """
    refuse_budget(budget, family, folder)
    try:
        rule = family.image_rule(folder, budget)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path: {folder} has no usable image processor "
            f"(preprocessor_config.json): {error}"
        ) from error
    if rule is None:
        raise CapabilityError(f"model.path: the model in {folder} has no vision tower")
    return rule


def video_rule_of(
    family: Family, folder: Path, images: ImageRule, budget: ImagesSection
) -> VideoRule | None:
    """The family's rule for videos; None where it takes none.

    Args:
        family: of the model.
        folder: model folder.
        images: its image rule.
        budget: that the rule keeps.

    Raises:
        CapabilityError: the folder's video processor is none that the family's rule follows.
    """
    settings = images.settings() if budget.set_values() else {}
    try:
        return family.video_rule(folder, settings)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CapabilityError(
            f"model.path: the data has videos, and the video processor of {folder} (a section of "
            f"processor_config.json, video_preprocessor_config.json or, without them, "
            f"preprocessor_config.json) is none that can be followed: {error}"
        ) from error
