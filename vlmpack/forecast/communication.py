"""What a rank of the first stage sends in an optimizer step, from sizes alone.

A replica's rows have T slots a step, and T' = T / CP of them lie on a rank. h is the decoder's
width, and e the bytes of a number. The stage has L decoder layers and runs n micro-batches. A layer
that is computed again is called recomputed. With SP, the bytes of PP and EP are divided by TP.

    gradients     4 bytes a trained parameter of the rank. A reduce-scatter over DP x CP with the
                  distributed optimizer or FSDP2, else an all-reduce. Those of experts go over ranks
                  of their own
    parameters    e a trained parameter. An all-gather of what the distributed optimizer wrote.
                  FSDP2 gathers e a parameter before each forward and backward pass
    TP            T' h e. 4 all-reduces a layer, 2 without an MLP (experts), one more if recomputed,
                  and the head's. The embedding's is of T h e
    TP with SP    T' h e. 6 all-gathers and 4 reduce-scatters a layer, 3 and 2 without an MLP, 2 and
                  1 more if recomputed, and the head's. The scatter behind the embedding gathers
                  once. 4 bytes of each norm's weight are summed
    CP            T e of keys and values. An all-gather forward, once more if recomputed, and a
                  reduce-scatter back in each layer
    CP, hf        T' e of queries, keys, values and outputs in an all-to-all there and one back,
                  over U ranks, with copies of keys where there are more ranks than heads of them.
                  The same over CP of layers that carry state, and of the inputs and outputs of
                  convolutions
    CP ring, hf   T' e of keys and values to R - 1 = CP / U - 1 others, three quarters of them on
                  average, in each pass, and once more their gradients
    CP, state     delta rules on mcore exchange slots for heads in an all-to-all. It has T' e of
                  queries, keys, values and two numbers a head, and T' e of values on the way back.
                  Each layer runs it forward, again if recomputed, and backward
    PP            T' h e to the next stage, and the last stage's copy of a tied embedding
    EP            T' k h e of hidden states with k experts a token, and 4 bytes a choice of weights.
                  They go to the experts and back, in the forward and the backward pass
    tower         F h e of features. An all-gather over TP x CP, summed over CP on the way back. Its
                  gradients go over TP, 4 bytes a trained parameter. The distributed optimizer
                  divides them into parts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from vlmpack.forecast.parameters import LayerSizes, ModelSizes, RecurrentSizes
from vlmpack.forecast.trained import EVERY_WEIGHT, TrainedSizes
from vlmpack.recipe.derived import data_parallel_size
from vlmpack.recipe.head_degrees import attention_columns, head_copies, shared_by
from vlmpack.recipe.schema import ModelSection, ParallelismSection, is_recomputed

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]

SENT: dict[Kind, float] = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 1.0,
    "send": 1.0,
}
"""How often a ring sends the whole tensor, but for the part that a rank keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The bandwidth of a GPU. It is assumed, as no run has measured it.

    Args:
        gpus_per_node: GPUs that the fast links join.
        node_gbs: GB/s of a GPU inside of a node.
        network_gbs: GB/s of a GPU between nodes, its share of the node's cards.
    """

    gpus_per_node: int = 8
    node_gbs: float = 300.0
    network_gbs: float = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One kind of message of one rank, over a step.

    Args:
        group: the ranks that take part, in words.
        span: neighbours from the group's first rank to its last.
        num_bytes: of the whole tensors, before any algorithm: what an all-gather makes, what a
            reduce-scatter is given.
    """

    what: str
    group: str
    kind: Kind
    ranks: int
    span: int
    calls: int
    num_bytes: int

    @property
    def sent(self) -> int:
        """Bytes that a rank sends, by a ring."""
        part = 1.0 if self.kind == "send" else (self.ranks - 1) / self.ranks
        return round(SENT[self.kind] * part * self.num_bytes)

    def seconds(self, links: Links) -> float:
        """How long the links take for it, when nothing else goes over them."""
        speed = links.node_gbs if self.span <= links.gpus_per_node else links.network_gbs
        return self.sent / speed / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficFigures:
    """A rank's messages of a step.

    Args:
        parts: of one kind each.
        overlapped: names of parts that run beside compute.
        notes: what the figures leave out.
    """

    where: str
    parts: tuple[Traffic, ...]
    links: Links
    overlapped: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(part.seconds(self.links) for part in self.parts)

    @property
    def exposed_seconds(self) -> float:
        """Time of the parts that compute waits for."""
        return sum(
            part.seconds(self.links) for part in self.parts if part.what not in self.overlapped
        )


