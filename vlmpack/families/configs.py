"""What config.json and the other JSON files of a model folder say of sizes and processors.

Published files name only what differs from the class's defaults. Pixtral-12B's file has neither the
tower's width nor its depth. FLOPs need all sizes, so config.json is filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmpack.capabilities.folder import read_config
from vlmpack.errors import ModelError
from vlmpack.model_folder.load import config_of
from vlmpack.whole_file import read_json


def whole_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the defaults of its transformers class filled in, in its sections too.

    Raises:
        ModelError: transformers does not take it.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        content: dict[str, Any] = config_of(config).to_dict()
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ModelError(f"config.json: {error}") from error
    except Exception as error:  # values of another type fail anywhere in a config's class
        raise ModelError(f"config.json: {type(error).__name__}: {error}") from error
    return content


def final_logit_cap(config: Mapping[str, Any]) -> float | None:
    """`final_logit_softcapping` of a class that bends its logits by it; None where it is unset."""
    cap = (config.get("text_config") or config).get("final_logit_softcapping")
    return None if cap is None else float(cap)


def whole_config_of(folder: Path) -> dict[str, Any]:
    """That of a model folder.

    Raises:
        ModelError: config.json is missing, unreadable, or transformers does not take it.
    """
    return whole_config(read_config(folder))


DEFAULT_IMAGE_LENGTH = 256
"""The `image_seq_length` of transformers' processor classes that have one."""


def processor_setting(
    folder: Path, key: str, default: Any, *, file: str = "processor_config.json"
) -> Any:
    """A value of a model folder's processor_config.json, or of another of its JSON files.

    Raises:
        ValueError: the file holds no JSON object.
    """
    path = folder / file
    if not path.is_file():
        return default
    try:
        content = read_json(path, object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object")
    return content.get(key, default)


def check_image_length(folder: Path, tokens: int, image: str) -> None:
    """Raise unless the folder's processor class writes as many tokens as the model makes.

    Raises:
        ValueError: another number; says what to write.
    """
    written = processor_setting(folder, "image_seq_length", None)
    if (DEFAULT_IMAGE_LENGTH if written is None else written) == tokens:
        return
    if written is not None:
        what = f"writes image_seq_length {written}"
    elif (folder / "processor_config.json").is_file():
        what = f"has no image_seq_length, which means {DEFAULT_IMAGE_LENGTH}"
    else:
        what = f"is missing, which means image_seq_length {DEFAULT_IMAGE_LENGTH}"
    raise ValueError(
        f"processor_config.json {what}, but the model makes {tokens} tokens of {image}: write "
        f'"image_seq_length": {tokens} into that file'
    )


FILE = "video_preprocessor_config.json"


def video_section(
    folder: Path, kind: str, defaults: Mapping[str, Any], images: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a video processor.

    They are a section of processor_config.json, or a file of their own, or else
    preprocessor_config.json.

    Args:
        kind: the class that it must name, unless it names none.
        defaults: values of missing keys.
        images: replaces the settings of its image processor's file, which apply where videos have
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
        fixed: key -> what every published file says; a missing key is as good.
    """
    for key, expected in fixed.items():
        if said.get(key, expected) != expected:
            raise ValueError(f"the video processor's {key} is {said[key]!r}, expected {expected!r}")


def _file(folder: Path, name: str) -> dict[str, Any]:
    content = read_json(folder / name, object)
    if not isinstance(content, dict):
        raise ValueError(f"{name} holds no JSON object")
    return content
