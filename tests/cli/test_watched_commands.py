"""Every command is watched as a run is: what blocks is named with its stack, what moves is not.
A watchdog ends nothing, so that commands go on here once they are let go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from support.recipes import run_settings, write_recipe
from support.shards import SHARD
from typer.testing import CliRunner

from vlmpack.activity import ACTIVITY, IDLE
from vlmpack.cli.app import app
from vlmpack.data.index.shard_index import IndexBuilder
from vlmpack.encode.encoder import Encoder
from vlmpack.errors import VlmpackError
from vlmpack.storage import RoutingFetcher

SECONDS = 0.4
LATE = 20.0
"""What a loaded machine adds at most."""


def commands(of: typer.Typer, *before: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command by the words that call it, those of groups as well."""
    for info in of.registered_commands:
        assert info.callback is not None
        yield (*before, info.name or info.callback.__name__), info
    for group in of.registered_groups:
        assert group.typer_instance is not None and group.name is not None
        yield from commands(group.typer_instance, *before, group.name)


EVERY = dict(commands(app))


@pytest.fixture
def until_said(monkeypatch, caplog) -> Iterator[Callable[..., None]]:
    """Blocks until the watchdog speaks."""
    monkeypatch.setattr("vlmpack.cli.app.SECONDS", SECONDS)
    ACTIVITY.enter_alone("starting")

    def stands_here(*_: Any, **__: Any) -> None:
        end = time.monotonic() + LATE
        while "in stands_here" not in caplog.text and time.monotonic() < end:
            time.sleep(0.01)

    yield stands_here
    ACTIVITY.enter(IDLE)


def test_what_is_called_a_command_is_one() -> None:
    """Guard of the tests below."""
    assert {"index", "pack", "plan", "verify", "inspect", "generate", "export"} <= {
        name for name, *rest in EVERY if not rest
    }
    assert {("data", "lint"), ("data", "stats"), ("recipe", "check"), ("finetune",)} <= set(EVERY)


@pytest.mark.parametrize("words", list(EVERY), ids=" ".join)
def test_every_command_is_watched(monkeypatch, caplog, until_said, words) -> None:
    """One that is added tomorrow is, too."""
    monkeypatch.setattr(
        "typer.testing._get_command", typer.main.get_command.__wrapped__
    )  # a new tree
    monkeypatch.setattr("vlmpack.cli.app.SECONDS", SECONDS / 8)
    monkeypatch.setattr(EVERY[words], "name", words[-1])
    monkeypatch.setattr(EVERY[words], "callback", lambda: until_said())
    ended = CliRunner().invoke(app, list(words))
    assert ended.exit_code == 0, ended.exception
    assert "no progress for 0 s: process " in caplog.text
    assert "its main thread stands at" in caplog.text and "in stands_here" in caplog.text
    assert ACTIVITY.watchdog is None, "it ends with the command"


def blocked_once(until_said: Callable[..., None], call: Any) -> Any:
    """The call, which first blocks."""

    def blocks(*arguments: Any, **options: Any) -> Any:
        ACTIVITY.moved()  # what came before, imports that take long here, is another silence
        until_said()
        return call(*arguments, **options)

    return blocks


BLOCKED = {
    "a reader": (IndexBuilder, "samples", ("index", "SHARD", "--index-dir", "INDEX")),
    "a store": (RoutingFetcher, "head", ("data", "lint", "SHARD", "--index-dir", "INDEX")),
    "a template": (Encoder, "length", ("plan", "RECIPE", "packing.mode=online")),
    "an encoder": (
        Encoder,
        "encode",
        ("inspect", "RECIPE", "packing.mode=online", "--row", "0", "-o", "INSPECT"),
    ),
    "a packer": (Encoder, "length", ("pack", "RECIPE", "packing.mode=online", "-o", "PACKS")),
    "a source": (
        IndexBuilder,
        "samples",
        ("data", "stats", "SHARD", "--model", "MODEL", "--index-dir", "INDEX"),
    ),
}


@pytest.mark.cases(quick="a reader", slow="*")
@pytest.mark.parametrize("case", list(BLOCKED))
def test_what_blocks_is_named_and_the_command_goes_on(
    tmp_path: Path, monkeypatch, caplog, until_said, case: str
) -> None:
    of, name, words = BLOCKED[case]
    settings = run_settings(tmp_path, training__micro_batch_size=1, data__index_dir=None)
    places = {
        "SHARD": SHARD,
        "INDEX": tmp_path / "index",
        "MODEL": settings["model"]["path"],
        "RECIPE": write_recipe(tmp_path / "recipe.yaml", settings),
        "INSPECT": tmp_path / "inspect",
        "PACKS": tmp_path / "packs",
    }
    monkeypatch.setenv("VLMPACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(of, name, blocked_once(until_said, getattr(of, name)))
    ended = CliRunner().invoke(app, [str(places.get(word, word)) for word in words])
    assert ended.exit_code == 0, (ended.exception, ended.output)
    assert "in stands_here" in caplog.text and "in blocks" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("command", ["export", "merge", "generate", "chat", "verify", "reference"])
def test_what_loads_models_is_watched_where_it_loads(
    tmp_path: Path, monkeypatch, caplog, until_said, command: str
) -> None:
    recipe = str(write_recipe(tmp_path / "recipe.yaml", run_settings(tmp_path)))
    door, words = {
        "export": ("vlmpack.run.export.choose_export", [str(tmp_path)]),
        "merge": ("vlmpack.run.export.merge_folders", ["m", "a", "-o", "out"]),
        "generate": ("vlmpack.evaluation.generation.load_for_generation", ["?", "--model", "m"]),
        "chat": ("vlmpack.evaluation.generation.load_for_generation", ["--model", "m"]),
        "verify": ("vlmpack.proof.verify.verify_recipe", [recipe, "logging.watch_seconds=1"]),
        "reference": (
            "vlmpack.run.reference.make_references",
            [recipe, "logging.watch_seconds=1"],
        ),
    }[command]

    def loads(*_: Any, **__: Any) -> None:
        until_said()
        raise VlmpackError("let go")

    monkeypatch.setattr(door, loads)
    ended = CliRunner().invoke(app, [command, *words])
    assert str(ended.exception) == "let go"
    assert "in loads" in caplog.text
    assert caplog.text.count("no progress") == 1, "one watchdog speaks"
    phase = "opening model and data" if words[0] == recipe else "the"
    assert phase in caplog.text


def test_a_slow_command_that_moves_is_left_alone(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("vlmpack.cli.app.SECONDS", seconds := 1.0)
    original, start = IndexBuilder.samples, time.monotonic()

    def slow(self: IndexBuilder, stamp: Any) -> Iterator[Any]:
        for raw in original(self, stamp):
            time.sleep(seconds / 5)
            yield raw
            if time.monotonic() - start > 3 * seconds:
                return

    monkeypatch.setattr(IndexBuilder, "samples", slow)
    ended = CliRunner().invoke(app, ["data", "lint", str(SHARD), "--index-dir", str(tmp_path)])
    assert time.monotonic() - start > 2 * seconds, "guard: it was slow"
    assert ended.exit_code == 0, ended.output
    assert "no progress" not in caplog.text
