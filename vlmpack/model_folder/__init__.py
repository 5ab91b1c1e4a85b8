"""A model folder is data: the one door to what it holds.

images    what makes pixels of images
load      every loading call of transformers: no code of the folder runs, and nothing is asked
weights   which files hold its weights; safetensors_header: where the tensors of one lie
"""

from vlmpack.model_folder.images import IMAGE_BACKEND, made_with, transformers_version
from vlmpack.model_folder.load import (
    build_model,
    build_part,
    config_of,
    load_config,
    load_image_processor,
    load_model_class,
    load_shapes,
    load_tokenizer,
)
from vlmpack.model_folder.weights import weight_files

__all__ = [
    "IMAGE_BACKEND",
    "build_model",
    "build_part",
    "config_of",
    "load_config",
    "load_image_processor",
    "load_model_class",
    "load_shapes",
    "load_tokenizer",
    "made_with",
    "transformers_version",
    "weight_files",
]
