"""Layers whose parameters are known without reading them, and what torch's modules can do."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tools.servers.tensors import blank, joined, stacked
from tools.servers.values import Instance, Layer, Parameter, Unknown


class Buffer(Parameter):
    """A tensor of a module that is not trained.

    Args:
        persistent: whether files hold it.
    """

    def __init__(self, persistent: bool) -> None:
        self.persistent = persistent


def _linear(*_: Any, bias: Any = True, **named: Any) -> tuple[str, ...]:
    return ("weight", "bias") if bias is not False else ("weight",)


def _torch_linear(*args: Any, bias: Any = True, **named: Any) -> tuple[str, ...]:
    bias = args[2] if len(args) > 2 else bias
    return ("weight", "bias") if bias else ("weight",)


def _unbiased(*_: Any, bias: Any = False, **named: Any) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def _weight(*_: Any, **named: Any) -> tuple[str, ...]:
    return ("weight",)


def _norm(*_: Any, has_weight: Any = True, with_scale: Any = True, **named: Any) -> tuple[str, ...]:
    return ("weight",) if has_weight and with_scale else ()


def _layer_norm(*_: Any, elementwise_affine: Any = True, bias: Any = True, **named: Any) -> Any:
    return (("weight", "bias") if bias else ("weight",)) if elementwise_affine else ()


def _nothing(*_: Any, **named: Any) -> tuple[str, ...]:
    return ()


_PARAMETERS: dict[Callable[..., tuple[str, ...]], str] = {
    _linear: """ColumnParallelLinear MergedColumnParallelLinear RowParallelLinear QKVParallelLinear
        ReplicatedLinear Conv1d Conv2d Conv3d Conv2dLayer Conv3dLayer""",
    _torch_linear: "Linear",
    _unbiased: "ParallelLMHead GateLinear",
    _weight: """VocabParallelEmbedding Embedding GemmaRMSNorm Gemma3RMSNorm
        RMSNormGated""",
    _norm: "RMSNorm Gemma4RMSNorm",
    _layer_norm: "LayerNorm",
    _nothing: """Identity Dropout GELU SiLU ReLU Tanh Sigmoid QuickGELU SiluAndMul GeluAndMul
        NewGELU ReLUSquaredActivation LogitsProcessor Pooler Softmax AvgPool2d MaxPool2d Unfold
        Unflatten Flatten Upsample PixelShuffle Attention EncoderOnlyAttention MMEncoderAttention
        RadixAttention MLAAttention IdentityInputNorm ApplyRotaryEmb PixtralVisionRotaryEmbedding
        PPMissingLayer StageMissingLayer""",
}
"""What gives the names of a layer's parameters, and the classes of layers that it holds for."""


def modules(*layers: Any) -> Instance:
    """A `ModuleList` or a `Sequential`; of a dictionary, its values by their names."""
    if len(layers) == 1 and isinstance(layers[0], dict):
        return Instance(Layer("Sequential", _nothing), **layers[0])
    if len(layers) == 1 and isinstance(layers[0], list | tuple):
        layers = tuple(layers[0])
    return Instance(Layer("ModuleList", _nothing), layers_=list(layers))


def children(module: Instance) -> Iterator[tuple[str, Any]]:
    """Modules, parameters and buffers of a module, in the order in which they were given."""
    for name, value in module.attributes.items():
        if name == "layers_":
            yield from ((str(i), one) for i, one in enumerate(value))
        elif isinstance(value, Instance | Parameter):
            yield name, value


