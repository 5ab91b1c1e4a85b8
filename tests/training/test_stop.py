"""SIGTERM asks for a stop at the next step boundary and interrupts nothing."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from vlmpack.errors import Preempted
from vlmpack.training.run_dir import RunDir
from vlmpack.training.stop import StopFlag, interrupt_logged, stop_on_sigterm


def test_sigterm_sets_the_flag_and_nothing_else():
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm() as listen:
        assert signal.getsignal(signal.SIGTERM) is before
        flag = listen()
        assert not flag.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.is_set()
        os.kill(os.getpid(), signal.SIGTERM)  # a second one changes nothing
        assert flag.is_set()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("started_by", ["torchrun", "a shell"])
def test_a_launcher_that_is_gone_asks_for_a_stop(monkeypatch, caplog, started_by):
    """A shell may go, as behind `nohup`."""
    if started_by == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    parents = iter([7, 7, 1, 1, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    flag = StopFlag()
    assert not flag.is_set()
    assert [flag.is_set() for _ in range(2)] == [started_by == "torchrun"] * 2
    assert caplog.text.count("torchrun has ended") == (started_by == "torchrun")


@contextmanager
def closing_slowly():
    """Its process is ended meanwhile, as launchers do when another one has failed."""
    try:
        yield
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def test_an_error_on_its_way_out_is_not_cut_off_and_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with stop_on_sigterm() as listen, closing_slowly():
            listen()
            raise RuntimeError
    except RuntimeError:
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_cannot_take_signals_and_do_not_fail():
    seen = []

    def work():
        with stop_on_sigterm() as listen:
            seen.append(listen().is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=30)
    assert seen == [False]


def test_a_signal_that_comes_while_one_is_handled_does_not_wait_for_itself():
    """Signals nest: a second one may come at any call inside the handler of the first."""
    with stop_on_sigterm() as listen:
        flag = listen()
        handle = signal.getsignal(signal.SIGTERM)
        assert callable(handle)
        nested = []

        def again(frame, event, _argument):
            nested.append(event)
            handle(signal.SIGTERM, frame)

        def work():
            sys.setprofile(again)
            handle(signal.SIGTERM, None)
            sys.setprofile(None)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(timeout=20)
        assert nested and not thread.is_alive(), "the handler waits for a lock that it holds"
        assert flag.is_set()


def test_being_preempted_has_an_exit_code_of_its_own():
    assert Preempted.exit_code == 75


@pytest.mark.parametrize(
    ("steps", "saved", "expected"),
    [
        ((1, 2, 3), ("step-00000002",), "step 3; the last checkpoint is step 2, the same command"),
        ((), (), "step 0; no checkpoint is saved yet, the same command starts again"),
    ],
)
def test_an_interrupt_says_what_is_saved_and_goes_on(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    steps: tuple[int, ...],
    saved: tuple[str, ...],
    expected: str,
) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    for name in saved:
        (run_dir.checkpoints / name).mkdir(parents=True)
    caplog.set_level(logging.WARNING, "vlmpack")
    with pytest.raises(KeyboardInterrupt), interrupt_logged(run_dir):
        raise KeyboardInterrupt  # no signal: where tests run in the background it is ignored
    (line,) = caplog.messages
    assert line.startswith(f"interrupted at {expected}")