BUCKET = 40_000_000
"""Megatron's least elements of a bucket whose reduction overlaps the backward pass."""

GRADIENTS, PARAMETERS = "gradients", "parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of one replica in an optimizer step."""

    micro_batches: int
    slots: float
    features: float


def traffic_figures(
    model: ModelSection,
    split: ParallelismSection,
    sizes: ModelSizes,
    rows: StepRows,
    *,
    world_size: int,
    trained: TrainedSizes = EVERY_WEIGHT,
    links: Links | None = None,
) -> TrafficFigures | None:
    """A rank's messages; None for one process.

    Args:
        model: its dtype resolved.
    """
    if world_size == 1:
        return None
    step = _Step(model, split, sizes, rows, world_size, trained)
    made = step.mcore() if model.backend == "mcore" else step.hf()
    parts = tuple(part for part in made if part.ranks > 1 and part.num_bytes)
    first = " of the first pipeline stage" if split.pipeline > 1 else ""
    overlap = split.overlap is not False or model.backend == "hf"
    return TrafficFigures(
        where=f"a rank{first}",
        parts=parts,
        links=links or Links(),
        overlapped=(GRADIENTS, PARAMETERS, "experts' gradients", "experts' parameters") * overlap,
        notes=tuple(step.notes()),
    )


class _Group(NamedTuple):
    """Ranks that take part: in words, their number, and neighbours from the first to the last."""

    name: str
    ranks: int
    span: int


