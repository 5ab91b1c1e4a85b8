"""Ranks that share rows compute what one process computes, by packing mode and what is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from backends.hf import context_modes
from backends.hf.context_modes import MODES, TRAINED
from safetensors.torch import load_file
from support.families import FAMILIES
from support.forked import check_ranks
from support.runs import GRADIENT_TOLERANCE, LOSS_TOLERANCE, errors_by_name

from vlmpack.distributed import Ranks

IN_CI = ("qwen2_5_vl", "qwen3_5_moe", "gemma4", "llava_onevision", "nemotron_h")
CASES = [f"{name}-{mode}-{trained}" for name in FAMILIES for mode in MODES for trained in TRAINED]


@pytest.fixture(scope="module")
def size(request: Any) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def shared(request: Any, size: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the chosen cases found in so many processes; one launch for all."""
    asked = [
        str(item.callspec.params["case"])
        for item in request.session.items
        if item.path == request.path and item.callspec.params["size"] == size
    ]
    folder = tmp_path_factory.mktemp(f"of-{size}")
    context_modes.prepare(folder, asked)
    check_ranks([context_modes.__file__, folder, str(size), *asked], size)
    return folder


@pytest.mark.cases(slow=tuple(f"2-{name}-{mode}-*" for name in IN_CI for mode in MODES))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2], indirect=True)
def test_ranks_have_the_gradients_of_one_process(shared: Path, case: str) -> None:
    loss, expected = context_modes.first_batch(shared, case, Ranks())
    ours = load_file(shared / f"{case}.safetensors")
    assert ours.keys() == expected.keys() and len(ours) > 10
    theirs = json.loads((shared / f"{case}.json").read_text())
    assert loss > 0.1 and abs(theirs / loss - 1) < LOSS_TOLERANCE
    errors = errors_by_name(ours, expected)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < GRADIENT_TOLERANCE, worst
