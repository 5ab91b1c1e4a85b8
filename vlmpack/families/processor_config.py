"""What a model folder says beside the image processor: counts of tokens, a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DEFAULT_IMAGE_LENGTH = 256
"""The `image_seq_length` of transformers' processor classes that have one."""


def processor_setting(folder: Path, key: str, default: Any) -> Any:
    """A value of a model folder's processor_config.json.

    Args:
        folder: model folder.
        key: at the top of the file.
        default: of the processor class, for files without it or folders without the file.

    Raises:
        ValueError: the file holds no JSON object.
    """
    return _setting(folder / "processor_config.json", key, default)


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


def processor_template(folder: Path) -> str | None:
    """The chat template of a folder's processor class, where it is kept apart from the tokenizer's.

    Older folders of vision-language models have it in chat_template.json, and in
    tokenizer_config.json that of the language model alone, which writes no images. transformers'
    processors take it before chat_template.jinja, its tokenizers do not know it.

    Raises:
        ValueError: a file that holds no JSON object, or no text.
    """
    found = _setting(folder / "processor_config.json", "chat_template", None)
    if found is None:
        found = _setting(folder / "chat_template.json", "chat_template", None)
    if found is None or isinstance(found, str):
        return found
    raise ValueError(f"its processor's chat_template is a {type(found).__name__}, expected a text")


def _setting(path: Path, key: str, default: Any) -> Any:
    if not path.is_file():
        return default
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content.get(key, default)
