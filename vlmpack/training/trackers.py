"""Experiment trackers, through accelerate: one run of a tracker for one run of ours, resumed too.

    wandb         project, name, tags, group, id; `offline` keeps it in the run folder
    mlflow        experiment, name, tags, run id. With `offline` a file store in the run folder
    swanlab       project, name, tags, group, id; `offline` keeps it in the run folder
    tensorboard   the run folder, always
    others        project alone

`tracker-ids.json` of the run folder has the ids. Trackers get the recipe's identity, without
credentials, logins, queries and tokens in addresses. W&B and SwanLab would also send the command
line, the console, the clone's remote and installed packages, and are configured not to.

Each tracker has a thread that starts it, sends it one point after the other, and finishes it. A
blocked tracker does not delay the run. Points beyond a full queue are dropped and counted.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

from vlmpack.activity import ACTIVITY
from vlmpack.addresses import redacted, without_secrets
from vlmpack.errors import CapabilityError
from vlmpack.recipe.notes import DEFAULT_TRACKER, missing_trackers, trackers_advice
from vlmpack.recipe.schema import LoggingSection
from vlmpack.whole_file import read_json, write_atomically

MOST_WAITING = 1000
"""Most points in a tracker's queue."""
THREADS = "vlmpack-tracker-"
"""How the names of these threads begin."""


class TrackerThread:
    """One tracker, from its start to its end.

    Args:
        start: makes it and starts it; called in the thread.
    """

    def __init__(self, name: str, start: Callable[[], Any]) -> None:
        self.name = name
        self.off: str | None = None
        """Since when it has had no figures, and why; None while it works."""
        self.num_points = self.num_sent = 0
        self.doing = "start"
        """What it was called for last: start, log or finish."""
        self._start = start
        self._points: SimpleQueue[tuple[Mapping[str, float], int] | None] = SimpleQueue()
        self._started, self._given_up, self._said_full = Event(), False, False
        self._thread = Thread(target=self._run, name=f"{THREADS}{name}", daemon=True)
        self._thread.start()

    def started_by(self, deadline: float) -> bool:
        """Wait until it has started, or failed to; whether it has by then.

        Args:
            deadline: as `time.monotonic` counts.
        """
        with ACTIVITY.waiting(lambda: f"waiting for tracker {self.name} to start"):
            return self._started.wait(max(0.0, deadline - time.monotonic()))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Queue a point without waiting."""
        if self.off is not None:
            return
        self.num_points += 1
        if self._points.qsize() < MOST_WAITING:
            self._points.put((values, step))
        elif not self._said_full:
            self._said_full = True
            logger.warning(
                "tracker %s is %d points behind, so points are dropped from step %d on",
                self.name,
                MOST_WAITING,
                step,
            )

    def end(self) -> None:
        """End the thread after the last point."""
        self._points.put(None)

    def ended_by(self, deadline: float) -> bool:
        """Wait until it has ended; whether it has by then. If not, it is called no more."""
        with ACTIVITY.waiting(lambda: f"waiting for tracker {self.name} to finish"):
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._given_up = self._thread.is_alive()
        return not self._given_up

    def missing(self) -> str:
        lost = self.num_points - self.num_sent
        return f"it lacks {lost} of this launch's {self.num_points} points" if lost else ""

    def _run(self) -> None:
        step = 0
        try:
            tracker = self._start()
            self._started.set()
            while (point := self._points.get()) is not None and not self._given_up:
                (values, step), self.doing = point, "log"
                tracker.log(values, step=step)
                self.num_sent += 1
            if not self._given_up:
                self.doing = "finish"
                tracker.finish()
        except BaseException as error:  # its sys.exit too would only end this thread, in silence
            self._fail(step, without_secrets(str(error) or type(error).__name__))
        finally:
            self._started.set()

    def _fail(self, step: int, said: str) -> None:
        if self._given_up:  # its end was told
            return
        if self.doing == "finish":
            logger.warning("tracker %s did not finish: %s", self.name, said)
        elif self.doing == "log":
            self.off = f"from step {step} on ({said})"
            logger.warning("tracker %s failed and is off from here: %s", self.name, said)
        else:
            self.off = f"from the start ({said})"
            logger.warning(
                "tracker %s is off: %s (set logging.trackers to [] to silence this)",
                self.name,
                said,
            )


logger = logging.getLogger("vlmpack")

IDS_NAME = "tracker-ids.json"
FOLDER = "tracking"
"""The folder in a run's where trackers write that write to a disk."""


