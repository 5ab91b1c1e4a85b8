"""Weights of matrix products in the compute dtype, beside the float32 ones that are learned.

Autocast casts a float32 weight in each micro-batch, and its gradient in each backward pass. A
working weight is cast once a step, all of them by one call:

    parameter, float32 -> working weight, which products read
    its gradient -> added to the parameter's, in float32, as soon as it is there

A layer's attribute is then the working weight. `named_parameters()` and `state_dict()` still have
the parameter, so optimizer, checkpoints and exports know nothing of this. Products, sums and their
roundings are those of autocast, so losses and gradients are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.backends.hf.frozen import read_by_dtype
from vlmpack.backends.policy import is_adapter


def product_parameters(
    model: Any, head: nn.Module, *, dora: bool
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The trained float32 parameters that products alone read, with their linear layers and names.

    A head keeps its float32 weight, which its loss casts itself, and an embedding its own. Adapters
    of DoRA do too, since norms are taken of them. Layers whose class asks for the dtype of their
    weight are left out.

    Args:
        model: a transformers model, with its adapters.
        head: the layer that makes logits.
        dora: whether its adapters are DoRA's.
    """
    asked = read_by_dtype(model)
    for path, layer in model.named_modules():
        if type(layer) is not nn.Linear or layer is head or id(layer) in asked:
            continue
        if dora and is_adapter(f"{path}.weight"):
            continue
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad and parameter.dtype is torch.float32:
                yield layer, name, parameter


def hold_rounded(model: Any, head: nn.Module, *, dora: bool) -> int:
    """Turn those parameters into bfloat16, for an optimizer that rounds; how many weights."""
    found = [parameter for _, _, parameter in product_parameters(model, head, dora=dora)]
    for parameter in found:
        parameter.data = parameter.data.to(torch.bfloat16)
    return sum(parameter.numel() for parameter in found)


class WorkingWeights:
    """The working weights of `product_parameters`.

    Args:
        model: on its device.
    """

    def __init__(self, model: Any, head: nn.Module, dtype: torch.dtype, *, dora: bool) -> None:
        self.parameters: list[Tensor] = []
        self.weights: list[Tensor] = []
        for layer, name, parameter in product_parameters(model, head, dora=dora):
            # An instance's own attribute comes before a module's parameters.
            vars(layer)[name] = self._of(parameter, dtype)
        self.refresh()

    def _of(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        weight = torch.empty_like(parameter, dtype=dtype, requires_grad=True)

        def hand_over(weight: Tensor) -> None:
            gradient, weight.grad = weight.grad, None
            assert gradient is not None
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.dtype)
            else:
                parameter.grad.add_(gradient)

        weight.register_post_accumulate_grad_hook(hand_over)
        self.parameters.append(parameter)
        self.weights.append(weight)
        return weight

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the parameters as they are now."""
        if self.weights:
            torch._foreach_copy_(self.weights, self.parameters)
