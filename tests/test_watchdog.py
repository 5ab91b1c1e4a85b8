"""A process in which nothing moves says so in time, with what it waits for; others do not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import timeit

import pytest

from vlmpack.activity import ACTIVITY, IDLE, Activity
from vlmpack.watchdog import Silence, Watchdog

SECONDS = 0.4


LATE = 5.0
"""What a loaded machine adds."""


def heard(activity, lasting, *, seconds=SECONDS, act=lambda: None, until=1_000_000, **options):
    """(when, what) is said while this thread does `act` over and over for so long, or until so
    many have been."""
    said, begin = [], time.monotonic()
    with Watchdog(
        activity,
        seconds,
        who="process 7",
        say=lambda text: said.append((time.monotonic() - begin, text)),
        **options,
    ):
        activity.enter(activity.phase)
        while time.monotonic() - begin < lasting and len(said) < until:
            act()
            time.sleep(0.02)
    return said


@pytest.fixture
def activity():
    made = Activity()
    made.step, made.samples = 12, ["a", "b", "c", "d", "e"]
    made.enter("forward and backward")
    return made


def test_silence_is_broken_in_time_with_phase_step_samples_waits_and_stack(activity):
    with activity.waiting(lambda: "waiting for godot"), activity.waiting(lambda: None):
        said = heard(activity, 4 * LATE, until=2, others=lambda: ["rank 1 sleeps"])
    (first, text), (second, again) = said[:2]
    assert 0.6 * SECONDS < first < SECONDS + LATE
    assert 0.6 * SECONDS < second - first < SECONDS + LATE
    lines = text.splitlines()
    assert "process 7: step 12, forward and backward; last samples: a, b, c and 2 more" in lines[0]
    assert lines[1:3] == ["  waiting for godot", "  rank 1 sleeps"]
    assert "in heard" in text, "the stack of the thread that works"
    assert "waiting for godot" in again
    assert "in heard" not in again, "once is enough"


@pytest.mark.slow
def test_whoever_moves_or_has_no_orders_is_left_alone(activity):
    moving = heard(activity, 3 * SECONDS, act=lambda: activity.enter("optimizer"))
    assert moving == []
    activity.enter(IDLE)
    assert heard(activity, 3 * SECONDS) == []


def test_another_process_speaks_for_those_that_do_not(activity):
    assert heard(activity, 2 * SECONDS, speaks=lambda: False) == []


def test_time_in_which_the_process_was_stopped_itself_is_no_silence(activity):
    """Looks every second; a stop of 60 s counts as the one pause that the thread meant to wait."""
    activity.since = 100.0
    silence = Silence(1.0, 100.0)
    assert [silence.at(now, activity) for now in (101.0, 102.1)] == pytest.approx([1.0, 2.1])
    assert silence.at(162.1, activity) == pytest.approx(3.1)
    assert silence.at(163.1, activity) == pytest.approx(4.1), "what follows counts again"
    activity.moved()
    activity.since = 163.5
    assert silence.at(223.1, activity) == pytest.approx(1.0), "it moved, and was stopped then"
    activity.moved()
    activity.since = 224.0
    assert silence.at(224.1, activity) == pytest.approx(0.1)


def test_a_thread_that_is_always_late_still_hears_silence(activity):
    activity.since = 0.0
    silence = Silence(1.0, 0.0)
    assert [silence.at(now, activity) for now in (5.0, 10.0, 15.0)] == [1.0, 2.0, 3.0]


@pytest.mark.slow
def test_where_no_python_thread_can_run_the_last_resort_prints_the_stack():
    """A C function that keeps the interpreter to itself; so called that it does not let go."""
    code = """
import ctypes, time
from vlmpack.activity import ACTIVITY
from vlmpack.watchdog import Watchdog

def keeps_the_interpreter():
    ctypes.PyDLL(None).usleep(1_200_000)

ACTIVITY.enter("x")
with Watchdog(ACTIVITY, 0.2, who="w", say=lambda text: None, last_resort=True):
    time.sleep(0.1)
    keeps_the_interpreter()
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "in keeps_the_interpreter" in ran.stderr


def test_a_phase_inside_another_falls_back(activity):
    before = activity.beats
    with activity.during("loading samples", ["k"]):
        assert (activity.phase, activity.samples) == ("loading samples", ["k"])
    assert activity.phase == "forward and backward"
    assert activity.beats == before + 2


def test_outside_of_steps_no_samples_are_named(activity):
    watchdog = Watchdog(activity, SECONDS, who="process 7", say=print)
    assert "last samples: a, b, c and 2 more" in watchdog.report(9.0, stack=False)
    activity.enter_alone("writing the report")
    said = watchdog.report(9.0, stack=False)
    assert said == "no progress for 9 s: process 7: step 12, writing the report"


def test_imports_are_named_without_a_stack(activity, monkeypatch):
    monkeypatch.setattr(activity.__class__, "stack", lambda *_: 'File "<frozen importlib._boot"')
    said = Watchdog(activity, SECONDS, who="process 7", say=print).report(9.0, stack=True)
    assert said.endswith("\n  still importing Python packages (slow disk or busy CPU)")


def test_of_several_watchdogs_the_innermost_speaks_alone(activity):
    outer: list[str] = []
    with Watchdog(activity, SECONDS / 2, who="outer", say=outer.append):
        said = heard(activity, LATE, until=2)
        assert len(said) == 2 and outer == []
        activity.moved()
        end = time.monotonic() + LATE
        while not outer and time.monotonic() < end:
            time.sleep(0.01)
    assert outer, "it goes on where the inner one ends"
    assert activity.watchdog is None


def test_the_last_resort_of_the_outer_one_is_silent_while_a_patient_one_works():
    code = """
import time
from vlmpack.activity import Activity
from vlmpack.watchdog import Watchdog

def watched(seconds):
    return Watchdog(Activity(), seconds, who="w", say=print, last_resort=True)

outer, inner = watched(0.2), watched(60.0)
inner.activity = outer.activity
with outer:
    time.sleep(0.2)  # it has armed its last resort, for 0.4 s from its last look
    with inner:
        time.sleep(1.0)
print("worked")
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.stdout, ran.stderr) == ("worked\n", "")


def test_what_a_bar_shows_is_watched_and_not_named(activity):
    activity.enter_alone("indexing", shown=True)
    assert activity.stage == IDLE, "for `Waits`"
    assert "process 7: step 12, indexing" in heard(activity, LATE, until=1)[0][1]


def test_work_of_another_thread_is_no_sign_of_the_one_that_works(activity):
    before = activity.beats
    thread = threading.Thread(target=activity.worked)
    thread.start()
    thread.join()
    assert activity.beats == before
    activity.worked()
    assert activity.beats == before + 1


def test_a_step_is_not_slowed():
    """Some ten changes a step; a step of a millisecond would be a short one."""
    runs = timeit.repeat(lambda: ACTIVITY.enter(IDLE), timer=time.thread_time, number=10_000)
    seconds = min(runs) / 10_000
    assert seconds < 5e-6


def test_no_thread_stays_behind(activity):
    heard(activity, 0.1)
    assert "vlmpack-watchdog" not in {thread.name for thread in threading.enumerate()}
