"""`vlmpack data convert`: other formats to shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpack.cli.options import ColumnsOption, IndexDir, columns_of
from vlmpack.cli.progress import BytesBar, size_text
from vlmpack.terminal import say
from vlmpack.words import counted

if TYPE_CHECKING:
    from vlmpack.convert import ConvertReport

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="A .jsonl, .json, .csv, .tsv or .parquet file, or a folder of a data set.",
    ),
]
Out = Annotated[
    Path,
    typer.Argument(metavar="OUT", help="Folder and name: out/train is out/train-000000.tar ..."),
]
Form = Annotated[
    str, typer.Option("--format", metavar="NAME", help="auto, jsonl, llava, csv, tsv or hf.")
]
Images = Annotated[
    Path | None,
    typer.Option(
        "--images",
        metavar="DIR",
        help="Folder that image paths start at and must stay in.",
        show_default="the source's folder",
    ),
]
Split = Annotated[str | None, typer.Option("--split", help="Split of a folder that has several.")]
ShardMb = Annotated[
    int, typer.Option("--shard-mb", min=1, help="Megabytes after which a shard is closed.")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave bad records out and list them.")]
Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="DIR",
        help="Model folder: what its chat template or image processor refuses is bad, too.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace shards of the same prefix.")]


def convert(  # noqa: PLR0913 - the options of a command
    source: Source,
    out: Out,
    form: Form = "auto",
    columns: ColumnsOption = None,
    images: Images = None,
    split: Split = None,
    shard_mb: ShardMb = 256,
    model: Model = None,
    skip_bad: SkipBad = False,
    overwrite: Overwrite = False,
    index_dir: IndexDir = None,
) -> None:
    """Convert to WebDataset shards, and index them, in one pass over the source."""
    from vlmpack.convert import ConvertSettings, open_records
    from vlmpack.convert import convert as run
    from vlmpack.storage.folders import default_cache_dir

    encoder = None
    if model is not None:
        from vlmpack.encode import Encoder

        encoder = Encoder(model)
        encoder.load()  # a wrong folder is named before any record is read
    settings = ConvertSettings(
        folder=out.parent,
        layout=columns_of(columns),
        image_root=images or (source if source.is_dir() else source.parent),
        prefix=out.name,
        max_shard_bytes=shard_mb * 1_000_000,
        skip_bad=skip_bad,
        overwrite=overwrite,
        index_dir=index_dir or default_cache_dir(),
        encoder=encoder,
    )
    with BytesBar("converting", None) as bar:
        records = open_records(source, form, split, every_column=columns is not None)
        report = run(records, settings, lambda *_: bar.advance())
    _print_report(report, out)


def _print_report(report: ConvertReport, out: Path) -> None:
    from vlmpack.data.shards.keys import describe_keys

    say(f"read as {report.layout}")
    for item in report.skipped:
        say(f"left out ({item.error_class}): {item.place}: {item.reason}", err=True)
    if report.unknown_keys:
        say(f"keys of records that were not read: {describe_keys(report.unknown_keys)}", err=True)
    if report.placed:
        say(
            f"{counted(report.placed, 'record')} with images and no place for them: they stand "
            "before the first text of the user, where TRL and ms-swift put them",
            err=True,
        )
    total = sum(shard.num_bytes for shard in report.shards)
    left_out = f", {len(report.skipped)} left out" if report.skipped else ""
    say(
        f"{counted(report.records, 'record')} -> {counted(report.samples, 'sample')} in "
        f"{counted(len(report.shards), 'shard')} ({size_text(total)}){left_out}: {out}-*.tar"
    )
