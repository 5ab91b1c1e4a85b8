"""Model families: what each needs, said once, on CPU."""

from vlmpack.families.base import (
    Family,
    ImageFeatures,
    ImageLayout,
    ImageRule,
    ModulePaths,
    PixelBudget,
    stock_arguments,
)
from vlmpack.families.registry import family_of, model_types

__all__ = [
    "Family",
    "ImageFeatures",
    "ImageLayout",
    "ImageRule",
    "ModulePaths",
    "PixelBudget",
    "family_of",
    "model_types",
    "stock_arguments",
]
