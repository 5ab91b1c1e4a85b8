"""The token that one image feature replaces, looked up in a folder's tokenizer."""

from __future__ import annotations

from typing import Any

from vlmpack.errors import ModelError


def feature_token_id(tokenizer: Any, token: str, *around: str) -> int:
    """The id of the token that an image feature replaces.

    Args:
        tokenizer: of transformers.
        token: the feature token.
        around: others that the family writes for images.

    Raises:
        ModelError: one of them is none of the tokenizer's special tokens.
    """
    missing = {token, *around} - tokenizer.get_added_vocab().keys()
    if missing:
        raise ModelError(
            f"model.path: the tokenizer has no special token {', '.join(sorted(missing))}, "
            f"which this family writes for images"
        )
    return int(tokenizer.convert_tokens_to_ids(token))
