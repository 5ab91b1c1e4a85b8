"""A transformers model as one module that maps a batch to the losses of its label tokens.

    input_ids -> embeddings, with a vision tower its features over the placeholders (merge)
    -> decoder with varlen attention -> label tokens only -> head and cross entropy in chunks

The parts are called one by one instead of through the model's own forward. So nothing is derived
again from ids or masks, and the text's boundaries never reach the vision tower. The losses are the
cross entropy alone. A router's loss is added to the gradients (`router_loss`).

DeepStack adds image features to the output of the first layers. transformers indexes the row with a
mask for that, which on a GPU reads a count on the host twice a layer. Here the features are as long
as the row and zero outside the placeholders, so they are added without a mask.

Some classes run whole, for their own forward pass merges features, adds deep ones and embeds for
each layer (`WholeVLM`, `WholeLM`):

    batch -> input_ids, position_ids, images as the class takes them, boundaries for attention
    -> the class without its head -> hidden states -> head and cross entropy as in `PackedLM`

The boundaries travel in the keyword arguments that it hands down. They are removed again where it
calls the tower or a projector, which must not see them.

Shapes: T slots of the batch, M placeholder tokens, D width, L label tokens, A position axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.attention import BlockMasks
from vlmpack.attention.prefix_attention import PrefixRow
from vlmpack.backends.cross_entropy import capped, linear_cross_entropy
from vlmpack.backends.decoder_graph import DecoderGraph, Recorder, StaticRow, boundaries_alone
from vlmpack.backends.hf.context import ContextGroup
from vlmpack.backends.hf.recurrence import (
    ROW_ARGUMENT,
    kernel_places,
    packed_row,
    require_replaced,
    stateful_modules,
)
from vlmpack.backends.hf.router_loss import RouterLoss
from vlmpack.backends.hf.whole_classes import (
    OWN_SLOTS,
    cut_inputs,
    logit_scale,
    refuse_window_of_masks,
    without_boundaries,
)
from vlmpack.capabilities.refused import refusal
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.families.base import Family, ImageFeatures
from vlmpack.packing import Batch, Media, PackedBatch, PackedSeqParams, PaddedBatch
from vlmpack.packing.media import move_media
from vlmpack.recurrence import RowSegments


def take_whole_rows(language: Any) -> None:
    """Let a decoder take deep features of every slot where it gets no mask.

    The change is permanent. The class's own forward, which has a mask, still works.
    """
    if "_deepstack_process" not in vars(language):
        language._deepstack_process = partial(_process, language._deepstack_process)


def _process(
    stock: Callable[..., Tensor], hidden: Tensor, mask: Tensor | None, features: Tensor
) -> Tensor:
    """(B, S, D) hidden states with a layer's features; those of every slot are (B * S, D)."""
    if mask is not None:
        return stock(hidden, mask, features)
    return hidden + features.view_as(hidden)


ROPE_OF_THE_LONGEST = ("dynamic", "longrope")
"""Rotary rules of transformers that look at the largest position of the whole batch."""


@dataclass(frozen=True, slots=True)
class MergedInputs:
    """The inputs of the decoder.

    Args:
        embeds: (T, D) token embeddings with the image features in place of the placeholders.
        deep: (T, D) for each of the decoder's first layers, added to its output there. The features
            of `ImageFeatures` at the placeholders, zeros elsewhere.
    """

    embeds: Tensor
    deep: tuple[Tensor, ...] = ()


def transformers_spelling(params: PackedSeqParams) -> dict[str, Any]:
    """The boundaries in the keyword arguments that transformers' attention functions know."""
    cu = params.cu_seqlens_physical
    return {
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "max_length_q": params.max_seqlen_q,
        "max_length_k": params.max_seqlen_kv,
    }


def _rope_types(text: Mapping[str, Any]) -> set[str]:
    """The rotary rules of a decoder: one, or one for each kind of its layers."""
    rope = text.get("rope_parameters") or {}
    parts = [part for part in rope.values() if isinstance(part, Mapping)] or [rope]
    return {part.get("rope_type", "default") for part in parts}


