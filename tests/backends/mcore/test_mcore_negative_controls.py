"""Each known way to get parallelism wrong is found; its unbroken twin is not.

A comparison that accepts any of these would prove nothing.
"""

from __future__ import annotations

import pytest
from support import broken_layouts, layouts
from support.broken_layouts import CONTROLS
from support.forked import check_ranks
from support.launches import once

pytestmark = pytest.mark.slow

FORWARD_IS_WRONG = {
    "labels shifted after slicing",
    "zigzag over the row",
    "slice before merge",
    "positions from the slice",
}
"""The others spoil gradients alone."""
IN_CI = (
    *("labels shifted after slicing", "zigzag over the row", "features without a sum"),
    *("norms without the flag", "tied weight without a sum"),
)
FURTHER = [name for name in CONTROLS if name not in IN_CI]
TWINS = {CONTROLS[name].layout: name for name in (*FURTHER, *IN_CI)}
"""By layout, a control whose launch has it unbroken as well."""


def marked(value, control):
    """With the mark of the control's launch."""
    return pytest.param(value, marks=() if control in IN_CI else pytest.mark.soak)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a control, or a layout that is not broken, led to; those of a mark share a launch."""
    folder = tmp_path_factory.mktemp("broken")

    @once
    def launch(in_ci):
        check_ranks([broken_layouts.__file__, folder, *(IN_CI if in_ci else FURTHER)], 2)

    def load(name):
        launch(TWINS.get(name, name) in IN_CI)
        return layouts.Trained.load(folder / name)

    return load


@pytest.fixture(scope="module")
def expected():
    return layouts.train_reference("sgd", steps=1)


@pytest.fixture(scope="module")
def start():
    return layouts.start_weights()


@pytest.mark.parametrize("layout", [marked(layout, name) for layout, name in TWINS.items()])
def test_the_unbroken_twin_is_accepted(found, expected, start, layout):
    errors = layouts.worst_errors(found(layout), expected, start)
    assert layouts.beyond_tolerance(errors) == {}


@pytest.mark.parametrize("name", [marked(name, name) for name in CONTROLS])
def test_a_broken_layout_is_found(found, expected, start, name):
    errors = layouts.worst_errors(found(name), expected, start)
    print(f"\n{name}: {', '.join(f'{what} {error:.1e}' for what, error in errors.items())}")
    wrong = {"gradient norm", "weights", "updates"} | (
        {"loss"} if name in FORWARD_IS_WRONG else set()
    )
    assert layouts.beyond_tolerance(errors).keys() == wrong
    assert errors["gradient norm"] >= 10 * layouts.TOLERANCES["gradient norm"]
