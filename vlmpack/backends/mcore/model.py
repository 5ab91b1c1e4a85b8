"""One pipeline stage of a model: transformers' vision tower, if it has one, Megatron's GPTModel.

    first stage   embeddings + image features (merge) -> this CP rank's slice -> this TP rank's
                  part (sequence parallelism) -> decoder layers, with DeepStack's features
    in between    decoder layers
    last stage    decoder layers -> label tokens only -> vocabulary-parallel head and cross entropy

Every stage computes the row's boundaries and rotary angles from the batch, so only hidden states
travel between stages.

The tower is transformers' own. In most families its projector is part of it. In others one module
here holds both, under their names in the transformers model. DeepStack's features travel with the
row's params, because pipeline stages process several micro-batches at a time. They are added
outside of what is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from vlmpack.attention import VarlenAttention, rope_cos_sin
from vlmpack.backends.collectives import gather_features
from vlmpack.backends.cross_entropy import VocabularyShard, chunk_rows, linear_cross_entropy
from vlmpack.backends.decoder_graph import DecoderGraph, Recorder, StaticRow
from vlmpack.backends.fused import FusedOps
from vlmpack.backends.mcore.attention import RowParams, megatron_params
from vlmpack.backends.mcore.config import decoder_spec, padded_vocabulary
from vlmpack.backends.mcore.decoder_graph import ORDER, MixerGraphs, capture_layers
from vlmpack.backends.mcore.overlap import ParameterGather
from vlmpack.backends.mcore.weights.dims import LanguageDims
from vlmpack.backends.recompute import draws_random_numbers, recompute_layers
from vlmpack.backends.skeleton import model_skeleton
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
from vlmpack.families.base import Family, ImageFeatures
from vlmpack.kernel_operators import is_plain
from vlmpack.model_folder.load import build_part
from vlmpack.packing import Media, PackedBatch, PackedSeqParams
from vlmpack.packing.batch import TowerRule
from vlmpack.packing.media import move_media
from vlmpack.recipe.schema import ParallelismSection, Recomputed
from vlmpack.recurrence import RecurrenceChoice


def add_after(layers: Sequence[nn.Module]) -> None:
    """Let each layer add its features, (T', 1, D), from the params that it is called with."""
    for number, layer in enumerate(layers):
        layer.register_forward_hook(partial(_add, number), with_kwargs=True)


def _add(
    number: int, module: nn.Module, args: Any, kwargs: Any, output: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    hidden, context = output
    return hidden + kwargs["packed_seq_params"].deep[number], context


@dataclass(frozen=True, slots=True)
class MergedRow:
    """The inputs of the decoder.

    Args:
        embeds: (T, D) token embeddings with the image features in place of the placeholders.
        deep: (T, D) each, DeepStack features by layer, zero but at the placeholders.
    """

    embeds: Tensor
    deep: tuple[Tensor, ...] = ()


class VisionTower(NamedTuple):
    """The images' part of the first stage.

    Args:
        blank: the smallest image. A rank without images runs it with weight zero, so that the
            tower's gradients exist on every rank.
        rule: what makes `Media.tower`; None for a tower that makes it itself.
    """

    module: nn.Module
    blank: Media
    features: Callable[[nn.Module, Media], ImageFeatures]
    rule: TowerRule | None


class MegatronVLM(MegatronModule):
    """The module that Megatron's schedules call, one per pipeline stage.

    Args:
        varlen: attention over whole rows; None for Transformer Engine.
        tower: None except on the first stage of a vision-language model.
    """

    graph: DecoderGraph | MixerGraphs | None = None
    """Replays the layers for training rows of one shape."""

    def __init__(
        self,
        config: TransformerConfig,
        dims: LanguageDims,
        sizes: ParallelismSection,
        groups: ProcessGroupCollection,
        *,
        varlen: VarlenAttention | None,
        tower: VisionTower | None,
        fused: FusedOps | None = None,
        recurrence: RecurrenceChoice | None = None,
    ) -> None:
        super().__init__(config=config)
        self.dims, self.sizes, self.groups = dims, sizes, groups
        self.rotate = None if fused is None else fused.rotate
        self.has_plain_path = varlen is not None
        self.pre_process = parallel_state.is_pipeline_first_stage()
        self.post_process = parallel_state.is_pipeline_last_stage()
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = dims.tied
        self.tower = tower
        self.vision = tower.module if tower is not None else None
        self.gpt = GPTModel(
            config,
            decoder_spec(config, dims, varlen, fused, recurrence),
            vocab_size=padded_vocabulary(dims, sizes),
            max_sequence_length=0,  # positions are data; Megatron builds none
            pre_process=self.pre_process,
            post_process=self.post_process,
            share_embeddings_and_output_weights=dims.tied,
            position_embedding_type="none",
            scatter_embedding_sequence_parallel=False,  # images are merged before the scatter
            pg_collection=groups,
        )
        if self.pre_process:
            add_after(self.gpt.decoder.layers[: dims.deep_features])
        self.register_buffer("inv_freq", dims.inv_freq, persistent=False)
        self.gather: ParameterGather | None = None

    def overlap_gathers(self, ddp: DistributedDataParallel) -> ParameterGather:
        """Have parts of the forward pass wait for their parameters, which others update."""
        decoder = self.gpt.decoder
        last = [decoder.final_layernorm] if self.post_process else []
        self.gather = ParameterGather(ddp, [*decoder.layers, *last])
        return self.gather

    def _wait_for(self, module: nn.Module) -> None:
        """Before parameters are read in other ways than by calling a layer."""
        if self.gather is not None:
            self.gather.wait(module)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Hidden states of the stage before, from the schedule."""
        self.gpt.set_input_tensor(input_tensor)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The weight whose gradient the first and the last stage share where it is tied."""
        weight: Tensor | None = self.gpt.shared_embedding_or_output_weight()
        return weight

    def forward(self, batch: PackedBatch, packed_seq_params: PackedSeqParams) -> Tensor:
        """This stage's part of the forward pass.

        Args:
            batch: on the model's device, with its `context` where CP > 1, and its `media_part`
                where ranks divide the vision work.

        Returns:
            (T', 1, D) hidden states, T' = T / CP (/ TP with sequence parallelism); on the last
            stage (l,) float32 losses of this CP rank's label tokens.
        """
        merged = self.merge(batch) if self.pre_process else None
        return self.decode(batch, packed_seq_params, merged)

    def decode(
        self, batch: PackedBatch, packed_seq_params: PackedSeqParams, merged: MergedRow | None
    ) -> Tensor:
        """As `forward`, from merged embeddings on the first stage, None on the others."""
        hidden: Tensor | None = None
        deep: tuple[Tensor, ...] = ()
        if merged is not None:
            hidden = self._scatter(merged.embeds, batch)
            deep = tuple(self._scatter(each, batch) for each in merged.deep)
        replays = hidden is not None and self.graph is not None and self.graph.takes(batch)
        if hidden is not None and replays and isinstance(self.graph, DecoderGraph):
            self._wait_for(self.gpt)
            row = StaticRow(
                embeds=hidden,
                boundaries=packed_seq_params.cu_seqlens_physical,
                where=self._where(batch),
                deep=deep,
            )
            return self._losses(self.graph(row), batch)
        params = self._row_params(batch, packed_seq_params, deep)
        if replays:
            params.replayed = self._where(batch)
        hidden = self.gpt.decoder(
            hidden_states=hidden,
            attention_mask=None,
            packed_seq_params=params,
            padding_mask=self._padding_mask(batch),
        )
        return self._losses(hidden, batch) if self.post_process else hidden

    def capture_decoder(self, recorder: Recorder) -> None:
        """Have the layers recorded at the first training row of fixed shape, and replayed; of a
        stage that has all of them. Of a mixture of experts their mixers."""
        self.dims.check_captured(self.sizes)
        if self.dims.experts is None:
            self.graph = capture_layers(self.gpt.decoder, recorder, rotate=self.rotate)
        else:
            self.graph = MixerGraphs(self.gpt.decoder.layers, recorder, rotate=self.rotate)

    def _where(self, batch: PackedBatch) -> dict[str, Tensor]:
        """What a recording reads of a row besides its boundaries."""
        cos, sin = self._angles(batch)
        slices = {} if batch.context is None else {ORDER: batch.context.natural_order}
        return {"cosines": cos, "sines": sin, **slices}

    def _padding_mask(self, batch: PackedBatch) -> Tensor | None:
        """(1, T') bool of this rank's tokens, for the experts' statistics."""
        mask = batch.padding_mask
        if mask is None:
            return None
        if batch.context is not None:
            mask = mask.index_select(1, batch.context.row_index)
        if self.sizes.sequence:
            mask = mask.chunk(self.sizes.tensor, dim=1)[self.groups.tp.rank()]
        return mask

    def _row_params(
        self, batch: PackedBatch, params: PackedSeqParams, deep: tuple[Tensor, ...]
    ) -> RowParams:
        """Boundaries with the rotary angles of this rank's tokens."""
        cos, sin = self._angles(batch)
        rotate = None if is_plain() else self.rotate
        return megatron_params(
            params, cos=cos, sin=sin, context=batch.context, deep=deep, rotate=rotate
        )

    def _angles(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """cos and sin of this rank's tokens, (T / CP, D / 2) float32 each."""
        positions = batch.position_ids[:, 0]
        if batch.context is not None:
            positions = positions.index_select(1, batch.context.row_index)
        if self.dims.rope.mrope_section is None:
            positions = positions[:1]
        return rope_cos_sin(positions, self.inv_freq, self.dims.rope)

    def merge(self, batch: PackedBatch) -> MergedRow:
        """Embeddings of the whole row with image features in place of the placeholders.

        Raises:
            CapabilityError: the tower's feature count differs from the placeholders', or images
                without a tower.
        """
        if self.vision is not None:
            self._wait_for(self.vision)
        self._wait_for(self.gpt.embedding)
        embeds = self._embeds(batch.input_ids)
        if self.vision is None:
            if batch.media is not None:
                raise CapabilityError("the batch has images, but the model has no vision tower")
            return MergedRow(embeds)
        features = self._features(batch.media)
        if batch.media is None:  # the blank image keeps the tower in the graph
            features = 0.0 * features[:0] + 0.0 * features.sum()
        part = batch.media_part
        count = part.counts[part.rank] if part is not None else batch.num_features
        if features.shape[0] != count:
            raise CapabilityError(
                f"the vision tower made {features.shape[0]} features for {count} placeholder tokens"
            )
        if part is not None:
            features = gather_features(
                features,
                part.order,
                part.counts,
                group=self.groups.tp_cp,
                cp_group=self.groups.cp,
            )
        if batch.media_sources is not None:  # the sequences of a pair show the same images
            features = features.index_select(0, batch.media_sources)
        first, *deep = features.to(embeds.dtype).chunk(1 + self.dims.deep_features, dim=1)
        return MergedRow(
            embeds.index_copy(0, batch.media_positions, first),
            tuple(
                torch.zeros_like(embeds).index_copy(0, batch.media_positions, layer)
                for layer in deep
            ),
        )

    def _embeds(self, ids: Tensor) -> Tensor:
        """(T, D) embeddings of a row's tokens; that of a padding token gets no gradient here, as
        transformers' gets none."""
        embeds: Tensor = self.gpt.embedding.word_embeddings(ids).flatten(0, 1)
        if self.dims.padding is None:
            return embeds
        return torch.where(ids.flatten()[:, None] == self.dims.padding, embeds.detach(), embeds)

    def _features(self, media: Media | None) -> Tensor:
        """(m, D) features of this rank's images, in one call of the tower.

        With DeepStack the features of each layer are appended, (m, D * (1 + layers)).
        """
        assert self.tower is not None  # on the first stage
        chosen = media if media is not None else self.tower.blank
        tower: Any = self.vision
        weight = next(tower.parameters())
        images = self.tower.features(tower, move_media(chosen, weight.device, weight.dtype))
        return torch.cat((images.features, *images.deep), dim=1)

    def _scatter(self, embeds: Tensor, batch: PackedBatch) -> Tensor:
        """(T', 1, D): first the slice of the CP rank, then the part of the TP rank."""
        if batch.context is not None:
            embeds = embeds.index_select(0, batch.context.row_index)
        hidden = embeds[:, None]
        if self.sizes.sequence:
            hidden = scatter_to_sequence_parallel_region(hidden, group=self.groups.tp)
        return hidden

    def _losses(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """(l,) losses of this CP rank's label tokens, the same on all TP ranks."""
        self._wait_for(self.gpt)
        if self.sizes.sequence:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.groups.tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.groups.tp)
        positions, targets = batch.own_labels()
        weight = self.shared_embedding_or_output_weight()
        if weight is None or not self.dims.tied:
            weight = self.gpt.output_layer.weight
        start = self.groups.tp.rank() * weight.shape[0]
        real_rows = min(weight.shape[0], self.dims.vocabulary - start)  # padding has no logits
        if real_rows < 1:
            raise CapabilityError(
                f"a vocabulary of {self.dims.vocabulary} leaves a tensor-parallel rank without a "
                f"row (parallelism.tensor is {self.sizes.tensor})"
            )
        shard = self._shard(start)
        return linear_cross_entropy(
            hidden[:, 0].index_select(0, positions),
            weight[:real_rows],
            targets,
            # The same on every rank, padding counted.
            rows_per_chunk=(
                None if shard is None else chunk_rows(weight.shape[0], cuda=hidden.is_cuda)
            ),
            shard=shard,
            temperatures=batch.own_temperatures(),
        )

    def _shard(self, start: int) -> VocabularyShard | None:
        group = self.groups.tp
        if group.size() == 1:
            return None

        def reduce(values: Tensor, operation: Any) -> Tensor:
            dist.all_reduce(values, op=operation, group=group)
            return values

        return VocabularyShard(
            start=start,
            all_max=lambda values: reduce(values, dist.ReduceOp.MAX),
            all_sum=lambda values: reduce(values, dist.ReduceOp.SUM),
        )


class TowerParts(nn.Module):
    """Parts of a transformers model without storage, under their names; None for parts that it
    lacks.
    """

    def __init__(self, whole: Any, names: Sequence[str]) -> None:
        super().__init__()
        parts = dict(whole.named_children())
        for name in names:
            self.register_module(name, parts.get(name))
        saved = self.state_dict().keys()
        unsaved = [name for name, _ in self.named_buffers() if name not in saved]
        if unsaved:
            raise CapabilityError(
                f"the mcore engine cannot make the buffer {unsaved[0]} of the vision tower; use "
                f"model.backend: hf"
            )
        self.to_empty(device="cpu")


def tower_prefix(family: Family) -> str:
    """In front of a tower's own names in the transformers model."""
    names = family.tower_modules()
    return f"{names[0]}." if len(names) == 1 else ""


def vision_tower(
    config: TransformerConfig,
    skeleton: nn.Module,
    encoder: Encoder,
    recomputed: Recomputed,
    folder: Path,
) -> VisionTower | None:
    """The vision tower with its projector, its weights not yet read.

    None where the model has none, and on all stages but the first.
    """
    family = encoder.family
    path, names = family.modules.vision, family.tower_modules()
    if path is None or not parallel_state.is_pipeline_first_stage():
        return None
    tower: Any
    if len(names) == 1:
        tower = stack = build_part(skeleton.get_submodule(path))
    else:  # another skeleton: adapters may be in this one
        tower = TowerParts(model_skeleton(family.auto_class(), folder), names)
        stack = tower.get_submodule(path)
    for parameter in tower.parameters():  # buffers stay float32: rotary frequencies
        parameter.data = parameter.data.to(config.params_dtype)
    draws = draws_random_numbers(stack, adapter_dropout=0.0)
    recompute_layers(stack, recomputed, draws=draws)
    blank = encoder.image_rule.smallest()
    rule = family.tower_rule(stack.config.to_dict())
    if rule is not None:
        blank = replace(blank, tower=rule(blank.grid_thw))
    return VisionTower(tower, blank, family.tower_features, rule)
