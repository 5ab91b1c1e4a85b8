"""Rules about sources, splits, images and paths.

A recipe names files, folders and addresses, never a program or a secret. Paths are taken as
written. A relative path starts at the current directory, so that a resolved recipe runs again from
the directory it first ran in. `~` and `${...}` in a path are refused, not expanded. Only shards
and images may lie in stores. `${env:NAME}` in the address of a shard is resolved when the shard is
read, so a saved recipe has the reference. `rules.py` says what a rule is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from math import isfinite
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
from vlmpack.recipe.data import DataSection, ImagesSection, unsafe_storage
from vlmpack.recipe.problems import KeyPath, Problem
from vlmpack.recipe.schema import EvaluationSection, ModelSection, PackingSection, Recipe
from vlmpack.recipe.sources import Section


def weights_are_complete(data: DataSection) -> list[Problem]:
    """Weights are shares of each other: all sources have one, or none has."""
    bare = [source.name for source in data.train if source.weight is None]
    if len(bare) in (0, len(data.train)):
        return []
    message = (
        f"{len(bare)} of {len(data.train)} sources have no weight ({', '.join(bare)}); weights "
        "are shares of the draws, so give all sources one, or none"
    )
    return [Problem(("data", "train"), message)]


def weights_are_for_training(data: DataSection) -> list[Problem]:
    """Evaluation reads each sample once."""
    return [
        Problem(
            ("data", split, index, "weight"),
            f"{source.weight:g}, but weights blend data.train only; "
            f"data.{split} is read once, sample by sample",
        )
        for split, sources in data.splits().items()
        for index, source in enumerate(sources)
        if split != "train" and source.weight is not None
    ]


def epoch_size_needs_weights(data: DataSection) -> list[Problem]:
    """Without blending, an epoch is every sample once."""
    if data.epoch_size is None or any(source.weight is not None for source in data.train):
        return []
    message = (
        f"{data.epoch_size}, but without weights in data.train an epoch is every sample once; "
        "leave it out, or give each source a weight"
    )
    return [Problem(("data", "epoch_size"), message)]


def tokens_need_weights(data: DataSection) -> list[Problem]:
    """Without blending there is nothing to count by tokens."""
    if data.weights == "samples" or any(source.weight is not None for source in data.train):
        return []
    message = (
        f"{data.weights}, but no source of data.train has a weight; leave it out, or give each "
        "source a weight"
    )
    return [Problem(("data", "weights"), message)]


def variables_are_plain(data: DataSection) -> list[Problem]:
    """A variable of the chat template is a value, or a list of some."""
    return [
        Problem(
            ("data", "chat_template_kwargs", name),
            f"{value!r}; expected true or false, a number, a text, or a list of such",
        )
        for name, value in data.chat_template_kwargs.items()
        if not all(map(_is_plain, value if isinstance(value, list) and value else [value]))
    ]


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | str) or (isinstance(value, float) and isfinite(value))


def source_names_differ(data: DataSection) -> list[Problem]:
    """Metrics and reports tell the sources of a split apart by name."""
    problems = []
    for split, sources in data.splits().items():
        first: dict[str, int] = {}
        for index, source in enumerate(sources):
            first.setdefault(source.name, index)
        problems += [
            Problem(
                ("data", split, index, "name"),
                f"'{name}' is also the name of source {first[name] + 1}; "
                "give each source its own, for example name: "
                f"{name}-{index + 1}",
            )
            for index, name in enumerate(source.name for source in sources)
            if first[name] != index
        ]
    return problems


def evaluation_has_data(data: DataSection, evaluation: EvaluationSection) -> list[Problem]:
    """An evaluation that is asked for has a split to read."""
    problems = []
    if evaluation.interval_steps is not None and data.validation is None:
        message = (
            f"{evaluation.interval_steps}, but data.validation is not set, so there is no "
            "validation loss; add data.validation, or leave interval_steps out"
        )
        problems.append(Problem(("evaluation", "interval_steps"), message))
    if evaluation.generate and data.test is None:
        message = (
            "true, but data.test is not set, so there are no questions to answer; "
            "add data.test, or set generate to false"
        )
        problems.append(Problem(("evaluation", "generate"), message))
    return problems


def pixel_bounds_leave_room(images: ImagesSection) -> list[Problem]:
    """The smallest size is not larger than the largest."""
    low, high = images.min_pixels, images.max_pixels
    if low is None or high is None or low <= high:
        return []
    message = f"{low} is more than images.max_pixels {high}; lower it, or raise max_pixels"
    return [Problem(("images", "min_pixels"), message)]


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
    """Why `path` is not local. Only its scheme is quoted, since an address may hold a password."""
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
