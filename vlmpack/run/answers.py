"""Answers to the test questions: before training, on the way, and after it.

    predictions-before.jsonl   predictions-step-00000200.jsonl   predictions-after.jsonl

Answers that a run gave on the way with the weights that it exports are those after it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vlmpack.errors import CheckpointError, DataError
from vlmpack.evaluation.generation import answer_over_ranks
from vlmpack.evaluation.metrics import Scores, score
from vlmpack.evaluation.predictions import (
    PREDICTIONS_AFTER,
    PREDICTIONS_BEFORE,
    Prediction,
    Question,
    make_predictions,
    predictions_at,
    read_predictions,
    write_predictions,
)
from vlmpack.run.session import Session
from vlmpack.training.checkpoint import find_damage, load_checkpoint, step_folder
from vlmpack.whole_file import regular_text, write_atomically

logger = logging.getLogger("vlmpack")


def test_questions(session: Session) -> list[Question]:
    """The questions of `data.test` that the recipe asks to answer; none without generation."""
    section = session.spec.evaluation
    if session.test is None or not section.generate:
        return []
    questions: list[Question] = []
    for sample in session.test.samples():
        try:
            questions.append(Question.from_sample(sample))
        except DataError as error:
            _skip_or_raise(session, error)
        if len(questions) == section.generate_max_samples:
            break
    return questions


def answer_before(session: Session, questions: Sequence[Question]) -> Scores | None:
    """Answers of the initial model, kept in the run folder for a resume. Collective.

    Raises:
        DataError: a bad question whose error class is not skipped.
        ExtensionError: a metric of the program's own fails.
    """
    path = session.place.run_dir.path / PREDICTIONS_BEFORE
    if not questions:
        return None
    if session.place.ranks.on_main(path.is_file):
        return _kept(session, path, questions)
    if session.trainer.totals.step > 0:
        return None
    return _answer(session, path, questions, "before training", 0)


def answer_on_the_way(
    session: Session, questions: Sequence[Question]
) -> Mapping[str, float | None]:
    """Metrics of the model as it is. Collective.

    Raises:
        DataError, ExtensionError: as `answer_before`.
    """
    step = session.trainer.totals.step
    path = session.place.run_dir.path / predictions_at(step)
    scores = _answer(session, path, questions, f"step {step}", step) if questions else None
    return {} if scores is None else scores.total.shares


def answer_after(session: Session, questions: Sequence[Question], step: int) -> Scores | None:
    """Answers of the weights that the run leaves. Collective.

    Args:
        step: at which these weights were.

    Raises:
        DataError, ExtensionError: as `answer_before`.
    """
    if not questions:
        return None
    folder, ranks = session.place.run_dir.path, session.place.ranks
    given, after = folder / predictions_at(step), folder / PREDICTIONS_AFTER
    scores = _kept(session, given, questions) if ranks.on_main(given.is_file) else None
    if scores is None:
        return _answer(session, after, questions, "after training", step)
    ranks.on_main(lambda: write_atomically(after, regular_text(given)))
    _say(scores, f"after training (step {step})", None)
    return scores


def take_best(session: Session) -> int:
    """Load the weights that the run exports, by the recipe those of the best step. Collective.

    Returns:
        The step at which they were.

    Raises:
        CheckpointError: that checkpoint is gone, or damaged.
    """
    trainer = session.trainer
    best, step = trainer.listeners.best, trainer.totals.step
    takes_last = session.spec.export.weights == "last"
    if takes_last or best is None or best.value is None or best.step == step:
        return step
    folder = step_folder(session.place.run_dir.checkpoints, best.step)
    damage = session.place.ranks.on_main(lambda: find_damage(folder))
    if damage is not None:
        raise CheckpointError(
            f"export.weights: best is that of step {best.step}, and {folder} cannot be read: "
            f"{damage}; export.weights=last exports the last step's"
        )
    load_checkpoint(folder, session.engine, session.place.ranks)
    logger.info("%-14s of step %d: %s", "weights", best.step, best.words)
    return best.step


def _kept(session: Session, path: Path, questions: Sequence[Question]) -> Scores | None:
    """Scores of answers that are there; None where they are to other questions."""
    rows = read_predictions(path)
    asked = {(question.shard, question.key) for question in questions}
    if {(row.shard, row.key) for row in rows} <= asked and len(rows) <= len(questions):
        return _scored(session, rows)
    logger.warning("the answers in %s are to other questions; they are left out", path)
    return None


def _answer(
    session: Session, path: Path, questions: Sequence[Question], when: str, step: int
) -> Scores:
    section, started = session.spec.evaluation, time.perf_counter()
    answers = answer_over_ranks(
        session.engine,
        session.encoder,
        questions,
        ranks=session.place.ranks,
        batch_size=section.batch_size,
        max_new_tokens=section.max_new_tokens,
        on_bad_sample=lambda error: _skip_or_raise(session, error),
    )
    predictions = make_predictions(questions, answers)
    scores = _scored(session, predictions)
    session.place.ranks.on_main(lambda: write_predictions(path, predictions))
    _say(scores, when, time.perf_counter() - started)
    session.trainer.listeners.callbacks.tell("on_answers", scores.total.shares, step=step)
    return scores


def _scored(session: Session, rows: Sequence[Prediction]) -> Scores:
    """Scored by the main rank alone: a program's metric may differ between calls."""
    return session.place.ranks.on_main(lambda: score(rows, session.spec.metrics))


def _say(scores: Scores, when: str, seconds: float | None) -> None:
    logger.info(
        "%s: %s of %d %s%s",
        when,
        ", ".join(f"{name} {_percent(share)}" for name, share in scores.total.shares.items()),
        scores.total.num_questions,
        "image questions" if scores.has_images else "questions",
        "" if seconds is None else f" ({seconds:.0f} s)",
    )


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.1%}"


def _skip_or_raise(session: Session, error: DataError) -> None:
    assert session.test is not None
    if not session.test.config.data.on_error.skips(error.error_class):
        raise error
    logger.warning("test question left out: %s", error)
