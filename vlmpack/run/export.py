"""A checkpoint of a run -> a transformers folder, or the adapters alone: one process, no optimizer.

A checkpoint has trained parameters alone, under transformers' names. Frozen ones come from the
model folder. `merge_folders` merges adapter folders. An export is chosen first, so that it can be
shown before anything is written.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from vlmpack.activity import ACTIVITY
from vlmpack.backends.boxes import whole
from vlmpack.build.data import build_encoder
from vlmpack.build.engine import policy_of
from vlmpack.build.look import read_recipe
from vlmpack.capabilities.folder import read_config
from vlmpack.capabilities.servers import SERVERS
from vlmpack.data.plan.state import DataState
from vlmpack.distributed import Ranks
from vlmpack.errors import CheckpointError, VlmpackError, writing
from vlmpack.file_format import CHECKPOINT
from vlmpack.model_folder.extra_shards import rename_tensors
from vlmpack.model_folder.quantised import is_quantised
from vlmpack.recipe import Recipe
from vlmpack.recipe.show import PublicRecipe
from vlmpack.recipe.trainable import COMPONENTS, LoraSection
from vlmpack.run.card import CARD, card_of, hub_name_of, is_hub_name
from vlmpack.run.result import export_dtype, publish_folder
from vlmpack.training.checkpoint import (
    STATE,
    CheckpointReader,
    data_state_of,
    find_damage,
    list_checkpoints,
    newest_checkpoint,
    step_folder,
)
from vlmpack.training.evaluations import Best, evaluated
from vlmpack.training.metrics import read_rows
from vlmpack.training.model_watch import check_model_again, check_trained_from
from vlmpack.training.run_dir import RunDir
from vlmpack.whole_file import read_json

logger = logging.getLogger("vlmpack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What is to be written.

    Args:
        dtype: of the whole model, as `export.dtype` of a recipe.
        base: the hub's name of the model that the run began with. None if it is not known, or if
            the adapters are for this machine, where its folder's path finds it.
    """

    run_dir: RunDir
    recipe: Recipe
    checkpoint: Path
    why: str
    adapter: bool
    out: Path
    dtype: str
    base: str | None
    server: str | None = None


class Exported(NamedTuple):
    """What was written.

    Args:
        dtype: of the whole model's weights; None for adapters, which are written as trained.
    """

    folder: Path
    checkpoint: Path
    dtype: torch.dtype | None
    why: str


def choose_export(
    run: Path,
    *,
    merge: bool,
    out: Path | None = None,
    step: int | None = None,
    dtype: str | None = None,
    base: str | None = None,
    pushed: bool = False,
    server: str | None = None,
) -> Chosen:
    """Choose what of a run is exported, and check that it exists; nothing is written.

    Args:
        merge: the whole model with merged adapters; else the adapters. A run without adapters has
            only the whole model.
        out: folder to write, which must not be there yet. None: `export-N` or `adapter-N` in the
            run folder, N the checkpoint's step.
        step: of the checkpoint. With None, the recipe's `export.weights` chooses the newest one
            that verifies, or that of the best step.
        dtype: of the whole model; None for the recipe's `export.dtype`.
        base: OWNER/NAME of the base model on the hub. With None, for a push, its place in
            huggingface_hub's cache gives the name.
        pushed: whether it is for the hub, where local paths have no meaning.
        server: a key of `SERVERS`, whose names tensors get.

    Raises:
        CapabilityError: the server does not take it.
        VlmpackError: no run folder, no such checkpoint, a place that is taken, a dtype for
            adapters, or adapters for the hub whose base has no known name.
    """
    run_dir = RunDir(run)
    if not run.is_dir():
        raise VlmpackError(f"{run}: expected a run folder, found no folder there")
    if not run_dir.identity.is_file():
        raise VlmpackError(
            f"{run}: expected a run folder, found no {run_dir.identity.name} in it, which a run's "
            "first launch writes"
        )
    recipe = read_recipe(run)
    adapter = bool(recipe.trainable.uses("lora")) and not merge
    if adapter and dtype is not None:
        raise VlmpackError("adapters are written as trained, in float32; add --merge for --dtype")
    if server is not None:
        config, trainable = read_config(Path(recipe.model.path)), recipe.trainable
        parts = COMPONENTS if "vision_config" in config else ("language",)
        adapted = [part for part in parts if getattr(trainable, part) != "frozen"]
        own = [key for key, value in trainable.lora if value != getattr(LoraSection(), key)]
        SERVERS[server].check(str(config["model_type"]), adapted if adapter else None, own)
    base = _named(recipe.model.path, base, pushed=pushed, adapter=adapter)
    checkpoint, why = _choose(run_dir, recipe, step)
    if out is None:
        out = run / f"{'adapter' if adapter else 'export'}-{_step(checkpoint)}"
    if out.exists():
        raise VlmpackError(f"{out} is there already; choose another place with -o, or delete it")
    return Chosen(
        run_dir=run_dir,
        recipe=recipe,
        checkpoint=checkpoint,
        why=why,
        adapter=adapter,
        out=out,
        dtype=recipe.export.dtype if dtype is None else dtype,
        base=base,
        server=server,
    )


