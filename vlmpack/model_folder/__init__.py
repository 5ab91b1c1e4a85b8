"""A model folder is data: the one door to what it holds.

load      every loading call of transformers: no code of the folder runs, and nothing is asked
weights   which files hold its weights
"""

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
    "build_model",
    "build_part",
    "config_of",
    "load_config",
    "load_image_processor",
    "load_model_class",
    "load_shapes",
    "load_tokenizer",
    "weight_files",
]
