"""A model folder -> a transformers model on CPU, in float32, with every weight accounted for.

`check_weights` checks from file headers whether a folder's weights fit its config.json. It reads no
weight, except a head and an embedding that config.json says are one. transformers itself loads
tensors without values (on the meta device). So the code that will load the weights also judges
renamed, tied and fused ones.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from vlmpack.backends.finite import refuse_non_finite_weights
from vlmpack.backends.hf.deferred import Deferred, deferred, read_whole
from vlmpack.backends.ties import record_ties, ties_notes
from vlmpack.backends.unused import Loaded, load_by_headers
from vlmpack.errors import ModelError, as_model_error
from vlmpack.families.registry import family_of
from vlmpack.model_folder.finite import non_finite_tensors
from vlmpack.model_folder.load import load_config, load_model_class, load_with
from vlmpack.model_folder.quantised import dense_tensors, is_quantised
from vlmpack.model_folder.weights import raise_misfits, weight_files

logger = logging.getLogger("vlmpack")


def load_model(folder: Path) -> Any:
    """Load a pretrained model; master weights are float32 whatever the file's dtype.

    Raises:
        ModelError: no weights in the folder, a weight that is missing, left over, of the wrong
            shape or no number, or a damaged file.
        CapabilityError: no family serves its model_type.
    """
    weight_files(folder)
    if is_quantised(folder):
        return read_parameters(folder, deferred_model(folder))
    from safetensors import SafetensorError

    wrong = (OSError, ValueError, RuntimeError, SafetensorError)
    with as_model_error(f"model.path: {folder} cannot be loaded", *wrong):
        model, info = load_model_class(family_of(folder).auto_class(), folder)
    raise_misfits(folder, info)
    _refuse_non_finite(folder, model)
    record_ties(model)
    return model


def read_parameters(folder: Path, model: Any) -> Any:
    """A model of `deferred_model`, with its parameters read into memory; raises as `load_model`."""
    read: dict[int, nn.Parameter] = {}
    with as_model_error(f"model.path: {folder} cannot be loaded", OSError, ValueError):
        for module in model.modules():
            for name, value in list(module.named_parameters(recurse=False)):
                if isinstance(value, Deferred):
                    if id(value) not in read:
                        read[id(value)] = nn.Parameter(read_whole(value), value.requires_grad)
                    setattr(module, name, read[id(value)])
    _refuse_non_finite(folder, model)
    return model


def _refuse_non_finite(folder: Path, model: Any) -> None:
    saved = model.state_dict().keys()
    named = chain(model.named_parameters(), model.named_buffers())
    non_finite = non_finite_tensors((name, value) for name, value in named if name in saved)
    refuse_non_finite_weights(folder, non_finite, lambda: model)


def open_model(folder: Path, *, whole: str = "") -> Any:
    """Open a model whose parameters stay in their files until `shard_model` reads them.

    It is loaded whole, with a line in the log, where that is not possible.

    Args:
        whole: why whole weights are needed; empty where they are not.

    Raises:
        ModelError, CapabilityError: as `load_model`.
    """
    try:
        if not whole:
            return deferred_model(folder)
    except (NotImplementedError, RuntimeError) as error:
        whole = str(error).strip().splitlines()[-1]
    logger.warning("every process loads the whole model in float32 on its host: %s", whole)
    return load_model(folder)


def deferred_model(folder: Path) -> Any:
    """As `open_model`; NotImplementedError or RuntimeError where only the whole can be loaded."""
    auto_class = family_of(folder).auto_class()
    dense = dense_tensors(folder, deferred)
    for name, held in dense.held.items():
        tensor = dense.tensors[name]
        assert isinstance(tensor, Deferred)
        tensor.held = held
    with as_model_error(f"model.path: {folder} cannot be loaded", OSError, ValueError, KeyError):
        model, info = load_with(auto_class, folder, dense.tensors)
        _read_buffers(model)
    raise_misfits(folder, info)
    record_ties(model)
    return model


def _read_buffers(model: nn.Module) -> None:
    """Buffers are small, and every rank holds them whole."""
    for module in model.modules():
        for name, value in list(module.named_buffers(recurse=False)):
            if isinstance(value, Deferred):
                setattr(module, name, read_whole(value))


def check_weights(folder: Path) -> Loaded:
    """Check that loading the folder will find every weight, in its shape, and no unknown ones.

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
    except (NotImplementedError, RuntimeError):  # only the load itself can show it
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