def require_trackers(section: LoggingSection) -> None:
    """Check that the trackers' packages are installed, before anything else.

    Raises:
        CapabilityError: a package is missing. A line in the log would be overlooked.
    """
    missing = missing_trackers(section)
    if missing:
        raise CapabilityError(trackers_advice(missing))


class Trackers:
    """The trackers of a run, on its main rank, each in a thread of its own.

    A tracker that fails is dropped with one message, and one more at the end. Training waits for
    trackers at most `logging.tracker_seconds` at the start and at the end.

    Args:
        config: the recipe's identity as flat scalars.
    """

    def __init__(self, section: LoggingSection, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._seconds = section.tracker_seconds
        self._undo = ExitStack()
        sent = sent_config(config)
        self._trackers = [
            TrackerThread(name, partial(_tracker, name, section, run_dir, sent, self._undo))
            for name in section.trackers
        ]  # all at work before any is waited for: one that blocks delays no other
        deadline = time.monotonic() + self._seconds
        for tracker in self._trackers:
            if not tracker.started_by(deadline):
                logger.warning(
                    "tracker %s has not started within %g s (logging.tracker_seconds); the run "
                    "goes on without waiting for it",
                    tracker.name,
                    self._seconds,
                )

    @property
    def at_work(self) -> list[str]:
        return [tracker.name for tracker in self._trackers if tracker.off is None]

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """Queue scalars for every tracker, without waiting."""
        finite = {
            key: value
            for key, value in values.items()
            if value is not None and math.isfinite(value)
        }
        for tracker in self._trackers:
            tracker.log(finite, step)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.end()
        deadline = time.monotonic() + self._seconds
        for tracker in self._trackers:
            name, ended = tracker.name, tracker.ended_by(deadline)
            lacks = "; ".join(filter(None, (tracker.missing(), "metrics.jsonl has them all")))
            if not ended:
                logger.warning(
                    "tracker %s did not finish within %g s (logging.tracker_seconds): its %s does "
                    "not return; %s",
                    name,
                    self._seconds,
                    tracker.doing,
                    lacks,
                )
            elif tracker.off is not None:
                if (name, tracker.doing) != (DEFAULT_TRACKER, "start"):
                    since = tracker.off
                    logger.warning(
                        "tracker %s has none of this run's figures %s; metrics.jsonl has them",
                        name,
                        since,
                    )
            elif tracker.missing():
                logger.warning("tracker %s was too slow: %s", name, lacks)
        try:
            self._undo.close()
        except Exception as error:
            logger.warning("a tracker's own settings stay: %s", without_secrets(str(error)))


def read_ids(run_dir: Path) -> dict[str, str]:
    """The ids that a run has at its trackers; empty where none are known."""
    try:
        ids = read_json(run_dir / IDS_NAME)
        return {str(name): str(value) for name, value in ids.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def sent_config(config: Mapping[str, Any]) -> dict[str, int | float | str | bool]:
    """The recipe's identity as trackers take it: scalars, without what an address may hide."""
    return {
        key: value if isinstance(value, int | float | bool) else redacted(str(value))
        for key, value in config.items()
    }


_IDS_LOCK = Lock()


def _tracker(
    name: str, section: LoggingSection, run_dir: Path, config: Mapping[str, Any], undo: ExitStack
) -> Any:
    """A started tracker that has the recipe's identity, and whose id is kept."""
    known = read_ids(run_dir).get(name)
    tracker, made = _started(name, section, run_dir, known, undo)
    if made is not None and made != known:
        with _IDS_LOCK:
            ids = read_ids(run_dir) | {name: made}
            write_atomically(run_dir / IDS_NAME, json.dumps(ids, indent=1) + "\n")
    if name not in _KEPT_ONCE or known is None:
        tracker.store_init_configuration(config)
    return tracker


def _started(
    name: str, section: LoggingSection, run_dir: Path, known: str | None, undo: ExitStack
) -> tuple[Any, str | None]:
    """A started tracker and its run's id; None if it resumes no runs."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    of: Any = LOGGER_TYPE_TO_CLASS.get(name)
    if of is None:
        raise ValueError("accelerate does not know it")
    return _MAKERS.get(name, _plain)(of, section, run_dir, known, undo)


def _plain(
    of: Any, section: LoggingSection, run_dir: Path, known: str | None, undo: ExitStack
) -> tuple[Any, None]:
    options = {"logging_dir": str(run_dir / FOLDER)} if of.requires_logging_directory else {}
    tracker = of(section.project, **options)
    tracker.start()
    logger.warning(
        "note: vlmpack does not keep back what tracker %s finds by itself (the command line, the "
        "console or a clone's remote, say). See its own settings",
        of.name,
    )
    return tracker, None


def _tensorboard(
    of: Any, section: LoggingSection, run_dir: Path, known: str | None, undo: ExitStack
) -> tuple[Any, None]:
    tracker = of(run_dir.name, logging_dir=str(run_dir / FOLDER))
    tracker.start()
    return tracker, None


def _wandb(
    of: Any, section: LoggingSection, run_dir: Path, known: str | None, undo: ExitStack
) -> tuple[Any, str]:
    import wandb

    own = known or _new_id()
    (run_dir / FOLDER).mkdir(exist_ok=True)
    tracker = of(
        section.project,
        name=section.name or run_dir.name,
        tags=list(section.tags) or None,
        group=section.group,
        id=own,
        resume="allow",
        dir=str(run_dir / FOLDER),
        mode="offline" if section.offline else None,
        settings=wandb.Settings(**WANDB_KEEPS_BACK),
    )
    tracker.start()
    return tracker, own


def _swanlab(
    of: Any, section: LoggingSection, run_dir: Path, known: str | None, undo: ExitStack
) -> tuple[Any, str]:
    import swanlab

    own = known or _new_id()
    options: dict[str, Any] = {"group": section.group} if section.group else {}
    tracker = of(
        section.project,
        experiment_name=section.name or run_dir.name,
        tags=list(section.tags) or None,
        id=own,
        resume="allow",
        logdir=str(run_dir / FOLDER / "swanlab"),
        mode="offline" if section.offline else None,
        settings=_silent(swanlab.Settings(**SWANLAB_KEEPS_BACK)),
        **options,
    )
    tracker.start()
    return tracker, own


def _silent(settings: Any) -> Any:
    """SwanLab's settings, checked, since it ignores names that it does not know."""
    held = settings.model_dump()
    for section, keys in SWANLAB_KEEPS_BACK.items():
        options = held.get(section) or {}
        if any(options.get(name) != value for name, value in keys.items()):
            raise ValueError(
                f"this SwanLab does not take {section}={dict(keys)}, so it would send the "
                "command line, the console and the git remote; pip install -U 'swanlab>=0.10'"
            )
    return settings


def _mlflow(
    of: Any, section: LoggingSection, run_dir: Path, known: str | None, undo: ExitStack
) -> tuple[Any, str]:
    import mlflow

    if section.offline:
        for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_TRACKING_URI"):  # MLflow sets the second
            undo.callback(_set_variable, name, os.environ.get(name))
        before = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
        undo.callback(mlflow.set_tracking_uri, before)
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri((run_dir / FOLDER / "mlflow").absolute().as_uri())
    tags = dict.fromkeys(section.tags, "true") | ({"group": section.group} if section.group else {})
    tracker = of(
        experiment_name=section.project,
        run_id=known,
        run_name=section.name or run_dir.name,
        tags=tags or None,
    )
    tracker.start()
    return tracker, str(tracker.active_run.info.run_id)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


Make = Callable[[Any, LoggingSection, Path, str | None, ExitStack], tuple[Any, str | None]]
"""(accelerate's class, the section, the run folder, the known id, what is undone at the end) -> a
tracker at work, its id."""

_MAKERS: Mapping[str, Make] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "swanlab": _swanlab,
    "mlflow": _mlflow,
}
_KEPT_ONCE = ("mlflow",)
"""Trackers that refuse a parameter that changes: those of the first launch stay."""

WANDB_KEEPS_BACK: Mapping[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "host": "",
    "x_disable_meta": True,
    "x_save_requirements": False,
}
"""Settings of W&B: no console, git, command line, host or packages, whose addresses may hold a
token. One that a version does not know is an error of W&B's, so nothing is sent then."""

SWANLAB_KEEPS_BACK: Mapping[str, Mapping[str, Any]] = {
    "probe": dict.fromkeys(
        ("hardware", "runtime", "requirements", "conda", "git", "swanlab"), False
    ),
    "terminal": {"proxy_type": "none"},
}
"""The same of SwanLab. Its `runtime` is the command line, the folder and the host's name."""


def _new_id() -> str:
    """21 characters, as SwanLab wants them."""
    return secrets.token_hex(11)[:21]
