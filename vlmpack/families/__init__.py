"""Model families: what each needs, said once, on CPU."""

from vlmpack.families.base import (
    Family,
    ImageFeatures,
    ImageLayout,
    ImageRule,
    ModulePaths,
    stock_arguments,
)
from vlmpack.families.registry import family_of, model_types

__all__ = [
    "Family",
    "ImageFeatures",
    "ImageLayout",
    "ImageRule",
    "ModulePaths",
    "family_of",
    "model_types",
    "stock_arguments",
]
