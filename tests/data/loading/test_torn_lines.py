"""A line that a kill or a full disk cut takes no other with it: in the ledger, the metrics and the
sample record, cut at every byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.loading.read import SkippedSample
from vlmpack.training.metrics import MetricsLog, read_rows
from vlmpack.training.record import SampleName, SampleRecord, StepSamples, read_steps


def hole(number: int) -> SkippedSample:
    return SkippedSample(number, f"k{number}", "s.tar", 512 * number, "decode", "cut \u2028 short")


def cuts(data: bytes) -> range:
    """Every length that cuts the last of two lines; the first is whole."""
    first = data.index(b"\n") + 1
    assert data.count(b"\n") == 2 and data.endswith(b"\n")
    return range(first, len(data))


def test_a_torn_line_of_the_ledger_swallows_no_other(tmp_path: Path) -> None:
    path = tmp_path / "data-errors.jsonl"
    Ledger(path).record([hole(1), hole(2)], epoch=0, batch=4)
    whole = path.read_bytes()
    for cut in cuts(whole):
        path.write_bytes(whole[:cut])
        Ledger(path).record([hole(3)], epoch=0, batch=5)
        keys = [line["key"] for line in Ledger(path).lines()]
        # Without its line end the second one may be whole.
        assert keys in (["k1", "k3"], ["k1", "k2", "k3"]), cut
        assert (keys == ["k1", "k2", "k3"]) == (cut == len(whole) - 1), cut


def test_a_resumed_run_leaves_no_torn_line_in_the_ledger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "data-errors.jsonl"
    Ledger(path).record([hole(1), hole(2)], epoch=0, batch=4)
    whole = path.read_bytes()
    for cut in cuts(whole):
        path.write_bytes(whole[:cut])
        ledger = Ledger(path)
        ledger.rewind(5)
        ledger.record([hole(3)], epoch=0, batch=5)
        assert [line["key"] for line in ledger.lines()] == ["k1", "k3"]
        assert ledger.damaged_lines() == [], "a kill is no damage"
    assert not caplog.records


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{}", b"7", b'{"batch": 1}', b"\xff\xfe", b"{"])
def test_a_line_that_is_none_is_counted_and_left_out(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "data-errors.jsonl"
    path.write_bytes(text + b"\n")
    ledger = Ledger(path)
    ledger.record([hole(1)], epoch=None, batch=None)
    assert [line["key"] for line in ledger.lines()] == ["k1"]
    assert ledger.damaged_lines() == [1]
    assert ledger.worst().keys == (("k1 (s.tar)", 1),)


def test_a_torn_row_of_the_metrics_swallows_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n')
    whole = path.read_bytes()
    for cut in cuts(whole):
        path.write_bytes(whole[:cut])
        log = MetricsLog(path, resume_step=2)
        log.write({"step": 3})
        log.close()
        steps = [row["step"] for row in read_rows(path)]
        assert steps == ([1, 2, 3] if cut == len(whole) - 1 else [1, 3])
    path.write_bytes(whole + b"[" * 100_000 + b'\n7\n{"loss": 1}\n\xff\n')
    assert [row["step"] for row in read_rows(path)] == [1, 2]


def test_a_torn_line_of_the_sample_record_swallows_no_other(tmp_path: Path) -> None:
    def step(batch: int) -> StepSamples:
        return StepSamples(batch, 0, ((SampleName("s.tar", f"k{batch}"),),), ())

    def write(*batches: int, launch: int) -> Path:
        record = SampleRecord(tmp_path, dp_rank=0, launch=launch)
        for batch in batches:
            record.write(step(batch))
        record.close()
        return record.path

    path = write(0, 1, launch=1)
    whole = path.read_bytes()
    for cut in cuts(whole):
        path.write_bytes(whole[:cut])
        write(1, launch=2)
        assert [(n, s.batch) for n, s in read_steps(tmp_path, 0)] == [(1, 0), (2, 1)], cut
