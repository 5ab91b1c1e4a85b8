"""Ranks that share rows compute what one process computes, by packing mode and what is trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from backends.hf import context_modes
from backends.hf.context_modes import MANY, MODES, TRAINED
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


def modes_of(family: str, name: str, size: int) -> Iterable[str]:
    """All modes in one of a family's two models, and one in the other if it can be shared."""
    if name == family:
        return MODES if fits(family, size) else ()
    return MODES if not fits(family, size) else ("in_batch",)


LAUNCHED = [
    (size, name, mode, trained)
    for size in (2, 4, 8)
    for family in FAMILIES
    for name in (family, family + MANY)
    for mode in modes_of(family, name, size)
    for trained in TRAINED
]
IN_ONE = {
    *((2, name, mode, trained) for name in IN_CI for mode in MODES for trained in TRAINED),
    *((4, name + MANY, "in_batch", "full") for name in IN_CI),
}
"""Those in CI, of each size in one launch."""


def id_of(size: int, name: str, mode: str, trained: str) -> str:
    return f"{size}-{name}-{mode}-{trained}"


CASES = [
    pytest.param(
        (case[0], "five" if case in IN_ONE else case[1]), id_of(*case)[2:], id=id_of(*case)
    )
    for case in LAUNCHED
]
"""The launch of each, a world size and whose cases, and the case."""


def test_every_family_is_shared_in_every_mode_at_every_size() -> None:
    expected = set(product((2, 4, 8), FAMILIES, MODES, TRAINED))
    assert {(size, name.removesuffix(MANY), *rest) for size, name, *rest in LAUNCHED} == expected
    exchanged = {(size, name) for size, name, *_ in LAUNCHED if name.endswith(MANY)}
    assert exchanged == {(size, family + MANY) for size in (2, 4, 8) for family in FAMILIES}
    assert {*LAUNCHED} > IN_ONE


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
                if item.path == request.path and hasattr(item, "callspec")
                if item.callspec.params["launch"] == launch
            ]
            folder = folders[launch] = tmp_path_factory.mktemp(f"of-{launch[0]}")
            context_modes.prepare(folder, asked)
            check_ranks([context_modes.__file__, folder, str(launch[0]), *asked], launch[0])
        return folders[launch]

    return folder_of


@pytest.mark.cases(slow=tuple(id_of(*case) for case in sorted(IN_ONE)))
@pytest.mark.parametrize(("launch", "case"), CASES)
def test_ranks_have_the_gradients_of_one_process(
    folder_of: Callable[[Launch], Path], launch: Launch, case: str
) -> None:
    folder = folder_of(launch)
    loss, expected, _ = context_modes.first_batch(folder, case, Ranks())
    ours = load_file(folder / f"{case}.safetensors")
    assert ours.keys() == expected.keys() and len(ours) > 10
    theirs, how = json.loads((folder / f"{case}.json").read_text())
    assert how == "exchange of heads" or (how and MANY not in case)
    assert loss > 0.1 and abs(theirs / loss - 1) < LOSS_TOLERANCE
    errors = errors_by_name(ours, expected)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < GRADIENT_TOLERANCE, worst
