"""Model folders, adapters and exports with values that are no numbers are refused by name."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vlmpack.backends.finite import (
    refuse_non_finite_adapters,
    refuse_non_finite_state,
    refuse_non_finite_weights,
)
from vlmpack.errors import ModelError, NonFiniteError

INF = float("inf")


class Masked(nn.Module):
    """A layer with a mask that files hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([[0.0, -INF], [0.0, 0.0]]))


@pytest.mark.parametrize(
    ("name", "values", "refused"),
    [
        ("old.prefix.mask", {"-inf"}, False),
        ("tower.mask", {"inf"}, False),
        ("mask", {"NaN"}, True),
        ("mask", {"inf", "-inf"}, True),
        ("layer.weight", {"-inf"}, True),
        ("another", {"-inf"}, True),
    ],
)
def test_a_buffer_may_hold_one_infinity_and_nothing_else_may(tmp_path, name, values, refused):
    if not refused:
        refuse_non_finite_weights(tmp_path, {name: values}, Masked)
        return
    with pytest.raises(ModelError, match=rf"model\.path: {tmp_path}: 1 tensor .*: {name} \("):
        refuse_non_finite_weights(tmp_path, {name: values}, Masked)


def test_no_model_is_made_where_all_are_numbers(tmp_path):
    refuse_non_finite_weights(tmp_path, {}, pytest.fail)


def test_what_is_written_is_looked_at(tmp_path):
    model = Masked()
    refuse_non_finite_state(model.state_dict(), model, "")
    large = {"layer.weight": torch.full((2, 2), 1e6).half()}
    with pytest.raises(NonFiniteError, match=r"nothing is written: .*layer\.weight \(inf\); use"):
        refuse_non_finite_state(large, model, "use another dtype")


def test_adapters_are_refused_by_their_file(tmp_path):
    path = tmp_path / "adapter_model.safetensors"
    save_file({"lora_A": torch.ones(2), "lora_B": torch.ones(2)}, path)
    refuse_non_finite_adapters(path)
    save_file({"lora_A": torch.ones(2), "lora_B": torch.tensor([1.0, INF])}, path)
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: 1 tensor .* lora_B \(inf\)"):
        refuse_non_finite_adapters(path)
