"""Walking a JSON schema: from a key to the node that describes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vlmpack.recipe.problems import KeyPath

Node = Mapping[str, Any]
"""A node of a JSON schema."""


def resolved(node: Node, schema: Node) -> Node:
    """The node that a `$ref` points to, or the node itself."""
    while "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    return node


def options(node: Node, schema: Node) -> Iterator[Node]:
    """Each alternative of a union, or the node itself."""
    node = resolved(node, schema)
    if "anyOf" in node:
        for option in node["anyOf"]:
            yield from options(option, schema)
    else:
        yield node


def properties(node: Node, schema: Node) -> Mapping[str, Node]:
    """The keys that a mapping of this form has."""
    return {
        name: inner
        for option in options(node, schema)
        for name, inner in option.get("properties", {}).items()
    }


def items(node: Node, index: int, schema: Node) -> Node:
    """The form of one item of a list; empty where the node is no list."""
    for option in options(node, schema):
        if "prefixItems" in option:
            return dict(option["prefixItems"][min(index, len(option["prefixItems"]) - 1)])
        if "items" in option:
            return dict(option["items"])
    return {}


def node_at(schema: Node, location: KeyPath) -> Node:
    """The node of a key, its description and examples included; empty where there is none."""
    node: Node = schema
    for part in location:
        if isinstance(part, int):
            node = items(node, part, schema)
        else:
            node = properties(node, schema).get(part, {})
    return node


def allowed_values(node: Node, schema: Node) -> list[str]:
    """The values of an enumeration; empty where the node is none."""
    return [
        str(value)
        for option in options(node, schema)
        for value in option.get("enum", [option["const"]] if "const" in option else [])
    ]


def all_keys(schema: Node) -> dict[str, list[str]]:
    """Every key of a recipe -> the dotted names it occurs under. The keys of a source are left
    out: its place in the list is no name."""
    keys: dict[str, list[str]] = {}
    pending: list[tuple[str, Node]] = [("", schema)]
    while pending:
        prefix, node = pending.pop(0)
        for key, inner in resolved(node, schema).get("properties", {}).items():
            keys.setdefault(key, []).append(prefix + key)
            pending.append((f"{prefix}{key}.", inner))
    return keys
