"""Whether a model's head is its embedding. The weights decide, and config.json is corrected.

    head in the files   a flag says tied   no flag does
    other values        untied             untied
    the same values     tied               untied
    none                tied               refused: the head is missing
    the head alone      tied               refused: the embedding is missing

transformers reads weights in this way, but its configs keep their flags, and exports and other
engines use these configs. The flag of `text_config` follows that of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmpack.capabilities.folder import read_config

FLAG = "tie_word_embeddings"
SECTION = "text_config"


def record_ties(model: Any) -> None:
    """Write into the config of a model whether its head is its embedding."""
    head = model.get_output_embeddings()
    if head is not None:
        write_ties(model.config, tied=head.weight is model.get_input_embeddings().weight)


def is_tied(model: Any, state: Mapping[str, Tensor]) -> bool:
    """Whether the head is the embedding in tensors that training or merging has changed.

    Args:
        model: only its config and names are read.
        state: tensors under its names. A missing one equals the one that it is tied to.
    """
    pairs = model.all_tied_weights_keys.items()
    return bool(getattr(model.config, FLAG, False)) and all(
        torch.equal(state[tied], state[name]) for tied, name in pairs if tied in state
    )


def write_ties(config: Any, *, tied: bool) -> None:
    """Write the flag into a config of transformers, and into its language model's."""
    for part in (config, config.get_text_config()):
        if getattr(part, FLAG, tied) != tied:
            setattr(part, FLAG, tied)


def ties_notes(folder: Path, config: Any) -> list[str]:
    """A line for each statement of config.json about the head that the weights contradict."""
    tied = getattr(config, FLAG, None)
    if tied is None:
        return []
    raw = read_config(folder)
    text = raw.get(SECTION)
    said = {FLAG: raw.get(FLAG)}
    if isinstance(text, Mapping):
        said[f"{SECTION}.{FLAG}"] = text.get(FLAG)
    wrong = {name: value for name, value in said.items() if value not in (None, tied)}
    head = "is the embedding" if tied else "has values of its own"
    return [
        f"{folder / 'config.json'} says {name}: {str(value).lower()}, but the head of the weights "
        f"{head}; it is trained so, and an export says {str(tied).lower()}"
        for name, value in wrong.items()
    ]
