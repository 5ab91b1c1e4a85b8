"""Linear layers whose products other code computes.

Layers that read one tensor are computed together. Autograd alone would give that tensor a gradient
of each, rounded to the dtype of products, and add those up in it. Here the sum is rounded once:

    y_i = x W_i^T + b_i         dx = sum of dy_i W_i,  dW_i = dy_i^T x,  db_i = dy_i summed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

WORKING, GROUP = "working_weights", "group"
GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
"""Names of children that read what their parent reads, where it takes one input."""
JOINED = 4
"""Times the width of x that the outputs of layers may have to be joined for one product."""


def operands(layer: Any) -> tuple[Tensor, Tensor | None]:
    """What the product of a linear layer reads: its (out, in) weight and its (out,) bias.

    Under autocast a working weight takes the place of each that has one.
    """
    # Not by the names of attributes, each of which is a call of Python.
    held, working = layer._parameters, vars(layer).get(WORKING)
    if working is not None and torch.is_autocast_enabled(held["weight"].device.type):
        held = {**held, **working}
    return held["weight"], held["bias"]


def has_hooks(*layers: nn.Module) -> bool:
    """Whether a hook would not run where a layer is read without a call of it."""
    for layer in layers:
        before = layer._forward_pre_hooks or layer._backward_pre_hooks
        if before or layer._forward_hooks or layer._backward_hooks:
            return True
    return False


class Operands(NamedTuple):
    """What a product reads of a layer: an (out, in) weight and an (out,) bias."""

    weight: Tensor
    bias: Tensor | None

    def state(self, x: Tensor) -> tuple[Any, ...]:
        """What an output for x depends on, beside which tensors those are."""
        return state_of(x, *self)

    def joins(self, first: Operands) -> bool:
        """Whether it can be computed with the first of a group."""
        return True


def state_of(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """What a product of x and others depends on, beside which tensors those are."""
    kind = x.device.type
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        [each._version for each in (x, *others) if each is not None],
    )


class ProductGroup:
    """Layers of which the first that a forward pass of their parent calls computes all.

    The other outputs are kept for the calls of their layers, until the pass ends. A later call that
    finds none, or one of another input or state, computes its layer alone. So recomputation runs
    what the first pass ran.

    Args:
        parts: what the function reads of a layer now, with `state` and `joins`; None for a layer
            that something else computes.
        outputs: the function: of parts and (..., in) x, an output each.
    """

    def __init__(
        self,
        parent: nn.Module,
        layers: Sequence[Any],
        parts: Callable[[Any], Any],
        outputs: Callable[[Sequence[Any], Tensor], Sequence[Tensor]],
    ) -> None:
        self.layers, self.parts, self.outputs = layers, parts, outputs
        self.input: Tensor | None
        self.kept: dict[Any, tuple[Tensor, Any, tuple[Any, ...]]]
        for layer in layers:
            vars(layer)[GROUP] = self
        self.end()
        self.hooks = (
            parent.register_forward_pre_hook(self.start),
            parent.register_forward_hook(self.end, always_call=True),
        )

    def start(self, *_: Any) -> None:
        """A hook before the parent's forward."""
        self.is_first, self.input, self.kept = True, None, {}

    def end(self, *_: Any) -> None:
        """A hook behind it."""
        self.is_first, self.input, self.kept = False, None, {}

    def compute(self, layer: Any, parts: Any, x: Tensor) -> Tensor:
        """The output of the first layer for (..., in) x. Those of the others are kept."""
        self.is_first, self.input = False, x
        each = {one: parts if one is layer else self.parts(one) for one in self.layers}
        together = {one: own for one, own in each.items() if own is not None and own.joins(parts)}
        outputs = self.outputs([*together.values()], x)
        for (one, own), output in zip(together.items(), outputs, strict=True):
            self.kept[one] = output, own, own.state(x)
        return self.kept.pop(layer)[0]

    def take(self, layer: Any, x: Tensor) -> Tensor | None:
        """The output for x that is kept for a layer, if nothing that it depends on has changed."""
        if self.input is not x:
            return None
        output, parts, state = self.kept.pop(layer, (None, None, None))
        return output if parts is not None and parts.state(x) == state else None


