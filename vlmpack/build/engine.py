"""A recipe's engine: the value that it is made from, what is checked before, and the engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from vlmpack.backends.engine import Engine
from vlmpack.backends.policy import TrainingPolicy
from vlmpack.build.adapter import go_on_with, open_adapter
from vlmpack.build.compute import settled_compute
from vlmpack.build.policy import policy_of
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.recipe import Recipe
from vlmpack.recipe.schema import ModelSection, ParallelismSection

logger = logging.getLogger("vlmpack")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """All that an engine is made from.

    Args:
        model: the recipe's section.
        parallelism: the recipe's section.
        policy: what is trained.
        encoder: of the model folder.
        ranks: who this process is.
        captures: whether the decoder is recorded (`training.cuda_graphs`).
    """

    model: ModelSection
    parallelism: ParallelismSection
    policy: TrainingPolicy
    encoder: Encoder
    ranks: Ranks
    captures: bool = False


def engine_spec(recipe: Recipe, encoder: Encoder, ranks: Ranks) -> EngineSpec:
    """What a recipe says of its engine."""
    return EngineSpec(
        model=recipe.model,
        parallelism=recipe.parallelism,
        policy=policy_of(recipe),
        encoder=encoder,
        ranks=ranks,
        captures=recipe.training.cuda_graphs == "decoder",
    )


def check_model(folder: Path, ranks: Ranks) -> str:
    """See that the model folder's weights fit its config.json, before any data is read; only the
    headers of its files are. Collective.

    Returns:
        The tensors that training does not read, in words; empty where it reads all.

    Raises:
        ModelError: they do not.
    """
    from vlmpack.backends.hf.weight_headers import check_weights

    def check() -> tuple[str, tuple[str, ...]]:
        loaded = check_weights(folder)
        return loaded.unread_words, loaded.notes

    unread, notes = ranks.on_main(check)
    for note in notes:
        logger.warning("note: %s", note)
    return unread


def check_policy(spec: EngineSpec) -> None:
    """See that the model and this machine can be trained like that, without reading a weight.

    Raises:
        CapabilityError: adapters without a layer to go to, or 4-bit weights without a GPU.
        ModelError: the model folder's config.json is none that transformers knows, or the adapters
            that training goes on with are others than the policy has.
    """
    policy, encoder, adapter = spec.policy, spec.encoder, spec.model.adapter
    if policy.lora is None:
        return
    from vlmpack.backends.hf.adapters import adapter_targets
    from vlmpack.backends.hf.quantize import check_quantization
    from vlmpack.backends.skeleton import model_skeleton

    if policy.lora.quantize != "none":
        check_quantization(spec.ranks.device)
    if adapter is not None:
        open_adapter(Path(adapter), policy, encoder)
        return
    family = encoder.family
    skeleton = model_skeleton(family.auto_class(), encoder.folder)
    adapter_targets(skeleton, family.modules, policy)


def build_engine(spec: EngineSpec) -> Engine:
    """The engine, with the weights that training begins with. Collective.

    Raises:
        CapabilityError: it cannot run here.
        ModelError: the model folder or its adapters cannot be loaded.
    """
    engine, adapter = _engine_of(spec), spec.model.adapter
    if adapter is not None:
        stored = open_adapter(Path(adapter), spec.policy, spec.encoder)
        go_on_with(engine, stored, spec.ranks)
    return engine


def _engine_of(spec: EngineSpec) -> Engine:
    model, split, encoder, ranks = spec.model, spec.parallelism, spec.encoder, spec.ranks
    compute = settled_compute(model, split, encoder, ranks.device, captures=spec.captures)
    parts = (model, split, encoder, ranks, spec.policy, compute)
    if model.backend == "mcore":
        from vlmpack.backends.mcore.engine import MegatronEngine  # megatron-core is an extra

        return MegatronEngine(*parts)
    from vlmpack.backends.hf.engine import HFEngine

    return HFEngine(*parts)