def walk(module: Instance, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every module, parameter and buffer below a module, by its full name, aliases too."""
    for name, value in children(module):
        yield f"{prefix}{name}", value
        if isinstance(value, Instance) and value.is_module:
            yield from walk(value, f"{prefix}{name}.")


def modules_of(module: Instance) -> list[tuple[str, Instance]]:
    """Every module below a module, by its full name, aliases too."""
    return [(n, m) for n, m in walk(module) if isinstance(m, Instance) and m.is_module]


def parameters_of(
    module: Instance, *, remove_duplicate: bool = True, recurse: bool = True
) -> list[tuple[str, Parameter]]:
    """As `named_parameters`."""
    return _named(module, lambda x: not isinstance(x, Buffer), remove_duplicate, recurse)


def buffers_of(module: Instance, recurse: bool = True) -> list[tuple[str, Parameter]]:
    """As `named_buffers`."""
    return _named(module, lambda x: isinstance(x, Buffer), True, recurse)


def _named(
    module: Instance, kept: Any, remove_duplicate: bool, recurse: bool
) -> list[tuple[str, Parameter]]:
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    for name, value in walk(module) if recurse else children(module):
        if isinstance(value, Parameter) and kept(value):
            if remove_duplicate and id(value) in seen:
                continue
            seen.add(id(value))
            found[name] = value
    return list(found.items())


def _modules_of(module: Instance, *_: Any, **named: Any) -> list[tuple[str, Instance]]:
    return [("", module)] + [(n, m) for n, m in walk(module) if isinstance(m, Instance)]


def _register_buffer(module: Instance, name: str, value: Any, persistent: bool = True) -> None:
    module.attributes[name] = None if value is None else Buffer(persistent)
    if not persistent:
        module.attributes.setdefault("_non_persistent_buffers_set", set()).add(name)


def _register(module: Instance, name: str, value: Any) -> None:
    module.attributes[name] = Parameter() if isinstance(value, Unknown) else value


def _tie(head: Instance, embedding: Instance) -> Instance:
    head.attributes["weight"] = embedding.attributes["weight"]
    return head


def _append(module: Instance, layer: Any) -> None:
    module.attributes["layers_"].append(layer)


def _submodule(module: Instance, path: str) -> Any:
    return dict(walk(module))[path] if path else module


def _of_transformers(config: Any, **_: Any) -> Any:
    """A model of transformers itself, which a server uses for a tower."""
    if isinstance(config, Unknown):
        return Unknown("from_config()")
    from transformers import AutoModel

    with torch.device("meta"):
        return _mirrored(AutoModel.from_config(config))


def of_class(name: str, *args: Any, **named: Any) -> Any:
    """A layer of transformers that a server uses as it is, by its full name."""
    module, _, cls = name.rpartition(".")
    kind = getattr(importlib.import_module(module), cls)
    if not issubclass(kind, torch.nn.Module):
        return Unknown(f"{name}()")
    with torch.device("meta"):
        return _mirrored(kind(*args, **named))


def _mirrored(module: torch.nn.Module) -> Instance:
    made = Instance(Layer(type(module).__name__, _nothing))
    for name, child in module.named_children():
        made.attributes[name] = _mirrored(child)
    for name, _ in module.named_parameters(recurse=False):
        made.attributes[name] = Parameter()
    kept = module._non_persistent_buffers_set
    for name, _ in module.named_buffers(recurse=False):
        _register_buffer(made, name, Parameter(), name not in kept)
    return made


MODULE: dict[str, Callable[..., Any]] = {
    "named_parameters": lambda m, prefix="", recurse=True, remove_duplicate=True: parameters_of(
        m, remove_duplicate=remove_duplicate, recurse=recurse
    ),
    "parameters": lambda m, recurse=True: [p for _, p in parameters_of(m, recurse=recurse)],
    "named_buffers": lambda m, recurse=True, **_: buffers_of(m, recurse),
    "named_modules": _modules_of,
    "modules": lambda m: [one for _, one in _modules_of(m)],
    "named_children": lambda m: [(n, c) for n, c in children(m) if isinstance(c, Instance)],
    "children": lambda m: [c for _, c in children(m) if isinstance(c, Instance)],
    "state_dict": lambda m, **_: dict(parameters_of(m)) | dict(buffers_of(m)),
    "register_buffer": _register_buffer,
    "register_parameter": _register,
    "add_module": _register,
    "get_submodule": _submodule,
    "tie_weights": _tie,
    "append": _append,
    "to": lambda m, *_, **__: m,
    "eval": lambda m: m,
    "post_init": lambda m: None,
    "requires_grad_": lambda m, *_: m,
    "items": lambda m: list(children(m)),
    "values": lambda m: [one for _, one in children(m)],
    "_get_name": lambda m: repr(m),
}


def layer_hooks() -> dict[str, Any]:
    """What stands for layers, by the names of their classes."""
    hooks: dict[str, Any] = {
        name: Layer(name, how) for how, names in _PARAMETERS.items() for name in names.split()
    }
    hooks |= {f"Module.{name}": method for name, method in MODULE.items()}
    parameter = lambda *_, **__: Parameter()  # noqa: E731
    return hooks | {
        "ModuleList": modules,
        "Sequential": modules,
        "ModuleDict": modules,
        "OrderedDict": dict,
        "partial": partial,
        "from_config": _of_transformers,
        "of transformers": of_class,
        "Parameter": parameter,
        "Buffer": lambda value, *, persistent=True, **_: Buffer(persistent),
        **{
            f"{package}.{name}": getattr(re, name)
            for package in ("re", "regex")
            for name in ("compile", "sub", "search", "match", "fullmatch", "findall")
        },
        "cat": joined,
        "stack": stacked,
        "zeros_like": blank,
    }
