"""What of a model is trained, from names and shapes, as an engine counts it.

It also has the bytes of AdamW's moments under the hf engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vlmpack.backends.policy import (
    ComponentCount,
    TrainingPolicy,
    component_of,
    count_components,
    is_adapter,
)
from vlmpack.encode import Encoder
from vlmpack.errors import ModelError
from vlmpack.forecast.parameters import ModelSizes, block_of
from vlmpack.model_folder.quantised import Packing, dense_headers, is_quantised
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.recipe.trainable import (
    BLOCK,
    COMPONENTS,
    FACTS,
    LEAST_IN_8_BITS,
    LEAST_PAGED,
    Component,
    OptimizerFacts,
)
from vlmpack.whole_file import read_json


class MomentBytes(NamedTuple):
    """Bytes on the device, and bytes in pages, which may leave it."""

    held: int
    paged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentSizes:
    """The size of the moments of trained parameters. By default two float32 numbers each.

    Args:
        small: trained elements of tensors whose moments stay in 32 bits.
        short: trained elements of tensors whose moments are in no page.
    """

    facts: OptimizerFacts = FACTS["adamw"]
    small: int = 0
    short: int = 0

    @classmethod
    def of(cls, facts: OptimizerFacts, trained: Iterable[tuple[int, ...]]) -> MomentSizes:
        sizes = [prod(shape) for shape in trained]
        return cls(
            facts=facts,
            small=sum(size for size in sizes if size < LEAST_IN_8_BITS),
            short=sum(size for size in sizes if size < LEAST_PAGED),
        )

    def bytes_of(self, updated: int) -> MomentBytes:
        """The bytes of two moments."""
        facts = self.facts
        small = self.small if facts.in_8_bits else 0
        scales = 2 * 4 * (updated - small) // BLOCK if facts.in_8_bits else 0
        each = 2 if facts.in_8_bits else 8
        paged = each * (updated - self.short) if facts.paged else 0
        return MomentBytes(8 * small + each * (updated - small) - paged + scales, paged)

    @property
    def words(self) -> str:
        each = "8"
        if self.facts.in_8_bits:
            each = f"2.03 (of tensors from {LEAST_IN_8_BITS:,} elements, else 8)"
        return f"{each}, in pages of the host where the GPU is full," if self.facts.paged else each


class PackedSizes(NamedTuple):
    """Weights in 4 or 8 bits, and the bytes of their codes and scales."""

    weights: int
    bytes: int


NO_PACKED = PackedSizes(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSizes:
    """The sizes of the trained part of a model. By default every weight is trained.

    Args:
        counts: the components as an engine counts them, adapters included; empty if every weight is
            trained.
        tower_keeps: whether the tower keeps activations for a backward pass.
        adapters: parameters that adapters add, all of them trained.
        tower_adapters: those of them in tower and projector.
        cut_adapters: those of the language model that tensor parallelism cuts, like their weights;
            each rank holds the others whole.
        expert_adapters: those of routed experts, which expert parallelism divides.
        packed: weights held in 4 or 8 bits: of the model, of the block that has most, and of none.
        before_graph: parameters of frozen components before the first trained one, which no
            gradient passes; without adapters.
        narrow: frozen weights that the hf engine holds in bfloat16, if it computes in it.
        narrow_experts: those of them of routed experts.
        narrow_in_graph: those of them that are not before the graph.
        rounded: trained weights that are bfloat16, as are their gradients and moments.
    """

    counts: tuple[ComponentCount, ...] = ()
    tower_keeps: bool = True
    images: int = 0
    trained_images: int = 0
    language: bool = True
    adapters: int = 0
    tower_adapters: int = 0
    cut_adapters: int = 0
    expert_adapters: int = 0
    packed: tuple[PackedSizes, PackedSizes, PackedSizes] = (NO_PACKED,) * 3
    before_graph: int = 0
    narrow: int = 0
    narrow_experts: int = 0
    narrow_in_graph: int = 0
    rounded: int = 0
    dora: bool = False
    moments: MomentSizes = field(default=MomentSizes(), compare=False)

    def expert_adapters_on(self, split: ParallelismSection) -> int:
        """Those of them that lie beside experts."""
        return self.expert_adapters // split.pipeline // split.expert

    def adapters_on(self, split: ParallelismSection, *, tower: bool) -> int:
        """Parameters of adapters on a rank, before any sharding over replicas."""
        whole = self.adapters - self.tower_adapters - self.cut_adapters - self.expert_adapters
        cut = self.cut_adapters // split.tensor + self.expert_adapters // split.expert
        held = (whole + cut) // split.pipeline
        return held + (self.tower_adapters if tower else 0)


EVERY_WEIGHT = TrainedSizes()


def copy_bytes(
    sizes: ModelSizes,
    model: ModelSection,
    split: ParallelismSection,
    world_size: int,
    trained: TrainedSizes,
) -> int:
    """Bytes of the whole copy that each rank makes of a model in parts, to answer questions.

    It is 0 if the model is whole. Weights that not only matrix products read are float32 in the
    copy. So are adapters, except on mcore, which merges them.
    """
    mcore = model.backend == "mcore"
    if not mcore and (split.sharding == "none" or world_size == 1):
        return 0
    wide = sizes.embedding + sizes.vectors
    if trained.dora and not mcore:  # norms are taken of weights that bfloat16 has not exactly
        wide = sizes.parameters - sizes.experts - (trained.narrow - trained.narrow_experts)
    packed = trained.packed[0]
    narrow = (2 if model.dtype == "bfloat16" else 4) * (sizes.parameters - wide - packed.weights)
    return narrow + packed.bytes + 4 * (wide + (0 if mcore else trained.adapters))


def trained_sizes(policy: TrainingPolicy, encoder: Encoder) -> TrainedSizes:
    """The sizes that a policy trains of a model, which is built without storage.

    Raises:
        CapabilityError: adapters without a layer to go to.
        ModelError: config.json is none that transformers can build.
    """
    is_all = all(policy.mode(component) == "full" for component in COMPONENTS)
    if is_all and policy.optim.facts.is_torchs and not policy.optim.rounds:
        return EVERY_WEIGHT
    from vlmpack.backends.hf.adapted_experts import is_expert_tensor
    from vlmpack.backends.hf.adapters import adapter_shapes, adapter_targets, held_layers
    from vlmpack.backends.hf.load import deferred_model
    from vlmpack.backends.skeleton import model_skeleton

    paths = encoder.family.modules
    model = model_skeleton(encoder.family.auto_class(), encoder.folder)
    base = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    added: list[tuple[str, tuple[int, ...]]] = []
    packings: dict[str, Packing] = {}
    if is_quantised(encoder.folder):
        held = held_layers(deferred_model(encoder.folder), paths, policy)
        packings |= {name: codes.packing for name, codes in held.items()}
    if policy.lora is not None:
        targets = adapter_targets(model, paths, policy)
        added = list(adapter_shapes(model, targets, policy.lora))
        if policy.lora.quantize != "none":
            layers = (name for name in targets if not is_expert_tensor(model, name))
            packings |= dict.fromkeys(layers, Packing(kind=policy.lora.quantize))
    assert all(is_adapter(name) for name, _ in added)
    trained = [shape for name, shape in chain(base, added) if policy.trains_parameter(name, paths)]
    moments = MomentSizes.of(policy.optim.facts, trained)
    rounded = 0
    if policy.optim.rounds:
        rounded = _rounded(model, policy, encoder)
        rounded += 0 if policy.has_dora else sum(prod(shape) for _, shape in added)
    if is_all:
        return replace(EVERY_WEIGHT, moments=moments, rounded=rounded)
    own = {count.component: count for count in count_components(base, policy, paths)}
    before_graph, in_front = 0, set()  # what the graph of the backward pass does not hold
    for count in own.values():  # in the order of the forward pass
        if policy.trains(count.component):
            break
        before_graph += count.parameters
        in_front.add(count.component)
    narrow, narrow_experts = _narrow(model, policy, encoder, packings)
    images = [own[name] for name in ("vision", "projector") if name in own]
    counts = tuple(count_components(chain(base, added), policy, paths))
    adapters = {one.component: one.parameters for one in count_components(added, policy, paths)}
    language = [(n, shape) for n, shape in added if component_of(n, paths) == "language"]
    return TrainedSizes(
        counts=counts,
        tower_keeps=any(count.component == "vision" and count.trained for count in counts),
        images=sum(count.parameters for count in images),
        trained_images=sum(count.trained for count in images),
        language=policy.mode("language") == "full",
        adapters=sum(adapters.values()),
        tower_adapters=sum(adapters.values()) - adapters.get("language", 0),
        cut_adapters=sum(prod(shape) for name, shape in language if _is_cut(name)),
        expert_adapters=sum(prod(shape) for name, shape in language if ".experts." in name),
        packed=_packed(model, packings),
        before_graph=before_graph,
        narrow=sum(narrow.values()),
        narrow_experts=narrow_experts,
        rounded=rounded,
        dora=policy.has_dora,
        narrow_in_graph=sum(n for component, n in narrow.items() if component not in in_front),
        moments=moments,
    )


def _packed(
    model: Any, packings: Mapping[str, Packing]
) -> tuple[PackedSizes, PackedSizes, PackedSizes]:
    """Counts of all packed layers, of the block that has most, and of those in no block."""
    blocks: dict[str, PackedSizes] = {"": NO_PACKED}
    for name, packing in packings.items():
        shape = tuple(model.get_submodule(name).weight.shape)
        block, (weights, held) = block_of(name) or "", blocks.get(block_of(name) or "", NO_PACKED)
        blocks[block] = PackedSizes(weights + prod(shape), held + packing.nbytes(shape))
    whole = PackedSizes(*map(sum, zip(*blocks.values(), strict=True)))
    outside = blocks.pop("")
    return whole, max(blocks.values(), default=NO_PACKED), outside


def _rounded(model: Any, policy: TrainingPolicy, encoder: Encoder) -> int:
    """Trained weights, without adapters, that an optimizer which rounds holds in bfloat16."""
    from vlmpack.backends.hf.adapters import set_trainable
    from vlmpack.backends.hf.working_weights import product_parameters

    paths = encoder.family.modules
    set_trainable(model, paths, policy)
    found = product_parameters(model, paths.head_of(model), dora=policy.has_dora)
    return sum(parameter.numel() for parameter in {parameter for *_, parameter in found})


def _narrow(
    model: Any, policy: TrainingPolicy, encoder: Encoder, packings: Iterable[str]
) -> tuple[dict[Component, int], int]:
    """Frozen weights of each component that the folder, and so memory, holds in bfloat16, and how
    many of all are those of routed experts."""
    from vlmpack.backends.hf.adapted_experts import expert_weights
    from vlmpack.backends.hf.adapters import set_trainable
    from vlmpack.backends.hf.frozen import frozen_weights

    stored = _Stored.of(encoder.folder)
    paths = encoder.family.modules
    set_trainable(model, paths, policy)
    packed = {id(model.get_submodule(name).weight) for name in packings}
    names_of = {id(value): name for name, value in model.named_parameters()}
    counts: dict[Component, int] = {}
    of_experts, experts = 0, set(map(id, expert_weights(model)))
    for weight in frozen_weights(model):
        if id(weight) not in packed:
            component = component_of(names_of[id(weight)], paths)
            narrow = round(weight.numel() * stored.narrow_share(tuple(weight.shape)))
            counts[component] = counts.get(component, 0) + narrow
            of_experts += narrow * (id(weight) in experts)
    return counts, of_experts


@dataclass(frozen=True, slots=True)
class _Stored:
    """The matrices of a folder by shape, since names change on the way into a model.

    Args:
        by_shape: shape -> number of matrices, and of those in bfloat16.
        others: share of matrices of other shapes in bfloat16.
    """

    by_shape: Mapping[tuple[int, ...], tuple[int, int]]
    others: float

    @classmethod
    def of(cls, folder: Path) -> _Stored:
        """By the headers of the folder's files; without files, bfloat16 or config.json's type."""
        try:
            stored = dense_headers(folder).values()
        except ModelError:
            config = read_json(folder / "config.json")
            inner = config.get("text_config") or {}
            said = [each.get(key) for each in (config, inner) for key in ("dtype", "torch_dtype")]
            wide = {"float32", "float16"} & {*map(str, said)}  # published ones are in bfloat16
            return cls({}, 0.0 if wide else 1.0)
        found: dict[tuple[int, ...], tuple[int, int]] = {}
        matrices = [x for x in stored if x.ndim > 1]
        for tensor in matrices:
            count, narrow = found.get(tuple(tensor.shape), (0, 0))
            found[tuple(tensor.shape)] = count + 1, narrow + (tensor.dtype is torch.bfloat16)
        narrow = sum(tensor.dtype is torch.bfloat16 for tensor in matrices)
        return cls(found, float(bool(matrices) and narrow == len(matrices)))

    def narrow_share(self, shape: tuple[int, ...]) -> float:
        count, narrow = self.by_shape.get(shape, (0, 0))
        return narrow / count if count else self.others


def _is_cut(name: str) -> bool:
    """Whether TP cuts an adapter's parameter: A with the weight's columns, others with its rows."""
    layer, _, kind = name.partition(".lora_")
    if ".experts." in name:
        return False
    by_columns = layer.endswith(("o_proj", "down_proj"))
    return kind.startswith("A.") == by_columns
