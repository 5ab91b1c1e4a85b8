"""Bytes that plan says ranks of a row send, beside those that four ranks send, counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from backends.hf import shared_bytes
from support.families import tiny_family_folder
from support.forked import check_ranks

from vlmpack.forecast.communication import StepRows, traffic_figures
from vlmpack.forecast.parameters import read_sizes
from vlmpack.recipe.schema import ModelSection, ParallelismSection

CASES = [f"{degree}-{kind}" for degree in (1, 2, 4) for kind in ("none", "selective", 2, "full")]
"""Of 4 query heads and 2 of keys: a ring, both, and copies of keys."""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of what was counted, and the model."""
    folder = tmp_path_factory.mktemp("bytes")
    model = tiny_family_folder("llama", folder)
    check_ranks([shared_bytes.__file__, folder, model, *CASES], 4)
    return folder, model


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_sent_is_what_plan_says(launched: tuple[Path, Path], case: str) -> None:
    """Of a ring the mean of the ranks."""
    folder, model = launched
    degree, kind = case.split("-")
    again: Any = int(kind) if kind.isdigit() else kind
    section = ModelSection(path=str(model), dtype="float32", activation_checkpointing=again)
    split = ParallelismSection(context=4, context_heads=int(degree))
    ranks = json.loads((folder / f"{case}.json").read_text())
    rows = StepRows(micro_batches=1, slots=ranks[0]["slots"], features=0)
    sizes = read_sizes(model)
    assert sizes is not None and sizes.query_heads == 4
    assert {layer.query // layer.key for layer in sizes.decoder} == {2}
    figures = traffic_figures(section, split, sizes, rows, world_size=4)
    assert figures is not None
    expected = {
        part.kind: [part.calls, part.num_bytes]
        for part in figures.parts
        if part.kind in ("all-to-all", "send")
    }
    assert len(expected) == 1 + (degree == "2")
    for how, (calls, size) in expected.items():
        found = [one for rank in ranks for one in rank["sent"] if one[1] == how]
        assert sum(one[3] for one in found) / 4 == size
        assert how == "send" or {one[2] for one in found} == {calls}
