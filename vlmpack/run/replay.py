"""A step that was not finite, computed again: what of it comes again, and where it begins.

    the newest checkpoint before the step -> training up to it, as the run did -> the step
    comes again: each micro-batch -> each of its samples alone -> in float32

Nothing of the run is changed. What a launch writes goes into a folder beside the dump, which is
removed afterwards.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vlmpack.build.data import build_encoder, data_spec
from vlmpack.build.engine import build_engine, engine_spec
from vlmpack.build.extensions import NO_EXTENSIONS, Extensions, agree, missing
from vlmpack.build.look import read_recipe
from vlmpack.build.objective import objective_spec
from vlmpack.build.run import run_spec
from vlmpack.data.loading.loader import GlobalStep
from vlmpack.data.plan.state import DataState
from vlmpack.errors import CapabilityError, RecipeError, VlmpackError
from vlmpack.file_format import DUMP
from vlmpack.packing import Batch
from vlmpack.packing.digest import digest_of
from vlmpack.proof.stock import first_non_finite
from vlmpack.recipe import Recipe, load_recipe
from vlmpack.run.launch import open_run
from vlmpack.run.opening import ResumePoint
from vlmpack.run.place import Place, joined, prepare
from vlmpack.run.session import Session
from vlmpack.training.checkpoint import (
    data_state_of,
    find_damage,
    list_checkpoints,
    load_checkpoint,
    step_folder,
)
from vlmpack.training.metrics import read_rows
from vlmpack.training.objective import Counts
from vlmpack.training.run_dir import RunDir
from vlmpack.training.step import Stepper
from vlmpack.whole_file import read_json
from vlmpack.words import some_of

QUIET = {
    "data.num_workers": 0,
    "logging.trackers": [],
    "logging.progress": "none",
    "training.verify": False,
    "training.sentinel_interval": None,
    "evaluation.generate": False,
    "evaluation.generate_interval_steps": None,
    "evaluation.metrics": ["exact_match"],
    "evaluation.best": None,
    "evaluation.patience": None,
    "export.weights": "last",
    "checkpoint.resume": "auto",
    "export.enabled": False,
}
"""What a launch does besides training, left out."""


@dataclass(slots=True, kw_only=True)
class Replay:
    """What was found.

    Args:
        step: of the dump, counted from 1.
        started: the step of the checkpoint that was taken; 0 for the model folder.
        trained: steps from there to the dump's that were trained again.
        left_out: those that the run trained and `at_checkpoint` does not.
        loss_off: the largest relative difference of their losses from those of the run.
        same_rows: whether the step's rows have the digests of the dump's.
        comes_again: whether the step is not finite here.
        rows: the micro-batches that are not finite by themselves, each with its samples.
        alone: the samples that are not finite in a row of their own.
        first: the first tensor that is not finite, in words, with `forward` or `backward`.
        in_float32: whether it is not finite in float32 too, or why that is not known.
    """

    dump: str
    step: int
    started: int
    trained: int = 0
    left_out: int = 0
    loss_off: float = 0.0
    same_rows: bool = True
    repeated_in_place: bool
    dumped_on: str
    comes_again: bool = False
    rows: list[list[str]] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    first: str | None = None
    in_float32: bool | str | None = None

    def as_json(self) -> dict[str, Any]:
        return {"outcome": self.outcome, **asdict(self)}

    @property
    def outcome(self) -> str:
        """`comes again`, `comes again packed`, `comes again as a sum` or `does not come again`."""
        if not self.comes_again:
            return "does not come again"
        if self.alone:
            return "comes again"
        return "comes again packed" if self.rows else "comes again as a sum"

    def words(self) -> list[str]:
        """The lines that a user reads."""
        how = f"trained on from step {self.started}, losses within {self.loss_off:.1e} of the run's"
        if self.left_out:
            how = f"with the weights of step {self.started}, which are older than the step's"
        lines = [f"step {self.step} {self.outcome}: {how}"]
        if not self.same_rows:
            lines.append("its rows are not those of the dump: data, processor or layout changed")
        if self.comes_again:
            return [*lines, *self._where()]
        why = "on the same device it came twice, so that device may be at fault"
        if not self.repeated_in_place:
            why = "it did not come twice where it was met either, so it was transient"
        return [*lines, f"that is no cause yet; {why} (dumped on {self.dumped_on})"]

    def _where(self) -> Iterator[str]:
        if self.alone:
            yield f"alone too: {some_of(self.alone, 5)}"
        elif self.rows:
            yield f"not one sample alone, but the rows of {'; '.join(map(', '.join, self.rows))}"
        else:
            yield "no micro-batch alone: their gradients overflow where they are added up"
        if self.first is not None:
            direction = "backward" if self.first.startswith("the gradient") else "forward"
            yield f"first: {self.first}, in the {direction} pass"
        if isinstance(self.in_float32, str):
            yield f"in float32: {self.in_float32}"
        elif self.in_float32 is not None:
            yield f"in float32: {'not finite either' if self.in_float32 else 'finite'}"


def recipe_of(dump: Path, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Recipe:
    """The recipe of a dump's run, with a folder of its own and nothing besides training.

    Args:
        overrides: as `load_recipe` takes them. With `run_dir` the folder lies in that one, and not
            beside the dump.

    Raises:
        VlmpackError: the dump lies in no run folder, or the recipe has problems.
    """
    run = RunDir(dump.parent.parent)
    if not run.recipe.is_file():
        found = f"{run.path} holds no recipe.yaml" if dump.is_file() else "no such file"
        raise VlmpackError(f"{dump}: {found}; expected a dump in the dumps/ of its run")
    own = load_recipe(read_recipe(run.path))
    recipe = load_recipe(own, overrides)
    scratch = dump.with_suffix(".replay")
    if recipe.run_dir != own.run_dir:
        scratch = Path(recipe.run_dir) / scratch.name
    return load_recipe(recipe, {**QUIET, "run_dir": str(scratch)})


def replay(
    dump: Path,
    recipe: Recipe,
    extensions: Extensions = NO_EXTENSIONS,
    *,
    at_checkpoint: bool = False,
) -> Replay:
    """Compute the step of a dump again. Collective under torchrun.

    Args:
        recipe: `recipe_of` the dump.
        at_checkpoint: take the step with the checkpoint's older weights, and train nothing.

    Raises:
        VlmpackError: no dump, or a step on the way that differs from the run's.
    """
    content, run = read_dump(dump), RunDir(dump.parent.parent)
    if problems := missing(recipe, extensions, call="vlmpack.replay(dump"):
        raise RecipeError(problems)
    is_main = False
    try:
        with joined(recipe) as place:
            is_main = place.ranks.is_main
            extensions = agree(extensions, place.ranks)
            place.ranks.on_main(lambda: _clear(place.run_dir, run))
            dated = prepare(recipe, place)
            assert dated is not None  # a folder without a result
            point = place.ranks.on_main(lambda: checkpoint_before(run, content["step"]))
            with closing(_session(dated, place, extensions, point)) as session:
                replayer = _Replayer(session, run, dump, content, point.folder)
                return replayer.run(at_checkpoint=at_checkpoint)
    finally:
        if is_main:
            shutil.rmtree(recipe.run_dir, ignore_errors=True)


def read_dump(path: Path) -> dict[str, Any]:
    """A dump as `vlmpack.training.bad_steps` writes it.

    Raises:
        VlmpackError: it is none, or of another format.
    """
    try:
        content: dict[str, Any] = read_json(path)
    except (OSError, ValueError) as error:
        raise VlmpackError(
            f"{path}: no dump of a step ({error}); expected a file of the run's dumps/"
        ) from error
    DUMP.take(content, path, VlmpackError)
    if lacking := sorted({"step", "repeats", "device", "micro_batches"} - content.keys()):
        raise VlmpackError(f"{path}: no dump of a step, it lacks {', '.join(lacking)}")
    return content


def checkpoint_before(run: RunDir, step: int) -> ResumePoint:
    """The newest checkpoint before a step that verifies; none for the model folder."""
    before = step_folder(run.checkpoints, step).name
    for folder in reversed(list_checkpoints(run.checkpoints)):
        if folder.name < before and find_damage(folder) is None:
            text = data_state_of(folder)
            return ResumePoint(folder, None if text is None else DataState.from_json(text))
    return ResumePoint()


def _clear(scratch: RunDir, run: RunDir) -> None:
    """Remove what an earlier replay has left, and take over the list of bad samples, and the
    reference's numbers, of which damaged ones are made again."""
    for path in scratch.path.iterdir():
        if path == scratch.lock:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if run.data_errors.is_file():
        shutil.copy(run.data_errors, scratch.data_errors)
    if run.reference.is_dir():
        shutil.copytree(run.reference, scratch.reference)


