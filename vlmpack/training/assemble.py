"""Recipe -> the parts of a run: encoder, data, engine, stepper, trainer configuration.

The one place where recipe fields meet the configuration classes of the layers below.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from vlmpack.addresses import is_remote
from vlmpack.backends.adamw import AdamWConfig
from vlmpack.backends.engine import Engine
from vlmpack.data.cache.cached import (
    READ_AHEAD_BYTES,
    CacheConfig,
    CachedFetcher,
    default_block_dir,
)
from vlmpack.data.config import DataConfig, PacksConfig, SourceConfig
from vlmpack.data.index.parts import Progress
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.loading.loader import LoaderSettings
from vlmpack.data.loading.read import ErrorPolicy
from vlmpack.data.packs.open import survey_data
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.packers import RowBudget
from vlmpack.data.plan.state import DataState
from vlmpack.data.shards.caps import SampleCaps
from vlmpack.data.splits.survey import DataLaunch
from vlmpack.data.stores import RoutingFetcher, StorageConfig
from vlmpack.data.stores.fetch import Fetcher
from vlmpack.distributed import Ranks
from vlmpack.families import Encoder
from vlmpack.packing import FixedShape, PackCollator, PadCollator, round_up
from vlmpack.packing.cost import CostModel
from vlmpack.recipe import Derived, Recipe, Source
from vlmpack.recipe.derived import multiples, plan_alignment, row_tokens
from vlmpack.training.optim import Schedule
from vlmpack.training.step import Stepper
from vlmpack.training.trainer import TrainerConfig

WORKER_PRELOAD = (
    "torch",
    "vlmpack.data.loading.loader",
    "vlmpack.families.encoder",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.image_processing_auto",
)
"""What loader workers find imported when they start; the encoder would import it on first use."""


def build_encoder(recipe: Recipe) -> Encoder:
    """The processor of the recipe's model folder.

    Raises:
        ModelError, CapabilityError: the folder, or a family this version does not know.
    """
    encoder = Encoder(Path(recipe.model.path), max_image_pixels=recipe.data.max_image_pixels)
    encoder.load()  # now, to fail early
    return encoder


def build_collator(
    recipe: Recipe, encoder: Encoder, derived: Derived, key: str = "data.train"
) -> PackCollator | PadCollator:
    """What turns a bin of a split into a batch."""
    if recipe.packing.mode == "none":
        return PadCollator(
            pad_token_id=encoder.pad_token_id,
            num_position_axes=encoder.num_position_axes,
            pad_to_multiple_of=derived.row_multiple,
        )
    return PackCollator(
        pad_token_id=encoder.pad_token_id,
        num_position_axes=encoder.num_position_axes,
        pad_to_multiple_of=derived.sequence_multiple,
        total_multiple_of=derived.row_multiple,
        fixed=_fixed_shape(recipe) if key == "data.train" else None,
    )


def _fixed_shape(recipe: Recipe) -> FixedShape | None:
    """The shape of all planned rows, where the recipe fixes it."""
    packing = recipe.packing
    if not packing.pad_to_max_length:
        return None
    return FixedShape(
        row_tokens=row_tokens(packing, recipe.training, recipe.parallelism),
        max_sequences=packing.max_sequences if packing.pad_cu_seqlens else None,
    )


def build_cost_model(encoder: Encoder) -> CostModel:
    """What a row costs on the recipe's model.

    Raises:
        ModelError: config.json lacks a size.
    """
    config = json.loads((encoder.folder / "config.json").read_text(encoding="utf-8"))
    return encoder.family.cost_model(config)


def _row_budget(recipe: Recipe, resume: DataState | None) -> RowBudget:
    """What a planned row holds.

    Where the recipe leaves `packing.alignment` open, a run keeps the one it began with as long as
    context parallelism can cut it: its global batches stay the same.
    """
    packing, parallelism = recipe.packing, recipe.parallelism
    alignment = plan_alignment(packing, parallelism)
    begun = None if resume is None else resume.identity.get("packing.alignment")
    if packing.alignment is None and isinstance(begun, int):
        is_whole = begun % multiples(parallelism).sequence == 0
        alignment = begun if is_whole else alignment
    return RowBudget(
        max_tokens=round_up(recipe.training.seq_length, alignment)
        if packing.max_tokens is None
        else packing.max_tokens,
        max_patches=packing.max_vision_patches,
        max_sequences=None if packing.max_sequences == "auto" else packing.max_sequences,
        alignment=alignment,
    )


def _packs_config(recipe: Recipe) -> PacksConfig:
    """What the recipe says of packs that were made before."""
    packing = recipe.packing
    assert packing.path is not None  # the recipe's rules see to it
    return PacksConfig(
        path=Path(packing.path),
        max_tokens=row_tokens(packing, recipe.training, recipe.parallelism),
        max_patches=packing.max_vision_patches,
        max_sequences=None if packing.max_sequences == "auto" else packing.max_sequences,
        alignment=packing.alignment,
        sequence_multiple=multiples(recipe.parallelism).sequence,
    )


def _data_config(
    recipe: Recipe,
    key: str,
    sources: tuple[Source, ...],
    *,
    micro: int,
    whole: int,
    resume: DataState | None,
) -> DataConfig:
    data = recipe.data
    mode = recipe.packing.mode
    budget = packs = None
    if key != "data.train":
        mode = "none" if mode == "none" else "in_batch"
    elif mode == "online":
        budget = _row_budget(recipe, resume)
    elif mode == "offline":
        packs = _packs_config(recipe)
    return DataConfig(
        key=key,
        sources=tuple(
            SourceConfig(name=source.name, paths=(source.path,), weight=source.weight)
            for source in sources
        ),
        seq_length=recipe.training.seq_length,
        mode=mode,
        budget=budget,
        packs=packs,
        scope=recipe.packing.scope,
        balance=recipe.packing.balance,
        micro_batch_size=micro,
        global_batch_size=whole,
        seed=recipe.training.seed,
        shuffle=data.shuffle if key == "data.train" else "none",
        on_data_change=recipe.checkpoint.on_data_change,
        weights=data.weights if key == "data.train" else "samples",
        epoch_size=data.epoch_size if key == "data.train" else None,
        over_long=data.over_long,
        on_error=ErrorPolicy.from_mapping(
            {name: getattr(data.on_error, name) for name in ErrorPolicy.__slots__}
        ),
        caps=SampleCaps(max_image_pixels=data.max_image_pixels),
        loader=LoaderSettings(
            num_workers=data.num_workers,
            prefetch_bins=data.prefetch_batches,
            preload=WORKER_PRELOAD,
        ),
        index_dir=Path(data.index_dir) if data.index_dir is not None else None,
    )


def build_fetcher(recipe: Recipe) -> Fetcher:
    """What reads the recipe's shards, wherever they lie; remote ones through `data.cache`.

    Raises:
        RecipeError: a store or the cache that cannot be used as the recipe says.
    """
    data = recipe.data
    values = data.storage.model_dump()
    credentials = {name: value for name, value in values.pop("credentials").items() if value}
    stores = RoutingFetcher(StorageConfig(credentials=credentials, **values))
    sources = [
        source for split in (data.train, data.validation, data.test) for source in split or ()
    ]
    if not data.cache.max_bytes or not any(is_remote(source.path) for source in sources):
        return stores
    directory = data.cache.directory
    config = CacheConfig(
        directory=default_block_dir() if directory is None else Path(directory),
        max_bytes=data.cache.max_bytes,
        # In any other order than `global` the samples of a shard are used close together.
        read_ahead_bytes=0 if data.shuffle == "global" else READ_AHEAD_BYTES,
    )
    return CachedFetcher(stores, config)


def open_split(
    recipe: Recipe,
    key: str,
    encoder: Encoder,
    derived: Derived,
    *,
    ranks: Ranks,
    ledger: Ledger,
    resume: DataState | None = None,
    progress: Progress | None = None,
) -> TrainData | None:
    """Open `data.train`, `data.validation` or `data.test`; None where the recipe has no such split.

    Collective: the main rank lists the shards for all.

    Args:
        resume: where the run goes on, as far as that is known before the model is built.
        progress: told about index and lengths parts.

    Raises:
        RecipeError, DataError, EmptyDataError: what is wrong with the split.
        RunIdentityError: `resume` is of other data.
    """
    sources = {
        "data.train": recipe.data.train,
        "data.validation": recipe.data.validation,
        "data.test": recipe.data.test,
    }[key]
    if not sources:
        return None
    training = recipe.training
    micro, whole = training.micro_batch_size, training.global_batch_size
    if key != "data.train":
        micro = whole = recipe.evaluation.batch_size
    config = _data_config(recipe, key, sources, micro=micro, whole=whole, resume=resume)
    if ranks.dp_size > 1:
        config = replace(config, row_cost=build_cost_model(encoder))
    fetcher = build_fetcher(recipe)
    return TrainData.open(
        config,
        encoder,
        build_collator(recipe, encoder, derived, key),
        ledger=ledger,
        fetcher=fetcher,
        list_dropped=ranks.is_main,
        progress=progress,
        launch=DataLaunch(
            survey=ranks.on_main(lambda: survey_data(config, encoder, fetcher, resume)),
            resume=resume,
            share=ranks.rank,
            shares=ranks.world_size,
        ),
    )


def build_engine(recipe: Recipe, encoder: Encoder, ranks: Ranks) -> Engine:
    """The engine that the recipe names.

    Raises:
        CapabilityError: it cannot run here.
        ModelError: the model folder cannot be loaded.
    """
    optim = recipe.optim
    optimizer = AdamWConfig(betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)
    if recipe.model.backend == "mcore":
        return _build_mcore(recipe, encoder, ranks, optimizer)
    return _build_hf(recipe, encoder, ranks, optimizer)


def _build_hf(recipe: Recipe, encoder: Encoder, ranks: Ranks, optimizer: AdamWConfig) -> Engine:
    from vlmpack.backends.hf.engine import HFEngine, HFEngineConfig

    model = recipe.model
    assert model.attention != "transformer_engine"  # the recipe's rules see to it
    config = HFEngineConfig(
        folder=Path(model.path),
        dtype=model.dtype,
        attention=model.attention,
        activation_checkpointing=model.activation_checkpointing,
        sharding=recipe.parallelism.sharding,
    )
    return HFEngine(config, encoder, ranks, optimizer)


def _build_mcore(recipe: Recipe, encoder: Encoder, ranks: Ranks, optimizer: AdamWConfig) -> Engine:
    # Imported here: megatron-core is an extra.
    from vlmpack.backends.mcore.engine import MegatronEngine, MegatronEngineConfig
    from vlmpack.backends.mcore.groups import ParallelSizes

    model, split = recipe.model, recipe.parallelism
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
    return MegatronEngine(config, encoder, ranks, optimizer)


def build_stepper(recipe: Recipe, engine: Engine, ranks: Ranks, *, total_steps: int) -> Stepper:
    """The engine with its schedule."""
    optim = recipe.optim
    return Stepper(
        engine=engine,
        schedule=Schedule(
            peak=optim.lr,
            floor=optim.lr * optim.min_lr_ratio,
            warmup_steps=optim.warmup_steps,
            total_steps=total_steps,
            kind=optim.schedule,
        ),
        max_grad_norm=optim.max_grad_norm,
        ranks=ranks,
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
    )