def _boundaries(batch: Batch, params: PackedSeqParams | None) -> dict[str, Any]:
    """Keyword arguments that tell our attention, and transformers' functions, where samples end."""
    if isinstance(batch, PaddedBatch):
        if params is not None:
            raise CapabilityError(
                "a padded batch has no segments, but packed_seq_params were given"
            )
        return {"padded_rows": True}
    if params is None:
        raise CapabilityError(
            "a packed row needs packed_seq_params; without them samples would mix"
        )
    prefix_row = None if params.prefix_tree is None else PrefixRow(params)
    return {
        "packed_seq_params": params,
        "prefix_row": prefix_row,
        **transformers_spelling(params),
    }


def block_masks(
    batch: Batch, params: PackedSeqParams | None, *, in_windows_alone: bool = False
) -> dict[str, Any]:
    """The keyword argument that says which tokens attend in both directions.

    It is made from host integers. Neither ids nor masks are read.
    """
    covered = sum(stop - start for start, stop in batch.image_blocks)
    if covered != batch.media_positions.shape[0]:
        raise CapabilityError(
            f"the batch says of {covered} of its {batch.media_positions.shape[0]} image tokens "
            f"which of them attend to one another, expected all. Without it attention would be "
            f"causal inside images"
        )
    rows, slots = batch.input_ids.shape
    lengths = params.segment_lengths if params is not None else (slots,) * rows
    device, blocks = batch.input_ids.device, batch.image_blocks
    return {"image_masks": BlockMasks(lengths, blocks, device, in_windows_alone=in_windows_alone)}


def own_slots(batch: Batch) -> Batch:
    """The batch that embeddings, positions and images are of: those of a rank's part of a row."""
    return batch.own_slots() if isinstance(batch, PackedBatch) else batch


def _deep_arguments(deep: Sequence[Tensor]) -> dict[str, Any]:
    """Keyword arguments that tell the decoder what to add; none without deep features. Without a
    mask, see `take_whole_rows`."""
    return {"deepstack_visual_embeds": list(deep)} if deep else {}


def _at_placeholders(layer: Tensor, batch: Batch, embeds: Tensor) -> Tensor:
    """(T, D) zeros with (M, D) deep features at the placeholders."""
    deep = _of_placeholders(layer.to(embeds.dtype), batch)
    return torch.zeros_like(embeds).index_copy(0, batch.media_positions, deep)


def _of_placeholders(features: Tensor, batch: Batch) -> Tensor:
    """(M, D), one a placeholder, of the images' features: the sequences of a pair show the same."""
    sources = batch.media_sources
    return features if sources is None else features.index_select(0, sources)


