"""The one date of a run whose chat template writes the day; see `vlmpack.encode.settings`."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path

from vlmpack.data.packs.manifest import UNFINISHED, read_manifest
from vlmpack.distributed import Ranks
from vlmpack.encode.settings import reads_clock, today
from vlmpack.errors import PacksError
from vlmpack.recipe import Recipe, load_recipe
from vlmpack.training.run_dir import RunDir
from vlmpack.whole_file import read_json

logger = logging.getLogger("vlmpack")


def settle_date(recipe: Recipe, ranks: Ranks, run_dir: RunDir | None = None) -> Recipe:
    """The recipe with the date that all ranks, launches and workers of a run write. Collective.

    The recipe's own, else that of its packs, else that of the run's first launch, else the main
    rank's clock's. For a template that does not read the clock there is none.

    Args:
        run_dir: of the run, if it has one.
    """

    def settled() -> str | None:
        asked = recipe.data.date
        day = date_of(recipe, run_dir)
        if day is None and asked is not None:
            logger.warning(
                "note: data.date %s changes nothing: the chat template of %s does not write the "
                "date",
                asked,
                recipe.model.path,
            )
        elif day is not None:
            logger.info(
                "%-14s %s in every conversation: the chat template writes the day (data.date)",
                "date",
                day,
            )
        return day

    return with_date(recipe, ranks.on_main(settled))


def date_of(recipe: Recipe, run_dir: RunDir | None = None) -> str | None:
    """That date; None for a template that does not read the clock."""
    day = recipe.data.date or _packs(recipe) or _recorded(run_dir) or today().isoformat()
    return day if reads_clock(Path(recipe.model.path)) else None


def encoder_date(recipe: Recipe) -> datetime.date | None:
    """The date for the recipe's encoder."""
    day = date_of(recipe)
    return None if day is None else datetime.date.fromisoformat(day)


def with_date(recipe: Recipe, day: str | None) -> Recipe:
    """The recipe with another date."""
    return recipe if day == recipe.data.date else load_recipe(recipe, {"data.date": day})


def _packs(recipe: Recipe) -> str | None:
    """That of the packs which the recipe trains on."""
    if not recipe.packing.facts.reads_packs or recipe.packing.path is None:
        return None
    try:
        return read_manifest(Path(recipe.packing.path)).encoder.get("date")
    except PacksError:  # whoever opens them says what is wrong
        return None


def begun_packs(folder: Path) -> str | None:
    """That of packs which were begun and are to go on."""
    try:
        content = read_json(folder / UNFINISHED)
        day: str | None = content["encoder"].get("date")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return day


def _recorded(run_dir: RunDir | None) -> str | None:
    recorded = run_dir.recorded_identity() if run_dir is not None else None
    day = (recorded or {}).get("data.date")
    return day if isinstance(day, str) else None
