"""`vlmpack export` and `vlmpack merge`: model folders from a run, or from a model and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vlmpack.activity import ACTIVITY
from vlmpack.terminal import say

READING = "reading the checkpoint and the model folder"

PushTo = Annotated[
    str | None,
    typer.Option(
        "--push",
        metavar="OWNER/NAME",
        help="Upload it to the Hugging Face Hub, to a private repository.",
    ),
]

Public = Annotated[
    bool,
    typer.Option(
        "--public", help="With --push: a new repository is public, and a public one is taken."
    ),
]

Replace = Annotated[
    bool,
    typer.Option(
        "--replace",
        help="With --push: another model that the repository holds goes in the same commit.",
    ),
]

Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="OWNER/NAME",
        help="What the model of model.path is called on the Hugging Face Hub.",
        show_default="with --push, as its folder in the hub's cache says",
    ),
]


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    merge: Annotated[
        bool,
        typer.Option("--merge", help="The whole model with the adapters merged into its weights."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder to write; must not be there yet.",
            show_default="export-N or adapter-N in the run folder",
        ),
    ] = None,
    checkpoint: Annotated[
        int | None,
        typer.Option(
            "--checkpoint",
            metavar="N",
            min=0,
            help="Its step.",
            show_default="as export.weights of the run's recipe: the newest, or the best",
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"] | None,
        typer.Option(
            "--dtype",
            help="Type of the whole model's weights; auto: as in the folder model.path.",
            show_default="export.dtype of the run's recipe",
        ),
    ] = None,
    push: PushTo = None,
    public: Public = False,
    replace: Replace = False,
    base: Base = None,
) -> None:
    """Write what a run has trained: its adapters in peft's format, or with --merge (and always
    where there are none) the whole model in transformers'."""
    if push is None and (public or replace):
        named = " and ".join(("--public",) * public + ("--replace",) * replace)
        raise typer.BadParameter(f"found {named} without --push; expected --push OWNER/NAME too")
    from transformers.utils import logging as transformers_logging

    from vlmpack.run.export import choose_export, write_export
    from vlmpack.run.push import check_target, push_folder
    from vlmpack.run.result import written_as

    transformers_logging.disable_progress_bar()
    ACTIVITY.enter_alone(READING)
    chosen = choose_export(
        run,
        merge=merge,
        out=out,
        step=checkpoint,
        dtype=dtype,
        base=base,
        pushed=push is not None,
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
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder in transformers format.")],
    adapters: Annotated[
        list[Path],
        typer.Argument(
            metavar="ADAPTER...",
            help="Folders in peft's format, in the order that they were trained in.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Folder to write; must not be there yet."
        ),
    ],
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option("--dtype", help="Type of the written weights; auto: as in the folder MODEL."),
    ] = "auto",
) -> None:
    """Merge adapters into the weights of a model, one folder after the other: to serve it, or to
    train the next adapters on it."""
    from transformers.utils import logging as transformers_logging

    from vlmpack.run.export import merge_folders

    transformers_logging.disable_progress_bar()
    ACTIVITY.enter_alone("loading the model")

    written = merge_folders(model, adapters, out, dtype=dtype)
    name = str(written).removeprefix("torch.")
    exact = "" if name == "float32" else "; merged in float32, which --dtype float32 keeps"
    say(f"{out}, in {name}{exact}")
