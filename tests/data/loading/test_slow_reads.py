"""What keeps a loader waiting is named in time: a stopped process, slow headers, a slow body."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.fault_server import Fault, FaultServer
from support.shard_fakes import loading, micro_batches, open_data, write_shards

from vlmpack.activity import ACTIVITY, IDLE, Activity
from vlmpack.recipe.data import StorageSection
from vlmpack.storage import RoutingFetcher
from vlmpack.storage.remote import Reading
from vlmpack.terminal import say_printable
from vlmpack.watchdog import Watchdog

WATCH = 1.0
LATE = 8.0
"""What a loaded machine adds."""


@pytest.fixture
def watch():
    """The trainer's watchdog; what it said, and when after the start."""
    said = []
    ACTIVITY.step = 5
    ACTIVITY.enter("waiting for data")
    with Watchdog(ACTIVITY, WATCH, who="rank 0", say=said.append):
        yield said
    ACTIVITY.step = 0
    ACTIVITY.enter(IDLE)


def first_word(said):
    """What is said first, which has to be in time."""
    ACTIVITY.enter("waiting for data")
    begin = time.monotonic()
    said.clear()
    while not said:
        assert time.monotonic() - begin < WATCH + LATE, "silent for too long"
        time.sleep(0.02)
    return said[0]


def storage(server, **changes):
    values = {
        "anonymous": True,
        "allow_private": True,
        "read_timeout_seconds": 20.0,
        "max_tries": 1,
    }
    return StorageSection(**(values | {"endpoint": server.url} | changes))


@pytest.mark.cases(slow="slow body")
@pytest.mark.parametrize(
    ("scheme", "fault", "came"),
    [
        ("http", Fault("drip", times=None, seconds=0.2), "no byte of its answer so far"),
        ("http", Fault("slow", bytes_per_second=40_000), r"[\d,]+ bytes so far, the last of them"),
        ("s3", Fault("stall", part=0.5, seconds=20), r"[\d,]+ bytes so far|no byte of its ans"),
    ],
    ids=["slow headers", "slow body", "stalled object store"],
)
def test_a_slow_store_is_named_without_its_secrets(tmp_path, watch, scheme, fault, came):
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "x.tar").write_bytes(random.Random(1).randbytes(3_000_000))
    with FaultServer(tmp_path) as server:
        login = server.url.replace("://", "://someone:hidden-word@")
        path = f"{login}/bucket/x.tar?sig=hidden" if scheme == "http" else "s3://bucket/x.tar"
        fetcher = RoutingFetcher(storage(server))
        stamp = fetcher.head(path)
        server.fail(fault)
        reader = threading.Thread(target=quietly, args=(fetcher, stamp), daemon=True)
        reader.start()
        text = first_word(watch)
        server.close()
        reader.join(30)
    shown = r"http://\*\*\*@127.0.0.1:\d+/bucket/x.tar\?\*\*\*" if scheme == "http" else path
    assert re.search(rf"waiting for {shown} for 1 s: ({came})", text), text
    assert "hidden" not in text
    assert "step 5, waiting for data" in text
    assert ACTIVITY.waits() == []


def quietly(fetcher, stamp):
    try:
        fetcher.read(stamp, 0, stamp.size)
    except Exception:
        return


def keys_of(batches):
    return [sample.key for batch in batches for sample in batch.samples]


