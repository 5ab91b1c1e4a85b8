"""One launch of a recipe on one rank, from the run's folder to the report: the stages in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from vlmpack.activity import ACTIVITY
from vlmpack.build.data import DataSpec, build_encoder, data_spec
from vlmpack.build.engine import EngineSpec, check_model, check_policy, engine_spec
from vlmpack.build.extensions import NO_EXTENSIONS, Extensions, agree, missing, unused
from vlmpack.build.objective import ObjectiveSpec, objective_spec
from vlmpack.build.run import RunSpec, run_spec
from vlmpack.distributed import world_size_from_environment
from vlmpack.errors import ExtensionError, RecipeError, VlmpackError
from vlmpack.evaluation.predictions import Question
from vlmpack.recipe import Recipe
from vlmpack.run.launch_memory import resolved_memory
from vlmpack.run.opening import ResumePoint, open_session, saved_state
from vlmpack.run.place import Place, joined, prepare
from vlmpack.run.result import (
    answer_after,
    answer_before,
    answer_on_the_way,
    export_model,
    take_best,
    test_questions,
    write_result,
)
from vlmpack.run.session import Prefetch, Session
from vlmpack.run.splits import open_splits
from vlmpack.training.model_watch import check_small_files, watched_model
from vlmpack.training.run_dir import RunDir
from vlmpack.training.stop import interrupt_logged

logger = logging.getLogger("vlmpack")

Report = Callable[[Path, Sequence[Question] | None], object]
"""Makes the report of a run folder, with the test questions if any."""


def launch(recipe: Recipe, report: Report, extensions: Extensions = NO_EXTENSIONS) -> RunDir:
    """Take a run to its end, from wherever it stands. Collective.

    Raises:
        VlmpackError: whatever is wrong, by its class.
    """
    problems = [] if extensions.problems else missing(recipe, extensions)
    if problems and world_size_from_environment() == 1:
        raise RecipeError(problems)
    with joined(recipe) as place:
        extensions = agree(extensions, place.ranks, problems)
        for note in unused(recipe, extensions) if place.ranks.is_main else ():
            logger.warning("note: %s", note)
        dated = prepare(recipe, place)
        if dated is not None:
            with interrupt_logged(place.run_dir):
                _train(dated, place, report, extensions)
        return place.run_dir


@contextmanager
def _going_on() -> Iterator[None]:
    """Add what is left of the run to a fault of the program before or after training."""
    try:
        yield
    except ExtensionError as error:
        raise error.going_on("with the run") from None


def open_run(
    place: Place,
    data: DataSpec,
    engine: EngineSpec,
    objective: ObjectiveSpec,
    run: RunSpec,
    resume: ResumePoint | None = None,
) -> Session:
    """Open the run: cheap checks first, then data, then the model.

    Args:
        resume: where to begin; None for the newest checkpoint of the run's folder.
    """
    ranks, folder, answers = place.ranks, engine.encoder.folder, run.evaluation.generate
    proofs = place.run_dir.verify
    kept = check_model(folder, ranks)
    check_policy(engine)
    prefetch = Prefetch(ranks)
    watched = watched_model(folder, ranks, place.run_dir, engine.model.adapter)
    with watched as model, prefetch.closed_on_error():
        model.leave_former()
        splits = open_splits(data, place.run_dir, answers=answers)
        engine = resolved_memory(engine, splits.train, answers=answers)
        section = objective.section
        generic, verify = engine.encoder.family.proven_by_verify, data.train.training.verify
        if generic or verify:
            from vlmpack.proof.verify.gate import require_proof, verify_at_start  # few need it
        if generic:
            weights = model.hashing.finish()
            require_proof(data, engine, section, proofs, splits.train, weights)
        elif verify and data.saved is None:
            verify_at_start(engine, section, proofs, splits.train)
        return open_session(place, splits, engine, objective, run, model, prefetch, kept, resume)


def _train(recipe: Recipe, place: Place, report: Report, extensions: Extensions) -> None:
    """Train, with evaluation by generation around it, and leave result, export and report."""
    ACTIVITY.enter("launch: opening the data")
    check_small_files(Path(recipe.model.path), place.ranks, place.run_dir)
    encoder, ranks = build_encoder(recipe), place.ranks
    saved = ranks.on_main(lambda: saved_state(recipe.checkpoint, place.run_dir))
    session = open_run(
        place,
        data_spec(recipe, encoder, ranks, extensions=extensions, saved=saved),
        engine_spec(recipe, encoder, ranks),
        objective_spec(recipe, extensions),
        run_spec(recipe, extensions),
    )
    with closing(session):  # loader processes would live as long as an error that is kept
        questions = test_questions(session)
        with _going_on():
            before = answer_before(session, questions)
        session.trainer.listeners.answers.ask = partial(answer_on_the_way, session, questions)
        session.run()
    with _going_on():
        after = answer_after(session, questions, take_best(session))
    export_model(session)

    def finish() -> None:
        write_result(session, before, after)
        try:
            report(place.run_dir.path, questions or None)
        except VlmpackError as error:
            logger.warning("no report: %s", error)

    ACTIVITY.enter_alone("writing the report")
    place.ranks.on_main(finish)
    session.end()
