"""A recipe's data: the encoder, the splits, and the value that they are opened from.

A run folder keeps a list of its shards, so that a resume on other data can name what changed. The
list only improves messages, so it may be missing or damaged.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from vlmpack.addresses import is_remote
from vlmpack.build.extensions import NO_EXTENSIONS, Extensions, missing
from vlmpack.build.run import encoder_date
from vlmpack.build.worker_server import WORKER_PRELOAD
from vlmpack.data.config import DataConfig, SplitKey
from vlmpack.data.files.registered import NOTHING, Registered, RegisteredFetcher
from vlmpack.data.files.source_form import describe_forms
from vlmpack.data.index.parts import Progress
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.loading.loader import WorkerSettings, level_scale
from vlmpack.data.modes import MODES, PackingMode
from vlmpack.data.packs.open import survey_data
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.rank_bins import RowCost, token_cost
from vlmpack.data.plan.state import DataState
from vlmpack.data.splits.survey import DataLaunch, Survey
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder, EncoderSettings
from vlmpack.encode.template_notes import template_notes
from vlmpack.errors import ModelError, RecipeError, RunDirError, RunIdentityError
from vlmpack.file_format import RUN
from vlmpack.packing.balance import CostModel
from vlmpack.packing.budget import RowBudget
from vlmpack.recipe import Recipe
from vlmpack.recipe.data import DataSection
from vlmpack.recipe.derived import graph_sequences, multiples, row_bounds
from vlmpack.recipe.schema import ModeName, PackingSection, TrainingSection
from vlmpack.storage import RoutingFetcher
from vlmpack.storage.cache.cached import READ_AHEAD_BYTES, BlockUse, CachedFetcher
from vlmpack.storage.fetch import Fetcher
from vlmpack.whole_file import read_json, write_atomically
from vlmpack.words import counted, some_of

LISTING_NAME = "shards.json"
MAX_LISTED = 100_000
MAX_NAMED = 5


logger = logging.getLogger("vlmpack")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """All that the splits of a run are opened from.

    Args:
        train, validation, test: the splits. One without sources is not opened.
        saved: where a resumed run continues, from its newest checkpoint; None for a new run.
    """

    train: DataConfig
    validation: DataConfig
    test: DataConfig
    encoder: Encoder
    ranks: Ranks
    own: Registered = NOTHING
    saved: DataState | None = None

    def split(self, key: SplitKey) -> DataConfig:
        config: DataConfig = getattr(self, key.removeprefix("data."))
        return config


def data_spec(
    recipe: Recipe,
    encoder: Encoder,
    ranks: Ranks,
    *,
    extensions: Extensions = NO_EXTENSIONS,
    saved: DataState | None = None,
    planned: DataState | None = None,
) -> DataSpec:
    """The DataSpec of a recipe.

    Args:
        planned: the state of a run that is only inspected, whose rows stay as planned.

    Raises:
        RecipeError: the program did not pass a source that the recipe names.
    """
    if problems := missing(recipe, extensions, data_alone=True):
        raise RecipeError(problems)
    training = recipe.training
    sizes = dict.fromkeys(("micro_batch_size", "global_batch_size"), recipe.evaluation.batch_size)

    def split(key: SplitKey, training: TrainingSection, mode: PackingMode) -> DataConfig:
        return DataConfig(
            data=recipe.data,
            key=key,
            training=training,
            mode=mode,
            objective=recipe.objective,
            new_era=recipe.checkpoint.on_data_change != "refuse",
            workers=WorkerSettings(
                watch_seconds=recipe.logging.watch_seconds, preload=WORKER_PRELOAD
            ),
        )

    evaluated = training.model_copy(update=sizes), evaluation_mode(recipe)
    return DataSpec(
        train=split("data.train", training, packing_mode(recipe, saved or planned)),
        validation=split("data.validation", *evaluated),
        test=split("data.test", *evaluated),
        encoder=encoder,
        ranks=ranks,
        own=extensions.data,
        saved=saved,
    )


def packing_mode(recipe: Recipe, state: DataState | None = None) -> PackingMode:
    """The recipe's mode, for its training split.

    Args:
        state: of the run that is resumed; None for a new run.
    """
    recipe = keep_alignment(recipe, state)
    packing, parallelism = recipe.packing, recipe.parallelism
    return MODES[packing.mode](
        packing=packing,
        budget=RowBudget(
            **row_bounds(packing, recipe.training, parallelism, pairs=recipe.objective.learns_pairs)
        ),
        multiples=multiples(parallelism),
        captures=recipe.training.cuda_graphs != "none",
        graph_sequences=graph_sequences(recipe.training),
    )


def evaluation_mode(recipe: Recipe) -> PackingMode:
    """The mode of the splits that are not trained on: they are read in order, bin by bin."""
    mode: ModeName = "none" if recipe.packing.facts.pads else "in_batch"
    section = PackingSection(mode=mode, share_prefix=recipe.packing.share_prefix)
    training = recipe.training.model_copy(update={"cuda_graphs": "none"})
    return packing_mode(recipe.model_copy(update={"packing": section, "training": training}))


def keep_alignment(recipe: Recipe, state: DataState | None) -> Recipe:
    """The recipe with the alignment that the run began with, if the recipe leaves it open.

    It is kept while context parallelism can cut it, so that global batches stay the same. Packs
    have an alignment of their own.
    """
    packing = recipe.packing
    alignment = None if state is None else state.identity.get("packing.alignment")
    cuts_rows = packing.facts.plans_rows and not packing.facts.reads_packs
    if not cuts_rows or packing.alignment is not None or not isinstance(alignment, int):
        return recipe
    if alignment % multiples(recipe.parallelism).sequence:
        return recipe
    return recipe.model_copy(
        update={"packing": packing.model_copy(update={"alignment": alignment})}
    )


def build_encoder(recipe: Recipe) -> Encoder:
    """The processor of the recipe's model folder.

    Raises:
        ModelError, CapabilityError: the folder, a family this version does not know, a pixel
            budget that it cannot keep, or levels that its pixels are not made of.
    """
    encoder = Encoder(Path(recipe.model.path), encoder_settings(recipe))
    encoder.load()  # now, to fail early
    if recipe.data.pixels == "levels" and encoder.takes_images:
        level_scale(encoder)
    _note_long_images(recipe, encoder)
    for note in template_notes(encoder.chat, encoder.settings.learn):
        logger.warning("note: %s", note)
    return encoder


def encoder_settings(recipe: Recipe) -> EncoderSettings:
    return EncoderSettings(
        max_image_pixels=recipe.data.max_image_pixels,
        budget=recipe.images,
        date=encoder_date(recipe),
        learn=recipe.data.learn,
        chat_template_kwargs=recipe.data.chat_template_kwargs,
        special_tokens=recipe.data.special_tokens,
        coordinates=recipe.data.coordinates,
        boxes_in_text=recipe.data.boxes_in_text,
        pairs=recipe.objective.learns_pairs,
        rollouts=recipe.objective.learns_rollouts,
        share_prefix=recipe.packing.share_prefix,
    )


def _note_long_images(recipe: Recipe, encoder: Encoder) -> None:
    """Say where a budget lets one image be longer than a sample may be."""
    if not recipe.images.set_values():
        return
    side = math.isqrt(recipe.data.max_image_pixels)
    tokens = encoder.image_rule.layout(side, side).num_tokens
    if tokens > recipe.training.seq_length:
        knobs = ", ".join(f"images.{name}: {n}" for name, n in recipe.images.set_values().items())
        logger.warning(
            "note: a large image takes up to %d tokens with %s, more than training.seq_length "
            "%d. data.over_long: %s decides what happens to it",
            tokens,
            knobs,
            recipe.training.seq_length,
            recipe.data.over_long,
        )


def build_cost_model(encoder: Encoder) -> CostModel:
    """The cost of a row on the recipe's model.

    Raises:
        ModelError: config.json lacks a size.
    """
    config = read_json(encoder.folder / "config.json")
    return encoder.family.cost_model(config)


def _row_cost(data: DataSpec) -> RowCost:
    """Costs for balancing ranks: the model's FLOPs, or tokens if config.json lacks a size."""
    if data.ranks.dp_size == 1 or data.train.mode.packing.balance != "cost":
        return token_cost
    try:
        return build_cost_model(data.encoder)
    except ModelError as error:
        if data.ranks.is_main:
            logger.warning(
                "%-14s packing.balance: cost counts tokens alone, since %s", "data", error
            )
        return token_cost