@pytest.mark.slow
def test_a_stopped_loader_process_is_named_with_the_last_sample_asked_of_it(tmp_path, watch):
    pattern = write_shards(tmp_path, 37, per_shard=10)
    settings = loading(2, prefetch_batches=1, timeout_seconds=60)
    expected = keys_of(micro_batches(open_data(pattern, tmp_path / "i", num_probed=0)))
    data = open_data(pattern, tmp_path / "i", num_probed=0, **settings)
    steps = data.batches(data.start(), rank=0, dp=1, max_steps=6)
    got = list(next(steps).micro_batches)
    stopped = {child.pid for child in multiprocessing.active_children()}
    assert len(stopped) == 2
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    reader = threading.Thread(target=lambda: got.extend(b for s in steps for b in s.micro_batches))
    reader.start()
    time.sleep(0.3)  # what was sent before is read
    text = first_word(watch)
    before = len(got)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    reader.join(60)
    waits = re.search(
        r"waiting for loader process [01] \(process (\d+), stopped by a signal .*\), which was "
        r"asked for \d+ samples?, the last asked for '(\w+)' of (\S+)",
        text,
    )
    assert waits is not None, text
    assert int(waits[1]) in stopped
    # A step is handed out whole: of its three micro-batches some were sent before the stop.
    nexts = [batch.samples[-1].key for batch in got[before : before + 3]]
    assert waits[2] in nexts, "the last sample of a micro-batch of the step that came next"
    assert waits[3].startswith(str(tmp_path))
    assert keys_of(got) == expected, "and nothing is lost by it"


PATIENT = """
import sys
from pathlib import Path
from support.shard_fakes import FakeEncoder, config_for, loading
from vlmpack.data.pipeline import TrainData
from vlmpack.recipe.data import StorageSection
from vlmpack.storage import RoutingFetcher

if __name__ == "__main__":
    url, folder = sys.argv[1:]
    loader = loading(1, watch_seconds=1.0)
    config = config_for(url, Path(folder), num_probed=0, **loader)
    fetcher = RoutingFetcher(StorageSection(allow_private=True, read_timeout_seconds=20.0))
    data = TrainData.open(config, FakeEncoder(), fetcher=fetcher)
    sys.stderr.write("opened\\n")
    step = next(data.batches(data.start(), rank=0, dp=1, max_steps=1))
    assert step.micro_batches[0].samples
"""


@pytest.mark.soak
def test_a_loader_process_says_itself_which_store_it_waits_for(tmp_path):
    write_shards(tmp_path / "bucket", 4, per_shard=4)
    script = tmp_path / "patient.py"
    script.write_text(PATIENT, encoding="ascii")
    with FaultServer(tmp_path) as server:
        (name,) = [path.name for path in (tmp_path / "bucket").glob("*.tar")]
        url = f"{server.url}/bucket/{name}"
        process = subprocess.Popen(
            [sys.executable, str(script), url, str(tmp_path / "i")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        before = process.stderr.readline()
        server.fail(Fault("latency", seconds=1.5 * WATCH))
        said = before + process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    assert before == "opened\n", said
    assert re.search(
        r"no progress for 1 s: loader process 0 \(process \d+\): loading samples; last samples: 0",
        said,
    ), said
    assert f"waiting for {url} for 1 s: no byte of its answer so far" in said


def test_no_key_or_address_steers_the_terminal_through_a_watchdog(caplog):
    """Loader processes, and scripts that call finetune, have no formatter of ours."""
    activity = Activity()
    activity.samples = ["k\x1b[2J", "e\u202eq"]
    activity.enter("loading samples")
    with (
        activity.waiting(lambda: "waiting for https://u:hidden@h/x\x9b"),
        Watchdog(activity, 0.1, who="loader process 0", say=say_printable),
    ):
        time.sleep(0.15)
    assert r"k\x1b[2J, e\u202eq" in caplog.text
    assert "hidden" not in caplog.text
    assert not set(caplog.text) & set("\x1b\u202e\x9b")


@pytest.mark.parametrize(("mine", "moves"), [(True, True), (False, False)], ids=["own", "other"])
def test_bytes_that_come_are_progress_of_the_thread_that_reads(mine, moves):
    """A long shard that streams is no stall; one that another thread streams hides none."""
    ACTIVITY.thread = threading.get_ident() if mine else 0
    before = ACTIVITY.beats
    chunks = [bytes(600_000)] * 4
    assert list(Reading("s3://bucket/x.tar").read_chunks(lambda: iter(chunks))) == chunks
    ACTIVITY.thread = threading.get_ident()
    assert (ACTIVITY.beats > before) == moves
    before = ACTIVITY.beats
    list(Reading("s3://bucket/x.tar").read_chunks(lambda: iter([bytes(10)] * 100)))
    assert ACTIVITY.beats == before, "a trickle is none"