@dataclass(frozen=True, slots=True)
class _Step:
    model: ModelSection
    split: ParallelismSection
    sizes: ModelSizes
    rows: StepRows
    world_size: int
    trained: TrainedSizes

    @property
    def number(self) -> int:
        return 2 if self.model.dtype == "bfloat16" else 4

    @property
    def layers(self) -> tuple[tuple[LayerSizes, bool], ...]:
        """The layers of the first stage, and whether each is recomputed."""
        each = self.sizes.num_layers // self.split.pipeline
        recomputed = self.model.recomputed
        return tuple(
            (layer, is_recomputed(place, recomputed))
            for place, layer in enumerate(self.sizes.decoder[:each])
        )

    @property
    def row_bytes(self) -> float:
        """T' h e: hidden states of a rank's tokens, before sequence parallelism."""
        return self.rows.slots / self.split.context * self.sizes.hidden * self.number

    def notes(self) -> Iterator[str]:
        yield "left out: losses, norms of gradients, votes on bad samples, and the data path"
        if self.split.context > 1 and self.model.backend == "hf":
            degree = self.split.context_heads or self.split.context
            yield f"ranks share rows by {shared_by(self.split.context, degree)}"
            if degree < self.split.context:
                yield "a ring sends less where a row has several samples, or windows"
        kinds = {layer.recurrent.kind for layer in self.sizes.decoder if layer.recurrent}
        if self.split.context > 1 and "convolution" in kinds and self.model.backend == "mcore":
            yield "left out: what convolutions alone exchange under context parallelism"

    def hf(self) -> Iterator[Traffic]:
        """DDP reduces gradients; FSDP2 gathers parameters for each pass and scatters gradients.
        Ranks of one row exchange heads.
        """
        yield from self._shared_rows()
        split, sizes, trained = self.split, self.sizes, self.trained
        packed = trained.packed[0]
        whole = sizes.parameters - packed.weights + trained.adapters
        updated = trained.adapters + (
            whole - trained.adapters - trained.images * (trained != EVERY_WEIGHT)
            if trained.language
            else 0
        )
        updated += trained.trained_images
        group = _Group("all ranks", self.world_size, self.world_size)
        if split.sharding != "fsdp":
            calls = max(1, ceil(4 * updated / 25e6))  # DDP's buckets of 25 MB
            yield self._part(GRADIENTS, "all-reduce", calls, 4 * updated, group)
            return
        ranks = self.world_size // split.replicate
        group = _Group("shards", ranks, ranks)
        blocks = sizes.num_layers + (sizes.vision.blocks if sizes.vision else 0) + 1
        passes = self.rows.micro_batches
        syncs = passes if split.gradient_sync == "micro_batch" else 1
        gathered = 2 * passes * (self.number * whole + packed.bytes)
        yield self._part(PARAMETERS, "all-gather", 2 * passes * blocks, gathered, group)
        scattered = syncs * 4 * updated
        yield self._part(GRADIENTS, "reduce-scatter", syncs * blocks, scattered, group)
        copies = _Group("copies", split.replicate, self.world_size)
        yield self._part(GRADIENTS, "all-reduce", syncs * blocks, scattered // ranks, copies)

    def _shared_rows(self) -> Iterator[Traffic]:
        """Slots for heads and back, in each pass of a layer, keys on a ring, and features."""
        context, n = self.split.context, self.rows.micro_batches
        degree = self.split.context_heads or context
        slots = self.rows.slots / context * self.number
        exchanged, calls = {degree: 0.0, context: 0.0}, {degree: 0, context: 0}
        ring, messages = 0.0, 0
        for (layer, again), key in zip(self.layers, self._attended(degree), strict=True):
            if layer.query:  # queries, keys and values; outputs
                columns, sent = attention_columns(
                    layer.query, key, context=context, degree=degree, again=again
                )
                exchanged[degree] += columns
                calls[degree] += (2 + again) * 2 * n
                ring, messages = ring + sent, messages + 3 + again
            if (state := layer.recurrent) is not None:
                exchanged[context] += (2 + again) * self._exchanged_by_hf(state)
                calls[context] += (
                    (2 + again) * n * {"convolution": 2, "scan": 4, "delta_rule": 5}[state.kind]
                )
        for ranks, columns in exchanged.items():
            group = _Group("CP" if ranks == context else "CP heads", ranks, ranks)
            yield self._part("slots for heads", "all-to-all", calls[ranks], slots * columns, group)
        others = context // degree - 1
        group = _Group("CP ring", others + 1, context)
        yield self._part("keys and values", "send", n * others * messages, slots * ring, group)
        group = _Group("CP", context, context)
        features = self.rows.features * self.sizes.hidden * self.number
        yield self._part("features", "all-gather", n, features, group)
        yield self._part("features", "all-reduce", n, features, group)

    def _attended(self, degree: int) -> Iterator[float]:
        """Columns of the keys that each layer attends to, with copies for more ranks. A layer may
        read those of one before it that is as wide. A latent head's values have the keys' width."""
        last: dict[int, int] = {}
        for layer, _ in self.layers:
            key = last[layer.query] = layer.key or last.get(layer.query, 0)
            width = layer.query / self.sizes.query_heads if self.sizes.query_heads else 1
            groups = ceil(key / width) if key else 0
            yield groups * width * head_copies(max(1, groups), degree)

    def _exchanged_by_hf(self, state: RecurrentSizes) -> float:
        """Columns of a token, there and back: a convolution's, and those of what follows it."""
        columns, context = 2.0 * state.channels, self.split.context
        if state.kind == "convolution":
            return columns
        columns += _exchanged(state, self.split)
        if state.kind == "delta_rule":  # decays in float32, and copies of keys for more ranks
            copies = max(1, context * state.key_width // state.keys)
            columns += state.heads * (4 / self.number - 1) + 2 * (copies - 1) * state.keys
        return columns

    def mcore(self) -> Iterator[Traffic]:
        yield from self._replicas()
        if self.split.tensor > 1:
            yield from self._tensor()
        yield from self._context()
        yield from self._stages()
        yield from self._experts()
        yield from self._tower()

    def _part(self, what: str, kind: Kind, calls: int, size: float, group: _Group) -> Traffic:
        return Traffic(
            what=what, group=group.name, kind=kind, ranks=group.ranks, span=group.span,
            calls=calls, num_bytes=round(size),
        )  # fmt: skip

    def _replicas(self) -> Iterator[Traffic]:
        split, sizes, trained = self.split, self.sizes, self.trained
        copies = data_parallel_size(split, self.world_size)
        experts = trained.expert_adapters_on(split)
        dense = trained.adapters_on(split, tower=True) - experts
        if trained.language:
            dense += (sizes.layers // split.tensor + sizes.vectors) // split.pipeline
            dense += sizes.embedding // split.tensor
            dense += sizes.head // split.tensor if split.pipeline == 1 else 0
        dense += sizes.tower if trained == EVERY_WEIGHT else trained.trained_images
        stage = self.world_size // split.pipeline
        group = _Group("DP x CP", copies * split.context, stage)
        yield from self._updated("", dense, group)
        experts += sizes.experts // split.pipeline // split.expert if trained.language else 0
        group = _Group("experts' DP", stage // split.expert, stage)
        yield from self._updated("experts' ", experts, group)

    def _updated(self, whose: str, count: int, group: _Group) -> Iterator[Traffic]:
        """Gradients, and parameters after the step."""
        ways: list[tuple[str, Kind, int]] = [(GRADIENTS, "all-reduce", 4)]
        if self.split.distributed_optimizer:
            gathered = self.number
            ways = [(GRADIENTS, "reduce-scatter", 4), (PARAMETERS, "all-gather", gathered)]
        calls = 1 if self.split.overlap is False else max(1, count // BUCKET)
        for what, kind, each in ways:
            yield self._part(whose + what, kind, calls, each * count, group)

    def _tensor(self) -> Iterator[Traffic]:
        split, n = self.split, self.rows.micro_batches
        group = _Group("TP", split.tensor, split.tensor)
        head = split.pipeline == 1
        blocks = [(_blocks(layer), again) for layer, again in self.layers]
        # A layer is computed again up to what ends it: a sum over ranks, but for experts.
        ended = sum(_blocks(one) - (not one.choices) for one, again in self.layers if again)
        whole = self.rows.slots * self.sizes.hidden * self.number
        yield self._part("embedding", "all-reduce", n, whole, group)
        summed = sum(2 * parts for parts, _ in blocks) + ended + head
        if not split.sequence:
            yield self._part("layers", "all-reduce", n * summed, summed * self.row_bytes, group)
            return
        calls = sum(3 * parts + parts * again for parts, again in blocks) + head + 1
        yield self._part("layers", "all-gather", n * calls, calls * self.row_bytes, group)
        yield self._part("layers", "reduce-scatter", n * summed, summed * self.row_bytes, group)
        if self.trained.language:
            norms = sum(layer.norms for layer, _ in self.layers) + head
            yield self._part("norms", "all-reduce", 1, 4 * norms * self.sizes.hidden, group)

    def _context(self) -> Iterator[Traffic]:
        split, n = self.split, self.rows.micro_batches
        span = split.tensor * split.context
        group = _Group("CP", split.context, span)
        layers = [(layer.key, again) for layer, again in self.layers if layer.key]
        each = 2 * self.rows.slots * self.number / split.tensor
        gathers = [key for key, again in layers for _ in range(1 + again)]
        gathered, scattered = sum(gathers) * each, sum(key for key, _ in layers) * each
        what = "keys and values"
        yield self._part(what, "all-gather", n * len(gathers), gathered, group)
        yield self._part(what, "reduce-scatter", n * len(layers), scattered, group)
        rules = [
            (_exchanged(layer.recurrent, split), 2 + again)
            for layer, again in self.layers
            if layer.recurrent is not None and layer.recurrent.kind != "convolution"
        ]
        tokens = self.rows.slots / split.context / split.tensor
        exchanged = tokens * self.number * sum(columns * passes for columns, passes in rules)
        calls = 2 * n * sum(passes for _, passes in rules)
        yield self._part("slots for heads", "all-to-all", calls, exchanged, group)

    def _stages(self) -> Iterator[Traffic]:
        split, n = self.split, self.rows.micro_batches
        narrow = split.tensor if split.sequence else 1
        group = _Group("PP", split.pipeline, self.world_size)
        yield self._part("hidden states", "send", n, self.row_bytes / narrow, group)
        if not self.sizes.head and self.trained.language:
            tied = 4 * self.sizes.embedding / split.tensor
            both = "head and embedding"
            group = _Group(both, min(2, split.pipeline), self.world_size)
            yield self._part("tied embedding", "all-reduce", 1, tied, group)

    def _experts(self) -> Iterator[Traffic]:
        split, n = self.split, self.rows.micro_batches
        group = _Group("EP", split.expert, split.expert)
        sent = [layer.choices for layer, _ in self.layers if layer.choices]
        again = sum(is_again for layer, is_again in self.layers if layer.choices)
        tokens = self.rows.slots / split.context / (split.tensor if split.sequence else 1)
        more = 1 + again / (2 * len(sent)) if sent else 1.0
        hidden = 4 * more * sum(sent) * tokens * self.sizes.hidden * self.number
        calls = round(4 * more * len(sent))
        yield self._part("tokens", "all-to-all", n * calls, hidden, group)
        chosen = 2 * more * sum(sent) * tokens * 4
        yield self._part("their weights", "all-to-all", n * calls // 2, chosen, group)

    def _tower(self) -> Iterator[Traffic]:
        split, sizes, n = self.split, self.sizes, self.rows.micro_batches
        both = split.tensor * split.context
        features = self.rows.features * sizes.hidden * self.number
        group = _Group("TP x CP", both, both)
        yield self._part("features", "all-gather", n, features, group)
        group = _Group("CP", split.context, both)
        yield self._part("features", "all-reduce", n, features, group)
        updated = sizes.tower if self.trained == EVERY_WEIGHT else self.trained.trained_images
        if split.distributed_optimizer:
            updated //= data_parallel_size(split, self.world_size) * split.context
        group = _Group("TP", split.tensor, split.tensor)
        yield self._part("tower's gradients", "all-reduce", 1, 4 * updated, group)


def _blocks(layer: LayerSizes) -> int:
    """Parts of a layer that TP ranks share: a mixer, and an MLP that every token passes."""
    mixer = layer.query or layer.recurrent is not None
    return bool(mixer) + bool(layer.shared or (layer.mlp and not layer.choices))


def _exchanged(recurrent: RecurrentSizes, split: ParallelismSection) -> int:
    """Columns of a token that CP ranks exchange for heads, there and back.

    These are the convolution's inputs, the numbers of each head (rates and decays, or steps), and
    the values.
    """
    if recurrent.kind == "delta_rule":
        return recurrent.channels + 2 * recurrent.heads + recurrent.inner
    groups = recurrent.keys // recurrent.key_width // split.tensor
    copies = max(1, split.context // max(1, groups))  # of a group that several ranks run heads of
    return 2 * recurrent.inner + 2 * copies * recurrent.keys + recurrent.heads
