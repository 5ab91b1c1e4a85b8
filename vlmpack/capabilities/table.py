"""The capability table: every served model_type x engine x feature, for given package versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vlmpack.capabilities.limits import (
    ENGINE_LIMITS,
    ENGINES,
    FEATURES,
    MCORE_FEATURES,
    NO_EXPERTS,
    Engine,
    Feature,
    Limit,
)
from vlmpack.capabilities.served import SERVED, ServedModel, generic_line
from vlmpack.capabilities.versions import version_limit


@dataclass(frozen=True, slots=True)
class Row:
    """What can be done with one model_type.

    Args:
        model_type: of config.json.
        model: its line.
        cells: by engine and feature, why not; None where it can be done.
    """

    model_type: str
    model: ServedModel
    cells: Mapping[Engine, Mapping[Feature, Limit | None]]


def capabilities(versions: Mapping[str, str | None]) -> tuple[Row, ...]:
    """A row for each model_type that can be trained.

    Args:
        versions: of `transformers`, `megatron-core` and `peft`; None where not installed.
    """
    return tuple(row_of(model_type, versions) for model_type in SERVED)


def row_of(model_type: str, versions: Mapping[str, str | None]) -> Row:
    """The row of a model_type; that of the generic family where no family of ours serves it."""
    model = SERVED.get(model_type) or generic_line(model_type)
    cells = {
        engine: {feature: why_not(model, engine, feature, versions) for feature in FEATURES}
        for engine in ENGINES
    }
    return Row(model_type, model, cells)


def why_not(
    model: ServedModel, engine: Engine, feature: Feature, versions: Mapping[str, str | None]
) -> Limit | None:
    """Why a feature cannot be had, the most lasting reason first; None where it can."""
    if feature == "EP" and not model.has_experts:
        return NO_EXPERTS
    if feature in model.limits:
        return model.limits[feature]
    if feature in MCORE_FEATURES and "mcore" not in model.engines:
        return model.only_on_mcore
    if feature in ENGINE_LIMITS[engine]:
        return ENGINE_LIMITS[engine][feature]
    if engine not in model.engines:
        return model.not_on_mcore
    packages = ["transformers"]
    if engine == "mcore":
        packages.append("megatron-core")
    if feature == "LoRA":
        packages.append("peft")
    limits = (version_limit(name, versions.get(name)) for name in packages)
    return next((limit for limit in limits if limit is not None), None)
