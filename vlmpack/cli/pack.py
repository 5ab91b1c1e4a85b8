"""`vlmpack pack`: packs made once, before training."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpack.cli.options import Processes
from vlmpack.cli.progress import BytesBar, size_text
from vlmpack.terminal import open_console, say

if TYPE_CHECKING:
    from vlmpack.data.packs.manifest import Manifest


class KindOption(StrEnum):
    """What is saved."""

    plan = "plan"
    tokens = "tokens"
    shards = "shards"


class PlannerOption(StrEnum):
    """Who chooses."""

    stream = "stream"
    bfd = "bfd"


class MediaOption(StrEnum):
    """What of an image."""

    original = "original"
    resized = "resized"


def pack(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Path of a YAML recipe.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="A new folder for the packs.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, e.g. packing.max_tokens=8192."),
    ] = None,
    kind: Annotated[
        KindOption,
        typer.Option(
            help="plan: which samples share a pack. tokens: their tokens too; images stay in the "
            "shards. shards: images too, so that the original shards are needed no more."
        ),
    ] = KindOption.plan,
    planner: Annotated[
        PlannerOption,
        typer.Option(
            help="stream: the rows and global batches of mode online, first epoch. bfd: "
            "best-fit-decreasing over all samples, in a seeded order."
        ),
    ] = PlannerOption.stream,
    media: Annotated[
        MediaOption,
        typer.Option(
            help="Images in kind shards: as they are, or as the model's processor resizes them "
            "(lossless; the same pixels)."
        ),
    ] = MediaOption.original,
    processes: Processes = None,
) -> None:
    """Pack the training samples once, for packing.mode: offline. Stopped, the same command goes
    on; nothing looks finished before it is."""
    from vlmpack.recipe import load_recipe

    # The folder is packing.path of the recipes that will train on it.
    loaded = load_recipe(recipe, [*(overrides or ()), f"packing.path={output}"])
    if media is MediaOption.resized and kind is not KindOption.shards:
        say(
            f"note: --media resized changes nothing in --kind {kind.value}, which saves no images; "
            "it goes with --kind shards",
            err=True,
        )
    from vlmpack.data.packs.write import PackOrder
    from vlmpack.run.packs import pack_recipe

    begin = time.perf_counter()
    with ExitStack() as stack:
        bars: dict[str, BytesBar] = {}

        def bar(what: str, total: int) -> BytesBar:
            if what not in bars:
                bars[what] = stack.enter_context(BytesBar(what, total))
            return bars[what]

        done: dict[str, int] = {}

        def on_index(what: str, now: int, total: int) -> None:
            bar(what, total).advance(units=now - done.get(what, 0))
            done[what] = now

        def on_packs(now: int, total: int, num_bytes: int) -> None:
            bar("packing", total).advance(num_bytes, units=now)

        order = PackOrder(
            kind=kind.value,
            planner=planner.value,
            media=media.value,
            processes=processes or min(16, len(os.sched_getaffinity(0))),
            on_index=on_index,
            on_packs=on_packs,
        )
        manifest = pack_recipe(loaded, output, order)
    _print_table(manifest, output, time.perf_counter() - begin)


def _print_table(manifest: Manifest, folder: Path, seconds: float) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("packs", f"{manifest.num_packs:,} of up to {manifest.budget}")
    per_pack = manifest.num_samples / max(1, manifest.num_packs)
    table.add_row("samples", f"{manifest.num_samples:,} ({per_pack:.1f} a pack)")
    table.add_row("tokens", f"{manifest.num_tokens:,}")
    table.add_row("fill", f"{manifest.fill:.2%}")
    if manifest.num_holes:
        table.add_row("left out", f"{manifest.num_holes:,} samples that cannot be encoded")
    if manifest.num_kept_original:
        table.add_row("not resized", f"{manifest.num_kept_original:,} samples")
    saved = sum(size for size in manifest.files.values() if isinstance(size, int))
    kinds = manifest.kind if manifest.media is None else f"{manifest.kind}, {manifest.media} images"
    table.add_row("kind", f"{kinds}; planner {manifest.planner}")
    if saved:
        table.add_row("bytes", size_text(saved))
    table.add_row("seconds", f"{seconds:.1f}")
    table.add_row("folder", str(folder))
    open_console().print(table)