def write_export(chosen: Chosen) -> Exported:
    """Write the chosen export with its card, whole or not at all.

    Raises:
        VlmpackError: a model that cannot be built from the recipe, or a folder that cannot be
            written.
        RunIdentityError: the model folder holds another model than the run was trained from.
    """
    run_dir, recipe = chosen.run_dir, chosen.recipe
    card = card_of(
        run_dir,
        Path(recipe.model.path),
        PublicRecipe.of(recipe, run_dir.path),
        adapter=chosen.adapter,
        step=_step(chosen.checkpoint),
        base=chosen.base,
    )

    def write(folder: Path) -> torch.dtype | None:
        written = _write(chosen, folder)
        (folder / CARD).write_text(card, "utf-8")
        return written

    with writing(chosen.out):
        written = publish_folder(chosen.out, Ranks(), write, replace=False)
    return Exported(chosen.out, chosen.checkpoint, written, chosen.why)


def _named(path: str, base: str | None, *, pushed: bool, adapter: bool) -> str | None:
    if base is not None:
        if not is_hub_name(base):
            raise VlmpackError(f"--base {base}: expected OWNER/NAME of a model on the hub")
        return base
    name = hub_name_of(Path(path)) if pushed else None
    if name is None and pushed and adapter:
        raise VlmpackError(
            f"adapters name the model that they are for, and {path} is a folder of this machine. "
            "Give its name on the hub by --base OWNER/NAME, or push the whole model by --merge"
        )
    return name


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _choose(run_dir: RunDir, recipe: Recipe, step: int | None) -> tuple[Path, str]:
    if step is not None:
        return _of_step(run_dir, step), "as asked"
    newest, damaged = newest_checkpoint(run_dir.checkpoints)
    if newest is None:
        listed = "".join(f"\n  {line}" for line in damaged)
        raise VlmpackError(f"{run_dir.path} has no checkpoint that verifies{listed}")
    if recipe.export.weights == "last":
        return newest, "the newest"
    best = Best.of(recipe.evaluation)
    assert best is not None  # the recipe's rules: weights: best follows a figure
    _judge_again(best, run_dir, newest)
    if best.value is None:
        return newest, f"the newest, as no {best.figure} says yet which is the best"
    why = f"the best by {best.figure}, export.weights: best"
    try:
        return _of_step(run_dir, best.step), why
    except VlmpackError as error:
        raise type(error)(f"{error}; that step is {why}, and --checkpoint takes another") from None


def _judge_again(best: Best, run_dir: RunDir, newest: Path) -> None:
    """Find the best step of a run so far.

    A run that a signal stopped evaluates its last step after the resume, so the newest checkpoint
    may not have that evaluation.
    """
    at_end = run_dir.figures().get("best")
    best.take(at_end or _state(newest).get("best"))
    for row in [] if at_end else read_rows(run_dir.metrics):
        if row["step"] == _step(newest):
            best.judge(_step(newest), evaluated(row))


