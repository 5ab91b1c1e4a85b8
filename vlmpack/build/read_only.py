"""A recipe's training split, opened again to look at: one process, no model, nothing written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from vlmpack.build.data import build_encoder, data_spec, open_split
from vlmpack.build.run_length import total_steps
from vlmpack.data.index.parts import Progress
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.batches import PlannedBatch
from vlmpack.data.plan.state import DataState, identity_differences
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.errors import VlmpackError
from vlmpack.recipe import Recipe, load_recipe
from vlmpack.training.record import read_launches
from vlmpack.training.record_history import standing_batches
from vlmpack.training.run_dir import RunDir


def recipe_file(path: Path) -> Path:
    """The recipe itself, or the resolved one of a run folder.

    Raises:
        VlmpackError: neither is there.
    """
    recipe = RunDir(path).recipe if path.is_dir() else path
    if not recipe.is_file():
        raise VlmpackError(f"{path}: expected a recipe, or a run folder that holds recipe.yaml")
    return recipe


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe, or that of a run folder with the shuffle that the run settled on.

    Args:
        path: a recipe, or a run folder.
        overrides: `key=value`.

    Raises:
        VlmpackError: what is wrong with the recipe.
    """
    recipe = load_recipe(recipe_file(path), overrides)
    begun = last_state(run_folder(path))
    shuffle = None if begun is None else begun.identity.get("data.shuffle")
    if recipe.data.shuffle == "auto" and isinstance(shuffle, str):
        recipe = load_recipe(recipe, {"data.shuffle": shuffle})
    return recipe


def run_folder(path: Path) -> RunDir | None:
    """The run folder at a path; None where it is a recipe."""
    return RunDir(path) if path.is_dir() else None


def last_state(run_dir: RunDir | None) -> DataState | None:
    """What the newest launch of a run began with; None where there is no run or launch."""
    launches = read_launches(run_dir.samples)[-1:] if run_dir is not None else []
    return next((DataState.from_json(launch.state) for launch in launches), None)


def open_train(path: Path, overrides: Sequence[str] = ()) -> tuple[TrainData, Encoder]:
    """Open the training data of a recipe or a run folder."""
    return open_recipe(read_recipe(path, overrides), begun=last_state(run_folder(path)))


def open_recipe(
    recipe: Recipe, progress: Progress | None = None, *, begun: DataState | None = None
) -> tuple[TrainData, Encoder]:
    """`data.train` as a run would open it, and its encoder.

    Args:
        progress: told about index and lengths parts.
        begun: what the run's newest launch began with: rows stay as it planned them where the
            recipe leaves that open. Other data than its are opened all the same.

    Raises:
        VlmpackError: what is wrong with model folder or data.
    """
    encoder = build_encoder(recipe)
    data = data_spec(recipe, encoder, Ranks(), planned=begun)
    train = open_split(data, "data.train", Ledger(None), progress=progress)
    assert train is not None  # data.train is required
    return train, encoder


def planned_batch(train: TrainData, number: int, run_dir: RunDir | None) -> PlannedBatch:
    """The global batch of that number, counted from 0 since the run's start.

    Args:
        run_dir: of the run, if there is one: its launches say what the batch was planned from.

    Raises:
        VlmpackError: the run planned that batch from other data or settings than there are now.
    """
    begin = train.start()
    for launch in read_launches(run_dir.samples) if run_dir is not None else ():
        if launch.start <= number:  # the newest of them has replaced what the others planned for it
            begin = DataState.from_json(launch.state)
    if lines := identity_differences(begin.identity, train.identity):
        raise VlmpackError(
            f"--batch {number}: from batch {begin.batches} on, the run planned from other data or "
            f"settings than there are now: {'; '.join(lines)}. Restore these to see it, or choose "
            "a batch that was planned from what there is now"
        )
    return next(islice(train.planned(begin, None), number - begin.batches, None))


def check_batch(recipe: Recipe, train: TrainData, number: int, run_dir: RunDir | None) -> None:
    """Refuses a batch behind the run's last one.

    Args:
        number: counted from 0.
        run_dir: of the run, if there is one.

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
