"""What of a model is trained, for its memory: from names and shapes, as an engine counts it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import prod

from vlmpack.backends.policy import (
    ComponentCount,
    TrainingPolicy,
    component_of,
    count_components,
    is_adapter,
)
from vlmpack.encode import Encoder
from vlmpack.recipe.schema import ParallelismSection
from vlmpack.recipe.trainable import COMPONENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSizes:
    """What memory depends on beside the model's sizes; by default every weight is trained.

    Args:
        counts: the components, adapters included; those that an engine would count. Nobody counts
            where every weight is trained.
        tower_keeps: whether the tower keeps activations for a backward pass.
        images: parameters of tower and projector, without adapters.
        trained_images: trained ones among them.
        language: whether the language model's own weights are trained.
        adapters: parameters that adapters add, all of them trained.
        tower_adapters: those of them in tower and projector.
        cut_adapters: those of the language model that tensor parallelism cuts, as it cuts the
            weights that they are beside; the others are whole on each rank.
        packed: weights held in 4 bits.
        before_graph: parameters, adapters excluded, of the frozen components that come before the
            first trained one: no gradient passes them.
    """

    counts: tuple[ComponentCount, ...] = ()
    tower_keeps: bool = True
    images: int = 0
    trained_images: int = 0
    language: bool = True
    adapters: int = 0
    tower_adapters: int = 0
    cut_adapters: int = 0
    packed: int = 0
    before_graph: int = 0

    def adapters_on(self, split: ParallelismSection, *, tower: bool) -> int:
        """Parameters of adapters on a rank, before any sharding over replicas."""
        whole = self.adapters - self.tower_adapters - self.cut_adapters
        held = (whole + self.cut_adapters // split.tensor) // split.pipeline
        return held + (self.tower_adapters if tower else 0)


EVERY_WEIGHT = TrainedSizes()


def trained_sizes(policy: TrainingPolicy, encoder: Encoder) -> TrainedSizes:
    """What a policy trains of a model, which is built without storage.

    Raises:
        CapabilityError: adapters without a layer to go to.
        ModelError: config.json is none that transformers can build.
    """
    if all(policy.mode(component) == "full" for component in COMPONENTS):
        return EVERY_WEIGHT
    from vlmpack.backends.hf.adapters import adapter_shapes, adapter_targets
    from vlmpack.backends.skeleton import model_skeleton

    paths = encoder.family.modules
    model = model_skeleton(encoder.family.auto_class(), encoder.folder)
    base = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    added: list[tuple[str, tuple[int, ...]]] = []
    packed = 0
    if policy.lora is not None:
        targets = adapter_targets(model, paths, policy)
        added = list(adapter_shapes(model, targets, policy.lora))
        if policy.lora.quantize != "none":
            packed = sum(model.get_submodule(name).weight.numel() for name in targets)
    assert all(is_adapter(name) for name, _ in added)
    own = {count.component: count for count in count_components(base, policy, paths)}
    before = 0
    for count in own.values():  # in the order of the forward pass
        if policy.trains(count.component):
            break
        before += count.parameters
    images = [own[name] for name in ("vision", "projector") if name in own]
    counts = tuple(count_components(chain(base, added), policy, paths))
    beside = {one.component: one.parameters for one in count_components(added, policy, paths)}
    language = [(n, shape) for n, shape in added if component_of(n, paths) == "language"]
    return TrainedSizes(
        counts=counts,
        tower_keeps=any(count.component == "vision" and count.trained for count in counts),
        images=sum(count.parameters for count in images),
        trained_images=sum(count.trained for count in images),
        language=policy.mode("language") == "full",
        adapters=sum(beside.values()),
        tower_adapters=sum(beside.values()) - beside.get("language", 0),
        cut_adapters=sum(prod(shape) for name, shape in language if _is_cut(name)),
        packed=packed,
        before_graph=before,
    )


def _is_cut(name: str) -> bool:
    """Whether tensor parallelism cuts a parameter of an adapter: A where it cuts the weight's
    columns, the others where it cuts its rows."""
    layer, _, kind = name.partition(".lora_")
    by_columns = layer.endswith(("o_proj", "down_proj"))
    return kind.startswith("A.") == by_columns
