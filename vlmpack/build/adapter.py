"""Adapters that training goes on with: looked at before data are read, and read into an engine."""

from __future__ import annotations

from pathlib import Path

from vlmpack.backends.adapter_folder import AdapterFolder
from vlmpack.backends.engine import Engine
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.backends.skeleton import model_skeleton
from vlmpack.capabilities.adapter_config import AdapterConfig
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.errors import ModelError


def open_adapter(folder: Path, policy: TrainingPolicy, encoder: Encoder) -> AdapterFolder:
    """The adapters of `model.adapter`, whose tensors are those that the policy trains.

    Args:
        folder: in peft's format.
        policy: what is trained.
        encoder: of the model folder.

    Raises:
        ModelError: they cannot be read, or are those of other layers, shapes or components.
        CapabilityError: the policy has adapters without a layer to go to.
    """
    from vlmpack.backends.hf.adapters import adapter_shapes, adapter_targets

    paths = encoder.family.modules
    model = model_skeleton(encoder.family.auto_class(), encoder.folder)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    if policy.lora is not None:
        targets = adapter_targets(model, paths, policy)
        shapes |= adapter_shapes(model, targets, policy.lora)
    trained = {
        name: shape
        for name, shape in shapes.items()
        if policy.of_parameter(name, len(shape), paths).trains
    }
    try:
        AdapterConfig.read(folder)
        stored = AdapterFolder.open(folder)
        stored.check(trained, policy, paths, model.all_tied_weights_keys)
    except ModelError as error:
        raise ModelError(f"model.adapter: {error}") from error
    return stored


def go_on_with(engine: Engine, stored: AdapterFolder, ranks: Ranks) -> None:
    """Give an engine the adapters, and what was trained in full beside them. Collective.

    Raises:
        ModelError: on every rank, if any cannot read them.
    """
    with ranks.raised_by_all(ModelError):
        try:
            engine.load_slices(stored.read, optimizer_steps=0)
        except ModelError as error:
            raise ModelError(f"model.adapter: {error}") from error
    engine.description["goes on with"] = f"{len(stored.tensors):,} tensors of {stored.folder}"
