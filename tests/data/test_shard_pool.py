"""A pool whose process is killed: the error says so, and what to do."""

from __future__ import annotations

import os
import signal

import pytest

from vlmpack.data.index.shard_pool import each_shard
from vlmpack.errors import VlmpackError


def doubled(number: int) -> int:
    if number < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * number


def test_a_killed_process_is_named_with_what_to_do() -> None:
    reports = each_shard(
        doubled, [1, -1, 3], processes=2, preload=(), in_order=True, remedy="use fewer --processes"
    )
    with pytest.raises(VlmpackError, match=r"2 processes .* 3 shards was killed.*fewer --process"):
        list(reports)
