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
from vlmpack.families.decode import decode_image
from vlmpack.families.encoder import Encoder, SampleLength
from vlmpack.families.processor_files import write_budget
from vlmpack.families.registry import family_of, model_types
from vlmpack.families.sample import ImagePart, Message, TextPart, VLMSample
from vlmpack.model_folder.content import PROCESSOR_FILES

__all__ = [
    "PROCESSOR_FILES",
    "Encoder",
    "Family",
    "ImageFeatures",
    "ImageLayout",
    "ImagePart",
    "ImageRule",
    "Message",
    "ModulePaths",
    "PixelBudget",
    "SampleLength",
    "TextPart",
    "VLMSample",
    "decode_image",
    "family_of",
    "model_types",
    "stock_arguments",
    "write_budget",
]
