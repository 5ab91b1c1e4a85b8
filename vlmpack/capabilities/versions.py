"""The packages that decide what can be done, and the versions that vlmpack is built for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from vlmpack.capabilities.limits import Limit


@dataclass(frozen=True, slots=True)
class Range:
    """Versions of a package, as in pyproject.toml.

    Args:
        lowest: the first that will do.
        below: the first that will not.
    """

    lowest: str
    below: str


RANGES: Mapping[str, Range] = {
    "transformers": Range("5.17", "6"),
    "megatron-core": Range("0.16.1", "0.17"),
    "peft": Range("0.20", "1"),
}

TRANSFORMER_ENGINE = "transformer-engine"

BESIDE_MEGATRON: Mapping[str, Range] = {TRANSFORMER_ENGINE: Range("2.9", "2.12")}
"""What megatron-core 0.16 asks of packages that it runs without, too: the range that its own
metadata name. No capability follows from them, so no record of one holds their versions."""

TESTED: Mapping[str, str | None] = {
    "transformers": "5.23.0",
    "megatron-core": "0.16.1",
    "peft": "0.21.2",
}
"""The versions that the table in docs/families.md is made for."""


def installed_versions() -> Mapping[str, str | None]:
    """The version of each package here; None where it is not installed."""
    return {name: _version(name) for name in RANGES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def range_of(name: str) -> Range:
    """The versions of a package that are wanted."""
    return {**RANGES, **BESIDE_MEGATRON}[name]


def how_to_install(name: str) -> str:
    """The command."""
    wanted = range_of(name)
    if name == TRANSFORMER_ENGINE:  # compiled where it is installed, against the torch of there
        return (
            f"pip install --no-build-isolation '{name}[pytorch]>={wanted.lowest},<{wanted.below}'"
        )
    return f"pip install '{name}>={wanted.lowest},<{wanted.below}'"


def version_limit(name: str, version: str | None) -> Limit | None:
    """What keeps `version` of a package, None if absent, from being used."""
    wanted, would_do = range_of(name), how_to_install(name)
    if version is None:
        return Limit(f"needs {name}, which is not installed", would_do)
    if release(wanted.lowest) <= release(version) < release(wanted.below):
        return None
    return Limit(f"needs {name} >= {wanted.lowest} and < {wanted.below}, found {version}", would_do)


def release(version: str) -> tuple[int, ...]:
    """`0.16.1rc0+cu` -> (0, 16, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
