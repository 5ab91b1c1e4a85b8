"""Model folder -> family, resolved lazily.

The registry is `vlmpack.capabilities.served`, a literal table. Its lines name a family's file here.
A model_type without a line uses the generic family.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from vlmpack.capabilities.folder import read_config, served_model_type
from vlmpack.capabilities.served import SERVED
from vlmpack.families.base import Family


def family_of(folder: Path) -> Family:
    """The family that serves a model folder.

    Raises:
        ModelError: the folder or its config.json is missing or unreadable.
        CapabilityError: no family serves it; the message says why.
    """
    model_type = served_model_type(folder)
    if model_type not in SERVED:
        from vlmpack.families.generic import generic_family

        return generic_family(folder, model_type)
    return served_family(model_type).configured(read_config(folder))


def served_family(model_type: str) -> Family:
    """The family that the line of a model type names, for models of any size."""
    file, _, value = SERVED[model_type].family.partition(":")
    family: Family = getattr(import_module(f"vlmpack.families.{file}"), value or "FAMILY")
    return family
