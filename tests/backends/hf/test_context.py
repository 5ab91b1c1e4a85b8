"""Ranks that share rows by exchange of heads compute what one process computes, for each family."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from backends.hf import context_rows
from safetensors.torch import load_file
from support.engines import make_engine
from support.families import FAMILIES, TEXT_FAMILIES, tiny_family_folder
from support.forked import check_ranks
from support.runs import GRADIENT_TOLERANCE, LOSS_TOLERANCE, errors_by_name
from support.shards import ROOT

from vlmpack.encode import Encoder
from vlmpack.forecast.communication import StepRows, traffic_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.recipe.schema import ModelSection, ParallelismSection

FAULTY = (
    *(f"qwen2_5_vl+{fault}" for fault in ("other heads", "other slots", "twice")),
    *(f"{name}+forgotten boundary" for name in ("qwen2_5_vl", "qwen3_5", "nemotron_h")),
    *(f"{name}+other channels" for name in ("qwen3_5", "nemotron_h")),
    "qwen3_5+other heads",
)


def shared(folder: Path, cases: Iterable[str], size: int, **options: Any) -> dict[str, Any]:
    """What each case found in so many processes: facts, and the errors of its gradients."""
    cases, models = list(cases), folder / "models"
    models.mkdir()
    alone: dict[str, Any] = {}
    for name in {case.partition("+")[0] for case in cases}:
        model = tiny_family_folder(name, models / name)
        if model != models / name:
            (models / name).symlink_to(model)
        rows = context_rows.rows_of(model, name)
        alone[name] = context_rows.gradients(make_engine(model, Encoder(model)), rows)
    processes, sharding = options.get("processes", size), options.get("sharding", "none")
    arguments = [folder, str(size), sharding, models, *cases]
    check_ranks([context_rows.__file__, *arguments], processes)
    found = {}
    for case in cases:
        facts = json.loads((folder / f"{case}.json").read_text())
        loss, expected = alone[case.partition("+")[0]]
        ours = load_file(folder / f"{case}.safetensors")
        assert ours.keys() == expected.keys()
        found[case] = {
            **facts,
            "model": models / case.partition("+")[0],
            "alone": loss,
            "errors": errors_by_name(ours, expected),
        }
    return found


def check(found: dict[str, Any]) -> None:
    assert len(found["errors"]) > 20 and found["alone"] > 0.1
    assert abs(found["loss"] / found["alone"] - 1) < LOSS_TOLERANCE
    worst = max(found["errors"], key=found["errors"].__getitem__)
    assert found["errors"][worst] < GRADIENT_TOLERANCE, worst


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return shared(tmp_path_factory.mktemp("two"), [*FAMILIES, *FAULTY], 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_two_processes_share_rows(in_two: dict[str, Any], name: str) -> None:
    check(in_two[name])
    assert "2 share each row by exchange of heads" in in_two[name]["processes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llama", "qwen3_5", "nemotron_h"])
def test_what_is_sent_is_what_plan_says(in_two: dict[str, Any], name: str) -> None:
    """Heads exactly. Features are padded to those of the fullest rank going out."""
    found = in_two[name]
    model = ModelSection(path=str(found["model"]), dtype="float32", activation_checkpointing="none")
    rows = StepRows(micro_batches=len(context_rows.ROWS), slots=found["slots"], features=0)
    figures = traffic_figures(
        model, ParallelismSection(context=2), read_sizes(found["model"]), rows, world_size=2
    )
    assert figures is not None
    heads = next(part for part in figures.parts if part.what == "slots for heads")
    assert found["sent"]["all-to-all"] == [heads.calls, heads.num_bytes]
    assert ("all-gather" in found["sent"]) is (name not in TEXT_FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAULTY)
def test_a_fault_is_found(in_two: dict[str, Any], case: str) -> None:
    found = in_two[case]["errors"]
    assert max(found.values()) > 100 * GRADIENT_TOLERANCE


@pytest.fixture(scope="module")
def in_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four ranks to a row, with copies of keys and values; and two replicas of two ranks."""
    cases = ("qwen2_5_vl", "gemma4", "deepseek_v3")
    found = shared(tmp_path_factory.mktemp("four"), cases, 4)
    pairs = shared(
        tmp_path_factory.mktemp("pairs"),
        ("qwen3_vl", "llava_onevision"),
        2,
        processes=4,
        sharding="fsdp",
    )
    return found | pairs


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", "gemma4", "deepseek_v3", "qwen3_vl", "llava_onevision"]
)
def test_four_processes_share_rows(in_four: dict[str, Any], name: str) -> None:
    check(in_four[name])


@pytest.mark.slow
def test_a_rank_keeps_its_part_of_activations(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    memory, models = (import_module(name) for name in ("bench_memory", "models"))
    models.write_wide_model(tmp_path, 256, layers=2)
    one, two = (
        memory.saved_mib(str(tmp_path), size, "--backend", "hf", tokens=2048) for size in (1, 2)
    )
    assert one > 50
    assert 0.45 * one < two <= 0.55 * one
