"""Which parameters each tensor of a folder ends in, by what a loader does with its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tools.servers.interpreter import Interpreter
from tools.servers.layers import parameters_of, walk
from tools.servers.tensors import Weight, sources
from tools.servers.values import Instance, Parameter, Raised

Found = list[tuple[Any, frozenset[str]]]
"""Copies: each the parameter, and the tensors of the folder that what was copied comes from."""


class NotRegistered(Exception):
    """The server has no class for a folder's architecture."""


@dataclass(slots=True)
class Recorder:
    """Takes the place of the functions that copy a tensor into a parameter."""

    found: Found = field(default_factory=list)

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """What stands for them, by their names."""
        return {"default_weight_loader": self.load, "weight_loader": self.of}

    def load(self, param: Any, loaded_weight: Any = None, *_: Any, **named: Any) -> bool:
        """A copy into a parameter, or into a part of it."""
        self.found.append((param, sources([loaded_weight])))
        return True

    def of(self, parameter: Any) -> Callable[..., bool]:
        """The `weight_loader` of a parameter, which may be called with that or without."""

        def load(*args: Any, param: Any = None, loaded_weight: Any = None, **named: Any) -> bool:
            weights = [one for one in (*args, loaded_weight) if isinstance(one, Weight)]
            return self.load(parameter, weights[0] if weights else None)

        return load


class Server(Protocol):
    """A reader of a server's source."""

    reader: Interpreter
    recorder: Recorder

    def build(self, hf_config: Any) -> Instance:
        """The model of a configuration.

        Raises:
            NotRegistered: the server has no class for it.
        """


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of the tensors of a folder.

    Args:
        ends: by the name of a tensor, the parameters that it ends in; empty for a skipped one.
        refused: names that the loader has no place for, each with its error.
        unfed: parameters of the server's own list that no tensor ends in.
    """

    ends: Mapping[str, tuple[str, ...]]
    refused: Mapping[str, str]
    unfed: tuple[str, ...]


def load(server: Server, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Loaded:
    """Give a model all tensors of a folder at once; where that fails, one by one to see which.

    Args:
        config: the configuration of the folder.
        shapes: names and shapes of its tensors.

    Raises:
        NotRegistered: the server has no class for it.
        Raised: the model cannot be built of it.
        Unread: the source does something that is not followed.
    """
    model = server.build(config)
    refused: dict[str, str] = {}
    try:
        found = _run(server, model, shapes)
    except Raised:
        for name, shape in shapes.items():
            try:
                _run(server, model, {name: shape})
            except Raised as raised:
                refused[name] = str(raised)
        found = _run(server, model, {n: s for n, s in shapes.items() if n not in refused})
    names: dict[int, str] = {}
    for name, value in walk(model):
        if isinstance(value, Parameter):
            names.setdefault(id(value), name)
    ends: dict[str, set[str]] = {name: set() for name in shapes if name not in refused}
    for parameter, tensors in found:
        for tensor in tensors:
            ends[tensor].add(names[id(parameter)])
    fed = set().union(*ends.values())
    return Loaded(
        {name: tuple(sorted(to)) for name, to in ends.items()},
        refused,
        tuple(name for name, _ in parameters_of(model) if name not in fed),
    )


def _run(server: Server, model: Instance, shapes: Mapping[str, tuple[int, ...]]) -> Found:
    server.recorder.found.clear()
    weights = [
        (name, Weight(torch.empty(shape, device="meta"), frozenset([name])))
        for name, shape in shapes.items()
    ]
    server.reader.get(model, "load_weights")(iter(weights))
    return list(server.recorder.found)