def _state(checkpoint: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = read_json(checkpoint / STATE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {error}") from error
    CHECKPOINT.take(state, checkpoint, CheckpointError)
    return state


def _of_step(run_dir: RunDir, step: int) -> Path:
    there = list_checkpoints(run_dir.checkpoints)
    folder = step_folder(run_dir.checkpoints, step)
    if folder not in there:
        known = ", ".join(str(_step(path)) for path in there) or "none"
        raise VlmpackError(f"{run_dir.path} has no checkpoint of step {step}; it has {known}")
    problem = find_damage(folder)
    if problem is not None:
        raise CheckpointError(f"{folder}: {problem}")
    return folder


def _write(chosen: Chosen, folder: Path) -> torch.dtype | None:
    """Write the whole model in the dtype that is returned, or with None the adapters."""
    from vlmpack.backends.adapter_folder import adapted_layers
    from vlmpack.backends.export import save_model_folder
    from vlmpack.backends.hf.adapters import (
        apply_policy,
        merged_state,
        modules_in_full,
        save_adapter,
    )
    from vlmpack.backends.hf.frozen import check_quantization, packing_error
    from vlmpack.backends.hf.load import deferred_model, load_model
    from vlmpack.backends.hf.sharding import whole_state

    recipe, checkpoint = chosen.recipe, chosen.checkpoint
    policy, source = policy_of(recipe), Path(recipe.model.path)
    encoder = build_encoder(recipe)
    paths = encoder.family.modules
    now = check_model_again(source, chosen.run_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if policy.lora is not None:
        check_quantization(policy.lora.quantize)
    check_trained_from(checkpoint, _state(checkpoint)["model"], now)
    model = load_model(source)
    apply_policy(model, paths, policy, device=device)
    read_parameters(model, checkpoint)
    ACTIVITY.enter_alone("writing the model")
    if chosen.adapter:
        in_full = modules_in_full(model, paths, policy)
        state = whole_state(model, keep=True)
        base = chosen.base or recipe.model.path
        lora, kind = policy.trainable.lora, model.config.model_type
        if server := SERVERS.get(chosen.server or ""):
            lora = lora.model_copy(update={"expert_form": server.expert_form(kind)})
        save_adapter(model, state, folder, in_full=in_full, base=base, lora=lora)
        if server:
            server.check_layers(kind, adapted_layers(folder))
        return None
    dtype = export_dtype(chosen.dtype, source)
    if policy.lora is not None and policy.lora.quantize != "none":
        logger.warning(
            "note: frozen weights are those of %s, as in training; they differ from %s by %.2g "
            "(relative L2)",
            policy.lora.quantize,
            source,
            packing_error(model, deferred_model(source)),
        )
    save_model_folder(
        model,
        merged_state(model, whole_state(model, keep=True), policy.lora),
        folder,
        processor_from=source,
        dtype=dtype,
    )
    if chosen.server is not None:
        name = partial(SERVERS[chosen.server].name, model.config.model_type)
        rename_tensors(folder, name)
    data = data_state_of(checkpoint)
    encoder.write_settings(folder, DataState.from_json(data).identity if data else ())
    return dtype


def read_parameters(model: Any, checkpoint: Path) -> None:
    """Fill a model's trained parameters from a checkpoint.

    Raises:
        CheckpointError: it does not fit the model.
    """
    trained: Mapping[str, nn.Parameter] = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    reader = CheckpointReader(checkpoint)
    with torch.no_grad():
        reader.check({name: tuple(parameter.shape) for name, parameter in trained.items()})
        for name, parameter in trained.items():
            value = reader.read("model", whole(name, tuple(parameter.shape)))
            assert value is not None  # the check has found it
            parameter.copy_(value)


def merge_folders(model: Path, adapters: Sequence[Path], out: Path, *, dtype: str) -> torch.dtype:
    """Merge one adapter folder after the other in float32, and write the result.

    Args:
        model: folder in transformers format, on which the first adapters were trained.
        adapters: in peft's format; each was trained on the model with the earlier ones merged.
        out: folder to write, which must not be there yet.
        dtype: of the written weights, as the recipe's `export.dtype`.

    Raises:
        VlmpackError: a place that is taken or cannot be written.
        ModelError: a folder that cannot be read, or adapters of another model.
    """
    from vlmpack.backends.export import save_model_folder
    from vlmpack.backends.hf.adapters import merge_adapter
    from vlmpack.backends.hf.frozen import relative_error
    from vlmpack.backends.hf.load import load_model

    if out.exists():
        raise VlmpackError(f"{out} is there already; choose another place with -o, or delete it")
    read_config(model)
    merged = load_model(model)
    for folder in adapters:
        merged = merge_adapter(merged, folder)
    chosen = export_dtype(dtype, model)
    if is_quantised(model):
        logger.warning(
            "note: %s is quantised, and what is written is dense. Weights in %s differ from the "
            "merged ones by %.2g (relative L2). They are not quantised again: that would round "
            "the update with them",
            model,
            str(chosen).removeprefix("torch."),
            relative_error((value, value.to(chosen)) for value in merged.parameters()),
        )

    def write(folder: Path) -> None:
        save_model_folder(
            merged, dict(merged.state_dict()), folder, processor_from=model, dtype=chosen
        )

    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        publish_folder(out, Ranks(), write, replace=False)
    return chosen
