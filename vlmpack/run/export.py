"""A checkpoint of a run -> a transformers folder, or the adapters alone: one process, no optimizer.

A checkpoint has trained parameters alone, under transformers' names whatever engine wrote it. The
frozen ones are those of the model folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from vlmpack.backends.boxes import whole
from vlmpack.build.data import build_encoder
from vlmpack.build.policy import policy_of
from vlmpack.build.read_only import read_recipe
from vlmpack.encode.clock import write_note
from vlmpack.encode.variables import write_variables
from vlmpack.errors import CheckpointError, VlmpackError
from vlmpack.recipe import Recipe
from vlmpack.recipe.public import PublicRecipe
from vlmpack.run.card import CARD, card_of
from vlmpack.run.result import export_dtype
from vlmpack.training.best import Best, evaluated
from vlmpack.training.checkpoint import (
    CheckpointReader,
    find_damage,
    list_checkpoints,
    newest_checkpoint,
    step_folder,
)
from vlmpack.training.checkpoint.folders import STATE, read_json
from vlmpack.training.metrics import read_rows
from vlmpack.training.model_watch import check_model_again, check_trained_from
from vlmpack.training.run_dir import RunDir


class Exported(NamedTuple):
    """What was written.

    Args:
        folder: where.
        checkpoint: what it was made from.
        dtype: of the whole model's weights; None for adapters, which are written as trained.
        why: that one, in words.
    """

    folder: Path
    checkpoint: Path
    dtype: torch.dtype | None
    why: str


def export_run(
    run: Path,
    *,
    merge: bool,
    out: Path | None = None,
    step: int | None = None,
    dtype: str | None = None,
) -> Exported:
    """Write what a run has trained.

    Args:
        run: its folder.
        merge: the whole model, adapters merged; else the adapters. A run without adapters has only
            the whole model.
        out: folder to write, which must not be there yet. None: `export-N` or `adapter-N` in the
            run folder, N the checkpoint's step.
        step: of the checkpoint; None for what `export.weights` of the recipe says: the newest one
            that verifies, or that of the best step.
        dtype: of the whole model, one of those of the recipe's `export.dtype`; None for that.

    Raises:
        VlmpackError: no run folder, no such checkpoint, a place that is taken, a dtype for
            adapters, or a model that cannot be built as the recipe says.
        RunIdentityError: the model folder holds another model than the run was trained from.
    """
    if not run.is_dir():
        raise VlmpackError(f"{run}: expected a run folder, found no folder there")
    recipe = read_recipe(run)
    checkpoint, why = _choose(RunDir(run), recipe, step)
    number = _step(checkpoint)
    adapter = bool(recipe.trainable.uses("lora")) and not merge
    if adapter and dtype is not None:
        raise VlmpackError("adapters are written as trained, in float32; add --merge for --dtype")
    if out is None:
        out = run / f"{'adapter' if adapter else 'export'}-{number}"
    if out.exists():
        raise VlmpackError(f"{out} is there already; choose another place with -o, or delete it")
    named = recipe.export.dtype if dtype is None else dtype
    partial = out.with_name(f"{out.name}.partial")
    public, source = PublicRecipe.of(recipe, run), Path(recipe.model.path)
    card = card_of(RunDir(run), source, public, adapter=adapter, step=number)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        written = _write(recipe, RunDir(run), checkpoint, partial, dtype=None if adapter else named)
        (partial / CARD).write_text(card, "utf-8")
        partial.rename(out)
    except OSError as error:
        raise VlmpackError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(out, checkpoint, written, why)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _choose(run_dir: RunDir, recipe: Recipe, step: int | None) -> tuple[Path, str]:
    """The checkpoint, and why it is that one."""
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

    What is due at the step that a signal stopped at, the resumed run evaluates: the checkpoint of
    that step does not know of it, and it may be the newest.
    """
    at_end = run_dir.figures().get("best")
    best.take(at_end or read_json(newest / STATE).get("best"))
    for row in [] if at_end else read_rows(run_dir.metrics):
        if row["step"] == _step(newest):
            best.judge(_step(newest), evaluated(row))


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


def _write(
    recipe: Recipe, run_dir: RunDir, checkpoint: Path, folder: Path, *, dtype: str | None
) -> torch.dtype | None:
    """The whole model in that dtype, which is returned; None: the adapters."""
    from vlmpack.backends.export import save_model_folder
    from vlmpack.backends.hf.adapters import (
        apply_policy,
        merged_state,
        modules_in_full,
        save_adapter,
    )
    from vlmpack.backends.hf.load import load_model
    from vlmpack.backends.hf.parameter_boxes import whole_state
    from vlmpack.backends.hf.quantize import check_quantization

    policy, source = policy_of(recipe), Path(recipe.model.path)
    encoder = build_encoder(recipe)
    paths = encoder.family.modules
    now = check_model_again(source, run_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packed = policy.lora is not None and policy.lora.quantize != "none"
    if packed:
        check_quantization(device)
    check_trained_from(checkpoint, read_json(checkpoint / STATE).get("model"), now)
    model = load_model(source)
    compute_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    apply_policy(model, paths, policy, device=device, compute_dtype=compute_dtype)
    read_parameters(model, checkpoint)
    if dtype is None:
        in_full = modules_in_full(model, paths, policy)
        state = whole_state(model, keep=True)
        save_adapter(model, state, folder, in_full=in_full, base=recipe.model.path)
        return None
    chosen = export_dtype(dtype, source)
    save_model_folder(
        model,
        merged_state(whole_state(model, keep=True), policy.lora),
        folder,
        processor_from=source,
        dtype=chosen,
    )
    encoder.write_budget(folder)
    write_note(folder, encoder.date)
    write_variables(folder, encoder.chat_template_kwargs)
    return chosen


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
