"""Recipe -> engine, stepper, trainer configuration; `recipe_data` does the same for the data.

The places where recipe fields meet the configuration classes of the layers below.
"""

from __future__ import annotations

from pathlib import Path

from vlmpack.backends.adamw import AdamWConfig
from vlmpack.backends.engine import Engine
from vlmpack.build.setup import Setup
from vlmpack.distributed import Ranks
from vlmpack.distributed.timeouts import CollectiveTimeouts
from vlmpack.recipe import Recipe
from vlmpack.training.first_step import FirstStepCheck
from vlmpack.training.objective import objective_named
from vlmpack.training.optim import Schedule
from vlmpack.training.step import Stepper
from vlmpack.training.trainer import TrainerConfig


def check_model(folder: Path, ranks: Ranks) -> None:
    """See that the model folder's weights fit its config.json, before any data is read; only the
    headers of its files are.

    Raises:
        ModelError: they do not.
    """
    from vlmpack.backends.hf.weight_headers import check_weights

    ranks.on_main(lambda: check_weights(folder))


def build_engine(setup: Setup) -> Engine:
    """The engine that the recipe names.

    Raises:
        CapabilityError: it cannot run here.
        ModelError: the model folder cannot be loaded.
    """
    optim = setup.recipe.optim
    optimizer = AdamWConfig(betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)
    if setup.recipe.model.backend == "mcore":
        return _build_mcore(setup, optimizer)
    return _build_hf(setup, optimizer)


def _build_hf(setup: Setup, optimizer: AdamWConfig) -> Engine:
    from vlmpack.backends.hf.engine import HFEngine, HFEngineConfig

    model = setup.recipe.model
    assert model.attention != "transformer_engine"  # the recipe's rules see to it
    config = HFEngineConfig(
        folder=Path(model.path),
        dtype=model.dtype,
        attention=model.attention,
        activation_checkpointing=model.activation_checkpointing,
        sharding=setup.recipe.parallelism.sharding,
    )
    return HFEngine(config, setup.encoder, setup.ranks, optimizer, setup.policy)


def _build_mcore(setup: Setup, optimizer: AdamWConfig) -> Engine:
    # Imported here: megatron-core is an extra.
    from vlmpack.backends.mcore.engine import MegatronEngine, MegatronEngineConfig
    from vlmpack.backends.mcore.groups import ParallelSizes

    model, split = setup.recipe.model, setup.recipe.parallelism
    config = MegatronEngineConfig(
        folder=Path(model.path),
        sizes=ParallelSizes(
            tensor=split.tensor,
            pipeline=split.pipeline,
            context=split.context,
            expert=split.expert,
            sequence=split.sequence,
        ),
        distributed_optimizer=split.distributed_optimizer,
        dtype=model.dtype,
        attention=model.attention,
        activation_checkpointing=model.activation_checkpointing,
        aux_loss=model.router_aux_loss_coef,
    )
    return MegatronEngine(config, setup.encoder, setup.ranks, optimizer, setup.policy)


def build_stepper(setup: Setup, engine: Engine, *, total_steps: int) -> Stepper:
    """The engine with its objective and its schedule."""
    recipe, ranks = setup.recipe, setup.ranks
    optim = recipe.optim
    return Stepper(
        engine=engine,
        objective=objective_named(recipe.objective.name),
        schedule=Schedule(
            peak=optim.lr,
            floor=optim.lr * optim.min_lr_ratio,
            warmup_steps=optim.warmup_steps,
            total_steps=total_steps,
            kind=optim.schedule,
        ),
        max_grad_norm=optim.max_grad_norm,
        ranks=ranks,
        check=FirstStepCheck(engine, ranks),
        dropout_seed=recipe.training.seed if recipe.trainable.drops() else None,
    )


def trainer_config(recipe: Recipe, *, total_steps: int) -> TrainerConfig:
    """The loop's knobs."""
    return TrainerConfig(
        total_steps=total_steps,
        checkpoint_interval=recipe.checkpoint.interval_steps,
        keep_checkpoints=recipe.checkpoint.keep,
        asynchronous_checkpoints=recipe.checkpoint.asynchronous,
        validation_interval=recipe.evaluation.interval_steps,
        log_interval=recipe.logging.interval_steps,
        timeouts=CollectiveTimeouts(
            recipe.parallelism.timeout_seconds, recipe.parallelism.step_timeout_seconds
        ),
    )
