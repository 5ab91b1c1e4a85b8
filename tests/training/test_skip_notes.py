"""Skipped samples are said: the first, and whenever they are ten times more."""

from __future__ import annotations

import logging

import pytest

from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.loading.read import SkippedSample
from vlmpack.training.reporting import SkipNotes


def test_a_thousand_skipped_samples_are_four_lines(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(None)
    notes = SkipNotes(ledger)
    with caplog.at_level(logging.INFO, "vlmpack"):
        for batch in range(500):
            for number in (2 * batch, 2 * batch + 1):
                hole = SkippedSample(number, f"k{number}", "s.tar", 512, "decode", "cut")
                ledger.record([hole], epoch=0, batch=batch)
            notes.note(2)
            notes.note(0)
    found = [text.split()[1] for text in caplog.messages]
    assert found == ["2", "10", "100", "1,000"]
    assert "the last is 'k1' in s.tar (decode): cut. data-errors.jsonl lists" in caplog.messages[0]


def test_a_sample_of_a_skipped_step_is_no_bad_one(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(None)
    ledger.record([SkippedSample(1, "k1", "s.tar", 512, "decode", "cut")], epoch=0, batch=0)
    ledger.record_unlearnt([(2, "k2", "s.tar")], reason="not finite", epoch=0, batch=1)
    SkipNotes(ledger).note(1)
    assert "the last is 'k1' in s.tar (decode): cut. " in caplog.messages[0]


def test_nothing_is_said_where_nothing_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    notes = SkipNotes(Ledger(None))
    for _ in range(3):
        notes.note(0)
    assert caplog.messages == []
