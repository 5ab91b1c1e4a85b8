"""What makes two launches the same run: the fields that change the objective or the order.

The identity contains

- the model, the adapters that it begins with, its compute type, and the weight of its auxiliary
  loss
- the training sources with their weights and columns, the share held back for validation, the
  shuffle, and the size of an epoch
- what happens to over-long or oversized samples, what an image may cost, and which answers are
  learnt
- the date and the variables that a template gets
- the packing mode, and the budgets and scope of planned rows
- sequence length, global batch, seed, and length of the run
- what is trained, by which adapters
- the objective
- the optimizer, its learning rates and its schedule

All else may change on resume:

- engine, attention, recurrence, fused layers, recomputation, fixed shapes, CUDA graphs
- parallelism, micro-batch size, balance, workers
- the policy for bad samples, evaluation, checkpoints, logging, export, folders
- `packing.alignment` and `packing.path`. The plan records the alignment and the packs' fingerprint.

With `checkpoint.on_data_change: new_era` the training sources, their weights and the epoch size
may change as well. The run then goes on as a new era.

A run may be made longer. Its learning-rate schedule then ends later as well. From the resumed step
on, the learning rate is that of the longer run, not what the shorter run would have used next.
Before that step it is not what an unbroken longer run would have used. `identity_notes` says so.
With `optim.schedule: constant` there is no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmpack.recipe.messages import shown
from vlmpack.recipe.objective import KNOBS, ObjectiveSection
from vlmpack.recipe.schema import Recipe
from vlmpack.recipe.sources import Share
from vlmpack.recipe.trainable import COMPONENTS, LoraSection, OptimSection, TrainableSection

MAY_GROW = ("training.max_steps", "training.num_epochs")
"""Fields of the identity that may be larger on resume."""

_INCLUDE: Mapping[str, Any] = {
    "model": {"path", "dtype", "router_aux_loss_coef"},
    "data": {
        "train": {"__all__": {"path", "weight"}},
        "shuffle": True,
        "over_long": True,
        "epoch_size": True,
        "max_image_pixels": True,
    },
    "training": {"global_batch_size", "seq_length", "max_steps", "num_epochs", "seed"},
}

_DATA_IF_CHANGED = (
    *("weights", "date", "learn", "chat_template_kwargs", "special_tokens"),
    *("group_by", "columns", "coordinates", "boxes_in_text"),
)
"""Fields of `data` that an identity has where they are not as by default."""

_WHERE_A_REFERENCE_IS = {"reference", "reference_dir"}
"""Knobs of an objective that no value depends on."""

_WHERE_THEY_APPLY = ("packing.", "trainable.lora.")
"""Fields that an identity lacks where they mean nothing, and not only where they are as by default.
"""


def identity(recipe: Recipe) -> dict[str, object]:
    """The run's identity: dotted key -> JSON scalar (`data.train.0.path`, `optim.betas.1`)."""
    flat: dict[str, object] = {}
    include = {**_INCLUDE, "packing": set(recipe.packing.facts.identity)}
    changed = [
        name for name in _DATA_IF_CHANGED if getattr(recipe.data, name) != _default(f"data.{name}")
    ]
    include["data"] = _INCLUDE["data"] | dict.fromkeys(changed, True)
    if isinstance(recipe.data.validation, Share):
        include["data"]["validation"] = True
    if any(source.columns is not None for source in recipe.data.train):
        include["data"]["train"] = {"__all__": {"path", "weight", "columns"}}
    if recipe.model.adapter is not None:
        include["model"] = _INCLUDE["model"] | {"adapter"}
    include["images"] = set(recipe.images.set_values())
    objective = recipe.objective
    knobs = set(KNOBS.get(objective.name, ())) - _WHERE_A_REFERENCE_IS
    if knobs or objective.name != ObjectiveSection().name:
        include["objective"] = (
            {"name"} | knobs | ({"fingerprint"} if objective.fingerprint else set())
        )
    include["optim"] = {
        name for name in OptimSection.model_fields if getattr(recipe.optim, name) is not None
    } | {"max_grad_norm"}
    if not recipe.optim.rounds:
        include["optim"] -= {"master"}
    if recipe.trainable != TrainableSection():
        include["trainable"] = set(COMPONENTS)
    if recipe.trainable.uses("lora"):
        lora = {*LoraSection.model_fields} - {"expert_form"}  # no value depends on it
        include["trainable"] = dict.fromkeys(include["trainable"], True) | {"lora": lora}
    _flatten("", recipe.model_dump(mode="json", include=include), flat)
    return flat


