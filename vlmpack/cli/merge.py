"""`vlmpack merge`: a model folder with adapters inside of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vlmpack.activity import ACTIVITY
from vlmpack.terminal import say


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
