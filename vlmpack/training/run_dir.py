"""The run folder: who may write it, whose run it is, and what lies in it.

runs/demo/
  recipe.yaml            the resolved recipe; `vlmpack finetune runs/demo/recipe.yaml` resumes
  identity.json          the fields that decide objective and order
  model.json             what the model folder held, see vlmpack.training.model_watch
  run-id                 a random name that tells this run from all others
  calling-0.json         which code of the program a rank calls, see vlmpack.handed_over
  run.lock               who works here, while somebody does; see vlmpack.training.run_lock
  shards.json            the shards of the last launch, see vlmpack.build.data
  metrics.jsonl          one row a step
  data-errors.jsonl      one row a skipped sample
  first-sample.txt       what the first sample teaches, token by token
  dumps/step-...json     a step that was not finite, see vlmpack.training.bad_steps
  samples/               which samples each step trained, see vlmpack.training.record
  checkpoints/step-...   see vlmpack.training.checkpoint
  trainable.json         what is trained: mode, parameters and learning rate by component
  export/                the finetuned model in transformers format
  verify/verify.json     with `training.verify`, or by `vlmpack verify`
  audit.json             by `vlmpack data audit`, of the run as it stood then
  adapter/               its adapters in peft's format, where there are some
  result.json            figures of a run at its end. Once the run goes on, .old has them
  predictions-*.jsonl, report/

A former run with other values, or with another model, may have saved nothing. Then its
metrics.jsonl, predictions-*.jsonl, verify and audit.json get `.old` behind their names.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vlmpack.distributed import Ranks
from vlmpack.errors import RunDirError, RunIdentityError
from vlmpack.file_format import RESULT, RUN
from vlmpack.handed_over import CALLS, clear_left_behind
from vlmpack.training.checkpoint import list_checkpoints
from vlmpack.training.metrics import read_rows
from vlmpack.training.run_lock import RunLock
from vlmpack.whole_file import read_json, regular_text, write_atomically
from vlmpack.words import counted, indented

logger = logging.getLogger("vlmpack")


class RunDir:
    """Paths of one run folder, and the rules for entering it."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.identity = self.path / "identity.json"
        self.model = self.path / "model.json"
        self.id = self.path / "run-id"
        self.lock = self.path / "run.lock"
        self.metrics = self.path / "metrics.jsonl"
        self.data_errors = self.path / "data-errors.jsonl"
        self.samples = self.path / "samples"
        self.dumps = self.path / "dumps"
        self.data_summary = self.path / "data-summary.json"
        self.checkpoints = self.path / "checkpoints"
        self.reference = self.path / "reference"
        self.trainable = self.path / "trainable.json"
        self.export = self.path / "export"
        self.adapter = self.path / "adapter"
        self.verify = self.path / "verify"
        self.audit = self.path / "audit.json"
        self.result = self.path / "result.json"

    def prepare(self) -> None:
        """Make the folder and see that it can be written.

        Raises:
            RunDirError: it cannot.
        """
        probe = self.path / f".write-test-{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise RunDirError(
                f"run_dir: {self.path} cannot be written ({error.strerror}); choose another "
                f"run_dir or change its permissions"
            ) from error

    @contextmanager
    def entered(self, ranks: Ranks) -> Iterator[None]:
        """Make the folder and lock it, on the main rank for all ranks.

        Raises:
            RunDirError: on every rank, if the folder cannot be written or is in use.
        """

        lock = RunLock(self.lock)

        def enter() -> None:
            self.prepare()
            lock.take()
            for line in clear_left_behind(self.path):
                logger.warning("note: %s", line)

        ranks.on_main(enter)
        try:
            with CALLS.kept_in(self.path, ranks.rank):
                yield
        finally:
            lock.release()

    def recorded_identity(self) -> dict[str, Any] | None:
        """The identity of this folder's run; None for a new folder.

        Raises:
            RunDirError: the file is damaged.
        """
        if not self.identity.exists():
            return None
        try:
            recorded: dict[str, Any] = read_json(self.identity)
        except (OSError, ValueError) as error:
            raise RunDirError(f"run_dir: {self.identity} is damaged: {error}") from error
        RUN.take(recorded, f"run_dir: {self.identity}", RunDirError)
        return recorded

    def figures(self) -> dict[str, Any]:
        """The content of result.json; empty before the run's end, or if the file is damaged."""
        try:
            return self.final_figures()
        except RunDirError:
            return {}

    def final_figures(self) -> dict[str, Any]:
        """The content of result.json.

        Raises:
            RunDirError: it is missing or damaged.
        """
        try:
            figures: dict[str, Any] = read_json(self.result)
        except (OSError, ValueError) as error:
            raise RunDirError(
                f"run_dir: {self.result} cannot be read: {error}. Delete it, and the same launch "
                "goes on from the last checkpoint and writes it again"
            ) from error
        RESULT.take(figures, f"run_dir: {self.result}", RunDirError)
        return figures

    def has_saved(self) -> bool:
        """Whether a run could continue from something here, or left a result."""
        return bool(list_checkpoints(self.checkpoints)) or self.result.exists()

    def new_id(self) -> None:
        """Give the run a name. If nothing was saved, it is a new run."""
        if not self.has_saved():
            self.id.unlink(missing_ok=True)
        self.run_id()

    def run_id(self) -> str:
        """A random name of this run. A folder that cannot be written has none."""
        with suppress(OSError, UnicodeDecodeError):
            text = regular_text(self.id).strip()
            if re.fullmatch(r"[0-9a-f]{32}", text):
                return text
        drawn = uuid.uuid4().hex
        with suppress(OSError):
            write_atomically(self.id, drawn + "\n")
        return drawn

    def put_aside(self) -> list[str]:
        """Rename the results of launches that saved nothing, and forget their model. They belong to
        another run than the one that starts here.

        Returns:
            The new names.
        """
        paths = [self.metrics] if read_rows(self.metrics) else []
        paths += [*sorted(self.path.glob("predictions-*.jsonl")), self.verify, self.audit]
        names = []
        for path in paths:
            if path.exists():
                aside = path.with_name(f"{path.name}.old")
                if aside.is_dir():
                    shutil.rmtree(aside)
                names.append(path.replace(aside).name)
        self.model.unlink(missing_ok=True)
        return names

    def _start_anew(self, lines: list[str]) -> None:
        """Put aside results of a run that saved nothing, whose values may change freely.

        They would otherwise be lost, or taken for the new run's. A start that failed before it had
        results leaves nothing.
        """
        num_steps = max((row["step"] for row in read_rows(self.metrics)), default=0)
        names = self.put_aside()
        if not names:
            return
        logger.warning(
            "run_dir: %s holds a run of other values that ended before its first checkpoint. "
            "Nothing of %s was saved:\n%s\nThis run begins at step 0. The former files are kept "
            "as %s. checkpoint.interval_steps and SIGTERM save on the way",
            self.path,
            f"its {counted(num_steps, 'step')}" if num_steps else "it",
            indented(lines),
            ", ".join(names),
        )

    def check_identity(
        self,
        current: Mapping[str, Any],
        differences: Callable[[Mapping[str, Any], Mapping[str, Any]], list[str]],
        *,
        hint: str = "",
        record: bool = True,
    ) -> None:
        """Record what this run is, or compare with what was recorded.

        A run that ended before its first checkpoint begins again with the recipe's values, and logs
        that.

        Args:
            current: flat mapping of the fields that decide objective and order.
            differences: (recorded, current) -> one readable line for each that matters.
            hint: what else the user can do.
            record: whether to write it down.

        Raises:
            RunIdentityError: the folder belongs to another run; lists every difference.
        """
        recorded = self.recorded_identity()
        lines = [] if recorded is None else differences(recorded, current)
        if lines and not self.has_saved():
            self._start_anew(lines)
        elif lines:
            listed = "\n".join(f"  {line}" for line in lines)
            raise RunIdentityError(
                f"run_dir: {self.path} holds another run. These fields differ and decide what is "
                f"learned, or in which order:\n{listed}\n"
                f"Choose another run_dir, or restore these values to resume.{hint}"
            )
        if record:
            write_atomically(
                self.identity, json.dumps(RUN.mark(current), indent=2, sort_keys=True) + "\n"
            )
