"""A look at a recipe or a run folder: one process, no model, nothing written.

Before a launch it finds missing places, and whether the run can resume. Later it opens the training
split again, with the batches that were planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from vlmpack.addresses import is_remote, unset_references
from vlmpack.build.data import build_encoder, data_spec, keep_alignment, open_split
from vlmpack.build.run import total_steps
from vlmpack.data.index.parts import Progress
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.batches import PlannedBatch
from vlmpack.data.plan.state import DataState, alignment_words, identity_differences
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.errors import CheckpointError, RecipeError, VlmpackError
from vlmpack.recipe import Recipe, load_recipe
from vlmpack.recipe.data_rules import read_folders
from vlmpack.recipe.derived import plan_alignment
from vlmpack.storage.sources import expand_shards
from vlmpack.training.checkpoint.folders import saved_data_state
from vlmpack.training.record import read_launches, standing_batches
from vlmpack.training.run_dir import RunDir
from vlmpack.words import meant_path


def recipe_file(path: Path) -> Path:
    """The recipe itself, or the resolved one of a run folder.

    Raises:
        VlmpackError: the file does not exist.
    """
    recipe = RunDir(path).recipe if path.is_dir() else path
    if not recipe.is_file():
        raise VlmpackError(f"{path}: expected a recipe, or a run folder that holds recipe.yaml")
    return recipe


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe, or that of a run folder with the run's own shuffle.

    Raises:
        VlmpackError: what is wrong with the recipe.
    """
    recipe = load_recipe(recipe_file(path), overrides)
    state = last_state(run_folder(path))
    shuffle = None if state is None else state.identity.get("data.shuffle")
    if recipe.data.shuffle == "auto" and isinstance(shuffle, str):
        recipe = load_recipe(recipe, {"data.shuffle": shuffle})
    return recipe


def missing_places(recipe: Recipe) -> list[str]:
    """A line for each missing place, with a similar name that exists; stores are not asked.

    It is no error, since a recipe may be checked on another machine than it runs on.
    """
    missing: list[str] = []
    for split, sources in recipe.data.splits().items():
        paths = [source.path for source in sources]
        here = [path for path in paths if not is_remote(path) and not unset_references(path)]
        try:
            if here:
                expand_shards(here, key=f"data.{split}")
        except RecipeError as error:
            missing += error.problems
    for key, path in read_folders(recipe):
        if path is not None and not is_remote(path) and not Path(path).is_dir():
            missing.append(f"{key}: {path!r} is no folder (from {Path.cwd()}){meant_path(path)}")
    return missing


def resume_note(recipe: Recipe) -> str | None:
    """Why a launch would refuse to resume: the recipe's layout cannot cut the run's alignment.

    None if there is no such run, or it can resume.
    """
    packing, checkpoint = recipe.packing, recipe.checkpoint
    cuts_rows = packing.facts.plans_rows and not packing.facts.reads_packs
    refuses = checkpoint.on_data_change == "refuse" and checkpoint.resume != "never"
    if not cuts_rows or not refuses:
        return None
    text = saved_data_state(RunDir(Path(recipe.run_dir)).checkpoints)
    try:
        saved = None if text is None else DataState.from_json(text)
    except CheckpointError:  # a launch says so
        return None
    planned = None if saved is None else saved.identity.get("packing.alignment")
    alignment = plan_alignment(keep_alignment(recipe, saved).packing, recipe.parallelism)
    if not isinstance(planned, int) or planned == alignment:
        return None
    return (
        f"run_dir: {recipe.run_dir} holds a run that a launch here would not go on with; "
        f"{alignment_words(planned, alignment)}"
    )


def run_folder(path: Path) -> RunDir | None:
    """The run folder at a path; None where it is a recipe."""
    return RunDir(path) if path.is_dir() else None


def last_state(run_dir: RunDir | None) -> DataState | None:
    """What the newest launch of a run began with; None where there is no run or launch."""
    launches = read_launches(run_dir.samples)[-1:] if run_dir is not None else []
    return next((DataState.from_json(launch.state) for launch in launches), None)


def open_train(path: Path, overrides: Sequence[str] = ()) -> tuple[TrainData, Encoder]:
    return open_recipe(read_recipe(path, overrides), state=last_state(run_folder(path)))


def open_recipe(
    recipe: Recipe, progress: Progress | None = None, *, state: DataState | None = None
) -> tuple[TrainData, Encoder]:
    """`data.train` as a run would open it, and its encoder.

    Args:
        state: what the run's newest launch began with: rows stay as it planned them where the
            recipe leaves that open. Other data than its are opened all the same.

    Raises:
        VlmpackError: what is wrong with model folder or data.
    """
    encoder = build_encoder(recipe)
    data = data_spec(recipe, encoder, Ranks(), planned=state)
    train = open_split(data, "data.train", Ledger(None), progress=progress)
    assert train is not None  # data.train is required
    return train, encoder


def planned_batch(train: TrainData, number: int, run_dir: RunDir | None) -> PlannedBatch:
    """A global batch of the plan, counted from 0 since the run's start.

    Args:
        run_dir: its launches say what the batch was planned from; None without a run.

    Raises:
        VlmpackError: the run planned that batch from other data or settings.
    """
    start = train.start()
    for launch in read_launches(run_dir.samples) if run_dir is not None else ():
        if launch.start <= number:  # the newest of them has replaced what the others planned for it
            start = DataState.from_json(launch.state)
    if lines := identity_differences(start.identity, train.identity):
        raise VlmpackError(
            f"--batch {number}: from batch {start.batches} on, the run planned from other data or "
            f"settings than there are now: {'; '.join(lines)}. Restore these to see it, or choose "
            "a batch that was planned from what there is now"
        )
    return next(islice(train.planned(start, None), number - start.batches, None))


def check_batch(recipe: Recipe, train: TrainData, number: int, run_dir: RunDir | None) -> None:
    """Refuse a batch, counted from 0, that lies beyond the run's last one.

    Raises:
        VlmpackError: with the number of the last batch.
    """
    total = total_steps(recipe.training, train, last_state(run_dir))
    if number >= total:
        epochs = recipe.training.num_epochs
        by = f"max_steps {total}" if epochs is None else f"num_epochs {epochs}"
        raise VlmpackError(
            f"--batch {number}: the run takes {total} steps (training.{by}), so its last global "
            f"batch is {total - 1}, counted from 0"
        )


def trained_in(run_dir: RunDir, key: str) -> Iterator[tuple[int, int, str]]:
    """(global batch, epoch, shard) of every time that a run trained a sample with this key."""
    for record in standing_batches(run_dir.samples, read_launches(run_dir.samples)):
        for step in record.steps.values():
            for samples in step.bins:
                yield from ((step.batch, step.epoch, n.shard) for n in samples if n.key == key)
