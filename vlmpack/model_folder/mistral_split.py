"""Mistral's tokenizers that were published with Llama 3's way to split texts.

transformers warns of them (#42299), and corrects them on request. The model was trained with one
token a digit, words that begin anew at a capital, and "'s" as no piece. The published
tokenizer.json splits differently, so the model would get ids that it was not trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlmpack.errors import ModelError
from vlmpack.model_folder.warned import WRONG_SPLIT
from vlmpack.whole_file import read_json, regular_bytes

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_MARK = "vlmpack_corrected_split"


def may_be_wrong(folder: Path) -> bool:
    """Whether the folder's tokenizer splits texts as Llama 3's; no tokenizer is loaded."""
    path = folder / "tokenizer.json"
    return path.is_file() and json.dumps(LLAMA_3)[1:-1].encode() in regular_bytes(path)


def is_corrected(tokenizer: Any) -> bool:
    """Whether it splits otherwise than its tokenizer.json says."""
    return hasattr(tokenizer, _MARK)


def corrected(folder: Path, tokenizer: Any, said: list[str], load: Callable[..., Any]) -> Any:
    """A tokenizer as the model was trained with it.

    Args:
        said: transformers' warnings when it was loaded.

    Raises:
        ModelError: transformers calls its way to split wrong, and it is not Llama 3's.
    """
    if not any(WRONG_SPLIT in text for text in said):
        return tokenizer
    setting = tokenizer.init_kwargs.get("fix_mistral_regex")
    if setting is False:
        return tokenizer
    found = load(fix_mistral_regex=True)
    if _split(found) == _split(tokenizer):
        return tokenizer
    if LLAMA_3 not in _patterns(tokenizer):
        raise ModelError(
            f"model.path: transformers says that the pre-tokenizer of {folder / 'tokenizer.json'} "
            "is wrong, as in many Mistral models. But it is not theirs. "
            'Set "fix_mistral_regex" in tokenizer_config.json to true to '
            "replace it by Mistral's, or to false to keep it"
        )
    setattr(found, _MARK, True)
    return found


def write_corrected(tokenizer: Any, folder: Path) -> None:
    """Put the way to split into the tokenizer.json of an exported folder, a copy of the model's,
    where they differ."""
    path = folder / "tokenizer.json"
    content = read_json(path)
    content["pre_tokenizer"] = _split(tokenizer)
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _split(tokenizer: Any) -> Any:
    return json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"]


def _patterns(tokenizer: Any) -> list[str]:
    """Regular expressions that a tokenizer's texts are split by."""
    split = _split(tokenizer)
    parts = split.get("pretokenizers", [split])
    return [part["pattern"].get("Regex", "") for part in parts if part["type"] == "Split"]
