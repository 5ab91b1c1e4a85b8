"""What a model folder's processor says beside the image processor: counts of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmpack.whole_file import read_json

DEFAULT_IMAGE_LENGTH = 256
"""The `image_seq_length` of transformers' processor classes that have one."""


def processor_setting(
    folder: Path, key: str, default: Any, *, file: str = "processor_config.json"
) -> Any:
    """A value of a model folder's processor_config.json, or of another of its JSON files.

    Args:
        folder: model folder.
        key: at the top of the file.
        default: of the processor class, for files without it or folders without the file.
        file: its name.

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

    Args:
        folder: model folder.
        tokens: that the model makes.
        image: what it makes them of, for messages.

    Raises:
        ValueError: another number; says what to write.
    """
    written = processor_setting(folder, "image_seq_length", None)
    if (DEFAULT_IMAGE_LENGTH if written is None else written) == tokens:
        return
    if written is not None:
        found = f"writes image_seq_length {written}"
    elif (folder / "processor_config.json").is_file():
        found = f"has no image_seq_length, which means {DEFAULT_IMAGE_LENGTH}"
    else:
        found = f"is missing, which means image_seq_length {DEFAULT_IMAGE_LENGTH}"
    raise ValueError(
        f"processor_config.json {found}, but the model makes {tokens} tokens of {image}: write "
        f'"image_seq_length": {tokens} into that file'
    )
