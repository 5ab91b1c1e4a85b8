"""The facts of servers (`facts.json`), and how names are compared with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.servers.adapters import Adapted
from tools.servers.loading import Loaded
from vlmpack.backends.adapter_folder import PREFIX
from vlmpack.model_folder.safetensors_read import tensors_of

FACTS = Path(__file__).with_name("facts.json")


def read_facts() -> dict[str, Any]:
    """The committed facts, by server."""
    facts: dict[str, Any] = json.loads(FACTS.read_text(encoding="utf-8"))
    return facts


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a folder's tensors."""
    files = sorted(folder.glob("*.safetensors"))
    return {tensor.name: tensor.shape for file in files for tensor in tensors_of(file)}


def pattern(name: str) -> str:
    """A name with `#` for each number that is a part of it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name)


def patterns(names: Iterable[str]) -> list[str]:
    """The patterns of names, each once."""
    return sorted({pattern(name) for name in names})


def outcome(loaded: Loaded) -> dict[str, Any]:
    """What became of a folder's names at a server, as patterns.

    `ends` has each name with the parameter that it ends in. `skipped` are those that the server
    leaves out by itself, `refused` those that it has no place for, and `several` those that end in
    more than one. `unfed` are parameters that no name ends in.
    """
    ends: dict[str, set[str]] = {}
    for name, parameters in loaded.ends.items():
        ends.setdefault(pattern(name), set()).update(map(pattern, parameters))
    found: dict[str, Any] = {
        "ends": {name: " or ".join(sorted(to)) for name, to in sorted(ends.items()) if to},
        "skipped": patterns(name for name, to in loaded.ends.items() if not to),
        "refused": patterns(loaded.refused),
        "several": patterns(name for name, to in loaded.ends.items() if len(to) > 1),
        "unfed": patterns(loaded.unfed),
    }
    return {key: value for key, value in found.items() if value}


def bare(layer: str) -> str:
    """The pattern of a layer's name in an adapter, without peft's prefix."""
    return pattern(layer.removeprefix(PREFIX))


def adapters_outcome(adapted: Adapted) -> dict[str, Any]:
    """What became of an adapter's layers at a server, as patterns without peft's prefix.

    `ends` has each layer with the server's module that computes it. `refused` are those that the
    server does not take in some layer, each with a reason, and `several` those that end in more
    than one module.
    """
    refused = {bare(name): pattern(why) for name, why in sorted(adapted.refused.items())}
    ends: dict[str, set[str]] = {}
    for name, to in adapted.ends.items():
        if bare(name) not in refused:
            ends.setdefault(bare(name), set()).update(map(pattern, to))
    found: dict[str, Any] = {
        "ends": {name: " or ".join(sorted(to)) for name, to in sorted(ends.items())},
        "refused": refused,
        "several": sorted({bare(name) for name, to in adapted.ends.items() if len(to) > 1}),
        "asks_for_all": adapted.asks_for_all,
    }
    return {key: value for key, value in found.items() if value}


def unknown_names(names: Iterable[str], family: Mapping[str, Any]) -> list[str]:
    """Patterns of names that a server was not seen to take.

    Args:
        family: the facts of one family at a server.
    """
    return sorted(set(map(pattern, names)) - {*family["ends"], *family.get("skipped", ())})
