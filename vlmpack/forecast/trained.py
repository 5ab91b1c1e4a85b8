"""What of a model is trained, for its memory: from names and shapes, as an engine counts it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from vlmpack.backends.policy import (
    ComponentCount,
    TrainingPolicy,
    count_components,
    is_adapter,
)
from vlmpack.encode import Encoder
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
    packed: int = 0
    before_graph: int = 0


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
    return TrainedSizes(
        counts=counts,
        tower_keeps=any(count.component == "vision" and count.trained for count in counts),
        images=sum(count.parameters for count in images),
        trained_images=sum(count.trained for count in images),
        language=policy.mode("language") == "full",
        adapters=sum(count.parameters for count in count_components(added, policy, paths)),
        packed=packed,
        before_graph=before,
    )
