"""What `index`, `lint` and `stats` read, and how: from a recipe, from options, or from both."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import columns_of, ignored_of
from vlmpack.errors import RecipeError

if TYPE_CHECKING:
    from vlmpack.data.files.form import FormOptions
    from vlmpack.data.shards.naming import SampleCaps
    from vlmpack.encode import Encoder
    from vlmpack.recipe import Recipe
    from vlmpack.recipe.data import StorageSection
    from vlmpack.storage.fetch import Fetcher
    from vlmpack.storage.sources import FoundShard

TRAINED = ("train", "validation")
"""Splits whose records have the objective's form; the others are questions to a model."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How shards are read.

    Args:
        shards: in order.
        fetcher: reads them.
        caps: limits of one sample.
        recipe: where one was given.
        objective: `objective.name` of the recipe or the option; None where neither is given.
        paired: paths of those that the objective takes its pairs from.
    """

    shards: tuple[FoundShard, ...]
    fetcher: Fetcher
    caps: SampleCaps
    recipe: Recipe | None
    objective: str | None = None
    paired: frozenset[str] = frozenset()

    @property
    def paths(self) -> list[str]:
        """The shards' paths and addresses."""
        return [shard.path for shard in self.shards]

    def encoder(self, model: Path | None, **settings: Any) -> Encoder | None:
        """The encoder of a model folder, as the recipe has it where there is one. It is loaded, so
        that a wrong folder is named before any shard is read.

        Args:
            model: the recipe's where it is None; without either there is no encoder.
            settings: of EncoderSettings, in place of the recipe's.
        """
        from vlmpack.build.run import encoder_date
        from vlmpack.encode import Encoder, EncoderSettings

        recipe = self.recipe
        if model is None and recipe is not None:
            model = Path(recipe.model.path)
        if model is None:
            return None
        found = EncoderSettings(max_image_pixels=self.caps.max_image_pixels)
        if recipe is not None:
            found = replace(
                found,
                budget=recipe.images,
                date=encoder_date(recipe),
                learn=recipe.data.learn,
                chat_template_kwargs=recipe.data.chat_template_kwargs,
                special_tokens=recipe.data.special_tokens,
            )
        encoder = Encoder(model, replace(found, **settings))
        encoder.load()
        return encoder

    def index_folder(self, given: Path | None) -> Path:
        """Where the index is kept: as an option says, else the recipe's folder, else the cache."""
        from vlmpack.storage.access import default_cache_dir

        if given is not None:
            return given
        if self.recipe is not None and self.recipe.data.index_dir is not None:
            return Path(self.recipe.data.index_dir)
        return default_cache_dir()


def open_reading(
    shards: Sequence[str] | None,
    *,
    recipe: Path | None,
    storage: Sequence[str] | None,
    max_image_pixels: int | None,
    objective: str | None = None,
    columns: str | None = None,
    image_root: str | None = None,
    ignore_columns: str | None = None,
) -> Reading:
    """Put options and recipe together.

    Args:
        shards: patterns; None or empty for all of the recipe's splits.
        recipe: a recipe or a run folder.
        storage: `key=value` of `data.storage`.
        max_image_pixels: instead of the recipe's.
        objective: what shards without a recipe are for, by the names of `objective.name`.
        columns, image_root, ignore_columns: of SHARDS, instead of the recipe's in `data`.

    Raises:
        RecipeError: what is wrong with any of them.
    """
    from vlmpack.data.files.form import FormOptions
    from vlmpack.data.shards.naming import SampleCaps
    from vlmpack.recipe.objective import LEARN_PAIRS

    if recipe is not None and objective is not None:
        raise RecipeError(
            ["--objective: --recipe has an objective.name of its own; expected one of the two"]
        )
    ACTIVITY.enter_alone("opening the data")
    loaded, fetcher = _opened(recipe, storage or ())
    if loaded is not None:
        objective = loaded.objective.name
        max_image_pixels = max_image_pixels or loaded.data.max_image_pixels
    caps = SampleCaps()
    if max_image_pixels is not None:
        caps = SampleCaps(max_image_pixels=max_image_pixels)
    asked: list[FoundShard] = []
    if not shards and (columns or image_root or ignore_columns):
        raise RecipeError(
            ["--columns, --images, --ignore-columns: these are of SHARDS; a recipe says its own"]
        )
    if shards:
        options = FormOptions(
            columns=columns_of(columns) or (None if loaded is None else loaded.data.columns),
            image_root=image_root or (None if loaded is None else loaded.data.image_root),
            ignored=ignored_of(ignore_columns)
            or (() if loaded is None else loaded.data.ignore_columns),
            key="SHARDS",
            knob="--columns",
        )
        found = _named(shards, options, fetcher, caps)
        if loaded is not None and objective in LEARN_PAIRS:
            asked = _asked_questions(loaded, fetcher)
    elif loaded is not None:
        splits = _all_splits(loaded, fetcher, caps)
        found = list({shard.path: shard for each in splits.values() for shard in each}.values())
        trained = {shard.path for name in TRAINED for shard in splits.get(name, [])}
        asked = [shard for shard in found if shard.path not in trained]
    else:
        raise RecipeError(["SHARDS: names no shard; give a path, or --recipe"])
    paired = frozenset[str]()
    if objective in LEARN_PAIRS:
        paired = frozenset(shard.path for shard in found) - {shard.path for shard in asked}
    return Reading(tuple(found), fetcher, caps, loaded, objective, paired)


