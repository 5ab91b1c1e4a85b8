"""What surrounds training: answers to the test questions, the exported model, result.json.

    predictions-before.jsonl   predictions-step-00000200.jsonl   predictions-after.jsonl

Answers that a run gave on the way with the weights that it exports are those after it.
"""

from __future__ import annotations

import json
import logging
import platform
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch

from vlmpack.activity import ACTIVITY
from vlmpack.distributed import Ranks
from vlmpack.errors import CapabilityError, CheckpointError, DataError
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
from vlmpack.file_format import RESULT
from vlmpack.model_folder.load import transformers_version
from vlmpack.model_folder.quantised import is_quantised
from vlmpack.model_folder.weights import first
from vlmpack.run.session import Session
from vlmpack.training.checkpoint import find_damage, load_checkpoint, step_folder
from vlmpack.training.metrics import read_rows, validations
from vlmpack.training.model_watch import check_model_again
from vlmpack.version import __version__
from vlmpack.whole_file import read_json, regular_text, write_atomically

logger = logging.getLogger("vlmpack")

Written = TypeVar("Written")

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""How many there are changes with the dtype."""


def export_model(session: Session) -> None:
    """Write the finetuned model in transformers format, adapters merged, and the adapters in
    peft's. Collective.

    Raises:
        RunIdentityError: the model folder, which exports take files from, has changed meanwhile.
    """
    spec = session.spec
    if not spec.export.enabled:
        return
    ACTIVITY.enter_alone("exporting the model")
    engine, source = session.engine, Path(spec.model)
    session.place.ranks.on_main(lambda: check_model_again(source, session.place.run_dir))
    dtype = export_dtype(spec.export.dtype, source)
    publish_folder(
        session.place.run_dir.export,
        session.place.ranks,
        lambda folder: _export_whole(session, folder, dtype),
    )
    logger.info("model written %s", written_as(dtype))
    if spec.has_adapters:
        try:
            publish_folder(
                session.place.run_dir.adapter,
                session.place.ranks,
                lambda folder: engine.export_adapter(folder, base=spec.model),
            )
        except CapabilityError as error:
            logger.warning("no adapter folder: %s", error)


def _export_whole(session: Session, folder: Path, dtype: torch.dtype) -> None:
    session.engine.export(folder, processor_from=Path(session.spec.model), dtype=dtype)
    data = session.train.identity
    session.place.ranks.on_main(lambda: session.encoder.write_settings(folder, data))


def publish_folder(
    final: Path, ranks: Ranks, write: Callable[[Path], Written], *, replace: bool = True
) -> Written:
    """Write a folder next to its place, then move it there: whole or not at all. Collective.

    Args:
        final: the place. A folder there with other files is kept under another name.
        write: called on every rank with the folder to write to.
        replace: replace what is there; else its presence is an error.
    """
    partial = final.with_name(f".{final.name}.vlmpack-partial")  # nobody else's name

    def publish() -> None:
        if replace:
            _make_way(final, partial)
        partial.rename(final)

    def clear() -> None:
        if ranks.is_main:
            shutil.rmtree(partial, ignore_errors=True)

    clear()
    try:
        written = write(partial)
        ranks.on_main(publish)
    finally:
        clear()
    return written


def _make_way(final: Path, new: Path) -> None:
    """Remove the former export, or rename it if it holds other files."""
    if not final.exists() and not final.is_symlink():
        return
    foreign = [final.name]
    if final.is_dir() and not final.is_symlink():
        ours = {path.name for path in new.iterdir() if path.is_file()}
        names = sorted(path.name for path in final.iterdir())
        foreign = [name for name in names if name not in ours and not _WEIGHTS.fullmatch(name)]
    if not foreign:
        shutil.rmtree(final)
        return
    aside = (final.with_name(f"{final.name}.old-{number}") for number in count(1))
    free = next(path for path in aside if not path.exists() and not path.is_symlink())
    final.rename(free)
    logger.warning(
        "note: %s held what no export writes (%s); it is kept as %s", final, first(foreign), free
    )


def export_dtype(name: str, source: Path) -> torch.dtype:
    """The recipe's dtype; auto is what the pretrained folder was saved in, and 16 bits where it is
    quantised."""
    if name == "auto":
        config = read_json(source / "config.json")
        name = config.get("dtype") or config.get("torch_dtype") or "float32"
        if is_quantised(source) and name != "float16":
            name = "bfloat16"  # whatever a package that unpacks it computes in
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes.get(name, torch.float32)


def written_as(dtype: torch.dtype, knob: str = "export.dtype: float32") -> str:
    """In which dtype a model was written, and what that took from the trained weights."""
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.float32:
        return f"in {name}, as it was trained"
    return f"in {name}; it was trained in float32, and {knob} keeps all of it"


def _best(session: Session) -> dict[str, Any]:
    trainer, best = session.trainer, session.trainer.listeners.best
    if best is None:
        return {}
    taken = session.spec.export.weights == "best" and best.value is not None
    return {
        "best": best.to_state(),
        "stopped_early": trainer.is_stopped_early,
        "exported_step": best.step if taken else trainer.totals.step,
    }


def write_result(session: Session, before: Scores | None, after: Scores | None) -> None:
    """Write result.json: the run's figures, and what they were measured on."""
    totals = session.trainer.totals
    figures: dict[str, Any] = {
        "steps": totals.step,
        "train_seconds": round(totals.train_seconds, 3),
        "real_tokens": totals.num_tokens,
        "padded_tokens": totals.num_padded_slots,
        "computed_tokens": totals.num_slots,
        "tokens_per_second": round(totals.num_tokens / max(1e-9, totals.train_seconds), 1),
        "samples": totals.num_samples,
        "skipped_samples": totals.num_skipped,
        "skipped_steps": totals.num_skipped_steps,
        "packing_mode": session.train.config.mode.name,
        "model": session.spec.model,
        "engine": session.engine.description,
        "image_processor": session.encoder.images_made_with,
        "versions": {
            "vlmpack": __version__,
            "torch": torch.__version__,
            "transformers": transformers_version(),
            "python": platform.python_version(),
        },
        **_best(session),
        **({} if (by := session.trainer.stopped_by) is None else {"stopped_by": by}),
        "seconds_of_launch": {name: round(spent, 3) for name, spent in ACTIVITY.spent.items()},
        "identity": session.spec.identity,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    for when, scores in (("before", before), ("after", after)):
        shares = scores.total.shares if scores else {}
        figures[f"metrics_{when}"] = shares
        figures[f"tasks_{when}"] = (
            {
                task: {**group.shares, "questions": group.num_questions}
                for task, group in scores.tasks.items()
            }
            if scores
            else None
        )
    checked = validations(read_rows(session.place.run_dir.metrics))
    figures["validation_before"] = next((row for row in checked if row["step"] == 0), None)
    figures["validation_after"] = checked[-1] if checked else None
    write_atomically(
        session.place.run_dir.result, json.dumps(RESULT.mark(figures), indent=2) + "\n"
    )


def test_questions(session: Session) -> list[Question]:
    """The questions of `data.test` that the recipe asks to answer; none without generation."""
    section = session.spec.evaluation
    if session.test is None or not section.generate:
        return []
    questions: list[Question] = []
    for sample in session.test.samples():
        try:
            questions.append(Question.from_sample(sample, session.encoder))
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
    names = {(question.shard, question.key) for question in questions}
    if {(row.shard, row.key) for row in rows} <= names and len(rows) <= len(questions):
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
