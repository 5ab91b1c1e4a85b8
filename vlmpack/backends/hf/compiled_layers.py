"""Layers of a transformers model, compiled by torch.compile: one code object a kind of layer.

    call of a layer -> recomputation, where it is on -> the kind's compiled forward
        -> attention, convolutions and recurrences, eager as ever (`attention/eager.py`)

Layers are of one kind if their classes, settings and sizes of parameters are the same. Weights are
inputs of its graphs, and tokens of a row a symbol. So layers of a kind share the graphs, and no row
compiles them again. Attention divides a layer into two graphs. A layer whose input needs no
gradient, such as the first one above frozen embeddings, has graphs of its own, and so has a tower's
layer for a row of one image, where it takes images as a batch.

The compiler fuses norms, activations, rotations and casts. It also chooses what a layer keeps for
its backward pass, so there is no `selective` recomputation of compiled layers. The kernels of one
write into memory of their own, which torch's `selective` would take for what a product made.

A kind that cannot be compiled runs eager, and the description says why. Outside of training all do.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from vlmpack.attention.eager import as_plain, keep_eager
from vlmpack.backends.adapter_folder import ADAPTER
from vlmpack.backends.fused import VARIANTS
from vlmpack.backends.hf.frozen import is_packed
from vlmpack.backends.recompute import stacked_layers
from vlmpack.errors import CapabilityError

logger = logging.getLogger("vlmpack")

DRAWS_IN_COMPILED = (
    "config.json or trainable.lora.dropout has dropout or jitter above 0. Compiled layers would "
    "draw other numbers than eager ones. Set it to 0, or model.compile to false"
)

BACKEND = "inductor"
"""What compiles a graph, of torch's backends."""

_OPTIONS = {"inductor": {"config_patches": {"emulate_precision_casts": True}}}
"""Fused operators round where eager ones do. Without it gradients in bfloat16 are 1.25 times as far
from float32 as those of eager layers."""

_SETTINGS = {
    "nested_graph_breaks": True,
    "specialize_float": True,
    "optimize_ddp": False,
    "fail_on_recompile_limit_hit": True,
}
"""A call that stays eager divides the layer, not each function around it. Epsilons are constants.
DDP's buckets divide no graph. A kind with too many graphs is eager by name."""


def why_not_compiled() -> str | None:
    """Why this torch compiles no layers; None where it does."""
    if "isolate_recompiles" in signature(torch.compile).parameters:
        return None
    return f"this is torch {torch.__version__}, wanted is 2.13 or newer"