class PackedLM(nn.Module):
    """A language model that takes typed batches; with a vision tower see `PackedVLM`."""

    model: Any
    router_loss: RouterLoss | None = None
    """The additional loss of a mixture of experts."""
    graph: DecoderGraph | None = None
    """Replays the decoder for training rows of one shape."""
    context_group: ContextGroup | None = None
    """The ranks that share each row, where several do."""

    def __init__(self, model: nn.Module, family: Family) -> None:
        super().__init__()
        self.model = model
        self.family = family
        self.paths = family.modules
        if self.head.bias is not None:
            raise CapabilityError("a language-model head with a bias is not supported")
        config: dict[str, Any] = self.model.config.to_dict()
        self.logit_cap = family.logit_cap(config)
        text: dict[str, Any] = self.model.config.get_text_config().to_dict()
        refused = sorted(_rope_types(text) & set(ROPE_OF_THE_LONGEST))
        if refused:
            raise CapabilityError(
                f"config.json has rope_type {refused[0]!r}, whose frequencies follow the longest "
                f"sequence of a batch: a sample's loss would depend on the samples beside it"
            )
        why = refusal(config)  # with the class's defaults
        if why is not None:
            raise CapabilityError(why)
        self.stateful = stateful_modules(self.language)
        self.recurrent = bool(self.stateful or kernel_places(self.model))

    @property
    def language(self) -> Any:
        """The decoder."""
        return self.model.get_submodule(self.paths.language)

    @property
    def head(self) -> Any:
        """The layer that makes logits. It is never called. Only its weight is used."""
        return self.paths.head_of(self.model)

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The submodules that have repeated layers of their own."""
        return (self.language,)

    def forward(self, batch: Batch, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        """Losses of the batch's label tokens.

        Args:
            packed_seq_params: the row's boundaries; None for a padded batch.

        Returns:
            (L,) float32, in the order of `batch.label_positions`; where ranks share the row, those
            of this rank's slots.
        """
        hidden = self.hidden_states(batch, packed_seq_params)
        positions, targets = batch.own_labels()
        picked = self.before_head(hidden.index_select(0, positions))
        temperatures = batch.own_temperatures()
        given = (picked, self.head.weight, targets)
        return linear_cross_entropy(*given, cap=self.logit_cap, temperatures=temperatures)

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, V) logits of (n, D) final hidden states, as the class's own forward has them."""
        return capped(self.before_head(hidden) @ self.head.weight.T, self.logit_cap)

    def before_head(self, hidden: Tensor) -> Tensor:
        """(n, D) final hidden states as the head takes them: scaled, where logits are."""
        return hidden

    def hidden_states(self, batch: Batch, packed_seq_params: PackedSeqParams | None) -> Tensor:
        """(T, D) final hidden states of every slot of a batch (T = B * S where it is padded), or of
        this rank's slots.

        Raises:
            CapabilityError: a packed row without boundaries, or a padded batch with some.
        """
        merged = self.merge(own_slots(batch))
        return self.decode(batch, packed_seq_params, merged)

    def decode(
        self, batch: Batch, packed_seq_params: PackedSeqParams | None, merged: MergedInputs
    ) -> Tensor:
        """(T, D) hidden states from merged inputs; raises as `hidden_states`."""
        self._refuse_prefixes(packed_seq_params)
        if packed_seq_params is not None and self.graph is not None and self.graph.takes(batch):
            require_replaced(self.stateful)
            return self.graph(
                StaticRow(
                    embeds=merged.embeds,
                    boundaries=packed_seq_params.cu_seqlens_physical,
                    where={"positions": batch.position_ids},
                    deep=merged.deep,
                )
            )
        own = own_slots(batch)
        arguments = {
            **_deep_arguments(merged.deep),
            **_boundaries(batch, packed_seq_params),
            **self._image_masks(batch, packed_seq_params),
            **self.family.decoder_arguments(self.model, own.input_ids, own.media_positions),
        }
        if batch.context is not None:
            assert self.context_group is not None
            arguments["head_exchange"] = self.context_group.exchange(
                batch.context, batch.segment_lengths
            )
        router_loss = self.router_loss if torch.is_grad_enabled() else None
        if router_loss is not None:
            arguments["output_router_logits"] = True
        output = self._run(merged.embeds, own.position_ids, packed_seq_params, arguments)
        hidden: Tensor = output.last_hidden_state.flatten(0, 1)
        return (
            hidden
            if router_loss is None
            else router_loss.attach(hidden, output.router_logits, batch)
        )

    def _run(
        self,
        embeds: Tensor,
        position_ids: Tensor,
        params: PackedSeqParams | None,
        arguments: Mapping[str, Any],
        width: int | None = None,
    ) -> Any:
        """The decoder's output for (B * S, D) embeddings and (A, B, S) positions."""
        axes, rows, slots = position_ids.shape
        return self.call(
            self.language,
            params,
            width=width,
            inputs_embeds=embeds.view(rows, slots, -1),
            position_ids=position_ids if axes > 1 else position_ids[0],
            **arguments,
        )

    def call(
        self,
        decoder: Any,
        params: PackedSeqParams | None,
        *,
        width: int | None = None,
        **arguments: Any,
    ) -> Any:
        """The output of a decoder, whose layers with a state get a packed row's segments.

        Args:
            width: slots of a captured row, whose segments do not say them. Those of other rows
                do, and a layer refuses a tensor of another width.
        """
        if params is not None and self.recurrent:
            require_replaced(self.stateful)
            arguments[ROW_ARGUMENT] = RowSegments.of(params, width=width)
            with packed_row():
                return decoder(use_cache=False, **arguments)
        return decoder(use_cache=False, **arguments)

    def capture_decoder(self, recorder: Recorder) -> DecoderGraph:
        """Have the decoder recorded at the first training row of fixed shape, and replayed."""

        def run(row: StaticRow) -> Tensor:
            width = row.embeds.shape[0]
            params = boundaries_alone(row.boundaries, width)
            arguments = {
                **_deep_arguments(row.deep),
                "packed_seq_params": params,
                **transformers_spelling(params),
            }
            output = self._run(row.embeds, row.where["positions"], params, arguments, width)
            hidden: Tensor = output.last_hidden_state
            return hidden.flatten(0, 1)

        self.graph = DecoderGraph(self.language, run, recorder)
        return self.graph

    def _refuse_prefixes(self, params: PackedSeqParams | None) -> None:
        """Raise CapabilityError for shared prefixes that the model would not compute."""
        if params is None or params.prefix_tree is None:
            return
        why = "has layers that carry state" if self.stateful else ""
        why = "has image tokens that attend in both directions" if self.paths.image_blocks else why
        why = "is of a class that no family serves" if self.family.proven_by_verify else why
        if why:
            raise CapabilityError(
                f"the row shares prefixes, and the model {why}; set packing.share_prefix: false"
            )

    def _image_masks(self, batch: Batch, params: PackedSeqParams | None) -> dict[str, Any]:
        if not self.paths.image_blocks:
            return {}
        return block_masks(batch, params, in_windows_alone=self.paths.blocks_in_windows)

    def merge(self, batch: Batch) -> MergedInputs:
        """Token embeddings.

        Raises:
            CapabilityError: a batch with images.
        """
        if batch.media is not None:
            raise CapabilityError("the batch has images, but the model has no vision tower")
        return MergedInputs(self.model.get_input_embeddings()(batch.input_ids).flatten(0, 1))


