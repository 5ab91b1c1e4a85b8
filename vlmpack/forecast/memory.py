"""Bytes that the fullest rank must hold, estimated from sizes alone. No model is built.

h is the decoder's width, and e the bytes of a number. Weights, gradients and AdamW's moments are in
bytes a parameter.

On hf, `fsdp` divides all of these among ranks:

    weights      4. bfloat16 adds a 2-byte copy, with fsdp only of two blocks and of the parameters
                 outside the blocks
    gradients    4. With fsdp and several micro-batches a step there are whole gradients as well,
                 unless each micro-batch is reduced
    moments      8

On mcore, tensor parallelism divides the matrices of decoder layers, embedding and head. Pipeline
parallelism divides layers, expert parallelism experts. The tower is whole on the first stage.

    weights      e
    gradients    4
    main weights and moments    12, or 8 in float32. The distributed optimizer divides them among
                 data- and context-parallel ranks

Only trained parameters, adapters included, have gradients, moments and, on mcore, main weights.
Weights in 4 bits (QLoRA) take 0.516 bytes and no copy. Frozen matrices that the folder holds in
bfloat16 take 2 and no copy, under hf in bfloat16 without fsdp. With stochastic rounding, weights of
trained linear layers take 2, their gradients 2 and their moments 4. Components in front of the
first trained one record no graph. They need no copies of their weights, and a frozen tower holds
the activations of one block at a time.

Activations of a decoder's layer are in bytes a token, by `vlmpack/forecast/activations.py`:

    a norm       12 of a column in float32, 10 under autocast, 8 with fsdp or mcore in bfloat16,
                 2 e with Transformer Engine, 4 + e beside adapters on hf, less where fused
    a tower's block    two norms, 4 columns of attention and 4 of the MLP (2 of a plain one), in
                 bytes a patch
    recomputed   a layer keeps its input, 4 h under autocast, else e h. With `selective` it also
                 keeps the outputs of matrix products and attention. For a while the largest
                 layer is held whole, with 3 f e of gradients
    offloaded    inputs of recomputed layers are on the host, but for two
    tiled MLP    a layer keeps nothing of it but its input. One tile of h tokens is held at a time,
                 with the sums of its weights' gradients
    torch's own attention    q e more, as it copies its output (`segments`, and all of float32)
    a tower with one matrix for queries, keys and values    2 columns more, as its output lives as
                 long as the values do
    logits       a chunk in float32, three times (values, gradient, exponentials), or once in the
                 dtype of products where a kernel writes the gradient over it. A trained head
                 has a gradient and a product, 4 + e bytes a weight, before they are added to the
                 sum of micro-batches. They are gone before a layer is computed again

What adapters themselves keep is left out. It is rank numbers a token and layer, and with dropout a
copy of their input. Left out are also the CUDA context and NCCL's buffers (1 to 3 GB), buckets, the
memory of kernels, and fragmentation.

The activations are compared with autograd's of tiny models (hf, CPU). The estimate is 0.95 to 1.1
times these in float32, and 1.0 to 1.2 in bfloat16. It is 1.3 for latent attention, whose narrow
vectors are not counted.

`least_that_fits` resolves `model.activation_checkpointing: auto` by this estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from vlmpack.forecast.activations import Forms, Numbers, layer_bytes, product_bytes, state_lines
from vlmpack.forecast.figures import LargestMicroBatch, MemoryFigures, ModeFigures
from vlmpack.forecast.parameters import LayerSizes, ModelSizes
from vlmpack.forecast.trained import EVERY_WEIGHT, MomentBytes, TrainedSizes, copy_bytes
from vlmpack.recipe.derived import data_parallel_size
from vlmpack.recipe.engine_rules import why_not_selective
from vlmpack.recipe.schema import (
    ModelSection,
    ParallelismSection,
    Recomputed,
    described,
    is_recomputed,
)
from vlmpack.words import sized

LOGIT_COPIES = 3

SLOPES = 3
"""Gradients of MLP columns that a backward pass holds at once: the product and both factors."""

ON_DEVICE = 2
"""Inputs of layers that are on the device at a time, where others wait on the host."""

TORCH_FORMS = Forms()  # everything by torch's own operators, on a GPU


@dataclass(frozen=True, slots=True)
class _Tower:
    """The tower's activations: bytes kept, bytes recomputed at once, and inputs of blocks among
    those kept that may leave the device."""

    kept: int
    again: int
    inputs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """One rank's part.

    Args:
        parameters: it computes with; of these `experts` in experts.
        in_flight: micro-batches whose activations it holds.
    """

    where: str
    parameters: int
    experts: int
    layers: range
    in_flight: int
    has_tower: bool
    has_head: bool


def memory_figures(
    model: ModelSection,
    split: ParallelismSection,
    sizes: ModelSizes,
    mode: ModeFigures | LargestMicroBatch,
    *,
    global_batch_size: int,
    world_size: int,
    trained: TrainedSizes = EVERY_WEIGHT,
    forms: Forms = TORCH_FORMS,
    answers: bool = False,
) -> MemoryFigures:
    """The figures of the fullest rank.

    Args:
        model: with its dtype resolved.
        mode: its largest micro-batch decides the activations.
        global_batch_size: in what the mode counts.
    """
    accumulation = global_batch_size // mode.micro_batch_size
    accumulation //= data_parallel_size(split, world_size)
    estimate = _Estimate(
        model, split, sizes, mode, max(1, accumulation), world_size, trained, forms
    )
    copy = copy_bytes(sizes, model, split, world_size, trained) if answers else 0
    figures = (replace(estimate.of(rank), answers=copy) for rank in estimate.ranks())
    return max(figures, key=lambda one: one.total)


@dataclass(frozen=True, slots=True)
class _Estimate:
    model: ModelSection
    split: ParallelismSection
    sizes: ModelSizes
    mode: ModeFigures | LargestMicroBatch
    accumulation: int
    world_size: int
    trained: TrainedSizes
    forms: Forms

    @property
    def number(self) -> int:  # bytes of an activation's number
        return 2 if self.model.dtype == "bfloat16" else 4

    def ranks(self) -> list[_Rank]:
        """The first and the last pipeline stage."""
        split, sizes = self.split, self.sizes
        stages, tensor = split.pipeline, split.tensor
        layers = (sizes.layers // tensor + sizes.vectors) // stages
        experts = sizes.experts // stages // split.expert
        first = layers + experts + sizes.embedding // tensor + sizes.tower
        head = (sizes.head or (sizes.embedding if stages > 1 else 0)) // tensor
        places, each = range(sizes.num_layers), sizes.num_layers // stages
        if stages == 1:
            return [_Rank(
                where="every rank alike", parameters=first + head, experts=experts, layers=places,
                in_flight=1, has_tower=True, has_head=True,
            )]  # fmt: skip
        return [
            _Rank(
                where="first pipeline stage", parameters=first, experts=experts,
                layers=places[:each], in_flight=min(stages, self.accumulation),
                has_tower=True, has_head=False,
            ),
            _Rank(
                where="last pipeline stage", parameters=layers + experts + head, experts=experts,
                layers=places[len(places) - each :], in_flight=1, has_tower=False, has_head=True,
            ),
        ]  # fmt: skip

    def of(self, rank: _Rank) -> MemoryFigures:
        weights, gradients, (optimizer, paged) = (
            self._mcore_state(rank) if self.model.backend == "mcore" else self._hf_state(rank)
        )
        kept, again, offloaded = self._activations(rank)
        return MemoryFigures(
            parameters=self.sizes.parameters,
            tower_parameters=self.sizes.tower,
            counted_from=self.sizes.files,
            rank_parameters=rank.parameters,
            rank_trained=self._trained(rank),
            where=rank.where,
            dtype=self.model.dtype,
            weights=weights,
            gradients=gradients + self._replayed_gradients(rank),
            optimizer=optimizer,
            paged=paged,
            activations=rank.in_flight * kept + again,
            again=again,
            offloaded=offloaded,
            logits=self._logits() if rank.has_head else 0,
            recomputed=described(self.model.recomputed),
            row_tokens=self.mode.max_row_slots,
            row_patches=self.mode.max_row_patches,
            rows_in_flight=rank.in_flight,
            formula=self._formula(),
        )

    def _trained(self, rank: _Rank, *, experts: bool = False) -> int:
        """Parameters of a rank that are updated, before any sharding over replicas."""
        trained = self.trained
        if experts:
            return trained.expert_adapters_on(self.split) + rank.experts * trained.language
        count = trained.adapters_on(self.split, tower=rank.has_tower)
        if trained.language:
            count += rank.parameters - (trained.images if rank.has_tower else 0)
        return count + (trained.trained_images if rank.has_tower else 0)

    def _replayed_gradients(self, rank: _Rank) -> int:
        """Bytes of decoder gradients that a captured backward pass writes before their sum."""
        outside = rank.experts * (self.model.backend == "mcore") + self.sizes.tower
        outside += (self.sizes.embedding + self.sizes.head) // self.split.tensor
        count = self.trained.language * (rank.parameters - outside)
        count += self.trained.adapters_on(self.split, tower=False)
        each = self.number if self._local() else 4
        return count * each if self.forms.captured else 0

    def _hf_state(self, rank: _Rank) -> tuple[int, int, MomentBytes]:
        sizes, trained = self.sizes, self.trained
        count = rank.parameters - trained.packed[0].weights + trained.adapters
        split, all_updated = self.split, self._trained(rank)
        shards = self.world_size // split.replicate if split.sharding == "fsdp" else 1
        held, updated = -(-count // shards), -(-all_updated // shards)
        gradients = 4 * updated
        if shards > 1 and self.accumulation > 1 and split.gradient_sync == "step":
            gradients += 4 * all_updated  # whole until the last micro-batch's are reduced
        copied = narrow = 0
        if shards > 1:
            _, block, outside = trained.packed
            gathered = self.number * (sizes.largest_block - block.weights) + block.bytes
            copied = self.number * (sizes.outside - outside.weights) + outside.bytes + 2 * gathered
        elif self.model.dtype == "bfloat16":
            narrow = trained.narrow
            copied = 2 * (count - trained.before_graph - trained.narrow_in_graph)
        weights = 4 * held - 2 * narrow + -(-trained.packed[0].bytes // shards) + copied
        rounded, moments = trained.rounded, trained.moments.bytes_of(updated)
        moments = moments._replace(held=moments.held - 4 * rounded)
        return weights - 4 * rounded, gradients - 2 * rounded, moments

    def _mcore_state(self, rank: _Rank) -> tuple[int, int, MomentBytes]:
        split, each = self.split, 12 if self.model.dtype == "bfloat16" else 8
        updated, experts = self._trained(rank), self._trained(rank, experts=True)
        optimizer = each * updated
        if split.distributed_optimizer:
            over = data_parallel_size(split, self.world_size) * split.context
            expert_over = max(1, over * split.tensor // split.expert)
            optimizer = each * (-(-(updated - experts) // over) + -(-experts // expert_over))
        adapters = self.trained.adapters_on(split, tower=rank.has_tower)
        weights = self.number * (rank.parameters + adapters)
        return weights, 4 * updated, MomentBytes(optimizer, 0)

    def _activations(self, rank: _Rank) -> tuple[int, int, int]:
        """Bytes that a micro-batch keeps, the largest part that is then recomputed at once, and
        those that wait on the host."""
        split, sizes, model = self.split, self.sizes, self.model
        tokens = -(-self.mode.max_row_slots // split.context)
        narrow = split.tensor if split.sequence else 1
        kept, again, inputs = 0, 0, 0
        for place in rank.layers:
            layer = self._outside_tiles(sizes.decoder[place], tokens)
            held = whole = self._layer(layer, narrow)
            if is_recomputed(place, model.recomputed):
                held, inputs = self._kept(layer, narrow), inputs + 1
                slopes = SLOPES * self.number * layer.mlp // split.tensor
                again = max(again, whole - held + slopes)
            kept += held
        each = tokens * self._residual() * sizes.hidden // narrow
        blocks = self._tower(rank)
        away = (
            blocks.inputs + max(0, inputs - ON_DEVICE) * each if model.activation_offloading else 0
        )
        kept = tokens * kept + blocks.kept - away
        return kept, max(tokens * again + self._tile(tokens), blocks.again), away

    def _outside_tiles(self, layer: LayerSizes, tokens: int) -> LayerSizes:
        """A layer without the MLP that is computed in tiles, each of as many tokens as h."""
        tiled = self.model.tiled_mlp and not layer.sent and tokens > self.sizes.hidden
        return replace(layer, mlp=0) if tiled else layer

    def _tile(self, tokens: int) -> int:
        """Bytes of a tile with its gradients, and of the sums of weights' gradients."""
        hidden, number = self.sizes.hidden, self.number
        if not self.model.tiled_mlp or tokens <= hidden:
            return 0
        columns = max((layer.mlp for layer in self.sizes.decoder if not layer.sent), default=0)
        summed = 3 * (4 + number) if self.trained.language else 0
        return hidden * columns * (number * (self._gated_columns() + SLOPES) + summed)

    def _layer(self, layer: LayerSizes, narrow: int) -> int:
        """Bytes that a layer keeps of each token on one rank."""
        norms, wide, whole = layer_bytes(
            layer, self.sizes.hidden, self._numbers(), self.forms.recurrences
        )
        if self._by_segments():  # what the kernel makes, and its copy for the projection
            wide += self.number * layer.query
        return norms // narrow + wide // self.split.tensor + whole

    def _numbers(self) -> Numbers:
        cast = self._residual() > self.number and not self.forms.norms
        # Under autocast heads come in bfloat16 to a weight in float32, which widens them.
        norm = self._norm_bytes(trained=self.trained.language)
        heads = 8 if cast else norm - self.number
        return Numbers(
            self.number,
            norm,
            self.number if self.forms.norms else heads,
            # A frozen matrix keeps no input, and adapters of one input keep it once.
            cast=cast and self.trained.language,
            mixed=self._local(),
            gated=self._gated_columns(),
        )

    def _gated_columns(self) -> int:
        """How often a gated MLP keeps its columns.

        They are gate, activation, up and product; Megatron's layers keep one copy more.
        """
        return 3 if self.forms.activations else 4 + self._local()

    def _by_segments(self) -> bool:
        """Whether attention is torch's own, segment by segment, by the recipe."""
        model = self.model
        return model.attention == "segments" or model.dtype == "float32"

    def _kept(self, layer: LayerSizes, narrow: int) -> int:
        """Bytes a token of a recomputed layer: its input, and products under `selective`."""
        held = self._residual() * self.sizes.hidden // narrow
        if self.model.recomputed == "selective":
            wide, whole = product_bytes(layer, self.sizes.hidden, self.number)
            held += wide // self.split.tensor + whole
        return held

    def _residual(self) -> int:
        """Bytes of a number between layers: 4 on hf, whose embeddings are float32 without FSDP2."""
        apart = self.model.backend == "mcore" or self.split.sharding == "fsdp"
        return self.number if apart else 4

    def _tower(self, rank: _Rank) -> _Tower:
        """What the tower keeps; of a frozen one, one block at a time."""
        block, blocks, patches = self._tower_block(rank)
        vision, recomputed = self.sizes.vision, self.model.recomputed
        if vision is None or not self.trained.tower_keeps:
            return _Tower(0, patches * block)
        held = self.number * vision.width
        if recomputed == "selective":
            mlp = (2 if vision.gated else 1) * vision.intermediate
            held += self.number * (6 * vision.width + mlp)
        fewer = sum(is_recomputed(place, recomputed) for place in range(blocks))
        kept = patches * (fewer * held + (blocks - fewer) * block)
        inputs = patches * self.number * vision.width * max(0, fewer - ON_DEVICE)
        return _Tower(kept, patches * (block - held) if fewer else 0, inputs)

    def _tower_block(self, rank: _Rank) -> tuple[int, int, int]:
        """Bytes a patch keeps in a block of the tower, blocks, and patches of this rank."""
        split, vision = self.split, self.sizes.vision
        if vision is None or not rank.has_tower:
            return 0, 0, 0
        mlp = (3 if self.forms.activations else 4) * vision.intermediate
        if not vision.gated:
            mlp = 2 * vision.intermediate
        attention = 6 if vision.fused else 4  # rotated ones beside the values' whole tensor
        block = 2 * self._norm_bytes() * vision.width
        block += self.number * (attention * vision.width + mlp)
        return block, vision.blocks, -(-self.mode.max_row_patches // (split.tensor * split.context))

    def _norm_bytes(self, *, trained: bool = True) -> int:
        if self.model.attention == "transformer_engine":
            return 2 * self.number
        if self.forms.norms:
            return self._residual() + self.number
        if not trained and not self._local():
            return 4 + self.number  # its float32 input, and what adapters read
        if self.model.dtype == "float32":
            return 12
        return 8 if self._local() or self.split.sharding == "fsdp" else 10

    def _local(self) -> bool:
        """Whether layers are Megatron's own, not Transformer Engine's."""
        return self.model.backend == "mcore" and self.model.attention != "transformer_engine"

    def _logits(self) -> int:
        from vlmpack.backends.cross_entropy import chunk_rows  # imports torch

        held = self.sizes.vocabulary // self.split.tensor  # of the head's rows
        cuda, kernels = self.forms.cuda, self.forms.cuda and self.split.tensor == 1
        rows = min(self.mode.max_row_slots, chunk_rows(held, cuda=cuda, kernels=kernels))
        each = self.number if kernels else LOGIT_COPIES * 4
        made = (4 + self.number) * self.sizes.hidden if self.trained.language else 0
        return held * (each * rows + made)

    def _formula(self) -> tuple[str, ...]:
        mcore = self.model.backend == "mcore"
        split = self.split
        if mcore:
            each = "12" if self.model.dtype == "bfloat16" else "8"
            over = ", over data and context ranks" if split.distributed_optimizer else ""
            state = f"{self.number} + 4 + {each} bytes a parameter (the last{over or ' whole'})"
        else:
            over = (
                f" over {self.world_size // split.replicate} ranks"
                if split.sharding == "fsdp"
                else " on every rank"
            )
            copy = " + copies in bfloat16" if self.model.dtype == "bfloat16" else ""
            if self.trained.rounded:
                copy += f"; 2 + 2 + 4 of {self.trained.rounded:,} (optim.master)"
            state = f"4 + 4 + {self.trained.moments.words} bytes a parameter{over}{copy}"
            if split.sharding == "fsdp" and self.accumulation > 1 and split.gradient_sync == "step":
                state += ", and whole gradients until a step's last micro-batch"
        if self.trained != EVERY_WEIGHT:
            state += "; gradients and AdamW's numbers of trained parameters alone"
        norm, number, sizes = 2 * self._norm_bytes(), self.number, self.sizes
        layer = (
            f"{norm} h + {number} (2 q + 2 k + {self._gated_columns()} f) bytes a token and layer"
        )
        if self.model.recomputed != "none":
            kept = f"{self._residual()} h"
            if self.model.recomputed == "selective":
                kept += f" + {number} (2 q + 2 k + 2 f + 2 h)"
            every = "" if isinstance(self.model.recomputed, str) else " that is computed again"
            layer = f"{kept} bytes a token and layer{every}, and one layer of {layer}"
        return (
            f"weights + gradients + AdamW: {state}",
            f"activations of the largest micro-batch: {layer} (h width, q and k heads, f MLP "
            "columns), as many norms and columns as a layer has; the tower's blocks likewise by "
            "patches",
            *state_lines(sizes.decoder, sizes.hidden, self._numbers(), self.forms.recurrences),
            "left out: CUDA context and NCCL (1 to 3 GB), communication buckets, kernels' "
            "temporaries, fragmentation",
        )


LADDER: tuple[Recomputed, ...] = ("none", "selective", 4, 3, 2, "full")
"""From no matrix product that is computed again to all of them. Memory may rise on the way."""

SHARE = 0.9
"""An estimate may fill this share of the memory: it leaves out the CUDA context, NCCL's buffers,
temporaries of kernels and fragmentation."""

Estimate = Callable[[ModelSection], MemoryFigures]
"""The fullest rank's bytes with one of the ladder's values."""


def given_room(model: ModelSection) -> tuple[int, str]:
    """Bytes of `model.memory_gib`, and whose they are in words; 0 where it is not set."""
    return round((model.memory_gib or 0) * 2**30), "model.memory_gib"


def next_rung(model: ModelSection, split: ParallelismSection) -> Recomputed | None:
    """A value of `activation_checkpointing` that needs less memory than a model's; None where every
    layer is computed again already.

    `selective` and one layer in k are no order: which needs more depends on the model's widths.
    """
    now = model.recomputed
    if now in ("full", 1):
        return None
    if now == "none":
        return "selective" if why_not_selective(model, split) is None else 4
    return "full" if now in ("selective", 2) else min(int(now) - 1, 4)


def least_that_fits(
    model: ModelSection,
    split: ParallelismSection,
    estimate: Estimate,
    room: int,
    where: str,
) -> tuple[ModelSection, MemoryFigures]:
    """The model section with the first recomputation that fits, else the last one.

    Args:
        model: with its dtype resolved; its recomputation is replaced.
        room: bytes that one process has.

    Returns:
        The section, and its figures with the reason.
    """
    fits = SHARE * room
    tried: list[str] = []
    for value in LADDER:
        if value == "selective" and why_not_selective(model, split) is not None:
            continue
        if value == "none" and model.activation_offloading:  # there would be nothing to move
            continue
        chosen = model.model_copy(update={"activation_checkpointing": value})
        figures = estimate(chosen)
        if figures.total <= fits or value == LADDER[-1]:
            break
        tried.append(f"{value} at {sized(figures.total)}")
    verb = "fits" if figures.total <= fits else "does not fit either"
    reason = (
        f"auto: about {sized(figures.total)}, which {verb} in {SHARE:.0%} of the "
        f"{sized(room)} of {where}"
    )
    if tried:
        reason += f"; too large: {', '.join(tried)}"
    return chosen, replace(figures, recomputed=f"{described(value)} ({reason})")
