"""The packages that decide what can be done, and the versions that vlmpack is built for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from vlmpack.capabilities.limits import Limit


@dataclass(frozen=True, slots=True)
class Range:
    """Versions of a package, from `lowest` up to but without `below`."""

    lowest: str
    below: str


RANGES: Mapping[str, Range] = {
    "transformers": Range("5.17", "6"),
    "megatron-core": Range("0.16.1", "0.20"),
    "peft": Range("0.20", "1"),
}

TESTED: Mapping[str, str | None] = {
    "transformers": "5.24.0",
    "megatron-core": "0.19.2",
    "peft": "0.21.2",
}
"""The versions that the table in docs/families.md is made for: the newest in their ranges."""

TRANSFORMER_ENGINE = "transformer-engine"
TRITON = "triton"

TRANSFORMER_ENGINES: Mapping[str, Range] = {
    "0.16": Range("2.9", "2.12"),
    "0.17": Range("2.9", "2.15"),
    "0.18": Range("2.9", "2.17"),
    "0.19": Range("2.9", "2.21"),
}
"""Transformer Engine's versions by the minor version of megatron-core that wraps it and also runs
without it.

0.16 names a range in its metadata. Later ones name none there, and their code refuses no new
version. The ranges of 0.17 and 0.18 end with the version that they were released against (2.14 and
2.16 in their lock files). That of 0.19, released against 2.17, ends with the newest whose
signatures the tests know. No capability follows from the version, so no record of one holds it.
"""

_IMPORTS_TRITON = (0, 18)
"""The first megatron-core that imports Triton as it starts, on a CPU too, and asks pip for none."""


def installed_versions() -> Mapping[str, str | None]:
    """The version of each package here; None where it is not installed."""
    return {name: _version(name) for name in RANGES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def range_of(name: str) -> Range:
    """The versions of a package that are wanted; Transformer Engine's by the megatron-core here."""
    return transformer_engines()[1] if name == TRANSFORMER_ENGINE else RANGES[name]


def transformer_engines() -> tuple[str, Range]:
    """The minor version of megatron-core here, and the versions of Transformer Engine that it is
    written for; those of the tested one where it is none that is known."""
    for megatron in (_version("megatron-core"), TESTED["megatron-core"]):
        minor = ".".join(map(str, release(megatron or "")[:2]))
        if minor in TRANSFORMER_ENGINES:
            break
    return minor, TRANSFORMER_ENGINES[minor]


def how_to_install(name: str) -> str:
    """The command."""
    bounds = range_of(name)
    if name == TRANSFORMER_ENGINE:  # compiled where it is installed, against the torch of there
        return (
            f"pip install --no-build-isolation '{name}[pytorch]>={bounds.lowest},<{bounds.below}'"
        )
    return f"pip install '{name}>={bounds.lowest},<{bounds.below}'"


def version_limit(name: str, version: str | None) -> Limit | None:
    """What keeps `version` of a package, None if missing, from being used."""
    bounds, would_do = range_of(name), how_to_install(name)
    if version is None:
        return Limit(f"needs {name}, which is not installed", would_do)
    if release(bounds.lowest) <= release(version) < release(bounds.below):
        return None
    return Limit(
        f"needs {name} >= {bounds.lowest} and < {bounds.below}, found {version}",
        would_do,
    )


def lacks_triton(megatron: str) -> Limit | None:
    """What keeps this version of megatron-core from being imported, in its range as it is."""
    if release(megatron) < _IMPORTS_TRITON or find_spec(TRITON) is not None:
        return None
    return Limit(
        f"needs {TRITON}, which megatron-core {megatron} imports and does not ask pip for, and "
        "which is not installed (torch for CUDA brings it)",
        f"pip install '{TRITON}>=3'",
    )


def release(version: str) -> tuple[int, ...]:
    """`0.16.1rc0+cu` -> (0, 16, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
