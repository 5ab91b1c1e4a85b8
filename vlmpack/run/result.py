"""What surrounds training: answers before and after, the exported model, result.json."""

from __future__ import annotations

import json
import logging
import platform
import re
import shutil
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch

from vlmpack.activity import ACTIVITY
from vlmpack.distributed import Ranks
from vlmpack.errors import CapabilityError
from vlmpack.evaluation.metrics import Scores
from vlmpack.file_format import RESULT
from vlmpack.model_folder.load import transformers_version
from vlmpack.model_folder.weights import first
from vlmpack.run.session import Session
from vlmpack.training.metrics import read_rows, validations
from vlmpack.training.model_watch import check_model_again
from vlmpack.version import __version__
from vlmpack.whole_file import read_json, write_atomically

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
    session.place.ranks.on_main(lambda: session.encoder.write_settings(folder))


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
    kept = next(path for path in aside if not path.exists() and not path.is_symlink())
    final.rename(kept)
    logger.warning(
        "note: %s held what no export writes (%s); it is kept as %s", final, first(foreign), kept
    )


def export_dtype(name: str, source: Path) -> torch.dtype:
    """The recipe's dtype; auto is what the pretrained folder was saved in."""
    if name == "auto":
        config = read_json(source / "config.json")
        name = config.get("dtype") or config.get("torch_dtype") or "float32"
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
