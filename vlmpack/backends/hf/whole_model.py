"""A model whose own forward pass runs on a whole row: ids, images and positions together.

    batch -> input_ids, position_ids, images as the class takes them, boundaries for attention
    -> the class without its head -> hidden states -> head and cross entropy as in `PackedLM`

The class itself merges features, adds deep ones and embeds for each layer. The boundaries travel in
the keyword arguments that it hands down. They are removed again where it calls the tower or a
projector, which must not see them.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.hf.model import PackedLM, PackedVLM, _boundaries
from vlmpack.backends.hf.recurrence import ROW_ARGUMENT, packed_row, require_replaced
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.families.base import Family
from vlmpack.packing import Batch, Media, PackedSeqParams
from vlmpack.packing.media import move_media

BOUNDARIES = (
    "packed_seq_params",
    "padded_rows",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "image_masks",
    "forked_row",
    ROW_ARGUMENT,
)
"""Keyword arguments that say where samples end."""


def logit_scale(model: Any) -> float:
    """What a class multiplies its logits with, by the words of its own forward pass.

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
            f"writes into masks and tells its attention nothing of; packed rows have no masks, so "
            f"longer samples would see beyond it"
        )


class _Whole(PackedLM):
    """What runs whole has no embeddings of ours: it is given the row's ids."""

    def __init__(self, model: nn.Module, *given: Any) -> None:
        super().__init__(model, *given)
        refuse_window_of_masks(self.language)
        self.scale = logit_scale(model)

    def before_head(self, hidden: Tensor) -> Tensor:
        """See `PackedLM.before_head`."""
        return hidden if self.scale == 1.0 else hidden * self.scale

    def _run_whole(
        self, whole: Any, batch: Batch, params: PackedSeqParams | None, **arguments: Any
    ) -> Tensor:
        """(T, D) final hidden states of every slot."""
        if self.router_loss is not None:
            raise CapabilityError(
                "model.router_aux_loss_coef: a class that no family of ours serves is trained "
                "without the loss of its router; set it to 0"
            )
        require_replaced(self.stateful if params is not None else ())
        arguments |= _boundaries(batch, params)
        with packed_row() if params is not None else nullcontext():
            output = whole(input_ids=batch.input_ids, use_cache=False, **arguments)
        hidden: Tensor = output.last_hidden_state
        return hidden.flatten(0, 1)


class WholeVLM(_Whole, PackedVLM):
    """A vision-language model that is run whole; see `PackedVLM`."""

    def __init__(self, model: nn.Module, family: Family, blank: Media) -> None:
        super().__init__(model, family, blank)
        for path in (self.paths.vision, *self.paths.projectors):
            part = _module(model, path)
            if part is not None:
                part.register_forward_pre_hook(_without_boundaries, with_kwargs=True)

    def hidden_states(self, batch: Batch, packed_seq_params: PackedSeqParams | None) -> Tensor:
        """(T, D) final hidden states of every slot; raises as `PackedLM.hidden_states`."""
        assert self.paths.whole is not None
        whole = self.model.get_submodule(self.paths.whole)
        is_image = torch.zeros_like(batch.input_ids, dtype=torch.bool)
        is_image.view(-1).index_fill_(0, batch.media_positions, True)
        images: dict[str, Any] = {}
        if batch.media is not None:
            images = self.family.image_arguments(
                move_media(batch.media, batch.input_ids.device, self.vision.dtype)
            )
        axes = batch.position_ids.shape[0]
        hidden = self._run_whole(
            whole,
            batch,
            packed_seq_params,
            position_ids=batch.position_ids if axes > 1 else batch.position_ids[0],
            **images,
            **self.family.token_arguments(is_image),
        )
        if batch.media is None:  # the blank image keeps every part of the tower in the graph
            features = self.image_features(self.blank, hidden.device).features
            hidden = hidden + 0.0 * features.sum().to(hidden.dtype)
        return hidden


class WholeLM(_Whole):
    """A language model that is given its ids, for classes that embed them more than once."""

    def hidden_states(self, batch: Batch, packed_seq_params: PackedSeqParams | None) -> Tensor:
        """(T, D) final hidden states of every slot; raises as `PackedLM.hidden_states`."""
        if batch.media is not None:
            raise CapabilityError("the batch has images, but the model has no vision tower")
        positions = batch.position_ids[0]
        return self._run_whole(self.language, batch, packed_seq_params, position_ids=positions)


def packed_model(model: nn.Module, encoder: Encoder) -> PackedLM:
    """The transformers model of the encoder's folder: run whole where its family says so, else part
    by part; with or without a vision tower."""
    family = encoder.family
    runs_whole = family.modules.whole is not None
    if not encoder.takes_images:
        return (WholeLM if runs_whole else PackedLM)(model, family)
    return (WholeVLM if runs_whole else PackedVLM)(model, family, encoder.image_rule.smallest())


def _module(model: nn.Module, path: str | None) -> nn.Module | None:
    return dict(model.named_modules()).get(path) if path is not None else None


def _without_boundaries(
    module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
