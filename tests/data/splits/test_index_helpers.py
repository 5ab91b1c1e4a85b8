"""The end of what works ahead of use: soon, even where a store holds it up."""

from __future__ import annotations

import multiprocessing
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.shard_fakes import config_for, open_data, write_shards

from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.splits.growing_index import GrowingIndex, IndexHelpers
from vlmpack.recipe.data import CacheSection
from vlmpack.storage.cache.cached import CachedFetcher
from vlmpack.storage.fetch import LocalFetcher


def deaf(ready: Any) -> None:
    """As one in a call that does not come back, where the signal's handler never runs."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(60)


def test_a_helper_that_does_not_hear_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmpack.data.splits.growing_index.CLOSE_SECONDS", 0.3)
    context = multiprocessing.get_context("fork")
    helpers, ready = IndexHelpers(), [context.Event(), context.Event()]
    helpers._processes += [context.Process(target=deaf, args=(event,)) for event in ready]
    started = list(helpers._processes)
    for process, event in zip(started, ready, strict=True):
        process.start()
        assert event.wait(30)
    begin = time.monotonic()
    helpers.close()
    assert 0.2 < time.monotonic() - begin < 15, "all together have the time of one"
    assert [process.exitcode for process in started] == [-signal.SIGKILL] * 2
    helpers.close()


def test_closing_a_book_stops_what_is_fetched_ahead(tmp_path: Path) -> None:
    stopped = []

    class Watched(CachedFetcher):
        def stop_prefetch(self) -> None:
            stopped.append(True)
            super().stop_prefetch()

    fetcher = Watched(LocalFetcher(), CacheSection(directory=str(tmp_path / "blocks")))
    builder: Any = SimpleNamespace(fetcher=fetcher)
    settings = BuildSettings(directory=tmp_path)
    GrowingIndex(config_for("s-*.tar", tmp_path), [], builder, settings).close()
    assert stopped == [True]


@pytest.mark.parametrize(("cores", "order"), [(2, ["indexed", "server"]), (8, ["server"])])
def test_with_few_cores_the_first_window_comes_before_the_server(
    cores: int, order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its imports would take the core that the first batch waits for."""
    paths, index, seen = write_shards(tmp_path / "d", 12, per_shard=4), tmp_path / "i", []

    def start_server(preload: tuple[str, ...]) -> None:
        seen.extend(["indexed"] if list(index.glob("*.index.part")) else [])
        seen.append("server")

    monkeypatch.setattr("vlmpack.data.splits.streamed.start_server", start_server)
    monkeypatch.setattr("vlmpack.data.splits.streamed.HELPER_MIN_BYTES", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    open_data(paths, index, shuffle="window").split.close()
    assert seen[: len(order)] == order
