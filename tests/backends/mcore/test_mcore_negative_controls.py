"""Each known way to get parallelism wrong is found; its unbroken twin is not.

A comparison that accepts any of these would prove nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import layouts
from support.forked import check_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("broken_layouts.py")
CONTROLS = {
    "labels shifted after slicing": "cp2",
    "zigzag over the row": "cp2",
    "slice before merge": "cp2",
    "positions from the slice": "cp2",
    "keys and values without a sum": "cp2",
    "features without a sum": "cp2",
    "norms without the flag": "tp2-sp",
    "tower without a sum": "tp2",
    "sums in kept products": "tp2",
    "head without a sum": "tp2",
    "tied weight without a sum": "pp2",
}
FORWARD_IS_WRONG = list(CONTROLS)[:4]
"""The others spoil gradients alone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    check_ranks([SCRIPT, folder], 2)
    return folder


@pytest.fixture(scope="module")
def expected():
    return layouts.train_reference("sgd", steps=1)


@pytest.fixture(scope="module")
def start():
    return layouts.start_weights()


@pytest.mark.parametrize("name", sorted(set(CONTROLS.values())))
def test_the_unbroken_twin_is_accepted(folder, expected, start, name):
    errors = layouts.worst_errors(layouts.Trained.load(folder / name), expected, start)
    assert layouts.beyond_tolerance(errors) == {}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_broken_layout_is_found(folder, expected, start, name):
    errors = layouts.worst_errors(layouts.Trained.load(folder / name), expected, start)
    print(f"\n{name}: {', '.join(f'{what} {error:.1e}' for what, error in errors.items())}")
    wrong = {"gradient norm", "weights", "updates"} | (
        {"loss"} if name in FORWARD_IS_WRONG else set()
    )
    assert layouts.beyond_tolerance(errors).keys() == wrong
    assert errors["gradient norm"] >= 10 * layouts.TOLERANCES["gradient norm"]


def test_every_control_is_run(folder):
    found = {path.stem for path in folder.glob("*.json")}
    assert found == set(CONTROLS) | set(CONTROLS.values())
