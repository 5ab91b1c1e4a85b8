"""Recipe -> the data of a run: encoder, collator, fetcher, and the splits opened with them."""

from __future__ import annotations

import logging
import math
import os
from itertools import chain
from pathlib import Path

from vlmpack.addresses import is_remote
from vlmpack.build.date import encoder_date
from vlmpack.build.extensions import NO_EXTENSIONS, Extensions, missing
from vlmpack.build.setup import Setup
from vlmpack.build.shard_listing import ShardListing
from vlmpack.build.worker_server import WORKER_PRELOAD
from vlmpack.data.config import DataConfig, SplitKey
from vlmpack.data.files.registered import NOTHING, RegisteredFetcher
from vlmpack.data.files.source_form import describe_forms
from vlmpack.data.index.parts import Progress
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.loading.loader import WorkerSettings, level_scale
from vlmpack.data.modes import evaluation_mode, packing_mode
from vlmpack.data.packs.open import survey_data
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.shares import RowCost, token_cost
from vlmpack.data.plan.state import DataState
from vlmpack.data.splits.survey import DataLaunch, Survey
from vlmpack.encode import Encoder, EncoderSettings
from vlmpack.encode.template_notes import template_notes
from vlmpack.errors import ModelError, RecipeError, RunIdentityError
from vlmpack.packing.cost import CostModel
from vlmpack.recipe import Recipe
from vlmpack.storage import RoutingFetcher
from vlmpack.storage.cache.cached import READ_AHEAD_BYTES, BlockUse, CachedFetcher
from vlmpack.storage.fetch import Fetcher
from vlmpack.whole_file import read_json

logger = logging.getLogger("vlmpack")


def build_encoder(recipe: Recipe) -> Encoder:
    """The processor of the recipe's model folder.

    Raises:
        ModelError, CapabilityError: the folder, a family this version does not know, a pixel
            budget that it cannot keep, or levels that its pixels are not made of.
    """
    settings = EncoderSettings(
        max_image_pixels=recipe.data.max_image_pixels,
        budget=recipe.images,
        date=encoder_date(recipe),
        learn=recipe.data.learn,
        chat_template_kwargs=recipe.data.chat_template_kwargs,
        special_tokens=recipe.data.special_tokens,
        pairs=recipe.objective.learns_pairs,
        share_prefix=recipe.packing.share_prefix,
    )
    encoder = Encoder(Path(recipe.model.path), settings)
    encoder.load()  # now, to fail early
    if recipe.data.pixels == "levels" and encoder.takes_images:
        level_scale(encoder)
    _note_long_images(recipe, encoder)
    for note in template_notes(encoder.chat, encoder.settings.learn):
        logger.warning("note: %s", note)
    return encoder


def _note_long_images(recipe: Recipe, encoder: Encoder) -> None:
    """Say where a budget lets one image be longer than a sample may be."""
    if not recipe.images.set_values():
        return
    side = math.isqrt(recipe.data.max_image_pixels)
    tokens = encoder.image_rule.layout(side, side).num_tokens
    if tokens > recipe.training.seq_length:
        knobs = ", ".join(f"images.{name}: {n}" for name, n in recipe.images.set_values().items())
        logger.warning(
            "note: a large image takes up to %d tokens with %s, more than training.seq_length %d; "
            "data.over_long: %s decides about such samples",
            tokens,
            knobs,
            recipe.training.seq_length,
            recipe.data.over_long,
        )


def build_cost_model(encoder: Encoder) -> CostModel:
    """What a row costs on the recipe's model.

    Raises:
        ModelError: config.json lacks a size.
    """
    config = read_json(encoder.folder / "config.json")
    return encoder.family.cost_model(config)


def _row_cost(setup: Setup) -> RowCost:
    """What evens out the ranks of a run: the model's FLOPs, or tokens where config.json leaves out
    a size that they follow from; that is said once."""
    if setup.ranks.dp_size == 1 or setup.recipe.packing.balance != "cost":
        return token_cost
    try:
        return build_cost_model(setup.encoder)
    except ModelError as error:
        if setup.ranks.is_main:
            logger.warning(
                "%-14s packing.balance: cost counts tokens alone, since %s", "data", error
            )
        return token_cost


