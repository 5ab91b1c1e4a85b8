"""Whether a folder's weights fit its config.json, from the headers of the files: nothing is read,
but a head that lies beside the embedding where config.json says that both are one.

transformers itself loads tensors without values (on the meta device), so names that are changed on
load, tied weights and experts that are fused are judged by what will really load them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmpack.backends.hf.load import deferred_model
from vlmpack.backends.ties import ties_notes
from vlmpack.backends.unread import Loaded, load_by_headers
from vlmpack.errors import ModelError
from vlmpack.families.registry import family_of
from vlmpack.model_folder.load import load_config
from vlmpack.model_folder.weights import raise_misfits


def check_weights(folder: Path) -> Loaded:
    """Raise unless loading the folder will find every weight, in its shape, and no others but those
    that stay as they are.

    Raises:
        ModelError: no weights, a damaged or missing file, a weight that is missing, left over or
            of the wrong shape.
        CapabilityError: no family serves its model_type.
    """
    loaded = load_by_headers(folder)
    raise_misfits(folder, loaded.info)
    if not family_of(folder).proven_by_verify:
        _refuse_sections(folder, load_config(folder).get_text_config())
    try:
        config = deferred_model(folder).config
    except (NotImplementedError, RuntimeError):  # the load itself has to tell
        return loaded
    return replace(loaded, notes=tuple(ties_notes(folder, config)))


def _refuse_sections(folder: Path, text: Any) -> None:
    """Raise ModelError where position axes share another number of frequencies than a head has."""
    rope = getattr(text, "rope_parameters", None) or {}
    sections = rope.get("mrope_section")
    if not sections:
        return
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    frequencies = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    if sum(sections) != frequencies:
        raise ModelError(
            f"model.path: {folder / 'config.json'} says mrope_section: {list(sections)}, which is "
            f"{sum(sections)} in all; a head of {head} has {frequencies} frequencies"
        )