def build_fetcher(recipe: Recipe) -> Fetcher:
    """A reader of the recipe's shards; remote ones go through `data.cache`.

    Raises:
        RecipeError: an unusable store or cache, or a program's source, which cannot be read here.
    """
    if problems := missing(recipe, data_alone=True):
        raise RecipeError(problems)
    return _stores(recipe.data)


def _stores(data: DataSection) -> Fetcher:
    stores = RoutingFetcher(data.storage)
    sources = chain(*data.splits().values())
    if not data.cache.max_bytes or not any(is_remote(source.path) for source in sources):
        return stores
    # In any other order than `global` the samples of a shard are used close together.
    ahead = 0 if data.shuffle == "global" else READ_AHEAD_BYTES
    return CachedFetcher(stores, data.cache, BlockUse(read_ahead_bytes=ahead))


def open_split(
    data: DataSpec,
    key: SplitKey,
    ledger: Ledger,
    *,
    progress: Progress | None = None,
    listing: ShardListing | None = None,
) -> TrainData | None:
    """Open `data.train`, `data.validation` or `data.test`; None where the recipe has no such split.

    Collective: the main rank lists the shards for all.

    Args:
        listing: has the shards of the run's last launch; gets those of this one.

    Raises:
        RecipeError, DataError, EmptyDataError: what is wrong with the split.
        RunIdentityError: `data.saved` is of other data.
    """
    config, ranks, encoder, saved = data.split(key), data.ranks, data.encoder, None
    if not config.sources:
        return None
    if key == "data.test":  # questions with one true answer, whatever is learnt
        encoder = _of_conversations(encoder)
    if key == "data.train":
        config, saved = replace(config, row_cost=_row_cost(data)), data.saved
    stores = _stores(config.data)
    fetcher = stores if data.own == NOTHING else RegisteredFetcher(stores, data.own)
    survey = ranks.on_main(lambda: survey_data(config, encoder, fetcher, saved))
    if ranks.is_main:
        _say_forms(config, survey)
    try:
        train = TrainData.open(
            config,
            encoder,
            ledger=ledger,
            fetcher=fetcher,
            list_dropped=ranks.is_main,
            progress=progress,
            launch=DataLaunch(
                survey=survey, resume=saved, rank=ranks.rank, world_size=ranks.world_size
            ),
        )
    except RunIdentityError as error:
        changes = [] if listing is None else listing.changes(survey)
        raise RunIdentityError("\n".join([str(error), *changes])) from None
    if listing is not None and ranks.is_main:
        listing.keep(survey)
    return train


