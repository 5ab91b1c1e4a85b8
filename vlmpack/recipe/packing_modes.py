"""What the recipe knows of each packing mode: plain facts, for its rules, the run's identity and
those who describe a run. How rows are cut and made is said in vlmpack/data/modes.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vlmpack.capabilities.limits import Feature

ModeName = Literal["none", "in_batch", "online", "offline"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeFacts:
    """What the recipe knows of one mode."""

    feature: Feature | None
    """The column of the capability table that it falls under; None for padded rows."""

    pads: bool = False
    """Whether rows are padded, one a sample; else samples share rows."""

    plans_rows: bool = False
    """Whether rows are planned by a token budget: a micro-batch is then one row, and the fields of
    the section that describe planned rows mean something."""

    reads_packs: bool = False
    """Whether the rows are saved ones, in the folder `packing.path`."""

    least_samples: int = 1
    """Samples that a micro-batch has at least."""

    identity: tuple[str, ...] = ("mode",)
    """Fields of the section that a run cannot change on the way."""


_PLANNED = ("mode", "max_tokens", "max_vision_patches", "max_sequences", "scope")

FACTS: Mapping[ModeName, ModeFacts] = {
    "none": ModeFacts(feature=None, pads=True),
    "in_batch": ModeFacts(feature="in_batch", least_samples=2),
    "online": ModeFacts(feature="online", plans_rows=True, identity=_PLANNED),
    "offline": ModeFacts(feature="offline", plans_rows=True, reads_packs=True, identity=_PLANNED),
}
