"""`vlmpack index`: index shards ahead of training.

`Reading` is what `index`, `data lint` and `data stats` read: the shards of a recipe, of the
options, or of both.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import (
    Processes,
    ReadOptions,
    RecipeOption,
    Shards,
    columns_of,
    ignored_of,
    num_processes,
    takes,
)
from vlmpack.cli.progress import BytesBar, size_text
from vlmpack.errors import RecipeError
from vlmpack.terminal import open_console, say
from vlmpack.words import counted

if TYPE_CHECKING:
    from vlmpack.data.files.form import FormOptions
    from vlmpack.data.index.shard_index import IndexBuilder
    from vlmpack.data.shards.naming import SampleCaps
    from vlmpack.data.tools.index_shards import ShardReport
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
        paired, drawn: paths of those that the objective takes its pairs or rollouts from.
        splits: name of a split -> its paths, `train` last; all are of `train` where they are named.
    """

    shards: tuple[FoundShard, ...]
    fetcher: Fetcher
    caps: SampleCaps
    recipe: Recipe | None
    objective: str | None = None
    paired: frozenset[str] = frozenset()
    drawn: frozenset[str] = frozenset()
    splits: Mapping[str, Sequence[str]] = field(default_factory=dict)

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
        from vlmpack.build.data import encoder_settings
        from vlmpack.encode import Encoder, EncoderSettings

        recipe = self.recipe
        if model is None and recipe is not None:
            model = Path(recipe.model.path)
        if model is None:
            return None
        chosen = EncoderSettings() if recipe is None else encoder_settings(recipe)
        # Each record is measured by itself, whatever rows are made of it.
        alone: dict[str, Any] = dict.fromkeys(("pairs", "rollouts", "share_prefix"), False)
        alone["max_image_pixels"] = self.caps.max_image_pixels
        encoder = Encoder(model, replace(chosen, **{**alone, **settings}))
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
    recipe: Path | None,
    given: ReadOptions,
    *,
    objective: str | None = None,
) -> Reading:
    """Put options and recipe together.

    Args:
        shards: patterns; None or empty for all of the recipe's splits.
        recipe: a recipe or a run folder.
        given: instead of the recipe's; columns and images are of `shards`.
        objective: what shards without a recipe are for, by the names of `objective.name`.

    Raises:
        RecipeError: what is wrong with any of them.
    """
    from vlmpack.data.files.form import FormOptions
    from vlmpack.data.shards.naming import SampleCaps
    from vlmpack.recipe.objective import LEARN_PAIRS, LEARN_ROLLOUTS

    if recipe is not None and objective is not None:
        raise RecipeError(
            "--objective: --recipe has an objective.name too; expected one of the two"
        )
    ACTIVITY.enter_alone("opening the data")
    loaded, fetcher = _open_recipe(recipe, given.storage or ())
    most = given.max_image_pixels
    if loaded is not None:
        objective = loaded.objective.name
        most = most or loaded.data.max_image_pixels
    caps = SampleCaps() if most is None else SampleCaps(max_image_pixels=most)
    questions: list[FoundShard] = []
    held: dict[str, list[str]] = {}
    if not shards and (given.columns or given.images or given.ignore_columns):
        raise RecipeError(
            "--columns, --images, --ignore-columns: these are of SHARDS; a recipe says its own"
        )
    if shards:
        options = FormOptions(
            columns=columns_of(given.columns) or (None if loaded is None else loaded.data.columns),
            image_root=given.images or (None if loaded is None else loaded.data.image_root),
            ignored=ignored_of(given.ignore_columns)
            or (() if loaded is None else loaded.data.ignore_columns),
            key="SHARDS",
            knob="--columns",
        )
        found = _named(shards, options, fetcher, caps)
        held = {"train": [shard.path for shard in found]}
        if loaded is not None and objective in LEARN_PAIRS | LEARN_ROLLOUTS:
            questions = _asked_questions(loaded, fetcher)
    elif loaded is not None:
        splits = _all_splits(loaded, fetcher, caps)
        found = list({shard.path: shard for each in splits.values() for shard in each}.values())
        held = {name: [shard.path for shard in splits[name]] for name in reversed(splits)}
        trained = {shard.path for name in TRAINED for shard in splits.get(name, [])}
        questions = [shard for shard in found if shard.path not in trained]
    else:
        raise RecipeError("SHARDS: names no shard; give a path, or --recipe")
    own = {shard.path for shard in found} - {shard.path for shard in questions}
    paired, drawn = (
        frozenset(own if objective in learners else ())
        for learners in (LEARN_PAIRS, LEARN_ROLLOUTS)
    )
    return Reading(tuple(found), fetcher, caps, loaded, objective, paired, drawn, held)


