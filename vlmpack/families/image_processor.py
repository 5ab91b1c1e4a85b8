"""transformers' image processor of a model folder: the one on PIL, whatever else there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmpack.errors import VlmpackError
from vlmpack.families.processor_config import processor_setting
from vlmpack.model_folder import load_image_processor


def image_processor(folder: Path, **settings: Any) -> Any:
    """The processor with the folder's settings, or those given in place of them.

    Raises:
        OSError, ValueError: its files are missing, or name no processor of transformers.
        ModelError: they name code of the folder's own.
    """
    section = processor_setting(folder, "image_processor", None)
    if section is None and not (folder / "preprocessor_config.json").is_file():
        raise FileNotFoundError("the file is missing")
    try:
        return load_image_processor(folder, **settings)
    except (VlmpackError, OSError, ValueError):
        raise
    except Exception as error:  # values of another type fail anywhere in a processor's class
        raise ValueError(f"{type(error).__name__}: {error}") from error


def family_processor(folder: Path, *kinds: str) -> Any:
    """The processor, if it is one that a family's rule follows.

    Args:
        folder: model folder.
        kinds: names of its class, without what says how it is built (Pil, Fast).

    Raises:
        OSError, ValueError: as `image_processor`; another class, one that leaves images at their
            own size, or one that crops them.
    """
    processor = image_processor(folder)
    name = type(processor).__name__
    if name.removesuffix("Pil").removesuffix("Fast") not in kinds:
        raise ValueError(f"it is a {name}, expected {' or '.join(kinds)}")
    if not processor.do_resize or processor.size is None:
        size = None if processor.size is None else dict(processor.size)
        raise ValueError(
            f"do_resize is {processor.do_resize} and size {size}, expected true and a size"
        )
    if processor.do_center_crop:
        raise ValueError("do_center_crop is true, expected false")
    return processor
