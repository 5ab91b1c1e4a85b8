"""Where one rank of a run works, and what is decided before anything is built."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vlmpack.activity import ACTIVITY, IDLE
from vlmpack.build.engine import with_adapter_layers
from vlmpack.build.run import resolve_date
from vlmpack.data.packs.manifest import other_packs
from vlmpack.distributed import Ranks, process_group, world_size_from_environment
from vlmpack.distributed.pulse import Pulse, has_ended, lost_connection, pulse_store, words_of_lost
from vlmpack.errors import RecipeError, VlmpackError
from vlmpack.handed_over import left_behind, words_of
from vlmpack.recipe import (
    Recipe,
    check_world,
    dump_recipe,
    identity,
    identity_differences,
    identity_hint,
    identity_notes,
    load_recipe,
    notes,
)
from vlmpack.terminal import say_printable
from vlmpack.training.run_dir import RunDir
from vlmpack.training.stop import StopFlag, stop_on_sigterm
from vlmpack.training.trackers import require_trackers
from vlmpack.watchdog import Watchdog, process_name
from vlmpack.whole_file import write_atomically
from vlmpack.words import counted

logger = logging.getLogger("vlmpack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank works."""

    ranks: Ranks
    run_dir: RunDir
    stop: StopFlag


@contextmanager
def joined(recipe: Recipe) -> Iterator[Place]:
    """Join the other ranks and lock the run's folder; watched for silence, and SIGTERM is a flag.

    Raises:
        RecipeError: the recipe cannot run on this number of processes.
        RunDirError: on every rank, if the folder cannot be written or is in use.
    """
    check_world(recipe, world_size=world_size_from_environment())
    run_dir = RunDir(Path(recipe.run_dir))
    with (
        stop_on_sigterm() as listen,  # behind all that an error closes on its way out
        watched_ranks(recipe, run_dir.path) as ranks,
        run_dir.entered(ranks),
    ):
        yield Place(ranks=ranks, run_dir=run_dir, stop=listen())


@contextmanager
def watched_ranks(recipe: Recipe, folder: Path | None = None) -> Iterator[Ranks]:
    """Join the other ranks of a recipe; watched for silence."""
    split = recipe.parallelism
    with (
        process_group(
            tensor=split.tensor,
            context=split.context,
            pipeline=split.pipeline,
            sharded=split.sharding == "fsdp",
            timeout_seconds=split.timeout_seconds,
        ) as ranks,
        watched(ranks, recipe.logging.watch_seconds, folder),
    ):
        yield ranks


@contextmanager
def watched(ranks: Ranks, seconds: float, folder: Path | None = None) -> Iterator[None]:
    """Watch for silence of this process that lasts longer than `seconds`.

    Args:
        folder: the run's, where processes note the program's code that they call.

    Raises:
        VlmpackError: another process is gone; replaces torch's error.
    """
    ACTIVITY.step, ACTIVITY.samples = 0, ()
    ACTIVITY.enter("launch")
    ACTIVITY.spent.clear()
    who = process_name(ranks.rank, ranks.world_size)
    with ExitStack() as stack:
        watchdog = Watchdog(ACTIVITY, seconds, who=who, say=_say_as_error, last_resort=True)
        store = pulse_store(ranks) if ranks.world_size > 1 else None
        ended: Callable[[], list[str]] = list
        if store is not None:
            rank, size = ranks.rank, ranks.world_size
            pulse = Pulse(ACTIVITY, rank=rank, world_size=size, seconds=seconds, store=store)
            stack.enter_context(pulse)
            watchdog.others, watchdog.speaks = pulse.lines, pulse.speaks
            ended = pulse.ended
        stack.enter_context(watchdog)
        try:
            yield
        except RuntimeError as error:
            words = lost_connection(error)
            if words is None:
                raise
            step, phase, size = ACTIVITY.step, ACTIVITY.phase, ranks.world_size
            text = words_of_lost(
                words, step=step, phase=phase, size=size, ended=[*ended(), *lost_inside(folder)]
            )
            raise VlmpackError(text) from error
        finally:
            ACTIVITY.enter(IDLE)


