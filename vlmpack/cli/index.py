"""`vlmpack index`: index shards ahead of training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vlmpack.cli.options import (
    ColumnsOption,
    IgnoreColumns,
    ImagesOption,
    IndexDir,
    MaxImagePixels,
    Processes,
    RecipeOption,
    Shards,
    Storage,
    num_processes,
)
from vlmpack.cli.progress import BytesBar, size_text
from vlmpack.cli.stores import open_reading
from vlmpack.terminal import open_console, say
from vlmpack.words import counted

if TYPE_CHECKING:
    from vlmpack.data.tools.index_shards import ShardReport

BYTES_A_SECOND = 60_000_000
"""One process's rate, without a recipe: only a hint."""


def index(
    shards: Shards = None,
    recipe: RecipeOption = None,
    storage: Storage = None,
    index_dir: IndexDir = None,
    processes: Processes = None,
    max_image_pixels: MaxImagePixels = None,
    columns: ColumnsOption = None,
    ignore_columns: IgnoreColumns = None,
    images: ImagesOption = None,
) -> None:
    """Index shards, or files of records: where each sample lies, its checksum, its image sizes;
    with a recipe, its length too. Only new and changed shards are read, so it can be stopped and
    run again. Exit code 1 if a shard is damaged, or no sample can be used."""
    from vlmpack.data.tools.index_shards import index_shards, parts_builder

    begin = time.perf_counter()
    reading = open_reading(
        shards,
        recipe=recipe,
        storage=storage,
        max_image_pixels=max_image_pixels,
        columns=columns,
        ignore_columns=ignore_columns,
        image_root=images,
    )
    paths, encoder = reading.paths, None
    preload: tuple[str, ...] = ()
    if reading.recipe is not None:
        from vlmpack.build.data import build_encoder
        from vlmpack.build.worker_server import WORKER_PRELOAD

        encoder, preload = build_encoder(reading.recipe), WORKER_PRELOAD
    folder = reading.index_folder(index_dir)
    builder = parts_builder(reading.fetcher, reading.caps, folder, encoder)
    reports: list[ShardReport] = []
    with BytesBar("indexing", len(paths)) as bar:
        count = num_processes(processes, paths, BYTES_A_SECOND)
        for report in index_shards(
            reading.shards, builder, folder, processes=count, preload=preload
        ):
            reports.append(report)
            bar.advance(report.num_bytes)
    _print_table(reports, folder, time.perf_counter() - begin)
    faults = {report.path: report.fault for report in reports if report.fault is not None}
    for path in paths:
        if path in faults:
            say(f"faulty: {faults[path]}", err=True)
    samples = sum(report.samples for report in reports)
    bad = sum(sum(report.bad.values()) for report in reports)
    _print_first_bad(reports)
    if bad and bad == samples:
        say(f"no usable sample: all {counted(samples, 'sample')} of these shards are bad", err=True)
    if faults or (bad and bad == samples):
        raise typer.Exit(1)


def _print_first_bad(reports: Sequence[ShardReport]) -> None:
    """The first bad sample of each class, in the order of the shards' paths."""
    first: dict[str, str] = {}
    for report in sorted(reports, key=lambda report: report.path):
        for name, (key, reason) in report.first_bad.items():
            first.setdefault(name, f"bad ({name}): sample {key!r} in {report.path}: {reason}")
    for line in first.values():
        say(line, err=True)


def _print_table(reports: Sequence[ShardReport], folder: Path, seconds: float) -> None:
    from rich.table import Table
    from rich.text import Text

    from vlmpack.data.shards.keys import count_keys, describe_keys

    read = [report for report in reports if report.was_read]
    faulty = sum(report.fault is not None for report in reports)
    samples = sum(report.samples for report in reports)
    bad: dict[str, int] = {}
    for report in reports:
        for name, count in report.bad.items():
            bad[name] = bad.get(name, 0) + count
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("shards", f"{len(reports):,} ({len(read):,} read now, {faulty:,} faulty)")
    listed = ", ".join(f"{count:,} {name}" for name, count in sorted(bad.items())) or "none"
    table.add_row("samples", f"{samples:,}")
    table.add_row("bad samples", listed)
    if unknown := count_keys(report.unknown_keys for report in reports):
        table.add_row("unknown keys", Text(describe_keys(unknown)))
    total = sum(report.num_bytes for report in reports)
    now = sum(report.num_bytes for report in read)
    table.add_row("bytes", f"{size_text(total) or 0} ({size_text(now) or 0} read now)")
    table.add_row("seconds", f"{seconds:.1f}")
    table.add_row("index", str(folder))
    open_console().print(table)