def _of_conversations(encoder: Encoder) -> Encoder:
    """The encoder for samples that are whole conversations, neither pairs nor rollouts."""
    settings = encoder.settings
    if not (settings.pairs or settings.rollouts or encoder.each_answer):
        return encoder
    learn = "all_turns" if encoder.each_answer else settings.learn
    return encoder.replace(pairs=False, rollouts=False, learn=learn, share_prefix=False)


def _say_forms(config: DataConfig, survey: Survey) -> None:
    """Log the kind of files that are not shards, one line a source."""
    for source, stamps in zip(config.sources, survey.sources, strict=False):
        if any(stamp.form for stamp in stamps):
            key = config.key.removeprefix("data.")
            logger.info("%-14s %s: %s", key, source.name, describe_forms(stamps))


class ShardListing:
    def __init__(self, path: Path) -> None:
        self.path = path

    def keep(self, survey: Survey) -> None:
        """Write the shards down, unless there are more than MAX_LISTED."""
        shards = _listed(survey)
        if len(shards) > MAX_LISTED or shards == self._read():
            return
        rows = [[path, *version] for path, version in shards.items()]
        text = json.dumps(RUN.mark({"shards": rows}), indent=0)
        try:
            write_atomically(self.path, text + "\n")
        except OSError as error:  # one rank's failure alone, so the others would wait for it
            logger.warning("note: %s cannot be written: %s", self.path, error)

    def changes(self, survey: Survey) -> list[str]:
        """The differences from the last launch, a line for each kind. Empty if nothing is known."""
        before, now = self._read(), _listed(survey)
        if not before:
            return []
        kinds = {
            "gone": [path for path in before if path not in now],
            "new": [path for path in now if path not in before],
            "rewritten": [p for p in now if p in before and before[p] != now[p]],
        }
        return [_line(kind, paths) for kind, paths in kinds.items() if paths]

    def _read(self) -> dict[str, tuple[int, str]]:
        try:
            content = read_json(self.path)
            RUN.take(content, self.path, RunDirError)
            rows = content["shards"]
            return {str(path): (int(size), str(version)) for path, size, version in rows}
        except (OSError, ValueError, TypeError, KeyError, RunDirError):
            return {}


def _listed(survey: Survey) -> dict[str, tuple[int, str]]:
    return {
        stamp.path: (stamp.size, str(stamp.version))
        for shards in survey.sources
        for stamp in shards
    }


def _line(kind: str, paths: Sequence[str]) -> str:
    names = some_of(paths, MAX_NAMED)
    return f"{kind} since the last launch: {counted(len(paths), 'shard')}: {names}"