def _open_recipe(recipe: Path | None, storage: Sequence[str]) -> tuple[Recipe | None, Fetcher]:
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

    shards: list[FoundShard] = []
    for name, sources in recipe.data.splits().items():
        for source in sources if name not in TRAINED else ():
            with suppress(RecipeError):
                shards += find_shards([source.path], key=f"data.{name}", fetcher=fetcher)
    return shards


def _all_splits(recipe: Recipe, fetcher: Fetcher, caps: SampleCaps) -> dict[str, list[FoundShard]]:
    """The shards and files of every split."""
    from vlmpack.data.files.form import FormOptions
    from vlmpack.data.files.source_form import find_shard_forms
    from vlmpack.storage.sources import find_shards

    splits: dict[str, list[FoundShard]] = {}
    for name, sources in recipe.data.splits().items():
        splits[name] = []
        for source in sources:
            key = f"data.{name}"
            options = FormOptions.of(recipe.data, source, key)
            several = find_shards([source.path], key=key, fetcher=fetcher)
            splits[name] += find_shard_forms(several, options, fetcher, caps)
    return splits


def _named(
    patterns: Sequence[str], options: FormOptions, fetcher: Fetcher, caps: SampleCaps
) -> list[FoundShard]:
    """The shards and files that patterns name, each pattern a source of its own."""
    from vlmpack.addresses import is_remote, record_kind
    from vlmpack.data.files.source_form import find_shard_forms
    from vlmpack.storage.sources import find_shards

    found = find_shards(patterns, key=options.key, fetcher=fetcher)
    may_ask = (record_kind(shard.path) or not is_remote(shard.path) for shard in found)
    if options.columns is None and not any(may_ask):
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
            raise RecipeError(f"--storage {key}: expected key=value, as in region=eu-central-1")
        section, _, name = key.rpartition(".")
        place = given.setdefault(section, {}) if section else given
        if not isinstance(place, dict):
            raise RecipeError(
                f"--storage {key}: {section} has a value already; give either it or its parts"
            )
        value = parse_yaml(text, "--storage")
        place[name] = text if value.problems else value.root
    try:
        storage = StorageSection.model_validate(given)
    except ValidationError as error:
        raise RecipeError(
            [
                f"--storage {'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
                for fault in error.errors()
            ]
        ) from None
    if problems := unsafe_storage(storage):
        raise RecipeError([f"{key_name(problem.path)}: {problem.message}" for problem in problems])
    return storage


AS_USUAL = ReadOptions()
BYTES_A_SECOND = 60_000_000
"""One process's rate, without a recipe: only a hint."""


