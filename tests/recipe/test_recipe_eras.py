"""Which differences `checkpoint.on_data_change: new_era` admits."""

from __future__ import annotations

import pytest

from vlmpack.recipe import identity_differences

OLD = {
    "data.train.0.path": "a-*.tar",
    "data.train.0.weight": 1.0,
    "data.epoch_size": 100,
    "data.shuffle": "window",
    "training.seed": 1,
}


@pytest.mark.parametrize(
    ("change", "is_data"),
    [
        ({"data.train.0.path": "b-*.tar"}, True),
        ({"data.train.0.weight": 2.0}, True),
        ({"data.train.1.path": "c-*.tar", "data.train.1.weight": 1.0}, True),
        ({"data.epoch_size": 200}, True),
        ({"data.weights": "tokens"}, True),
        ({"data.shuffle": "global"}, False),
        ({"training.seed": 2}, False),
        ({"data.train.0.path": "b-*.tar", "training.seed": 2}, False),
    ],
)
def test_other_data_and_weights_alone(change: dict[str, object], is_data: bool) -> None:
    new = {**OLD, **change}
    assert len(identity_differences(OLD, new)) == len(change)
    left = identity_differences(OLD, new, new_era=True)
    assert (not left) == is_data
    assert not any("data.train" in line for line in left)
