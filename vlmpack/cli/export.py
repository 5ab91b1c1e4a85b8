"""`vlmpack export` and `vlmpack merge`: model folders from a run, or from a model and adapters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import argument, option, quiet_transformers, takes
from vlmpack.terminal import say

READING = "reading the checkpoint and the model folder"


@dataclass(frozen=True, slots=True)
class PushOptions:
    """Options of the hub."""

    push: Annotated[str | None, option("export.push")] = None
    public: Annotated[bool, option("export.public")] = False
    replace: Annotated[bool, option("export.replace")] = False
    base: Annotated[str | None, option("export.base")] = None


NO_PUSH = PushOptions()


@takes(PushOptions)
def export(
    run: Annotated[Path, argument("export.run")],
    merge: Annotated[bool, option("export.merge")] = False,
    out: Annotated[Path | None, option("export.out")] = None,
    checkpoint: Annotated[int | None, option("export.checkpoint")] = None,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"] | None, option("export.dtype")] = None,
    server: Annotated[Literal["vllm", "sglang"] | None, option("export.server")] = None,
    hub: PushOptions = NO_PUSH,
) -> None:
    """Write what a run has trained. That is its adapters in peft's format, or with --merge the
    whole model in transformers' format. A run without adapters always writes the whole model."""
    push, public, replace = hub.push, hub.public, hub.replace
    if push is None and (public or replace):
        named = " and ".join(("--public",) * public + ("--replace",) * replace)
        raise typer.BadParameter(f"found {named} without --push; expected --push OWNER/NAME too")
    from vlmpack.run.export import choose_export, write_export
    from vlmpack.run.push import check_target, push_folder
    from vlmpack.run.result import written_as

    quiet_transformers()
    ACTIVITY.enter_alone(READING)
    chosen = choose_export(
        run,
        merge=merge,
        out=out,
        step=checkpoint,
        dtype=dtype,
        base=hub.base,
        pushed=push is not None,
        server=server,
    )
    if push is not None:
        ACTIVITY.enter_alone("asking the hub")
        run_id = chosen.run_dir.run_id()
        check_target(push, run=run_id, adapter=chosen.adapter, public=public, replace=replace)
        ACTIVITY.enter_alone(READING)
    written = write_export(chosen)
    line = f"{written.folder}, from {written.checkpoint} ({written.why})"
    if written.dtype is not None:
        line = f"{line}, {written_as(written.dtype, '--dtype float32')}"
    say(line)
    if push is not None:
        ACTIVITY.enter_alone("uploading to the hub")
        done = push_folder(written.folder, push, public=public, replace=replace)
        say(f"pushed: {done}")


def merge(
    model: Annotated[Path, argument("merge.model")],
    adapters: Annotated[list[Path], argument("merge.adapters")],
    out: Annotated[Path, option("merge.out")],
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], option("merge.dtype")] = "auto",
) -> None:
    """Merge adapters into the weights of a model, one folder after the other. The result can be
    served, or the next adapters can be trained on it."""
    from vlmpack.run.export import merge_folders

    quiet_transformers()
    ACTIVITY.enter_alone("loading the model")

    written = merge_folders(model, adapters, out, dtype=dtype)
    name = str(written).removeprefix("torch.")
    exact = "" if name == "float32" else "; merged in float32, which --dtype float32 keeps"
    say(f"{out}, in {name}{exact}")
