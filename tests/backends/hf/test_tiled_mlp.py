"""MLPs in tiles of tokens: the outputs and gradients of whole ones, of which the input is kept."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from vlmpack.backends.hf.tiled_mlp import tile_mlps
from vlmpack.backends.recompute import _policy
from vlmpack.errors import CapabilityError

WIDTH, COLUMNS, TOKENS = 16, 64, 72
BOUND = 1e-6
"""Relative, in float32: sums of weights' gradients in another order."""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, COLUMNS) for _ in range(2))
        self.down_proj = nn.Linear(COLUMNS, WIDTH)
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(x.shape[-2])
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """With a norm behind the MLP, which saves what that makes."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = Mlp(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.mlp(x))


def layer() -> Layer:
    torch.manual_seed(0)
    return Layer()


def found(model: Layer, how: str = "none", width: int = TOKENS) -> tuple[Tensor, list[Tensor], int]:
    """Output, gradients of the input and the parameters, and the bytes that are kept."""
    x = torch.randn(1, width, WIDTH, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    run = partial(checkpoint, use_reentrant=False)
    if how == "selective":
        run = partial(run, context_fn=partial(create_selective_checkpoint_contexts, _policy))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x) if how == "none" else run(model, x)
    out.square().sum().backward()
    return out.detach(), [x.grad, *(p.grad for p in model.parameters())], sum(kept.values())  # type: ignore[list-item]


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_tiles_learn_what_whole_mlps_do(how: str) -> None:
    whole, tiled = layer(), layer()
    assert tile_mlps(tiled) == 1
    expected, ours = found(whole), found(tiled, how)
    assert max(tiled.mlp.rows) == WIDTH < TOKENS and tiled.mlp.rows.count(TOKENS % WIDTH) >= 2
    torch.testing.assert_close(ours[0], expected[0], rtol=BOUND, atol=1e-7)
    for mine, theirs in zip(ours[1], expected[1], strict=True):
        assert (mine - theirs).norm() <= BOUND * theirs.norm()


def test_the_input_alone_is_kept() -> None:
    whole, tiled = layer(), layer()
    tile_mlps(tiled)
    columns = 4 * TOKENS * COLUMNS
    assert found(whole)[2] > 3 * columns
    assert found(tiled)[2] < columns


def test_a_layer_that_ends_in_an_mlp_does_not_run_it_again() -> None:
    """Twice: once forward, and tile by tile in the backward pass."""
    model = layer()
    model.norm = nn.Identity()  # type: ignore[assignment]
    tile_mlps(model)
    found(model, "full")
    assert sum(model.mlp.rows) == 2 * TOKENS


def test_frozen_weights_and_short_rows() -> None:
    model = layer()
    tile_mlps(model)
    model.mlp.gate_proj.requires_grad_(False)
    _, gradients, _ = found(model)
    assert sum(gradient is None for gradient in gradients) == 2
    model.mlp.rows.clear()
    found(model, width=WIDTH)
    assert model.mlp.rows == [WIDTH], "a tile is the whole row"


def test_nothing_is_kept_where_nothing_learns() -> None:
    """Of frozen layers in front, whose input needs no gradient either."""
    model = layer()
    model.requires_grad_(False)
    tile_mlps(model)
    x = torch.randn(1, TOKENS, WIDTH)
    assert not model.mlp(x).requires_grad and model.mlp.rows == [WIDTH] * 4 + [TOKENS - 4 * WIDTH]
    assert model.mlp(x.requires_grad_()).requires_grad


def test_a_model_without_such_mlps_is_refused() -> None:
    with pytest.raises(CapabilityError, match=r"model\.tiled_mlp: Linear has no MLP of layers"):
        tile_mlps(nn.Linear(2, 2))