class PackedVLM(PackedLM):
    """A vision-language model that takes typed batches.

    Args:
        blank: the smallest image. A batch without images runs it through the tower with weight
            zero, so that every rank enters every collective equally often.
    """

    def __init__(self, model: nn.Module, family: Family, blank: Media) -> None:
        super().__init__(model, family)
        if self.paths.deep_features:
            take_whole_rows(self.language)
        rule = family.tower_rule(self.model.config.to_dict().get("vision_config", {}))
        self.blank = blank if rule is None else replace(blank, tower=rule(blank.grid_thw))

    @property
    def vision(self) -> Any:
        """The vision tower, projector included."""
        assert self.paths.vision is not None
        return self.model.get_submodule(self.paths.vision)

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The submodules that have repeated layers of their own."""
        return (self.vision, self.language)

    def merge(self, batch: Batch) -> MergedInputs:
        """Token embeddings with the image features in place of the placeholders.

        Raises:
            CapabilityError: the tower's feature count differs from the placeholders'.
        """
        embeds: Tensor = self.model.get_input_embeddings()(batch.input_ids).flatten(0, 1)
        media, part = batch.media or self.blank, batch.media_part
        images = self.image_features(media, embeds.device)
        if batch.media is None:  # the blank image keeps every part of the tower in the graph
            unused = 0.0 * sum((deep.sum() for deep in images.deep), images.features.sum())
            if part is None:
                none = tuple(torch.zeros_like(embeds) for _ in images.deep)
                return MergedInputs(embeds + unused.to(embeds.dtype), none)
            images = ImageFeatures(
                images.features[:0] + unused, tuple(deep[:0] for deep in images.deep)
            )
        num_features = batch.num_features if part is None else part.counts[part.rank]
        if images.features.shape[0] != num_features:
            raise CapabilityError(
                f"the vision tower made {images.features.shape[0]} features for "
                f"{num_features} placeholder tokens"
            )
        if part is not None:
            assert self.context_group is not None
            images = self.context_group.all_features(images, part)
        features = _of_placeholders(images.features.to(embeds.dtype), batch)
        deep = tuple(_at_placeholders(layer, batch, embeds) for layer in images.deep)
        return MergedInputs(embeds.index_copy(0, batch.media_positions, features), deep)

    def image_features(self, media: Media, device: torch.device) -> ImageFeatures:
        """Features of all images; one call of the tower."""
        dtype = next(p.dtype for p in self.vision.parameters() if p.is_floating_point())
        return self.family.image_features(self.model, move_media(media, device, dtype))


class _Whole(PackedLM):
    """What runs whole has no embeddings of ours: it is given the row's ids."""

    def __init__(self, model: nn.Module, *given: Any) -> None:
        super().__init__(model, *given)
        refuse_window_of_masks(self.language)
        self.scale = logit_scale(model)
        self.language.register_forward_pre_hook(cut_inputs, with_kwargs=True)

    def before_head(self, hidden: Tensor) -> Tensor:
        """See `PackedLM.before_head`."""
        return hidden if self.scale == 1.0 else hidden * self.scale

    def _run_whole(
        self, whole: Any, batch: Batch, params: PackedSeqParams | None, **arguments: Any
    ) -> Tensor:
        """(T, D) final hidden states of every slot, or of this rank's slots."""
        if self.router_loss is not None:
            raise CapabilityError(
                "model.router_aux_loss_coef: a class that no family of ours serves is trained "
                "without the loss of its router; set it to 0"
            )
        arguments |= _boundaries(batch, params)
        if batch.context is not None:
            assert self.context_group is not None
            arguments["head_exchange"] = self.context_group.exchange(
                batch.context, batch.segment_lengths
            )
            arguments[OWN_SLOTS] = batch.context.row_index
        output = self.call(whole, params, input_ids=batch.input_ids, **arguments)
        hidden: Tensor = output.last_hidden_state
        return hidden.flatten(0, 1)


