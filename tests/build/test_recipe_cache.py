"""What a recipe says of the cache is what its fetcher does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlmpack.build.data import build_fetcher
from vlmpack.errors import RecipeError
from vlmpack.recipe import Recipe, load_recipe
from vlmpack.storage import RoutingFetcher
from vlmpack.storage.cache.cached import READ_AHEAD_BYTES, CachedFetcher, block_dir


def recipe(path: str, **data: Any) -> Recipe:
    return load_recipe(
        {
            "model": {"path": "model"},
            "data": {"train": path, **data},
            "training": {
                "max_steps": 1,
                "seq_length": 64,
                "micro_batch_size": 2,
                "global_batch_size": 2,
            },
            "optim": {"lr": 1e-4},
            "run_dir": "run",
        }
    )


def test_remote_shards_go_through_the_cache(tmp_path: Path) -> None:
    cache = {"directory": str(tmp_path / "blocks"), "max_bytes": 1 << 30}
    fetcher = build_fetcher(recipe("s3://bucket/a.tar", cache=cache))
    assert isinstance(fetcher, CachedFetcher) and isinstance(fetcher.inner, RoutingFetcher)
    assert (block_dir(fetcher.cache), fetcher.cache.max_bytes) == (tmp_path / "blocks", 1 << 30)
    assert fetcher.use.read_ahead_bytes == READ_AHEAD_BYTES
    scattered = build_fetcher(recipe("s3://bucket/a.tar", cache=cache, shuffle="global"))
    assert isinstance(scattered, CachedFetcher) and scattered.use.read_ahead_bytes == 0


def test_the_default_place_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLMPACK_CACHE", str(tmp_path))
    fetcher = build_fetcher(recipe("s3://bucket/a.tar"))
    assert isinstance(fetcher, CachedFetcher)
    assert block_dir(fetcher.cache) == tmp_path / "blocks"


def test_local_shards_and_no_bytes_mean_no_cache(tmp_path: Path) -> None:
    local = recipe(str(tmp_path / "a.tar"), cache={"directory": str(tmp_path / "blocks")})
    none = recipe("s3://bucket/a.tar", cache={"max_bytes": 0})
    assert isinstance(build_fetcher(local), RoutingFetcher)
    assert isinstance(build_fetcher(none), RoutingFetcher)
    assert not (tmp_path / "blocks").exists()


def test_a_cache_too_small_for_two_blocks_is_refused(tmp_path: Path) -> None:
    small = recipe("s3://bucket/a.tar", cache={"directory": str(tmp_path), "max_bytes": 1 << 20})
    with pytest.raises(RecipeError, match=r"data\.cache\.max_bytes: 1048576"):
        build_fetcher(small)
