"""Ranks that share rows compute what one process computes, by packing mode and what is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
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
FOUR_HEADS = ("qwen3_5", "gemma3", "gemma4", "glm4_moe_lite", "deepseek_v3")
"""What families begin with whose four heads all processes exchange, so that eight cannot; but for
Gemma 3 without images, which a ring takes."""


def fits(name: str, size: int) -> bool:
    return size <= 4 or name == "gemma3_text" or not name.startswith(FOUR_HEADS)


CASES = [
    pytest.param(
        (size, "five" if size == 2 and name in IN_CI else name),
        f"{name}-{mode}-{trained}",
        id=f"{size}-{name}-{mode}-{trained}",
    )
    for size in (2, 4, 8)
    for name in FAMILIES
    if fits(name, size)
    for mode in MODES
    for trained in TRAINED
]
"""The launch of each, a world size and whose cases, and the case. In CI all are one launch."""


Launch = tuple[int, str]


@pytest.fixture(scope="module")
def folder_of(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Launch], Path]:
    """Where the chosen cases of a launch lie, which runs once."""
    folders: dict[Launch, Path] = {}

    def folder_of(launch: Launch) -> Path:
        if launch not in folders:
            asked = [
                str(item.callspec.params["case"])
                for item in request.session.items
                if item.path == request.path and item.callspec.params["launch"] == launch
            ]
            folder = folders[launch] = tmp_path_factory.mktemp(f"of-{launch[0]}")
            context_modes.prepare(folder, asked)
            check_ranks([context_modes.__file__, folder, str(launch[0]), *asked], launch[0])
        return folders[launch]

    return folder_of


@pytest.mark.cases(slow=tuple(f"2-{name}-{mode}-*" for name in IN_CI for mode in MODES))
@pytest.mark.parametrize(("launch", "case"), CASES)
def test_ranks_have_the_gradients_of_one_process(
    folder_of: Callable[[Launch], Path], launch: Launch, case: str
) -> None:
    folder = folder_of(launch)
    loss, expected = context_modes.first_batch(folder, case, Ranks())
    ours = load_file(folder / f"{case}.safetensors")
    assert ours.keys() == expected.keys() and len(ours) > 10
    theirs = json.loads((folder / f"{case}.json").read_text())
    assert loss > 0.1 and abs(theirs / loss - 1) < LOSS_TOLERANCE
    errors = errors_by_name(ours, expected)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < GRADIENT_TOLERANCE, worst
