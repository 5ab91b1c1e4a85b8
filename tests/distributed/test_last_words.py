"""A lost connection is told from other errors, and a process that is gone from one that lives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vlmpack.distributed.pulse import has_ended, lost_connection, words_of_lost
from vlmpack.distributed.ranks import Ranks
from vlmpack.errors import VlmpackError
from vlmpack.run.place import lost_inside, watched

CLOSED = "[/pair.cc:553] Connection closed by peer [127.0.0.1]:18305. This is typically caused by"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError(CLOSED), "Connection closed by peer"),
        (RuntimeError("[/pair.cc:537] Read error: Connection reset by peer."), "Connection reset"),
        (
            RuntimeError(
                "ncclRemoteError: A call failed possibly due to a network error or a remote "
                "process exiting prematurely."
            ),
            "remote process exiting",
        ),
        (RuntimeError("[/unbound_buffer.cc:129] Timed out waiting 60000ms for send"), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ConnectionResetError("Connection reset by peer"), None),  # a store's, not a rank's
    ],
)
def test_lost_connections_are_those_of_collectives(error, words):
    found = lost_connection(error)
    assert found is None if words is None else found.startswith(words)


def test_a_rank_says_where_it_was_and_keeps_the_original():
    with pytest.raises(VlmpackError) as caught, watched(Ranks(), 60):
        raise RuntimeError(CLOSED)
    assert str(caught.value).startswith("lost one of the 1 processes in launch (Connection closed ")
    assert str(caught.value.__cause__) == CLOSED
    with pytest.raises(RuntimeError, match="shapes"), watched(Ranks(), 60):
        raise RuntimeError("shapes")
    known = ["rank 3 has ended"]
    text = words_of_lost("Broken pipe", step=7, phase="saving", size=8, ended=known)
    assert "in step 7, saving (Broken pipe): rank 3 has ended. " in text


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux")
def test_a_process_that_nobody_has_waited_for_has_ended_too():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not has_ended(child.pid) and not has_ended(os.getpid())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays, as launchers leave it
    assert has_ended(child.pid)
    child.wait()
    child.stdin.close()
    assert has_ended(child.pid)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux")
def test_a_process_that_ends_behind_its_connection_is_waited_for(tmp_path):
    child = subprocess.Popen(["sleep", "0.15"])
    entry = {"pid": child.pid, "step": 2, "calls": ["callback Ends.on_step"]}
    entry |= {"host": socket.gethostname()}
    (tmp_path / "calling-0.json").write_text(json.dumps(entry))
    assert not has_ended(child.pid)
    [line] = lost_inside(tmp_path)
    assert line.startswith(f"process {child.pid} ended inside callback Ends.on_step at step 2")
    child.wait()
    (tmp_path / "calling-0.json").write_text(json.dumps(entry | {"pid": os.getpid()}))
    assert lost_inside(tmp_path) == lost_inside(None) == []
