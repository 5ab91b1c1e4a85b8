"""What surrounds training: answers before and after, the exported model, result.json."""

from __future__ import annotations

import json
import logging
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vlmpack.activity import ACTIVITY
from vlmpack.distributed import Ranks
from vlmpack.encode.clock import write_note
from vlmpack.encode.variables import write_variables
from vlmpack.errors import CapabilityError, DataError
from vlmpack.evaluation.generation import answer_over_ranks
from vlmpack.evaluation.metrics import FORMER_KEYS, Scores, When, score
from vlmpack.evaluation.predictions import (
    PREDICTIONS_AFTER,
    PREDICTIONS_BEFORE,
    Question,
    make_predictions,
    read_predictions,
    write_predictions,
)
from vlmpack.model_folder.images import transformers_version
from vlmpack.recipe import identity
from vlmpack.run.session import Session
from vlmpack.training.metrics import read_rows, validations
from vlmpack.training.model_watch import check_model_again
from vlmpack.version import __version__
from vlmpack.whole_file import write_atomically

logger = logging.getLogger("vlmpack")


def test_questions(session: Session) -> list[Question]:
    """The questions of `data.test` that the recipe asks to answer; none without generation."""
    section = session.setup.recipe.evaluation
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


def evaluate_by_generation(
    session: Session, when: When, questions: Sequence[Question]
) -> Scores | None:
    """Answer the test questions with the model as it is, and score the answers. Collective.

    Answers from before training are kept in the run folder: a resumed run reads them.

    Returns:
        The figures, on every rank; None without questions, or for `before` once training has begun
        and no answers were kept.

    Raises:
        DataError: a bad question whose error class is not skipped.
    """
    if not questions:
        return None
    metrics = session.setup.extensions.metrics_of(session.setup.recipe)
    name = PREDICTIONS_BEFORE if when == "before" else PREDICTIONS_AFTER
    path = session.place.run_dir.path / name
    kept = session.place.ranks.on_main(path.is_file)
    if when == "before" and kept:
        rows = read_predictions(path)
        asked = {(question.shard, question.key) for question in questions}
        if {(row.shard, row.key) for row in rows} <= asked and len(rows) <= len(questions):
            return session.place.ranks.on_main(lambda: score(rows, metrics))
        logger.warning("the answers in %s are to other questions; they are left out", path)
        return None
    if when == "before" and session.trainer.totals.step > 0:
        return None
    started = time.perf_counter()
    answers = answer_over_ranks(
        session.engine,
        session.setup.encoder,
        questions,
        ranks=session.place.ranks,
        batch_size=session.setup.recipe.evaluation.batch_size,
        max_new_tokens=session.setup.recipe.evaluation.max_new_tokens,
        on_bad_sample=lambda error: _skip_or_raise(session, error),
    )
    predictions = make_predictions(questions, answers)
    scores = session.place.ranks.on_main(lambda: score(predictions, metrics))
    session.place.ranks.on_main(lambda: write_predictions(path, predictions))
    logger.info(
        "%s training: %s of %d %s (%.0f s)",
        when,
        ", ".join(f"{name} {_percent(share)}" for name, share in scores.total.shares.items()),
        scores.total.num_questions,
        "image questions" if scores.has_images else "questions",
        time.perf_counter() - started,
    )
    if session.trainer.callbacks is not None:
        shares = scores.total.shares
        session.trainer.callbacks.tell("on_answers", session.trainer.totals.step, shares)
    return scores


def _skip_or_raise(session: Session, error: DataError) -> None:
    assert session.test is not None
    if not session.test.config.data.on_error.skips(error.error_class):
        raise error
    logger.warning("test question left out: %s", error)


def export_model(session: Session) -> None:
    """Write the finetuned model in transformers format, adapters merged, and the adapters in
    peft's. Collective.

    Raises:
        RunIdentityError: the model folder, which exports take files from, has changed meanwhile.
    """
    recipe = session.setup.recipe
    if not recipe.export.enabled:
        return
    ACTIVITY.enter_alone("exporting the model")
    engine, source = session.engine, Path(recipe.model.path)
    session.place.ranks.on_main(lambda: check_model_again(source, session.place.run_dir))
    dtype = export_dtype(recipe.export.dtype, source)
    publish_folder(
        session.place.run_dir.export,
        session.place.ranks,
        lambda folder: _export_whole(session, folder, dtype),
    )
    logger.info("model written %s", written_as(dtype))
    if recipe.trainable.uses("lora"):
        try:
            publish_folder(
                session.place.run_dir.adapter,
                session.place.ranks,
                lambda folder: engine.export_adapter(folder, base=recipe.model.path),
            )
        except CapabilityError as error:
            logger.warning("no adapter folder: %s", error)


def _export_whole(session: Session, folder: Path, dtype: torch.dtype) -> None:
    session.engine.export(folder, processor_from=Path(session.setup.recipe.model.path), dtype=dtype)
    session.place.ranks.on_main(lambda: session.setup.encoder.write_budget(folder))
    session.place.ranks.on_main(lambda: write_note(folder, session.setup.encoder.date))
    given = session.setup.encoder.chat_template_kwargs
    session.place.ranks.on_main(lambda: write_variables(folder, given))


def publish_folder(final: Path, ranks: Ranks, write: Callable[[Path], None]) -> None:
    """Write a folder beside its place, then put it there: whole or not at all. Collective.

    Args:
        final: the place; what is there is replaced.
        ranks: who this process is.
        write: called on every rank with the folder to write to.
    """
    partial = final.with_name(f"{final.name}.partial")
    if ranks.is_main:
        shutil.rmtree(partial, ignore_errors=True)
    write(partial)

    def publish() -> None:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)

    ranks.on_main(publish)


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.1%}"


def export_dtype(name: str, source: Path) -> torch.dtype:
    """The recipe's dtype; auto is what the pretrained folder was saved in."""
    if name == "auto":
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes.get(name, torch.float32)


def written_as(dtype: torch.dtype, knob: str = "export.dtype: float32") -> str:
    """In which dtype a model was written, and what that took from the trained weights.

    Args:
        knob: what keeps them as they are.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.float32:
        return f"in {name}, as it was trained"
    return f"in {name}; it was trained in float32, and {knob} keeps all of it"


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
        "packing_mode": session.train.config.mode.name,
        "model": session.setup.recipe.model.path,
        "engine": session.engine.description,
        "image_processor": session.setup.encoder.images_made_with,
        "versions": {
            "vlmpack": __version__,
            "torch": torch.__version__,
            "transformers": transformers_version(),
            "python": platform.python_version(),
        },
        "identity": identity(session.setup.recipe),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    for when, scores in (("before", before), ("after", after)):
        shares = scores.total.shares if scores else {}
        figures[f"metrics_{when}"] = shares
        figures |= {f"{key}_{when}": shares.get(name) for name, key in FORMER_KEYS.items()}
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
    write_atomically(session.place.run_dir.result, json.dumps(figures, indent=2) + "\n")