def _opened(recipe: Path | None, storage: Sequence[str]) -> tuple[Recipe | None, Fetcher]:
    """The recipe, where one is given, and what reads its shards or those that are named."""
    if recipe is None:
        from vlmpack.storage import RoutingFetcher

        return None, RoutingFetcher(_storage(storage))
    from vlmpack.build.data import build_fetcher
    from vlmpack.build.look import recipe_file
    from vlmpack.recipe import load_recipe

    loaded = load_recipe(recipe_file(recipe), [f"data.storage.{item}" for item in storage])
    return loaded, build_fetcher(loaded)


def _asked_questions(recipe: Recipe, fetcher: Fetcher) -> list[FoundShard]:
    """Shards of the recipe whose samples are no pairs: those of the splits that are not trained.
    A split that cannot be listed has none of the shards that were named."""
    from vlmpack.storage.sources import find_shards

    found: list[FoundShard] = []
    for name, sources in recipe.data.splits().items():
        for source in sources if name not in TRAINED else ():
            with suppress(RecipeError):
                found += find_shards([source.path], key=f"data.{name}", fetcher=fetcher)
    return found


def _all_splits(recipe: Recipe, fetcher: Fetcher, caps: SampleCaps) -> dict[str, list[FoundShard]]:
    """The shards and files of every split."""
    from vlmpack.data.files.form import FormOptions
    from vlmpack.data.files.source_form import find_shard_forms
    from vlmpack.storage.sources import find_shards

    found: dict[str, list[FoundShard]] = {}
    for name, sources in recipe.data.splits().items():
        found[name] = []
        for source in sources:
            key = f"data.{name}"
            options = FormOptions.of(recipe.data, source, key)
            several = find_shards([source.path], key=key, fetcher=fetcher)
            found[name] += find_shard_forms(several, options, fetcher, caps)
    return found


def _named(
    patterns: Sequence[str], options: FormOptions, fetcher: Fetcher, caps: SampleCaps
) -> list[FoundShard]:
    """The shards and files that patterns name, each pattern a source of its own."""
    from vlmpack.addresses import is_remote, record_kind
    from vlmpack.data.files.source_form import find_shard_forms
    from vlmpack.storage.sources import find_shards

    found = find_shards(patterns, key=options.key, fetcher=fetcher)
    asked = (record_kind(shard.path) or not is_remote(shard.path) for shard in found)
    if options.columns is None and not any(asked):
        return found
    each = (find_shards([pattern], key=options.key, fetcher=fetcher) for pattern in patterns)
    return [shard for some in each for shard in find_shard_forms(some, options, fetcher, caps)]


def _storage(items: Sequence[str]) -> StorageSection:
    """`data.storage` from `key=value` texts. Values are not repeated in messages."""
    from pydantic import ValidationError

    from vlmpack.recipe.data import StorageSection, unsafe_storage
    from vlmpack.recipe.problems import key_name
    from vlmpack.recipe.yaml_nodes import parse_yaml

    given: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals:
            raise RecipeError([f"--storage {key}: expected key=value, as in region=eu-central-1"])
        section, _, name = key.rpartition(".")
        place = given.setdefault(section, {}) if section else given
        if not isinstance(place, dict):
            raise RecipeError(
                [f"--storage {key}: {section} has a value already; give either it or its parts"]
            )
        value = parse_yaml(text, "--storage")
        place[name] = text if value.problems else value.root
    try:
        found = StorageSection.model_validate(given)
    except ValidationError as error:
        raise RecipeError(
            [
                f"--storage {'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
                for fault in error.errors()
            ]
        ) from None
    if problems := unsafe_storage(found):
        raise RecipeError([f"{key_name(problem.path)}: {problem.message}" for problem in problems])
    return found
