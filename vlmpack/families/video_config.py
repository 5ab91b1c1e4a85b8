"""What a model folder says of its video processor, where transformers looks for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmpack.families.processor_config import processor_setting
from vlmpack.whole_file import read_json

FILE = "video_preprocessor_config.json"


def video_section(
    folder: Path, kind: str, defaults: Mapping[str, Any], images: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a video processor: the section of processor_config.json, or the file of its
    own, or without both preprocessor_config.json.

    Args:
        folder: model folder.
        kind: name of the class that it must be, or not name any.
        defaults: what a file that leaves a key out means by it.
        images: in place of those of its image processor's file, which counts where videos have
            none of their own.

    Raises:
        OSError, ValueError: no file, no JSON object, or another class.
    """
    section = processor_setting(folder, "video_processor", None)
    if section is None and (folder / FILE).is_file():
        section = _file(folder, FILE)
    if section is None:
        section = _file(folder, "preprocessor_config.json") | dict(images)
    named = section.get("video_processor_type", kind)
    if named != kind:
        raise ValueError(f"the video processor is a {named}, expected {kind}")
    return {**defaults, **section}


def refuse_other_values(said: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise ValueError where a video processor does what no rule follows.

    Args:
        said: its settings.
        fixed: key -> what every published file says; absent is as good.
    """
    for key, wanted in fixed.items():
        if said.get(key, wanted) != wanted:
            raise ValueError(f"the video processor's {key} is {said[key]!r}, expected {wanted!r}")


def _file(folder: Path, name: str) -> dict[str, Any]:
    content = read_json(folder / name, object)
    if not isinstance(content, dict):
        raise ValueError(f"{name} holds no JSON object")
    return content
