"""`vlmpack pack` and `vlmpack reference`: what can be computed once, before training."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import (
    Overrides,
    Processes,
    RecipeOrRun,
    RecipePath,
    launcher_number,
    load,
    option,
    quiet_transformers,
)
from vlmpack.cli.progress import Bars, size_text
from vlmpack.terminal import open_console, say

if TYPE_CHECKING:
    from vlmpack.data.packs.manifest import Manifest


def pack(
    recipe: RecipePath,
    output: Annotated[Path, option("pack.output")],
    overrides: Overrides = None,
    kind: Annotated[Literal["plan", "tokens", "shards"], option("pack.kind")] = "plan",
    planner: Annotated[Literal["stream", "bfd"], option("pack.planner")] = "stream",
    media: Annotated[Literal["original", "resized"], option("pack.media")] = "original",
    processes: Processes = None,
) -> None:
    """Pack the training samples once, for packing mode offline. If it was stopped, the same command
    goes on. Nothing looks finished before it is."""
    from vlmpack.recipe import load_recipe

    # The folder is packing.path of the recipes that will train on it.
    loaded = load_recipe(recipe, [*(overrides or ()), f"packing.path={output}"])
    if media == "resized" and kind != "shards":
        say(
            f"note: --media resized changes nothing in --kind {kind}, which saves no images; "
            "it goes with --kind shards",
            err=True,
        )
    from vlmpack.data.packs.write import PackOrder
    from vlmpack.run.packs import pack_recipe

    ACTIVITY.enter_alone("opening the data")
    started = time.perf_counter()
    with Bars() as bar:
        packed = 0

        def on_packs(now: int, total: int, num_bytes: int) -> None:
            nonlocal packed
            packed += now
            bar("packing", packed, total, num_bytes)

        order = PackOrder(
            kind=kind,
            planner=planner,
            media=media,
            processes=processes or min(16, len(os.sched_getaffinity(0))),
            on_index=bar,
            on_packs=on_packs,
        )
        manifest = pack_recipe(loaded, output, order)
    _print_table(manifest, output, time.perf_counter() - started)


def _print_table(manifest: Manifest, folder: Path, seconds: float) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    unit = "pairs" if manifest.holds_pairs else "samples"
    table.add_row("packs", f"{manifest.num_packs:,} of up to {manifest.budget.text(unit)}")
    per_pack = manifest.num_samples / max(1, manifest.num_packs)
    table.add_row(unit, f"{manifest.num_samples:,} ({per_pack:.1f} a pack)")
    size = manifest.global_batch_size
    if manifest.packs_by_batch:
        table.add_row("a step", f"{size:,} {unit}, exactly; the last of an epoch may be short")
    if manifest.holds_pairs:
        in_packs = f"{size} / {per_pack:.2f} = {max(1, round(size / max(1.0, per_pack))):,} packs"
        table.add_row(
            "", f"NeMo-Aligner's global batch size would be {in_packs}: as many pairs on average"
        )
    table.add_row("tokens", f"{manifest.num_tokens:,}")
    table.add_row("fill", f"{manifest.fill:.2%}")
    if manifest.num_holes:
        table.add_row("left out", f"{manifest.num_holes:,} {unit} that cannot be encoded")
    if manifest.num_kept_original:
        table.add_row("not resized", f"{manifest.num_kept_original:,} {unit}")
    saved = sum(size for size in manifest.files.values() if isinstance(size, int))
    kinds = manifest.kind if manifest.media is None else f"{manifest.kind}, {manifest.media} images"
    shares = "; packing.share_prefix" if manifest.share_prefix else ""
    table.add_row("kind", f"{kinds}; planner {manifest.planner}{shares}")
    if saved:
        table.add_row("bytes", size_text(saved))
    table.add_row("seconds", f"{seconds:.1f}")
    table.add_row("folder", str(folder))
    open_console().print(table)


def reference(recipe: RecipeOrRun, overrides: Overrides = None) -> None:
    """Compute the log-probabilities of a recipe's answers under its model, and keep them.

    They are two numbers a pair, or one a token of a rollout's answer, in `objective.reference_dir`.
    A run does the same at its launch. A pass that was stopped goes on where it was. Runs under
    torchrun too.
    """
    loaded = load(recipe, overrides, launcher_number("WORLD_SIZE", 1))
    from vlmpack.run.place import watched_ranks
    from vlmpack.run.reference import make_references

    quiet_transformers()
    with watched_ranks(loaded) as ranks:
        ACTIVITY.enter_alone("opening model and data")
        passes = make_references(loaded, ranks)
        units = "pairs" if loaded.objective.learns_pairs else "answers"
        if ranks.is_main:
            for found in passes:
                say(
                    f"{found.split}: {found.num_samples} {units}, {found.num_computed} of them "
                    f"computed now, in {found.folder}"
                )
