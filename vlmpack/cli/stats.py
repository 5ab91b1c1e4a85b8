"""`vlmpack data stats`: what a source holds, before there is a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vlmpack.cli.options import (
    AsJson,
    ColumnsOption,
    IgnoreColumns,
    ImagesOption,
    IndexDir,
    MaxImagePixels,
    ShareOption,
    Storage,
)
from vlmpack.cli.progress import BytesBar, size_text
from vlmpack.cli.stores import open_reading
from vlmpack.errors import RecipeError
from vlmpack.recipe.objective import LEARN_PAIRS
from vlmpack.recipe.sources import Share, as_share
from vlmpack.terminal import open_console, say
from vlmpack.words import counted

if TYPE_CHECKING:
    from vlmpack.data.tools.stats import SourceStats

LABELS = {
    "num_tokens": "tokens a sample",
    "num_image_tokens": "of images",
    "num_label_tokens": "learnt",
    "num_patches": "patches",
}
MAX_KEYS_SHOWN = 20


def stats(  # noqa: PLR0913 - the options of a command
    source: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE...", help="Files, a glob, or a folder of save_to_disk."),
    ],
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="Model folder: samples are measured for it."),
    ] = None,
    columns: ColumnsOption = None,
    ignore_columns: IgnoreColumns = None,
    images: ImagesOption = None,
    learn: Annotated[
        Literal["all_turns", "last_turn", "each_answer"],
        typer.Option("--learn", help="As data.learn of a recipe; with --model."),
    ] = "all_turns",
    objective: Annotated[
        Literal["sft", "dpo"],
        typer.Option(help="What SOURCE is for: sft refuses pairs of answers, dpo all else."),
    ] = "sft",
    validation: ShareOption = None,
    storage: Storage = None,
    max_image_pixels: MaxImagePixels = None,
    index_dir: IndexDir = None,
    as_json: AsJson = False,
) -> None:
    """What a source holds: its layout, keys, images, with a model its lengths, and what a run would
    refuse and why. Exit code 1 where no sample can be used."""
    from vlmpack.data.files.source_form import describe_forms
    from vlmpack.data.index.lengths import ShardBuilder
    from vlmpack.data.tools.index_shards import parts_builder
    from vlmpack.data.tools.stats import source_stats

    share, pairs = _share(validation), objective in LEARN_PAIRS
    if model is None and learn != "all_turns":
        raise RecipeError([f"--learn {learn}: needs --model, whose template says what is learnt"])
    reading = open_reading(
        source,
        recipe=None,
        storage=storage,
        max_image_pixels=max_image_pixels,
        columns=columns,
        ignore_columns=ignore_columns,
        image_root=images,
    )
    encoder = reading.encoder(model, learn=learn, pairs=pairs)
    notes: list[str] = []
    if encoder is not None:
        from vlmpack.encode.template_notes import template_notes

        notes = template_notes(encoder.chat, encoder.settings.learn)
    folder = reading.index_folder(index_dir)
    folder.mkdir(parents=True, exist_ok=True)
    builder = parts_builder(reading.fetcher, reading.caps, folder, encoder)
    lengths = builder.lengths if isinstance(builder, ShardBuilder) else None
    stamps = [shard.seen(reading.fetcher) for shard in reading.shards]
    with BytesBar("reading", len(stamps)) as bar:
        steps = source_stats(stamps, builder, folder, lengths, pairs=pairs)
        for stamp, found in zip(stamps, steps, strict=True):  # noqa: B007 - the last one
            bar.advance(stamp.size)
    forms = list(dict.fromkeys(describe_forms([stamp]) for stamp in stamps))
    facts = {"files": len(stamps), "bytes": sum(s.size for s in stamps), "read_as": forms}
    if share is not None:
        facts["validation"] = found.num_held(share)
    if as_json:
        told = facts | found.as_json() | ({"notes": notes} if notes else {})
        say(json.dumps(told, indent=1, ensure_ascii=False))
    else:
        _print(facts, found)
        for note in notes:
            say(f"note: {note}")
    if sum(each.count for each in found.refused.values()) == found.samples:
        say(f"no usable sample of {counted(found.samples, 'sample')}", err=True)
        raise typer.Exit(1)


def _print(facts: dict[str, Any], found: SourceStats) -> None:
    from rich.table import Table
    from rich.text import Text

    from vlmpack.data.tools.stats import percentiles

    table = Table(show_header=False, box=None, pad_edge=False)
    size = size_text(facts["bytes"]) or 0
    table.add_row("files", f"{facts['files']:,} ({size})")
    for form in facts["read_as"]:
        table.add_row("found", Text(form))
    refused = sum(each.count for each in found.refused.values())
    table.add_row("samples", f"{found.samples:,}, {refused:,} of them refused")
    keys = found.keys.most_common(MAX_KEYS_SHOWN)
    more = len(found.keys) - len(keys)
    table.add_row(
        "keys",
        Text(
            ", ".join(f"{key} {count:,}" for key, count in keys)
            + (f" and {more} more" if more else "")
        ),
    )
    counts = ", ".join(f"{n}: {found.images[n]:,}" for n in sorted(found.images)[:12])
    table.add_row("images", f"{found.sizes.shape[0]:,}; a sample has {counts or 'none'}")
    if "validation" in facts:
        table.add_row("validation", f"{facts['validation']:,} of {found.samples:,} held back")
    table.add_row("no image", f"{found.images[0]:,} of {counted(found.images.total(), 'sample')}")
    for name, column in (("width", found.sizes[:, 0]), ("height", found.sizes[:, 1])):
        _add_percentiles(table, f"  {name}", percentiles(column))
    for name, label in LABELS.items():
        if name in found.lengths:
            _add_percentiles(table, label, percentiles(found.lengths[name]))
    console = open_console()
    console.print(table)
    for kind, each in sorted(found.refused.items()):
        say(f"refused ({kind}): {counted(each.count, 'sample')}")
        for reason, (count, first) in each.reasons.items():
            say(f"  {count:,}: {reason} ({first})")


def _share(text: str | None) -> Share | None:
    try:
        return None if text is None else as_share(text)
    except ValueError as error:
        raise RecipeError([f"--validation: {error}"]) from None


def _add_percentiles(table: Any, label: str, values: dict[int, int]) -> None:
    if values:
        said = ", ".join(f"{p}%: {value:,}" for p, value in values.items())
        table.add_row(label, said)
