"""The tiny model, a few samples of the committed shards, and the reference; read-only."""

from __future__ import annotations

import gc
import os
import sys
import tempfile

# Tests never reach for a network, whatever the caller's environment says.
os.environ["HF_HUB_OFFLINE"] = "1"
# Matrices this small are slower on two threads, and much slower beside another process.
os.environ["OMP_NUM_THREADS"] = "1"

# Nor do they leave anything in a user's own cache.
os.environ["VLMPACK_CACHE"] = os.path.join(tempfile.gettempdir(), "vlmpack-tests-cache")  # noqa: PTH118

# Lines of commands stay whole: readline, which pytest imports, tells child processes a width.
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.runs import Run
    from support.shards import RawSample

    from vlmpack.encode import Encoder
    from vlmpack.packing import EncodedSample


YOUNG = 20_000
"""So many new objects, and garbage is looked for."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """A case whose function says where its cases run has the mark of that run."""
    from support import limits
    from support.cases import mark_of

    mark = mark_of(item)
    if mark:
        item.add_marker(mark)
    limits.limit(item)


def pytest_runtest_setup(item: pytest.Item) -> None:
    from support import limits

    limits.start(item)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A name of `cases` that no case has, where whole files were collected, is an error."""
    from support.cases import unknown_names

    if config.getoption("lf", False) or any("::" in argument for argument in config.args):
        return
    unknown = unknown_names(items)
    if unknown:
        raise pytest.UsageError("\n".join(unknown))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Garbage is looked for among what tests make, not among all that was imported for them.

    Python's own threshold is for smaller programs: with it a twentieth of the tests' time goes by.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(YOUNG)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def asked_once() -> Iterator[None]:
    """Build the tree of commands and read the version of a package once for all tests.

    Each takes milliseconds, at every call of a command and at every recipe.
    """
    from importlib import metadata

    import typer.main
    import typer.testing

    tree = cache(typer.main.get_command)
    version = cache(lambda name, distribution: distribution(name).version)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", tree)
        patch.setattr(typer.testing, "_get_command", tree)
        # By `distribution` too, which a test may replace.
        patch.setattr(metadata, "version", lambda name: version(name, metadata.distribution))
        # transformers writes each config that it loads into a line that nobody logs.
        if configs := sys.modules.get("transformers.configuration_utils"):
            patch.setattr(configs.PreTrainedConfig, "__repr__", object.__repr__)
        yield


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """The committed tiny Qwen2.5-VL."""
    from support.shards import TINY_MODEL

    return TINY_MODEL


@pytest.fixture(scope="session")
def encoder(tiny_folder: Path) -> Encoder:
    """Assistant-only labels."""
    from vlmpack.encode import Encoder

    return Encoder(tiny_folder)


@pytest.fixture(scope="session")
def mixed() -> list[RawSample]:
    """Six samples with 0 to 3 images."""
    from support.shards import mixed_samples

    samples = mixed_samples()
    assert {len(sample.images) for sample in samples} == {0, 1, 2, 3}
    return samples


@pytest.fixture(scope="session")
def encoded(encoder: Encoder, mixed: list[RawSample]) -> list[EncodedSample]:
    """The mixed samples, encoded by vlmpack."""
    return [encoder.encode(sample.cooked()) for sample in mixed]


@pytest.fixture(scope="session")
def one_rank() -> Any:
    """A single process on CPU."""
    from support.engines import single_rank

    return single_rank()


@pytest.fixture(scope="session")
def session_engine(tiny_folder: Path, encoder: Encoder) -> Any:
    """An engine for tests that change no weight; use it through `vlm`."""
    from support.engines import make_engine

    return make_engine(tiny_folder, encoder)


@pytest.fixture
def vlm(session_engine: Any) -> Any:
    """The packed model in training mode, without gradients. Its weights must not be changed."""
    session_engine.vlm.train()
    session_engine.vlm.zero_grad(set_to_none=True)
    return session_engine.vlm


@pytest.fixture(scope="session")
def stock_model(tiny_folder: Path) -> Any:
    """transformers' own model with sdpa, in float32."""
    from support.stock import load_stock

    return load_stock(tiny_folder).train()


@pytest.fixture(scope="session")
def reference(stock_model: Any, tiny_folder: Path, mixed: list[RawSample]) -> Run:
    """The mixed samples, one by one, through the stock model."""
    from support.stock import StockProcessor, run_one_by_one

    processor = StockProcessor(tiny_folder)
    return run_one_by_one(stock_model, {sample.key: processor(sample) for sample in mixed})