def _session(recipe: Recipe, place: Place, extensions: Extensions, point: ResumePoint) -> Session:
    encoder, ranks = build_encoder(recipe), place.ranks
    return open_run(
        place,
        data_spec(recipe, encoder, ranks, extensions=extensions, saved=point.state),
        engine_spec(recipe, encoder, ranks),
        objective_spec(recipe, extensions),
        run_spec(recipe, extensions),
        point,
    )


class _Replayer:
    """One replay on one rank."""

    def __init__(
        self,
        session: Session,
        run: RunDir,
        dump: Path,
        content: Mapping[str, Any],
        started_from: Path | None,
    ) -> None:
        self.session, self.content, self.started_from = session, content, started_from
        self.stepper, self.ranks = session.trainer.stepper, session.place.ranks
        self.stepper.check = self.stepper.start = None
        self.rows = {row["step"]: row for row in read_rows(run.metrics) if "loss" in row}
        self.found = Replay(
            dump=str(dump),
            step=int(content["step"]),
            started=session.trainer.totals.step,
            repeated_in_place=bool(content["repeats"]),
            dumped_on=str(content["device"]),
        )

    def run(self, *, at_checkpoint: bool) -> Replay:
        found = self.found
        step = found.started
        for data in self.session.steps():
            step += 1
            if step == found.step:
                break
            if self.rows.get(step, {}).get("skipped", False):
                continue
            if at_checkpoint:
                found.left_out += 1
            else:
                self._train(data, step)
        else:
            raise VlmpackError(f"step {found.step}: the run's recipe ends at step {step}")
        batches = [micro.batch for micro in data.micro_batches]
        found.same_rows = self._has_digests(data)
        found.comes_again, found.first = self._is_bad(self.stepper, batches)
        if found.comes_again:
            self._narrow(data)
        return found

    def _train(self, data: GlobalStep, step: int) -> None:
        """Take a step as the run did, and compare its loss."""
        batches = [micro.batch for micro in data.micro_batches]
        sums, _ = self.stepper.train(
            step - 1, batches, names=data.names, num_skipped=len(data.skipped), stop=False
        )
        self.session.trainer.totals.step = step
        self.found.trained += 1
        row = self.rows.get(step)
        if row is None or row["loss"] is None or sums.loss is None:
            return
        if (row["num_samples"], row["num_tokens"]) != (sums.num_samples, sums.num_tokens):
            raise VlmpackError(
                f"step {step} has {sums.num_samples} samples and {sums.num_tokens} tokens, the run "
                f"had {row['num_samples']} and {row['num_tokens']}: the data changed since"
            )
        off = abs(sums.loss - row["loss"]) / max(abs(row["loss"]), 1e-12)
        self.found.loss_off = max(self.found.loss_off, off)

    def _has_digests(self, data: GlobalStep) -> bool:
        """Whether all rows of the step are rows of the dump. Collective."""
        dumped = {row["digest"] for row in self.content["micro_batches"]}
        mine = [digest_of(micro.batch).hex() in dumped for micro in data.micro_batches]
        return all(all(rank) for rank in self.ranks.gather_objects(mine))

    def _is_bad(self, stepper: Stepper, batches: Sequence[Batch]) -> tuple[bool, str | None]:
        """Whether loss or gradient of micro-batches are not finite, and what is so first.
        Collective."""
        stepper.memory.keep()
        names = [batch.keys for batch in batches]
        if stepper.reference is not None:
            batches = stepper.reference(stepper.engine, batches)
        with first_non_finite(stepper.engine.module) as seen:
            counts = Counts.of(batches)
            made = stepper.compute(self.found.step - 1, stepper.objective, batches, names, counts)
        stepper.engine.zero_gradients()
        stepper.memory.put_back()
        everywhere = [one for rank in self.ranks.gather_objects(seen[:1]) for one in rank]
        return not made.sums.is_finite, next(iter(everywhere), None)

    def _narrow(self, data: GlobalStep) -> None:
        """Look at micro-batches by themselves, then at their samples. Collective."""
        found, empty = self.found, self.session.train.dataset.collator.empty()
        ranks, mine = self.ranks, data.micro_batches
        numbers = [[(s.number, f"{s.key} ({s.shard})") for s in micro.samples] for micro in mine]
        bad: list[Batch] = []
        by_replica = dict(ranks.gather_objects((ranks.dp_rank, numbers)))
        for replica, rows in sorted(by_replica.items()):
            for place, samples in enumerate(rows):
                own = replica == ranks.dp_rank
                batch = mine[place].batch if own else empty
                is_bad, first = self._is_bad(self.stepper, [batch])
                if not is_bad:
                    continue
                found.rows.append([name for _, name in samples])
                bad, found.first = [batch], first or found.first
                for number, name in samples:
                    with ranks.raised_by_all(VlmpackError):
                        alone = self.session.train.alone(number).batch if own else empty
                    is_bad, first = self._is_bad(self.stepper, [alone])
                    if is_bad:
                        found.alone.append(name)
                        bad, found.first = [alone], first or found.first
        found.in_float32 = self._in_float32(bad or [micro.batch for micro in mine])

    def _in_float32(self, batches: Sequence[Batch]) -> bool | str:
        """Whether micro-batches are not finite in float32. Collective."""
        session, built = self.session, self.session.built
        if session.engine.compute_dtype is torch.float32:
            return "the run computes in float32"
        folder = self.started_from
        if self.found.trained:
            session.trainer.save(last=True)
            folder = step_folder(session.place.run_dir.checkpoints, session.trainer.totals.step)
        model = built.model.model_copy(update={"dtype": "float32"})
        try:
            engine = build_engine(replace(built, model=model))
            if folder is not None:
                load_checkpoint(folder, engine, self.ranks)
            return self._is_bad(replace(self.stepper, engine=engine), batches)[0]
        except (CapabilityError, torch.OutOfMemoryError) as error:  # what was found before counts
            return f"not known: {error}"
