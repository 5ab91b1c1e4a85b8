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
from support.families import FAMILIES, ROUTED, TEXT_FAMILIES, tiny_family_folder
from support.forked import check_ranks
from support.runs import GRADIENT_TOLERANCE, LOSS_TOLERANCE, errors_by_name
from support.shards import ROOT

from tools.sweep.folder import write_folder
from vlmpack.backends.hf.ring import cuts_by_row, work_of_ranks
from vlmpack.encode import Encoder
from vlmpack.forecast.communication import StepRows, traffic_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.recipe.engine_rules import read_model_config
from vlmpack.recipe.schema import ModelSection, ParallelismSection

STRANGERS = ("lfm2", "glm4v", "cohere_compass", "ernie4_5_vl_moe", "granite4_vision")
"""Classes that run whole: with convolutions, and with images, deep features and kinds of tokens.
The last one's features come by layers of the decoder."""
FAULTY = (
    *(f"qwen2_5_vl+{fault}" for fault in ("other heads", "other slots", "own positions")),
    *(f"qwen2_5_vl+{fault}" for fault in ("twice", "owner's part")),
    *(f"{name}+forgotten boundary" for name in ("qwen2_5_vl", "qwen3_5", "nemotron_h")),
    *(f"{name}+other channels" for name in ("qwen3_5", "nemotron_h")),
    "qwen3_5+other heads",
)
RINGS = ("llama@1", "qwen2_5_vl@1", "mistral3@1", "gemma3_text@1", "qwen3_5@1")
"""Without exchange of heads. The third and fourth have layers with windows, the last has state."""
FAULTY_RINGS = tuple(
    f"llama@1+{fault}" for fault in ("skipped block", "other blocks", "no mask", "joined keys")
)


def family_of(case: str) -> str:
    """The family of NAME[@U][+FAULT]."""
    return case.partition("+")[0].partition("@")[0]


def shared(folder: Path, cases: Iterable[str], size: int, **options: Any) -> dict[str, Any]:
    """What each case found in so many processes: facts, and the errors of its gradients."""
    cases, models = list(cases), folder / "models"
    models.mkdir()
    alone: dict[str, Any] = {}
    for name in map(family_of, cases):
        if name in alone:
            continue
        (models / name).mkdir()
        make = tiny_family_folder if name in FAMILIES else write_folder
        model = make(name, models / name)
        if model != models / name:
            (models / name).rmdir()
            (models / name).symlink_to(model)
        rows = context_rows.rows_of(model)
        alone[name] = context_rows.gradients(make_engine(model, Encoder(model)), rows)
    processes, sharding = options.get("processes", size), options.get("sharding", "none")
    arguments = [folder, str(size), sharding, models, *cases]
    check_ranks([context_rows.__file__, *arguments], processes)
    found = {}
    for case in cases:
        facts = json.loads((folder / f"{case}.json").read_text())
        loss, expected = alone[family_of(case)]
        ours = load_file(folder / f"{case}.safetensors")
        assert ours.keys() == expected.keys()
        found[case] = {
            **facts,
            "model": models / family_of(case),
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
    return shared(
        tmp_path_factory.mktemp("two"), [*FAMILIES, *STRANGERS, *FAULTY, *RINGS, *FAULTY_RINGS], 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *STRANGERS])
