"""config.json with what it leaves out.

Published files name only what differs from the class's defaults (Pixtral-12B's says neither the
tower's width nor its depth); what is computed from sizes needs all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmpack.capabilities.folder import read_config
from vlmpack.errors import ModelError
from vlmpack.model_folder.load import config_of


def whole_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the defaults of its transformers class filled in, in its sections too.

    Args:
        config: the content of a config.json.

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
    """`final_logit_softcapping` of a class that bends its logits by it; None where it is unset.

    Args:
        config: the content of a config.json.
    """
    cap = (config.get("text_config") or config).get("final_logit_softcapping")
    return None if cap is None else float(cap)


def whole_config_of(folder: Path) -> dict[str, Any]:
    """That of a model folder.

    Raises:
        ModelError: config.json is missing, unreadable, or transformers does not take it.
    """
    return whole_config(read_config(folder))
