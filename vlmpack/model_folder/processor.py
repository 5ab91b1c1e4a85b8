"""The processor of transformers that a model folder names, composed of a tokenizer and an image
processor that are loaded already.

    AutoProcessor.from_pretrained(folder)   wants torchvision: most classes have a video processor
    compose_processor(folder, ...)          the same class, with what images need and nothing else

Nothing is loaded from the folder but the values of processor_config.json.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmpack.capabilities.folder import read_config
from vlmpack.whole_file import read_json

_FILES = ("processor_config.json", "tokenizer_config.json", "preprocessor_config.json")


def compose_processor(folder: Path, tokenizer: Any, image_processor: Any) -> Any:
    """A folder's processor class around these two; audio has none.

    Some classes ask their video processor for settings when they are made. The image processor
    stands in for it, as settings of both have one name, and is never shown a video.

    Args:
        folder: model folder.
        tokenizer: the folder's.
        image_processor: the folder's.

    Raises:
        ValueError: the folder names no processor class of transformers, or its class cannot be made
            without what is missing here.
    """
    files = {name: _content(folder / name) for name in _FILES}
    kind = _processor_class(folder, files)
    parts = kind.get_attributes()
    takes = inspect.signature(kind.__init__).parameters
    settings = {
        name: value
        for name, value in files["processor_config.json"].items()
        if name in takes and name not in parts
    }
    seen = dict.fromkeys(("image_processor", "video_processor"), image_processor)
    given = {part: tokenizer if "tokenizer" in part else seen.get(part) for part in parts}
    composed = type(
        kind.__name__,
        (kind,),
        {"check_argument_for_proper_class": _any_class, "__module__": kind.__module__},
    )
    try:
        return composed(**given, **settings)
    except Exception as error:  # a class may ask anything of what it is made of
        raise ValueError(
            f"transformers' {kind.__name__} cannot be made of the folder's tokenizer and image "
            f"processor alone: {type(error).__name__}: {error}"
        ) from error


def _any_class(self: Any, name: str, argument: Any) -> None:
    """In place of transformers' check, which refuses a processor without one for videos."""


def _processor_class(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Any:
    import transformers
    from transformers.models.auto import processing_auto

    registered: Mapping[str, Any] = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    model_type = read_config(folder).get("model_type")
    named = [content.get("processor_class") for content in files.values()]
    name = next((name for name in named if isinstance(name, str)), None)
    name = name or registered.get(str(model_type))
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type):
        said = f"names {name}, which transformers has not" if name else "names no processor class"
        raise ValueError(f"the folder {said}, expected one of transformers' (processor_class)")
    return kind


def _content(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = read_json(path, object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
    return found if isinstance(found, dict) else {}
