"""Setup -> engine, stepper; `build.data` does the same for the data."""

from __future__ import annotations

import logging
from pathlib import Path

from vlmpack.backends.engine import Engine
from vlmpack.build.adapter import go_on_with, open_adapter
from vlmpack.build.compute import settled_compute
from vlmpack.build.setup import Setup
from vlmpack.distributed import Ranks
from vlmpack.training.first_step import FirstStepCheck
from vlmpack.training.objective import objective_of
from vlmpack.training.optim import Schedule
from vlmpack.training.reference import without_adapters
from vlmpack.training.step import Stepper

logger = logging.getLogger("vlmpack")


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


def build_engine(setup: Setup) -> Engine:
    """The engine that the recipe names, with the weights that training begins with. Collective.

    Raises:
        CapabilityError: it cannot run here.
        ModelError: the model folder or its adapters cannot be loaded.
    """
    engine, adapter = _engine_of(setup), setup.recipe.model.adapter
    if adapter is not None:
        stored = open_adapter(Path(adapter), setup.policy, setup.encoder)
        go_on_with(engine, stored, setup.ranks)
    return engine


def _engine_of(setup: Setup) -> Engine:
    recipe = setup.recipe
    model, split, encoder, ranks = recipe.model, recipe.parallelism, setup.encoder, setup.ranks
    captures = recipe.training.cuda_graphs == "decoder"
    compute = settled_compute(model, split, encoder, ranks.device, captures=captures)
    parts = (model, split, encoder, ranks, setup.policy, compute)
    if model.backend == "mcore":
        from vlmpack.backends.mcore.engine import MegatronEngine  # megatron-core is an extra

        return MegatronEngine(*parts)
    from vlmpack.backends.hf.engine import HFEngine

    return HFEngine(*parts)


def build_stepper(setup: Setup, engine: Engine, *, total_steps: int) -> Stepper:
    """The engine with its objective and its schedule."""
    recipe, ranks = setup.recipe, setup.ranks
    objective = recipe.objective
    in_step = objective.learns_pairs and not objective.keeps_reference
    return Stepper(
        engine=engine,
        objective=objective_of(objective, recipe.data.source_names, setup.extensions.objective),
        schedule=Schedule(recipe.optim, total_steps),
        max_grad_norm=recipe.optim.max_grad_norm,
        ranks=ranks,
        check=FirstStepCheck(engine, ranks),
        dropout_seed=recipe.training.seed if recipe.trainable.drops() else None,
        reference=without_adapters if in_step else None,
    )
