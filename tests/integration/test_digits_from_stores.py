"""The digits recipe from S3 is the digits recipe from disk: every loss, bit for bit."""

from __future__ import annotations

import functools
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.fault_server import Fault, FaultServer, SeededFaults
from support.recipes import changed, rows
from support.shards import ROOT

from vlmpack.api import resolve, run_recipe
from vlmpack.recipe import load_recipe

pytestmark = pytest.mark.slow

STEPS = 12
VARIABLES = {"DIGITS_KEY": "any", "DIGITS_SECRET": "any"}
os.environ.update(VARIABLES)
"""For good and before any test: workers see the environment of when the first of them started."""

FAULTS = {
    "503": Fault("status", status=503),
    "429": Fault("status", status=429),
    "truncated": Fault("truncate"),
    "reset": Fault("reset"),
    "stall": Fault("stall", seconds=30),
    "slow": Fault("slow", bytes_per_second=8_000_000),
    "short without a length": Fault("short"),
    "short with a length": Fault("truncate", part=0.9),
}


@dataclass(frozen=True)
class Losses:
    """What a run computed: training rows and validation losses."""

    steps: list[tuple[Any, ...]]
    validation: list[tuple[Any, ...]]


def run_digits(run_dir: Path, place: str, *, shuffle: str, **changes: Any) -> Losses:
    """recipes/digits-demo.yaml for a few steps, its three kinds of shards in `place`."""
    recipe = load_recipe(ROOT / "recipes/digits-demo.yaml", {})
    settings = changed(
        recipe.model_dump(mode="json"),
        model__path=str(ROOT / recipe.model.path),
        data__train=[{"path": f"{place}/train-{{000000..000003}}.tar", "name": "digits"}],
        data__validation=[{"path": f"{place}/val-000000.tar", "name": "digits"}],
        data__test=None,
        data__shuffle=shuffle,
        data__index_dir=str(run_dir / "index"),
        training__max_steps=STEPS,
        evaluation__generate=False,
        evaluation__max_samples=32,
        logging={"trackers": [], "progress": "none"},
        export={"enabled": False},
        run_dir=str(run_dir / "run"),
        **changes,
    )
    run_recipe(resolve(settings, {}))
    columns = ("step", "epoch", "loss", "grad_norm", "num_tokens", "num_samples")
    text = (run_dir / "run/metrics.jsonl").read_text().splitlines()
    return Losses(
        rows(run_dir / "run", *columns), [line for line in text if "validation_loss" in line]
    )


def storage(endpoint: str) -> dict[str, Any]:
    return {
        "endpoint": endpoint,
        "region": "us-east-1",
        "allow_private": True,
        "read_timeout_seconds": 1.0,
        "credentials": {
            "access_key_id": "${env:DIGITS_KEY}",
            "secret_access_key": "${env:DIGITS_SECRET}",
        },
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one bucket that holds the committed digits."""
    root = tmp_path_factory.mktemp("served")
    shutil.copytree(ROOT / "assets/digits", root / "bucket" / "digits")
    return root


@pytest.fixture(scope="module")
def local(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Losses]:
    """What the files give, by shuffle."""

    @functools.cache
    def run(shuffle: str) -> Losses:
        folder = tmp_path_factory.mktemp(shuffle)
        place = str(served / "bucket/digits")
        found = run_digits(folder, place, shuffle=shuffle, data__num_workers=0)
        assert len({row[2] for row in found.steps}) == STEPS, "nothing is learned"
        assert len(found.validation) == 1
        return found

    return run


@pytest.mark.soak
def test_the_orders_differ(local: Callable[[str], Losses]) -> None:
    """Guard: equality means little if every order gives the same losses."""
    assert local("window") != local("global")


@pytest.mark.soak
@pytest.mark.parametrize("shuffle", ["window", "global"])
def test_losses_from_moto_are_those_from_disk(
    served: Path, tmp_path: Path, local: Callable[[str], Losses], shuffle: str
) -> None:
    from support.s3_emulator import s3_server

    with s3_server(served) as endpoint:
        found = run_digits(
            tmp_path, "s3://bucket/digits", shuffle=shuffle, data__storage=storage(endpoint)
        )
    assert found == local(shuffle)


def run_under(
    fault: str, seed: int, served: Path, folder: Path, shuffle: str
) -> tuple[Losses, Counter[str]]:
    """Losses, and the requests that each kind has hit: one kind, or all of them in turn."""
    kinds = tuple(FAULTS.values()) if fault == "all" else (FAULTS[fault],)
    with FaultServer(served, seeded=SeededFaults(seed, 0.3, kinds, attempts=2)) as server:
        for kind in kinds:
            twice = len(kinds) == 1 or (kind.status == 503 and kind.kind == "status")
            server.fail(replace(kind, times=1 + twice, methods=("GET", "HEAD")))
        found = run_digits(
            folder, "s3://bucket/digits", shuffle=shuffle, data__storage=storage(server.url)
        )
    return found, Counter(request.fault for request in server.requests if request.fault)


@pytest.mark.parametrize(
    ("fault", "seed"),
    [
        *(pytest.param("all", seed, marks=pytest.mark.soak) for seed in range(20)),
        *(
            pytest.param(name, seed, marks=pytest.mark.soak)
            for name in FAULTS
            for seed in range(20)
        ),
    ],
)
def test_losses_under_faults_are_those_from_disk(
    served: Path, tmp_path: Path, local: Callable[[str], Losses], fault: str, seed: int
) -> None:
    shuffle = ("window", "global")[seed % 2]
    found, hits = run_under(fault, seed, served, tmp_path, shuffle)
    if fault == "all":
        assert len(hits) == len({kind.kind for kind in FAULTS.values()})
    assert sum(hits.values()) > (len(FAULTS) if fault == "all" else 1), "few requests were hit"
    assert found == local(shuffle)