def test_two_processes_share_rows(in_two: dict[str, Any], name: str) -> None:
    check(in_two[name])
    assert "2 share each row by exchange of heads" in in_two[name]["processes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RINGS)
def test_two_processes_are_a_ring(in_two: dict[str, Any], name: str) -> None:
    check(in_two[name])
    assert "2 share each row by a ring of 2" in in_two[name]["processes"]


def sent_by_rings(found: dict[str, Any], size: int) -> int:
    """Bytes that the ranks of a ring send, all heads together: keys and values to those that see
    them, in both passes, and gradients back."""
    read = 0
    for lengths in found["lengths"]:
        by_row = cuts_by_row(lengths, size=size, slot=found["slot"])
        read += sum(slots for _, slots in work_of_ranks(lengths, size=size, by_row=by_row))
    layers = read_sizes(found["model"]).decoder
    return read * sum(3 * 2 * layer.key * 4 for layer in layers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama@1", "qwen2_5_vl@1"])
def test_a_ring_sends_what_is_read(in_two: dict[str, Any], name: str) -> None:
    found = in_two[name]
    assert 0 < found["by_ring"] == sent_by_rings(found, 2)


@pytest.mark.slow
def test_a_ring_sends_less_of_windows(in_two: dict[str, Any]) -> None:
    found = in_two["mistral3@1"]
    assert 0 < found["by_ring"] < 0.7 * sent_by_rings(found, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
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
@pytest.mark.parametrize("case", [*FAULTY, *FAULTY_RINGS])
def test_a_fault_is_found(in_two: dict[str, Any], case: str) -> None:
    found = in_two[case]["errors"]
    assert max(found.values()) > 100 * GRADIENT_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_config_says_which_rows_a_ring_cannot_cut(name: str, tmp_path: Path) -> None:
    """Image blocks are those of the family. Latent heads and inputs of layers have names."""
    folder = tiny_family_folder(name, tmp_path)
    config = read_model_config(ModelSection(path=str(folder)))
    assert config is not None
    family, text = Encoder(folder).family, config.values
    whole = family.modules.image_blocks or any(
        text.get(size) for size in ("kv_lora_rank", "hidden_size_per_layer_input")
    )
    assert bool(config.head_degrees.whole) is bool(whole)
    assert config.head_degrees.heads


BOTH = "exchange of heads between 2, and a ring of 2 such groups"
IN_FOUR = {
    "qwen2_5_vl": BOTH,
    "qwen2_5_vl@1": "4 share each row by a ring of 4",
    "qwen2_5_vl+by segments": BOTH,
    "llama@1+by segments": "4 share each row by a ring of 4",
    "qwen2_5_vl@4": "by exchange of heads)",
    "gemma3_text": BOTH,
    "qwen3_5@2": BOTH,
    "gemma4": "by exchange of heads)",
    "deepseek_v3": "by exchange of heads)",
}
"""How four ranks share a row. Of two key-value heads all four have copies only where asked to."""


IN_PAIRS = ("qwen3_vl", "llava_onevision", "llama@1", "glm4v")
"""Two ranks to a row, and one of four has an image; the last one runs whole."""
OF_PAIRS = ("qwen3_vl+owner's part", "qwen3_vl+twice")


@pytest.fixture(scope="module")
def in_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four ranks to a row, and two replicas of two ranks."""
    cases = IN_FOUR
    found = shared(tmp_path_factory.mktemp("four"), cases, 4)
    pairs = shared(
        tmp_path_factory.mktemp("pairs"),
        (*IN_PAIRS, *OF_PAIRS),
        2,
        processes=4,
        sharding="fsdp",
    )
    return found | pairs


@pytest.mark.slow
@pytest.mark.parametrize("name", [*IN_FOUR, *IN_PAIRS])
def test_four_processes_share_rows(in_four: dict[str, Any], name: str) -> None:
    check(in_four[name])
    how = IN_FOUR.get(name, "")
    assert how in in_four[name]["processes"]


def check_leaks(found: dict[str, Any], *, routed: bool) -> None:
    """By losses, with the others' tokens changed: to the bit, but where samples share the matmuls
    of experts. The last entry is of a segment's own tokens."""
    *others, own = found["leaks"]
    assert len(others) > 1 and own > 0.1
    assert max(others) <= (1e-4 if routed else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *STRANGERS])
def test_no_segment_sees_another_in_two(in_two: dict[str, Any], name: str) -> None:
    check_leaks(in_two[name], routed=name in {*ROUTED, "ernie4_5_vl_moe"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [case for case in (*FAULTY, *FAULTY_RINGS) if case.partition("+")[2] in context_rows.LEAKING],
)
def test_a_leak_is_found(in_two: dict[str, Any], case: str) -> None:
    *others, _ = in_two[case]["leaks"]
    assert max(others) > 0.001


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_PAIRS)
def test_a_fault_is_found_where_one_rank_of_four_has_an_image(
    in_four: dict[str, Any], case: str
) -> None:
    assert in_four[case]["images"] == [3, 0, 1, 0, 4, 0], (
        "in turn of the first and the second replica"
    )
    errors = in_four[case]["errors"]
    tower = {name: error for name, error in errors.items() if ".visual." in name}
    assert len(tower) > 20 and min(tower.values()) > 100 * GRADIENT_TOLERANCE
    assert max(errors[name] for name in errors.keys() - tower) < GRADIENT_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_FOUR)
def test_no_segment_sees_another_in_four(in_four: dict[str, Any], name: str) -> None:
    check_leaks(in_four[name], routed=name in ROUTED)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("qwen2_5_vl", 2), ("qwen2_5_vl@1", 4)])
def test_rings_of_some_heads_send_what_is_read(
    in_four: dict[str, Any], name: str, size: int
) -> None:
    found = in_four[name]
    assert 0 < found["by_ring"] == sent_by_rings(found, size)


@pytest.mark.slow
def test_rows_are_cut_both_ways(in_four: dict[str, Any]) -> None:
    """Rows of several segments, which send less if they are cut whole."""
    whole, cut = in_four["qwen2_5_vl"], in_four["qwen2_5_vl+by segments"]
    assert whole["lengths"] == cut["lengths"]
    assert whole["by_ring"] < 0.9 * cut["by_ring"]


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