class WholeVLM(_Whole, PackedVLM):
    """A vision-language model that is run whole; see `PackedVLM`."""

    def __init__(self, model: nn.Module, family: Family, blank: Media) -> None:
        super().__init__(model, family, blank)
        for path in (self.paths.vision, *self.paths.projectors):
            part = _module(model, path)
            if part is not None:
                part.register_forward_pre_hook(without_boundaries, with_kwargs=True)

    def hidden_states(self, batch: Batch, packed_seq_params: PackedSeqParams | None) -> Tensor:
        """(T, D) final hidden states of every slot; raises as `PackedLM.hidden_states`."""
        assert self.paths.whole is not None
        whole = self.model.get_submodule(self.paths.whole)
        is_image = torch.zeros_like(batch.input_ids, dtype=torch.bool)
        is_image.view(-1).index_fill_(0, batch.media_positions, True)
        images: dict[str, Any] = {}
        unused: Tensor | None = None
        if batch.media is None:
            # The blank image keeps every part of the tower in the graph. It goes first, as the
            # tower does, since sharded weights are gathered in one order on all ranks.
            features = self.image_features(self.blank, batch.input_ids.device).features
            unused = 0.0 * features.sum()
        else:
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
        return hidden if unused is None else hidden + unused.to(hidden)


class WholeLM(_Whole):
    """A language model that is given its ids, for classes that embed them more than once."""

    def hidden_states(self, batch: Batch, packed_seq_params: PackedSeqParams | None) -> Tensor:
        """(T, D) final hidden states of every slot; raises as `PackedLM.hidden_states`."""
        if batch.media is not None:
            raise CapabilityError("the batch has images, but the model has no vision tower")
        positions = batch.position_ids[0]
        return self._run_whole(self.language, batch, packed_seq_params, position_ids=positions)


def packed_model(model: nn.Module, encoder: Encoder) -> PackedLM:
    """The transformers model of the encoder's folder, with or without a vision tower.

    It runs whole if its family says so, else part by part.
    """
    family = encoder.family
    runs_whole = family.modules.whole is not None
    if not encoder.takes_images:
        return (WholeLM if runs_whole else PackedLM)(model, family)
    return (WholeVLM if runs_whole else PackedVLM)(model, family, encoder.image_rule.smallest())


def _module(model: nn.Module, path: str | None) -> nn.Module | None:
    return dict(model.named_modules()).get(path) if path is not None else None