def identity_differences(
    old: Mapping[str, object], new: Mapping[str, object], *, new_era: bool = False
) -> list[str]:
    """Why the run with identity `old` cannot go on as `new`, one line per field; empty if it can.

    Args:
        old: identity in the run folder.
        new: identity of the recipe that wants to resume it.
        new_era: whether `checkpoint.on_data_change` lets the run go on with other data.
    """
    return [
        f"{key}: {_shown(key, old, new)} in the run folder, {_shown(key, new, old)} in the recipe"
        for key in [*old, *(key for key in new if key not in old)]
        if not (key in old and key in new and _same(old[key], new[key]))
        and not _grows(key, old, new)
        and not (new_era and _says_which_data(key))
    ]


def _same(old: object, new: object) -> bool:
    """Equal and of one type: a template writes true, 1 and 1.0 in three ways."""
    return type(old) is type(new) and old == new


def _says_which_data(key: str) -> bool:
    return key.startswith("data.train.") or key in ("data.epoch_size", "data.weights")


def identity_hint(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    """What a user can do about differences that are not allowed, behind the list of them."""
    changed = [key for key in old.keys() | new.keys() if old.get(key) != new.get(key)]
    hint = ""
    for key in MAY_GROW:
        before, after = old.get(key), new.get(key)
        if isinstance(before, int) and isinstance(after, int) and after < before:
            hint += f" {key} may only grow: {before} or more."
    if any(_says_which_data(key) for key in changed):
        hint += (
            " Where only data.train or data.epoch_size differ, checkpoint.on_data_change: "
            "new_era goes on with the new data."
        )
    if {"objective.fingerprint"} < old.keys() & new.keys() and "objective.fingerprint" in changed:
        hint += (
            " objective.fingerprint stands for the objective's text and `version`, what it closes "
            "over, its defaults and its state: one of them is another."
        )
    return hint


def identity_notes(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """What a user should know about differences that are allowed."""
    if new.get("optim.schedule") == "constant":
        return []
    return [
        f"{key} grows from {old[key]} to {new[key]}: from here on the learning rate follows the "
        "longer schedule"
        for key in MAY_GROW
        if _grows(key, old, new)
    ]


def _grows(key: str, old: Mapping[str, object], new: Mapping[str, object]) -> bool:
    before, after = old.get(key), new.get(key)
    return key in MAY_GROW and isinstance(before, int) and isinstance(after, int) and after > before


def _shown(key: str, values: Mapping[str, object], others: Mapping[str, object]) -> str:
    """A value; where there is none, the default that stands for it, unless the field did not
    apply."""
    if key in values:
        return shown(values[key])
    default = None if key.startswith(_WHERE_THEY_APPLY) else _default(key)
    return "missing" if default in (None, others[key]) else f"{shown(default)}, by default,"


def _default(key: str) -> object:
    """That of a recipe's field; None where it has none, or is no plain field."""
    section: Any = Recipe
    *path, name = key.split(".")
    for part in path:
        field = getattr(section, "model_fields", {}).get(part)
        section = None if field is None else field.annotation
    field = getattr(section, "model_fields", {}).get(name)
    return None if field is None or field.is_required() else field.default


def _flatten(prefix: str, value: object, flat: dict[str, object]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}" if prefix else key, inner, flat)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _flatten(f"{prefix}.{index}", inner, flat)
    else:
        flat[prefix] = value
