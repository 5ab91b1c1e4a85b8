"""A model folder's tokenizer, with the chat template that its processor would use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmpack.errors import ModelError, VlmpackError
from vlmpack.families.processor_config import processor_setting
from vlmpack.model_folder.load import load_tokenizer


def open_tokenizer(folder: Path, *, takes_images: bool) -> Any:
    """transformers' fast tokenizer, with the chat template of the folder's processor.

    Args:
        folder: model folder.
        takes_images: whether its model has a vision tower, and so a processor.

    Raises:
        ModelError: the folder has no usable one.
    """
    if not (folder / "tokenizer.json").is_file():
        # transformers would make one without a vocabulary from config.json alone.
        raise ModelError(f"model.path: {folder} has no usable tokenizer: tokenizer.json is missing")
    try:
        tokenizer = load_tokenizer(folder)
        template = _processor_template(folder) if takes_images else None
    except VlmpackError:
        raise
    except Exception as error:  # an edited tokenizer raises anything in its reader
        raise ModelError(
            f"model.path: {folder} has no usable tokenizer: {type(error).__name__}: {error}"
        ) from error
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _processor_template(folder: Path) -> str | None:
    """The chat template of a folder's processor class, where it is kept apart from the tokenizer's.

    Older folders of vision-language models have it in chat_template.json, and in
    tokenizer_config.json that of the language model alone, which writes no images. transformers'
    processors take it before chat_template.jinja, its tokenizers do not know it.

    Raises:
        ValueError: a file that holds no JSON object, or no text.
    """
    for file in ("processor_config.json", "chat_template.json"):
        found = processor_setting(folder, "chat_template", None, file=file)
        if isinstance(found, str):
            return found
        if found is not None:
            kind = type(found).__name__
            raise ValueError(f"its processor's chat_template is a {kind}, expected a text")
    return None