class _Products(torch.autograd.Function):
    """The outputs (..., out) of layers for one (..., in) x, all of one dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *operands: Tensor | None) -> tuple[Tensor, ...]:
        # A layer whose output nobody reads has no gradient, as where it was never called.
        ctx.set_materialize_grads(False)
        weights: Any = operands[::2]
        ctx.save_for_backward(x, *weights)
        outputs = map(linear, [x] * len(weights), weights, operands[1::2])
        # A view of what a function returns could not be changed in place.
        return tuple(torch.ops.aten._unsafe_view(y, y.shape) for y in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows, needed = x.reshape(-1, x.shape[-1]), ctx.needs_input_grad
        gs = [None if grad is None else grad.reshape(-1, grad.shape[-1]) for grad in grads]
        found: list[Tensor | None] = []
        for g, of_weight, of_bias in zip(gs, needed[1::2], needed[2::2], strict=True):
            found.append(g.t() @ rows if g is not None and of_weight else None)
            found.append(g.sum(0) if g is not None and of_bias else None)
        given = [(g, weight) for g, weight in zip(gs, weights, strict=True) if g is not None]
        of_x = _summed_products(given).view(x.shape) if given and needed[0] else None
        return of_x, *found


def _summed_products(given: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of g_i W_i for (T, out_i) and (out_i, in), rounded once."""
    gs, weights = zip(*given, strict=True)
    if len(given) == 1:
        total: Tensor = gs[0] @ weights[0]
    elif not gs[0].is_cuda or sum(map(len, weights)) < JOINED * weights[0].shape[1]:
        total = torch.cat(gs, 1) @ torch.cat(weights)
    else:  # joined they would be read and written once more than the sum
        total = torch.mm(gs[0], weights[0], out_dtype=torch.float32)
        for g, weight in given[1:]:
            total = torch.addmm(total, g, weight, out_dtype=torch.float32)
        total = total.to(gs[0].dtype)
    return total


def products(operands: Sequence[Operands], x: Tensor) -> Sequence[Tensor]:
    """The outputs (..., out) of linear layers for one (..., in) x, whose dtype all operands get."""
    flat: list[Any] = [
        each if each is None else each.to(x.dtype) for one in operands for each in one
    ]
    if not x.requires_grad:  # nothing is added up
        return tuple(map(linear, [x] * len(operands), flat[::2], flat[1::2]))
    function: Any = _Products
    outputs: tuple[Tensor, ...] = function.apply(x, *flat)
    return outputs


def _operands_of(layer: nn.Module) -> Operands:
    return Operands(*operands(layer))


def linear_product(layer: nn.Module, input: Tensor) -> Tensor:  # torch's name
    """The `forward` of a linear layer with working weights, or with others of its group.

    A group computes what reads a tensor in autocast's dtype that needs a gradient.
    """
    group: ProductGroup | None = vars(layer).get(GROUP)
    own, kind = _operands_of(layer), input.device.type
    if group is None or not (input.requires_grad and torch.is_autocast_enabled(kind)):
        return linear(input, *own)
    if input.dtype is not torch.get_autocast_dtype(kind):
        return linear(input, *own)
    kept = group.take(layer, input)
    if kept is not None:
        return kept
    # Tensors of inference mode do not say whether they were changed.
    if not group.is_first or input.is_inference():
        return linear(input, *own)
    return group.compute(layer, own, input)


class WorkingLinear(nn.Linear):
    """A linear layer with working weights, whose `forward` is its class's."""

    forward = linear_product


def ungroup(model: nn.Module) -> None:
    """Let each layer compute for itself and by its class, as a compiler shares code by that."""
    for layer in model.modules():
        group: ProductGroup | None = vars(layer).pop(GROUP, None)
        for hook in () if group is None else group.hooks:
            hook.remove()
        if type(layer) is nn.Linear and vars(layer).pop("forward", None) is not None:
            layer.__class__ = WorkingLinear


def group_products(model: nn.Module) -> None:
    """Compute the plain linear layers of a model that read one tensor together, under autocast."""
    for parent in model.modules():
        for names in GROUPS:
            children = (getattr(parent, name, None) for name in names)
            layers = [child for child in children if type(child) is nn.Linear]
            layers = [layer for layer in layers if layer.in_features == layers[0].in_features]
            if len(layers) > 1:
                ProductGroup(parent, layers, _operands_of, products)
                for layer in layers:
                    vars(layer)["forward"] = partial(linear_product, layer)
