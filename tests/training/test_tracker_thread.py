"""A tracker that blocks for ever, at whichever call, keeps no run waiting; nothing it says is a
secret."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.recipes import run_settings

import vlmpack
from vlmpack.recipe.schema import LoggingSection
from vlmpack.training import trackers
from vlmpack.training.trackers import THREADS, Trackers, TrackerThread

SECONDS = 0.3
LATE = 20.0
"""What a loaded machine adds."""
CALLS = ("start", "log", "finish")


class Blocking:
    """Never returns from one of its calls, until it is let go."""

    name = "wandb"

    def __init__(self, at: str) -> None:
        self.at, self.go, self.calls = at, threading.Event(), []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.at:
            self.go.wait()

    def start(self) -> Blocking:
        self._call("start")
        return self

    def store_init_configuration(self, values: Any) -> None: ...

    def log(self, values: Any, step: int) -> None:
        self._call("log")

    def finish(self) -> None:
        self._call("finish")


def of_a_run(monkeypatch: pytest.MonkeyPatch, tracker: Blocking) -> None:
    """The tracker that runs get."""
    monkeypatch.setattr(trackers, "_started", lambda *_: (tracker.start(), None))
    monkeypatch.setattr("vlmpack.training.trackers.missing_trackers", lambda _: ())


@pytest.fixture
def blocking():
    """Makes a blocking tracker, which is let go at the end."""
    made: list[Blocking] = []

    def make(at: str) -> Blocking:
        made.append(Blocking(at))
        return made[-1]

    yield make
    for tracker in made:
        tracker.go.set()


@pytest.mark.parametrize("at", CALLS)
def test_a_call_that_does_not_return_is_waited_for_in_bounds(
    tmp_path, monkeypatch, caplog, blocking, at
):
    tracker = blocking(at)
    of_a_run(monkeypatch, tracker)
    section = LoggingSection.model_construct(trackers=("wandb",), tracker_seconds=SECONDS)
    begin = time.monotonic()
    made = Trackers(section, tmp_path, {})
    started = time.monotonic()
    for step in (1, 2, 3):
        made.log({"loss": 1.0}, step)
    logged = time.monotonic()
    made.close()
    assert (started - begin >= SECONDS) == (at == "start")
    assert logged - started < SECONDS / 2, "a step waits for nothing"
    assert SECONDS <= time.monotonic() - logged < LATE
    assert ("wandb has not started within 0.3 s" in caplog.text) == (at == "start")
    lacks = "" if at == "finish" else "it lacks 3 of this launch's 3 points; "
    said = f"tracker wandb did not finish within 0.3 s (logging.tracker_seconds): its {at} does "
    assert f"{said}not return; {lacks}metrics.jsonl has them all" in caplog.text
    tracker.go.set()
    made._trackers[0]._thread.join(LATE)
    expected = {"start": ["start"], "log": ["start", "log"], "finish": ["start"] + 3 * ["log"]}
    assert tracker.calls == expected[at] + ["finish"] * (at == "finish"), "it is called no more"


@pytest.mark.parametrize("at", ["never"])
def test_control_a_tracker_that_returns_has_all_and_is_not_named(
    tmp_path, monkeypatch, caplog, blocking, at
):
    tracker = blocking(at)
    of_a_run(monkeypatch, tracker)
    section = LoggingSection.model_construct(trackers=("wandb",), tracker_seconds=LATE)
    made = Trackers(section, tmp_path, {})
    made.log({"loss": 1.0}, 1)
    made.close()
    assert tracker.calls == ["start", "log", "finish"]
    assert caplog.text == ""
    assert not [each for each in threading.enumerate() if each.name.startswith(THREADS)]


def test_trackers_start_side_by_side(tmp_path, monkeypatch, caplog, blocking):
    """A healthy one behind one that blocks was called once the time was over, and named as late."""
    made = {"blocked": blocking("start"), "healthy": blocking("never")}
    monkeypatch.setattr(trackers, "_started", lambda name, *_: (made[name].start(), None))
    section = LoggingSection.model_construct(trackers=tuple(made), tracker_seconds=SECONDS)
    both = Trackers(section, tmp_path, {})
    both.log({"loss": 1.0}, 1)
    both.close()
    assert "tracker blocked has not started" in caplog.text and "healthy" not in caplog.text
    assert made["healthy"].calls == ["start", "log", "finish"]


@pytest.mark.slow
@pytest.mark.parametrize("at", CALLS)
def test_a_run_ends_in_time_with_its_metrics_whole(tmp_path, monkeypatch, caplog, blocking, at):
    tracker = blocking(at)
    of_a_run(monkeypatch, tracker)
    values = run_settings(tmp_path) | {
        "logging": {"trackers": ["wandb"], "tracker_seconds": 1, "progress": "none"}
        | {"interval_steps": 1}
    }
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="vlmpack"):
        result = vlmpack.finetune(values, training__max_steps=3)
    assert time.monotonic() - begin < 90
    lines = Path(values["run_dir"], "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3] and result.steps == 3
    said = f"tracker wandb did not finish within 1 s (logging.tracker_seconds): its {at}"
    assert caplog.text.count(said) == 1


def test_points_beyond_the_bound_are_dropped_counted_and_said(monkeypatch, caplog, blocking):
    monkeypatch.setattr(trackers, "MOST_WAITING", 5)
    tracker = blocking("log")
    thread = TrackerThread("wandb", tracker.start)
    thread.log({"loss": 1.0}, 1)
    while "log" not in tracker.calls:  # it has taken the first one
        time.sleep(0.01)
    for step in range(2, 11):
        thread.log({"loss": 1.0}, step)
    tracker.go.set()
    thread.end()
    assert thread.ended_by(time.monotonic() + LATE)
    assert tracker.calls.count("log") == 6
    assert thread.missing() == "it lacks 4 of this launch's 10 points"
    said = "tracker wandb is 5 points behind, so points are dropped from step 7 on"
    assert caplog.text.count(said) == 1


KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "error",
    [
        ValueError(f"API key {KEY} is refused"),
        ValueError("headers {'Authorization': 'Bearer planted'}"),
        ValueError("https://bob:planted@host/api?key=planted"),
        ValueError("cannot log in with planted-in-the-environment"),
        SystemExit("api_key = planted"),
        KeyError("token=planted"),
    ],
)
def test_what_a_tracker_raises_holds_no_secret(monkeypatch, caplog, error):
    monkeypatch.setenv("WANDB_API_KEY", "planted-in-the-environment")

    def start() -> Any:
        raise error

    thread = TrackerThread("wandb", start)
    assert thread.ended_by(time.monotonic() + LATE)
    assert "tracker wandb is off: " in caplog.text and "***" in caplog.text
    assert "planted" not in caplog.text + str(thread.off) and KEY not in caplog.text
