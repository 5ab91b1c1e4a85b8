"""Model families: what each needs, said once, on CPU."""

from vlmpack.families.base import Family, ImageRule, ModulePaths
from vlmpack.families.decode import decode_image
from vlmpack.families.encoder import Encoder, SampleLength
from vlmpack.families.fingerprint import PROCESSOR_FILES
from vlmpack.families.registry import family_of, model_types
from vlmpack.families.sample import ImagePart, Message, TextPart, VLMSample

__all__ = [
    "PROCESSOR_FILES",
    "Encoder",
    "Family",
    "ImagePart",
    "ImageRule",
    "Message",
    "ModulePaths",
    "SampleLength",
    "TextPart",
    "VLMSample",
    "decode_image",
    "family_of",
    "model_types",
]