def lost_inside(folder: Path | None) -> list[str]:
    """Lost processes of this machine that ended inside code of the program.

    A connection closes before the kernel says that its process has ended. This waits for that, at
    most a second.
    """
    entries = [] if folder is None else left_behind(folder)
    here = [entry for entry in entries if entry["host"] == socket.gethostname()]
    end = time.monotonic() + 1
    while True:
        lost = [entry for entry in here if has_ended(entry["pid"])]
        if lost or not here or time.monotonic() > end:
            return [f"process {entry['pid']} {words_of(entry)}" for entry in lost]
        time.sleep(0.02)


def _say_as_error(text: str) -> None:
    # Other ranks than the first show errors alone; one of them speaks when the first cannot.
    say_printable(text, logging.ERROR)


def prepare(recipe: Recipe, place: Place) -> Recipe | None:
    """The recipe with the run's date and the layers of its adapters, after it is checked and
    written to the folder. Collective.

    None if the run is at its end; the log then says how to continue it.

    Raises:
        RunIdentityError: the folder belongs to another run; lists every difference.
        CapabilityError: the package of a tracker is missing.
        ModelError: `model.adapter` cannot be read.
    """
    recipe = with_adapter_layers(resolve_date(recipe, place.ranks, place.run_dir))
    at_end = place.ranks.on_main(lambda: _record(recipe, place))
    if at_end is None:
        return recipe
    logger.info("%s, or delete %s to train again", at_end, place.run_dir.path)
    return None


def _record(recipe: Recipe, place: Place) -> str | None:
    """Write the recipe into the run's folder; returns what `_at_end` says.

    A run at its end is not made longer by a recipe, and its trackers are not checked.
    """
    run_dir, current = place.run_dir, identity(recipe)
    recorded, at_end = run_dir.recorded_identity() or current, _at_end(run_dir, recipe)
    for note in (
        *notes(recipe, place.ranks.world_size),
        *(identity_notes(recorded, current) if at_end is None else ()),
        *_packs_notes(run_dir.recipe, recipe.packing.path),
    ):
        logger.warning("note: %s", note)
    new_era = recipe.checkpoint.on_data_change != "refuse"
    run_dir.check_identity(
        current,
        partial(identity_differences, new_era=new_era),
        hint=identity_hint(recorded, current),
        record=at_end is None,
    )
    if at_end is None or recorded == current:
        write_atomically(run_dir.recipe, dump_recipe(recipe))
    if at_end is None:
        run_dir.new_id()
        require_trackers(recipe.logging)
    return at_end


def _at_end(run_dir: RunDir, recipe: Recipe) -> str | None:
    """Why this recipe has nothing left to train, and how to continue the run; else None."""
    figures, section = run_dir.figures(), recipe.evaluation
    if not figures.get("stopped_early"):
        knob = "max_steps" if recipe.training.num_epochs is None else "num_epochs"
        by, steps = figures.get("stopped_by"), figures.get("steps")
        ended = f"{by} ended this run at step {steps}" if by else "this run is finished"
        goes_on = f"{ended}; a higher training.{knob} goes on with it"
        return goes_on if figures.get("identity") == identity(recipe) else None
    best = figures.get("best") or {}
    waited = best.get("waited", 0)
    if section.best != best.get("figure") or section.patience is None or section.patience > waited:
        return None
    return (
        f"this run stopped early at step {figures.get('steps')}, after "
        f"{counted(waited, 'evaluation')} without a better {section.best}; an evaluation.patience "
        f"above {waited} goes on with it"
    )


def _packs_notes(recorded: Path, now: str | None) -> list[str]:
    """Notes on a run that continues with other packs."""
    if now is None or not recorded.is_file():
        return []
    try:
        before = load_recipe(recorded).packing.path
    except RecipeError:  # of another version of vlmpack
        return []
    if before is None:
        return []
    differ = other_packs(Path(before), Path(now))
    return [] if differ is None else [f"packing.path: {differ}"]