@dataclass(slots=True, eq=False)
class _Kind:
    """Layers that share their code.

    Args:
        own: their class.
        why_eager: why it is not compiled; None where it is.
        functions: what is compiled, by whether gradients are taken, the input needs one, and it is
            a batch of one.
        graphs: those that ran, by the same.
    """

    own: type[Any]
    settings: Any
    layers: list[Any] = field(default_factory=list)
    why_eager: str | None = None
    functions: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    graphs: dict[Any, set[Any]] = field(default_factory=dict)

    def run(self, layer: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """A layer's output."""
        if self.why_eager is None and layer.training:  # what is generated has other lengths
            given = {name: as_plain(value) for name, value in options.items()}
            first = next(x for x in (*args, *options.values()) if isinstance(x, Tensor))
            form = torch.is_grad_enabled(), first.requires_grad, len(first) == 1
            try:
                with self.settings:
                    return self._function(form)(layer, *map(as_plain, args), **given)
            except (
                torch._dynamo.exc.TorchDynamoException,
                torch._dynamo.exc.FailOnRecompileLimitHit,
            ) as error:
                self.why_eager = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                logger.warning("compiled layers: %s", self.described())
        return _own_forward(self.own)(layer, *args, **options)

    def _function(self, form: Any) -> Callable[..., Any]:
        if form not in self.functions:
            backend: Any = partial(_compiled, self.graphs.setdefault(form, set()))
            limits: dict[str, Any] = {"recompile_limit": VARIANTS, "isolate_recompiles": True}
            self.functions[form] = torch.compile(
                _own_forward(self.own), dynamic=True, backend=backend, **limits
            )
        return self.functions[form]

    def described(self) -> str:
        """What ran."""
        name = f"{len(self.layers)} {self.own.__name__}"
        if self.why_eager is not None:
            return f"{name} eager ({self.why_eager})"
        counts = " + ".join(str(len(graphs)) for graphs in self.graphs.values() if graphs)
        return f"{name} ({counts or 'no'} graphs)"


def _compiled(ran: set[Any], graph: Any, examples: Any) -> Callable[..., Any]:
    """What a graph is compiled to. It notes that it ran."""
    from torch._dynamo.backends.registry import lookup_backend

    compiled: Any = lookup_backend(BACKEND)(graph, examples, **_OPTIONS.get(BACKEND, {}))

    def run(*inputs: Any) -> Any:
        ran.add(run)
        return compiled(*inputs)

    return run


class CompiledLayers:
    """The layers of a model, compiled when they are first called.

    Args:
        model: with its adapters, and not sharded yet.

    Raises:
        CapabilityError: this torch cannot, or no layer is one that transformers checkpoints.
    """

    counted = False

    def __init__(self, model: nn.Module) -> None:
        why, layers = why_not_compiled(), [layer for _, layer in stacked_layers(model)]
        if why is None and not layers:
            why = f"transformers can compute no layer of {type(model).__name__} again"
        if why is not None:
            raise CapabilityError(f"model.compile: layers cannot run: {why}; set it to false")
        # Of the hidden states between layers, as a compiler looks at its inputs.
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
        keep_eager()
        settings = torch._dynamo.config.patch(_SETTINGS)
        kinds: dict[Any, tuple[_Kind, type]] = {}
        for layer in layers:
            key, own = tuple(_traits(layer)), type(layer)
            if key not in kinds:
                kind = _Kind(own, settings, why_eager=_why_eager(layer))
                kinds[key] = kind, _derived(own, kind)
            kind, layer.__class__ = kinds[key]
            kind.layers.append(layer)
        self.kinds = [kind for kind, _ in kinds.values()]

    def described(self) -> str:
        """What ran, for the log."""
        if not self.counted:
            return "counted in the first step"
        return ", ".join(kind.described() for kind in self.kinds)


def _derived(own: type, kind: _Kind) -> type:
    def forward(layer: Any, *args: Any, **options: Any) -> Any:
        return kind.run(layer, args, options)

    # transformers puts recomputation around the `forward` of a subclass too.
    body = {"__module__": own.__module__, "forward": forward}
    return type(f"Compiled{own.__name__}", (own,), body)


def _own_forward(own: Any) -> Any:
    """A class's forward without the recomputation that transformers puts around it."""
    forward = own.forward
    while forward.__code__.co_name == "forward_with_checkpointing":
        forward = forward.__wrapped__
    return forward


def _traits(layer: nn.Module) -> Iterator[Any]:
    """What layers of one kind share."""
    for name, module in layer.named_modules():
        held = {key: value for key, value in vars(module).items() if isinstance(value, bool | str)}
        held.pop("gradient_checkpointing", None)
        yield name, type(module), *sorted(held.items())
    for name, value in layer.named_parameters():
        yield name, value.shape, value.dtype, value.requires_grad


def _why_eager(layer: nn.Module) -> str | None:
    """Why a layer is not compiled; None where it is."""
    if any(map(is_packed, layer.modules())):
        return "packed weights are unpacked by functions that no compiler sees through"
    if any(ADAPTER in getattr(module, "lora_magnitude_vector", ()) for module in layer.modules()):
        return "adapters of DoRA are a function that no compiler sees through"
    if any(hasattr(module, "parameter_name") for module in layer.modules()):
        return "adapters of experts are grouped products of sorted tokens, which stay eager"
    return None
