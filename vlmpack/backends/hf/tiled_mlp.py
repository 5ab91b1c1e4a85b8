"""MLPs of a decoder in tiles of the sequence, of which the backward pass computes one at a time.

    (S, D) x -> tiles of D tokens -> MLP -> (S, D)

An MLP works token by token and is several times wider than x. Of all its activations x alone is
kept. The backward pass runs a tile again and differentiates it. Gradients of weights are added up
over the tiles in float32, and rounded once. This is TiledMLP of Arctic's long sequence training
(arXiv:2506.13996), which also takes as many tokens to a tile as the model is wide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vlmpack.backends.linear_layers import WORKING
from vlmpack.backends.recompute import keep_no_products
from vlmpack.errors import CapabilityError

_INWARD = {"gate_proj", "up_proj", "gate_up_proj"}


def tile_mlps(language: nn.Module) -> int:
    """Have the MLPs of a decoder computed in tiles; how many there are.

    Raises:
        CapabilityError: none was found.
    """
    mlps = [module for module in language.modules() if _is_mlp(module)]
    if not mlps:
        raise CapabilityError(
            f"model.tiled_mlp: {type(language).__name__} has no MLP of layers "
            f"{', '.join(sorted(_INWARD))} and down_proj; set it to false"
        )
    for mlp in mlps:
        vars(mlp)["forward"] = partial(_in_tiles, mlp, mlp.forward)
    return len(mlps)


def _is_mlp(module: nn.Module) -> bool:
    children = {name for name, _ in module.named_children()}
    takes_one = len(signature(type(module).forward).parameters) == 2  # self and its input
    return bool(children & _INWARD) and "down_proj" in children and takes_one


def _in_tiles(mlp: nn.Module, whole: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The `forward` of an MLP for (..., S, D) x."""
    if x.shape[-2] <= x.shape[-1]:
        return whole(x)
    leaves = [*_leaves(mlp)]
    if not torch.is_grad_enabled() or not (x.requires_grad or leaves):
        return _outputs(mlp, x)
    kept: list[Any] = []
    function: Any = _Tiles
    x = x if x.requires_grad else x.detach().requires_grad_()
    output: Tensor = function.apply(_Keep.apply(x, kept), kept, mlp, *leaves)  # type: ignore[no-untyped-call]
    return output


def _outputs(mlp: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([mlp(tile) for tile in x.split(x.shape[-1], -2)], -2)


def _leaves(mlp: nn.Module) -> Iterator[Tensor]:
    """The tensors of an MLP that have gradients: parameters, and the weights that products read."""
    for module in mlp.modules():
        held = (*module.parameters(recurse=False), *vars(module).get(WORKING, {}).values())
        yield from (tensor for tensor in held if tensor.requires_grad)


class _Keep(torch.autograd.Function):
    """The input, saved in front of the MLP. A layer that is computed again thus ends there, if
    nothing behind the MLP saves anything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        kept.append(ctx)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Any], mlp: nn.Module, *leaves: Tensor) -> Tensor:
        kind = x.device.type
        ctx.kept, ctx.mlp, ctx.leaves = kept, mlp, leaves
        ctx.autocast = partial(
            torch.autocast,
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
        )
        with keep_no_products():
            return _outputs(mlp, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (x,) = ctx.kept[0].saved_tensors
        rows, of_x = x.shape[-1], torch.empty_like(x)
        sums: list[Tensor | None] = [None] * len(ctx.leaves)
        parts = (whole.split(rows, -2) for whole in (x.detach(), grads[0], of_x))
        for tile, grad, out in zip(*parts, strict=True):
            with torch.enable_grad(), ctx.autocast():
                tile = tile.detach().requires_grad_()
                made = ctx.mlp(tile)
            found = torch.autograd.grad(made, (tile, *ctx.leaves), grad, allow_unused=True)
            out.copy_(found[0])
            for place, part in enumerate(found[1:]):
                if part is not None:
                    total, wide = sums[place], torch.promote_types(part.dtype, torch.float32)
                    sums[place] = part.to(wide) if total is None else total.add_(part)
        pairs = zip(sums, ctx.leaves, strict=True)
        return of_x, None, None, *(None if s is None else s.to(leaf.dtype) for s, leaf in pairs)
