"""Rules about places: a recipe names files, folders and addresses, never a program or a secret.

Paths are taken as written. Relative ones start at the current directory, so that a resolved
recipe runs again from the directory it was first run in. Nothing in them is expanded, neither
`~` nor `${...}`; what looks like it is refused, since a folder of that name is never meant. Shards
and images alone may lie in stores; `${env:NAME}` in the addresses of shards is resolved when they
are asked for, so that a saved recipe has the reference.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TypeVar

from vlmpack.addresses import (
    SCHEMES,
    is_remote,
    no_shard,
    redacted,
    registered_name,
    scheme_of,
    secret_in,
    without_references,
)
from vlmpack.recipe.data import DataSection
from vlmpack.recipe.problems import KeyPath, Problem
from vlmpack.recipe.schema import ModelSection, PackingSection, Recipe
from vlmpack.recipe.sources import Section
from vlmpack.recipe.storage import unsafe_storage

AnySection = TypeVar("AnySection", bound=Section)


def model_is_local(model: ModelSection) -> list[Problem]:
    """The model is a folder on this machine, and so are its adapters."""
    return [
        *_not_local(("model", "path"), model.path),
        *_not_local(("model", "adapter"), model.adapter or ""),
    ]


def sources_are_readable(data: DataSection) -> list[Problem]:
    """Shards are files on this machine, or addresses without a secret."""
    problems = []
    for split, sources in data.splits().items():
        for index, source in enumerate(sources):
            key: KeyPath = ("data", split, index, "path")
            if registered_name(source.path) is not None:
                continue
            if not is_remote(source.path):
                problems += _not_local(key, source.path)
            elif secret := secret_in(source.path):
                problems.append(Problem(key, f"a {scheme_of(source.path)}:// address {secret}"))
            elif "${" in without_references(source.path) or "$(" in source.path:
                message = "'$' references in addresses are '${env:NAME}', no others"
                problems.append(Problem(key, message))
            if what := no_shard(source.path):
                problems.append(Problem(key, f"{redacted(source.path)!r} {what}"))
            problems += _unsafe_root(("data", split, index, "image_root"), source.image_root)
    return problems + _unsafe_root(("data", "image_root"), data.image_root)


def _unsafe_root(key: KeyPath, root: str | None) -> list[Problem]:
    """What keeps a place from being one of images: on this machine, or in a store, in the open."""
    if root is None or not is_remote(root):
        return _not_local(key, root or "")
    if secret := secret_in(root):
        return [Problem(key, f"a {scheme_of(root)}:// address {secret}")]
    if "$" in root:
        return [Problem(key, "'$' references are not expanded in the address of images")]
    return []


def stores_are_safe(data: DataSection) -> list[Problem]:
    """No secret and no endpoint in the open, and one kind of store behind an endpoint."""
    problems = unsafe_storage(data.storage)
    if data.storage.endpoint is not None:
        used = {scheme_of(source.path) for source in chain(*data.splits().values())}
        stores = [name for name in SCHEMES if SCHEMES[name].endpoint_variables and name in used]
        if len(stores) > 1:
            names = " and ".join(f"{scheme}://" for scheme in stores)
            message = f"one endpoint for {names}; shards of one of them only"
            problems.append(Problem(("data", "storage", "endpoint"), message))
    return problems


def index_dir_is_local(data: DataSection) -> list[Problem]:
    """The shard index is kept on this machine, and so is what is cached of remote shards."""
    return [
        *_not_local(("data", "index_dir"), data.index_dir or ""),
        *_not_local(("data", "cache", "directory"), data.cache.directory or ""),
    ]


def packs_are_local(packing: PackingSection) -> list[Problem]:
    """Packs are read from this machine."""
    return _not_local(("packing", "path"), packing.path or "")


def run_dir_is_local(run_dir: str) -> list[Problem]:
    """A run writes to this machine."""
    return _not_local(("run_dir",), run_dir)


def _not_local(key: KeyPath, path: str) -> list[Problem]:
    """What keeps `path` from being a local one. Only its scheme is quoted: an address may hold a
    password."""
    if path.startswith("~"):
        return [Problem(key, "'~' is not expanded in paths; write the folder out")]
    if "${" in path or "$(" in path:
        return [Problem(key, "'$' references are not expanded in paths; write the folder out")]
    scheme = scheme_of(path)
    if scheme is None:
        return []
    if scheme in SCHEMES:
        message = f"'{scheme}://' addresses are for shards alone; copy the files to a local path"
    elif scheme == "file":
        message = "'file:' is not needed; write the path alone"
    else:
        message = f"'{scheme}:' is not allowed; a recipe names files and addresses of "
        message += f"{', '.join(SCHEMES)}, never a program"
    return [Problem(key, message)]


def read_folders(recipe: Recipe) -> Iterator[tuple[str, str | None]]:
    """Key and path of each folder that a launch reads and does not make."""
    yield "model.path", recipe.model.path
    yield "model.adapter", recipe.model.adapter
    if recipe.packing.facts.reads_packs:
        yield "packing.path", recipe.packing.path
    yield "data.image_root", recipe.data.image_root
    for split, sources in recipe.data.splits().items():
        for source in sources:
            yield f"data.{split}.{source.name}.image_root", source.image_root


def anchored(recipe: Recipe, base_dir: str | os.PathLike[str]) -> Recipe:
    """The recipe with its relative paths joined to `base_dir`."""

    def moved(section: AnySection, key: str) -> AnySection:
        path: str | None = getattr(section, key)
        if path is None or is_remote(path) or registered_name(path) is not None:
            return section
        return section.model_copy(update={key: str(Path(base_dir, path))})

    data = moved(moved(recipe.data, "index_dir"), "image_root")
    places: dict[str, object] = {
        split: tuple(moved(moved(source, "path"), "image_root") for source in sources)
        for split, sources in data.splits().items()
        if sources
    }
    places["cache"] = moved(data.cache, "directory")
    parts = {
        "model": moved(moved(recipe.model, "path"), "adapter"),
        "data": data.model_copy(update=places),
        "packing": moved(recipe.packing, "path"),
    }
    return moved(recipe.model_copy(update=parts), "run_dir")
