"""What a layout of records is, and the layouts that there are.

A layout says which keys its records have and turns such a record into one with `messages`, which
`chat.py` then reads like any other: flags, tools and keys that nobody reads are the same in all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

Turned = dict[str, Any]
"""A record whose turns stand under `messages` or `conversations`."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Keys by which a layout is known.

    Args:
        keys: all of them are there.
        unless: and none of these.
    """

    keys: frozenset[str]
    unless: frozenset[str] = frozenset()

    def fits(self, found: Collection[str]) -> bool:
        """Whether a record with these keys has it."""
        return self.keys <= {*found} and self.unless.isdisjoint(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to lay out records.

    Args:
        name: as `data.columns` has it.
        whose: who writes it, for messages.
        signatures: any of them makes a record one of this layout.
        turned: a record of this layout -> the same with turns; keys that it does not read stay.
        is_made: whether its turns are made of columns, so that a part of the question or of the
            answer may stand in a column that it does not read.
        others: keys that it reads beside those of its signatures.
        alias_of: the layout that reads the same records alike, and stands for both.
    """

    name: str
    whose: str
    signatures: tuple[Signature, ...]
    turned: Callable[[dict[str, Any]], Turned]
    is_made: bool = False
    others: frozenset[str] = frozenset()
    alias_of: str | None = None

    @property
    def columns(self) -> frozenset[str]:
        """The keys that it reads, beside those that records of all layouts may have."""
        return self.others.union(*(signature.keys for signature in self.signatures))

    def fits(self, found: Collection[str]) -> bool:
        """Whether a record with these keys is one of this layout."""
        return any(signature.fits(found) for signature in self.signatures)


def known_by(*keys: str, unless: Collection[str] = ()) -> Signature:
    """A signature of these keys."""
    return Signature(frozenset(keys), frozenset(unless))


LAYOUTS: Mapping[str, str] = {
    "messages": "vlmpack.data.columns.turns:MESSAGES",
    "llava": "vlmpack.data.columns.turns:LLAVA",
    "sharegpt": "vlmpack.data.columns.turns:SHAREGPT",
    "preference": "vlmpack.data.columns.turns:PREFERENCE",
    "query-response": "vlmpack.data.columns.query_response:LAYOUT",
    "prompt-completion": "vlmpack.data.columns.prompt_completion:LAYOUT",
    "alpaca": "vlmpack.data.columns.alpaca:LAYOUT",
    "vqa": "vlmpack.data.columns.vqa:LAYOUT",
    "caption": "vlmpack.data.columns.caption:LAYOUT",
    "cauldron": "vlmpack.data.columns.rounds:CAULDRON",
    "rounds": "vlmpack.data.columns.rounds:ROUNDS",
}
"""Name -> where its `Layout` is: a new one is a file of this room, and its line here."""

CHAT = "chat"
"""The layout of records that have `messages` or `conversations`, each record one of them."""

_UNLISTED: Mapping[str, str] = {CHAT: "vlmpack.data.columns.turns:CHAT_LAYOUT"}


@cache
def layout_named(name: str) -> Layout:
    """The layout of a name that is known."""
    module, _, value = {**LAYOUTS, **_UNLISTED}[name].partition(":")
    found = getattr(import_module(module), value)
    assert isinstance(found, Layout)
    return found


def fitting(keys: Collection[str]) -> tuple[Layout, ...]:
    """The layouts that a record with these keys may have, without aliases.

    Args:
        keys: those with a value.
    """
    layouts = map(layout_named, LAYOUTS)
    return tuple(each for each in layouts if each.alias_of is None and each.fits(keys))


@cache
def all_columns() -> frozenset[str]:
    """Every key that some layout reads, beside those that records of all layouts may have."""
    return frozenset().union(*(layout_named(name).columns for name in LAYOUTS))