def _data_config(setup: Setup, key: SplitKey, begun: DataState | None) -> DataConfig:
    recipe, trained = setup.recipe, key == "data.train"
    sizes = dict.fromkeys(("micro_batch_size", "global_batch_size"), recipe.evaluation.batch_size)
    return DataConfig(
        data=recipe.data,
        key=key,
        training=recipe.training if trained else recipe.training.model_copy(update=sizes),
        mode=packing_mode(recipe, begun) if trained else evaluation_mode(recipe),
        row_cost=_row_cost(setup) if trained else token_cost,
        new_era=recipe.checkpoint.on_data_change != "refuse",
        workers=WorkerSettings(watch_seconds=recipe.logging.watch_seconds, preload=WORKER_PRELOAD),
    )


def build_fetcher(recipe: Recipe, extensions: Extensions = NO_EXTENSIONS) -> Fetcher:
    """What reads the recipe's shards, wherever they lie; remote ones through `data.cache`.

    Args:
        recipe: names them.
        extensions: has the program's own sources.

    Raises:
        RecipeError: a store or the cache that cannot be used as the recipe says, or a program's
            source that nobody handed over.
    """
    if problems := missing(recipe, extensions, data_alone=True):
        raise RecipeError(problems)
    stores = _stores(recipe)
    if extensions.data == NOTHING:
        return stores
    return RegisteredFetcher(stores, extensions.data)


def _stores(recipe: Recipe) -> Fetcher:
    data = recipe.data
    stores = RoutingFetcher(data.storage)
    sources = chain(*data.splits().values())
    if not data.cache.max_bytes or not any(is_remote(source.path) for source in sources):
        return stores
    # In any other order than `global` the samples of a shard are used close together.
    ahead = 0 if data.shuffle == "global" else READ_AHEAD_BYTES
    return CachedFetcher(stores, data.cache, BlockUse(read_ahead_bytes=ahead))


def _of_conversations(encoder: Encoder) -> Encoder:
    """The encoder for samples that are whole conversations: no pairs, nor one of each answer."""
    if not (encoder.settings.pairs or encoder.each_answer):
        return encoder
    learn = "all_turns" if encoder.each_answer else encoder.settings.learn
    return encoder.replace(pairs=False, learn=learn, share_prefix=False)


def _say_forms(config: DataConfig, survey: Survey) -> None:
    """What files that are no shards were found to be, a line a source."""
    for source, stamps in zip(config.sources, survey.sources, strict=False):
        if any(stamp.form for stamp in stamps):
            key = config.key.removeprefix("data.")
            logger.info("%-14s %s: %s", key, source.name, describe_forms(stamps))


def open_split(
    setup: Setup,
    key: SplitKey,
    ledger: Ledger,
    *,
    resume: DataState | None = None,
    begun: DataState | None = None,
    progress: Progress | None = None,
    listing: ShardListing | None = None,
    shards: dict[str, set[str]] | None = None,
) -> TrainData | None:
    """Open `data.train`, `data.validation` or `data.test`; None where the recipe has no such split.

    Collective: the main rank lists the shards for all.

    Args:
        resume: where the run goes on, as far as that is known before the model is built.
        begun: a state of a run whose rows are looked at, and which does not go on.
        progress: told about index and lengths parts.
        listing: has the shards of the run's last launch; gets those of this one.
        shards: gets the split's, as addresses or whole paths; packs that hold their samples name
            none.

    Raises:
        RecipeError, DataError, EmptyDataError: what is wrong with the split.
        RunIdentityError: `resume` is of other data.
    """
    recipe, ranks, encoder = setup.recipe, setup.ranks, setup.encoder
    if key == "data.test":  # questions with one true answer, whatever is learnt
        encoder = _of_conversations(encoder)
    config = _data_config(setup, key, resume or begun)
    if not config.sources:
        return None
    fetcher = build_fetcher(recipe, setup.extensions)
    survey = ranks.on_main(lambda: survey_data(config, encoder, fetcher, resume))
    if ranks.is_main:
        _say_forms(config, survey)
    try:
        opened = TrainData.open(
            config,
            encoder,
            ledger=ledger,
            fetcher=fetcher,
            list_dropped=ranks.is_main,
            progress=progress,
            launch=DataLaunch(
                survey=survey, resume=resume, share=ranks.rank, shares=ranks.world_size
            ),
        )
    except RunIdentityError as error:
        changes = [] if listing is None else listing.changes(survey)
        raise RunIdentityError("\n".join([str(error), *changes])) from None
    if listing is not None and ranks.is_main:
        listing.keep(survey)
    if shards is not None:
        paths = [stamp.path for stamps in survey.sources for stamp in stamps]
        shards[key] = {path if is_remote(path) else os.path.realpath(path) for path in paths}
    return opened