@takes(ReadOptions)
def index(
    shards: Shards = None,
    recipe: RecipeOption = None,
    processes: Processes = None,
    given: ReadOptions = AS_USUAL,
) -> None:
    """Index shards, or files of records. The index says where each sample lies, its checksum and
    its image sizes, and with a recipe its length too. Only new and changed shards are read, so it
    can be stopped and run again. Exit code 1 if a shard is damaged, or no sample can be used."""
    from vlmpack.data.tools.index_shards import index_shards, parts_builder

    started = time.perf_counter()
    reading = open_reading(shards, recipe, given)
    paths, encoder = reading.paths, None
    preload: tuple[str, ...] = ()
    if reading.recipe is not None:
        from vlmpack.build.data import build_encoder
        from vlmpack.build.worker_server import WORKER_PRELOAD

        encoder, preload = build_encoder(reading.recipe), WORKER_PRELOAD
    folder = reading.index_folder(given.index_dir)
    builder = parts_builder(reading.fetcher, reading.caps, folder, encoder)
    reports: list[ShardReport] = []
    with BytesBar("indexing", len(paths)) as bar:
        count = num_processes(processes, paths, BYTES_A_SECOND)
        for report in index_shards(
            reading.shards, builder, folder, processes=count, preload=preload
        ):
            reports.append(report)
            bar.advance(report.num_bytes)
    _print_table(reports, folder, time.perf_counter() - started)
    faults = {report.path: report.fault for report in reports if report.fault is not None}
    for path in paths:
        if path in faults:
            say(f"faulty: {faults[path]}", err=True)
    samples = sum(report.samples for report in reports)
    bad = sum(sum(report.bad.values()) for report in reports)
    _print_first_bad(reports)
    if bad and bad == samples:
        say(f"no usable sample: all {counted(samples, 'sample')} of these shards are bad", err=True)
    if faults or (bad and bad == samples):
        raise typer.Exit(1)
    _write_tables(reading, reports, builder, folder)


def _write_tables(
    reading: Reading, reports: Sequence[ShardReport], builder: IndexBuilder, folder: Path
) -> None:
    """Leave the file of each split that its launch opens in place of all parts."""
    from vlmpack.data.index.lengths import ShardBuilder
    from vlmpack.data.index.parts import BuildSettings
    from vlmpack.data.index.table_file import open_table

    if not isinstance(builder, ShardBuilder):
        return
    stamps = {report.path: report.stamp for report in reports if report.stamp is not None}
    settings = BuildSettings(directory=folder)
    for name, paths in reading.splits.items():
        if paths and name in TRAINED:
            open_table([stamps[path] for path in paths], builder, settings, keep=False)


def _print_first_bad(reports: Sequence[ShardReport]) -> None:
    """The first bad sample of each class, in the order of the shards' paths."""
    first: dict[str, str] = {}
    for report in sorted(reports, key=lambda report: report.path):
        for name, (key, reason) in report.first_bad.items():
            first.setdefault(name, f"bad ({name}): sample {key!r} in {report.path}: {reason}")
    for line in first.values():
        say(line, err=True)


def _print_table(reports: Sequence[ShardReport], folder: Path, seconds: float) -> None:
    from rich.table import Table
    from rich.text import Text

    from vlmpack.data.shards.naming import count_keys, describe_keys

    read = [report for report in reports if report.was_read]
    faulty = sum(report.fault is not None for report in reports)
    samples = sum(report.samples for report in reports)
    bad: dict[str, int] = {}
    for report in reports:
        for name, count in report.bad.items():
            bad[name] = bad.get(name, 0) + count
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("shards", f"{len(reports):,} ({len(read):,} read now, {faulty:,} faulty)")
    listed = ", ".join(f"{count:,} {name}" for name, count in sorted(bad.items())) or "none"
    table.add_row("samples", f"{samples:,}")
    table.add_row("bad samples", listed)
    if unknown := count_keys(report.unknown_keys for report in reports):
        table.add_row("unknown keys", Text(describe_keys(unknown)))
    total = sum(report.num_bytes for report in reports)
    now = sum(report.num_bytes for report in read)
    table.add_row("bytes", f"{size_text(total) or 0} ({size_text(now) or 0} read now)")
    table.add_row("seconds", f"{seconds:.1f}")
    table.add_row("index", str(folder))
    open_console().print(table)
