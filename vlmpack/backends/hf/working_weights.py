"""Weights of matrix products in the compute dtype, beside the float32 ones that are learned.

Autocast casts a float32 weight in each micro-batch, and its gradient in each backward pass. A
working weight is cast once a step, all of them by one call:

    parameter, float32 -> working weight, which products read
    its gradient -> added to the parameter's, in float32, as soon as it is there

A layer's `forward` reads its working weights under autocast. Everything else sees the parameters:
`layer.weight`, `named_parameters()`, `state_dict()`, the optimizer, checkpoints and exports. A
parameter has one working weight, also where layers share it, as autocast casts it once.

Products, sums and their roundings are those of autocast, so losses and gradients are the same bit
for bit. That needs every read of a parameter to be a call of its layer. Autocast adds up in the
compute dtype what several products give to a weight, and here a read beside the layer is no part of
that sum. So layers are left out whose parents read their weight or bias, by the source of classes
of transformers'. In other classes such a gradient is as near to the exact one, but not the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.hf.frozen import read_by_parents
from vlmpack.backends.linear_layers import WORKING, linear_product
from vlmpack.backends.policy import is_adapter


def product_parameters(
    model: Any, head: nn.Module, *, dora: bool
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The trained float32 parameters that products alone read, with their linear layers and names.

    A head keeps its float32 weight, which its loss casts itself, and an embedding its own. Adapters
    of DoRA do too, since norms are taken of them. Left out are layers whose weight or bias a parent
    reads, and parameters that they or others share.

    Args:
        model: a transformers model, with its adapters.
        head: the layer that makes logits.
        dora: whether its adapters are DoRA's.
    """
    read, plain, elsewhere = read_by_parents(model), [], set[int]()
    for path, layer in model.named_modules():
        adapter = dora and is_adapter(f"{path}.weight")
        if type(layer) is nn.Linear and not (layer is head or id(layer) in read or adapter):
            plain.append(layer)
        else:
            elsewhere.update(map(id, layer.parameters(recurse=False)))
    for layer in plain:
        for name, parameter in layer.named_parameters():
            trained = parameter.requires_grad and parameter.dtype is torch.float32
            if trained and id(parameter) not in elsewhere:
                yield layer, name, parameter


def hold_rounded(model: Any, head: nn.Module, *, dora: bool) -> int:
    """Turn those parameters into bfloat16, for an optimizer that rounds; how many weights."""
    parameters = {parameter for _, _, parameter in product_parameters(model, head, dora=dora)}
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.bfloat16)
    return sum(parameter.numel() for parameter in parameters)


class _Working(dict[str, Tensor]):
    """The working weights of a layer by name.

    A copy of the layer has none, so autocast casts its own. Nobody would refresh copies of them.
    """

    def __deepcopy__(self, _: Any) -> _Working:
        return _Working()


class WorkingWeights:
    """The working weights of `product_parameters`.

    Args:
        model: on its device.
    """

    def __init__(self, model: Any, head: nn.Module, dtype: torch.dtype, *, dora: bool) -> None:
        weights: dict[nn.Parameter, Tensor] = {}
        for layer, name, parameter in product_parameters(model, head, dora=dora):
            if parameter not in weights:
                weights[parameter] = _working_weight(parameter, dtype)
            vars(layer).setdefault(WORKING, _Working())[name] = weights[parameter]
            vars(layer)["forward"] = partial(linear_product, layer)
        self.parameters: list[Tensor] = [*weights]
        self.weights = [*weights.values()]
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the parameters as they are now, and see which of them are trained."""
        for weight, parameter in zip(self.weights, self.parameters, strict=True):
            weight.requires_grad_(parameter.requires_grad)
        if self.weights:
            torch._foreach_copy_(self.weights, self.parameters)


def _working_weight(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """A working weight without values, whose gradient goes to its parameter."""
    # A parameter, whose sizes are no symbols where layers are compiled.
    weight = nn.Parameter(torch.empty_like(parameter, dtype=dtype))

    def hand_over(weight: Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        if parameter.grad is None:
            parameter.grad = gradient.to(parameter.dtype)
        else:
            parameter.grad.add_(gradient)

    weight.register_post_accumulate_grad_hook(hand_over)
    return weight
