"""What classes of transformers that run whole are asked, and what they are given around their own
forward pass."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from vlmpack.backends.hf.recurrence import ROW_ARGUMENT
from vlmpack.errors import CapabilityError

OWN_SLOTS = "own_slots"
"""The keyword argument that says which slots of a row the decoder of a class that runs whole takes,
where ranks share the row."""

BOUNDARIES = (
    "packed_seq_params",
    "padded_rows",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "image_masks",
    "prefix_row",
    "head_exchange",
    OWN_SLOTS,
    ROW_ARGUMENT,
)
"""Keyword arguments that say where samples end."""


def logit_scale(model: Any) -> float:
    """The factor of a class's logits, by the words of its own forward pass.

    IBM's classes divide by `logits_scaling`, Cohere's multiply by `logit_scale`. A class whose
    config has the entry but whose forward does not use it leaves its logits alone.
    """
    source = inspect.getsource(inspect.unwrap(type(model).forward))
    text = model.config.get_text_config()
    scale = 1.0
    if "logits_scaling" in source:
        scale /= float(getattr(text, "logits_scaling", None) or 1.0)
    if "logit_scale" in source:
        scale *= float(getattr(text, "logit_scale", None) or 1.0)
    return scale


def refuse_window_of_masks(language: Any) -> None:
    """Refuse a class that writes its window into masks alone, because it would train without one.

    vlmpack's attention takes no mask, and `verify` cannot see the difference in samples that fit
    the window.

    Raises:
        CapabilityError: its config.json has a window, but its attention gets none.
    """
    text = language.config.get_text_config().to_dict()
    window, kinds = text.get("sliding_window"), text.get("layer_types")
    used = "sliding_attention" in kinds if kinds else text.get("use_sliding_window") is not False
    if not window or not used:
        return
    source = inspect.getsource(sys.modules[type(language).__module__])
    if "sliding_window_causal_mask" in source and "sliding_window=" not in source:
        raise CapabilityError(
            f"config.json has a sliding_window of {window} tokens, which {type(language).__name__} "
            f"writes into masks and tells its attention nothing of. Packed rows have no masks, so "
            f"longer samples would see beyond it"
        )


BY_SLOT = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "position_ids": -1,
    "visual_pos_masks": 1,
    "vision_mask": 1,
    "moe_mm_token_type_ids": 1,
}
"""Inputs of decoders, and which of their dimensions is the row's slots."""

DEEP = {"deepstack_visual_embeds": "visual_pos_masks", "deepstack_features": "vision_mask"}
"""(M, D) features by layers, and the mask (1, T) or (1, T, 1) of the slots that they go to."""


def cut_inputs(
    module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """What goes into a decoder, for this rank's slots. The class has merged the whole row before.

    Raises:
        CapabilityError: the class gives it a tensor of which nobody said whether it has slots.
    """
    own = kwargs.pop(OWN_SLOTS, None)
    if own is None:
        return None
    given = {f"argument {place}": value for place, value in enumerate(args)} | kwargs
    tensors = {
        name
        for name, value in given.items()
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    }
    if unknown := sorted(tensors - {*BY_SLOT, *DEEP, *BOUNDARIES}):
        raise CapabilityError(
            f"parallelism.context: {type(module).__name__} is given {', '.join(unknown)} of a row "
            f"by its class, and nobody said how to cut that for processes that share rows; use 1"
        )
    cut = {
        name: given[name].index_select(dim, own) for name, dim in BY_SLOT.items() if name in tensors
    }
    for name in tensors & DEEP.keys():
        is_image = given[DEEP[name]].flatten()
        number = is_image.cumsum(0) - 1
        mine = number[own][is_image[own]]
        cut[name] = tree_map(partial(torch.index_select, dim=0, index=mine), given[name])
    return args, kwargs | cut


def without_boundaries(
    module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """What goes into a tower or a projector."""
    return args, {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
