"""`vlmpack data convert`: other formats to shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import (
    ColumnsOption,
    IgnoreColumns,
    IndexDir,
    argument,
    columns_of,
    ignored_of,
    option,
    takes,
)
from vlmpack.cli.progress import BytesBar, size_text
from vlmpack.errors import VlmpackError
from vlmpack.terminal import say
from vlmpack.words import counted

if TYPE_CHECKING:
    from vlmpack.convert import ConvertReport, VideoSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    """How records are read and shards are written."""

    form: Annotated[str, option("convert.form")] = "auto"
    columns: ColumnsOption = None
    ignore_columns: IgnoreColumns = None
    images: Annotated[Path | None, option("convert.images")] = None
    split: Annotated[str | None, option("convert.split")] = None
    question: Annotated[str | None, option("convert.question")] = None
    shard_mb: Annotated[int, option("convert.shard_mb")] = 256
    model: Annotated[Path | None, option("convert.model")] = None
    skip_bad: Annotated[bool, option("convert.skip_bad")] = False
    overwrite: Annotated[bool, option("convert.overwrite")] = False
    index_dir: IndexDir = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoOptions:
    """How videos that records name are converted."""

    video: Annotated[bool, option("convert.video")] = False
    fps: Annotated[float | None, option("convert.fps")] = None
    max_frames: Annotated[int | None, option("convert.max_frames")] = None
    frame_format: Annotated[str | None, option("convert.frame_format")] = None
    frame_quality: Annotated[int | None, option("convert.frame_quality")] = None

    def settings(self) -> VideoSettings | None:
        """The settings that are asked for. None if videos are not decoded.

        Raises:
            VlmpackError: a bound of it without --video, or one that is no such bound.
        """
        from vlmpack.convert import VideoSettings

        given = {
            "fps": self.fps,
            "max_frames": self.max_frames,
            "form": self.frame_format,
            "quality": self.frame_quality,
        }
        said = {name: value for name, value in given.items() if value is not None}
        if said and not self.video:
            raise VlmpackError(
                "--fps, --max-frames, --frame-format and --frame-quality are about the frames of "
                "videos; expected --video too"
            )
        return VideoSettings(**said) if self.video else None  # type: ignore[arg-type]


@takes(ConvertOptions, VideoOptions)
def convert(
    source: Annotated[Path, argument("convert.source")],
    out: Annotated[Path, argument("convert.out")],
    options: ConvertOptions,
    videos: VideoOptions,
) -> None:
    """Convert to WebDataset shards, and index them, in one pass over the source."""
    from vlmpack.convert import ConvertSettings, open_records
    from vlmpack.convert import convert as run
    from vlmpack.storage.access import default_cache_dir

    ACTIVITY.enter_alone("opening the records")
    frames = videos.settings()
    encoder = None
    if options.model is not None:
        from vlmpack.encode import Encoder

        encoder = Encoder(options.model)
        encoder.load()  # a wrong folder is named before any record is read
    settings = ConvertSettings(
        folder=out.parent,
        layout=columns_of(options.columns),
        ignored=ignored_of(options.ignore_columns),
        image_root=options.images or (source if source.is_dir() else source.parent),
        prefix=out.name,
        max_shard_bytes=options.shard_mb * 1_000_000,
        skip_bad=options.skip_bad,
        overwrite=options.overwrite,
        index_dir=options.index_dir or default_cache_dir(),
        encoder=encoder,
        videos=frames,
    )
    every_column = options.columns is not None
    with BytesBar("converting", None) as bar:
        records = open_records(
            source,
            options.form,
            options.split,
            every_column=every_column,
            question=options.question,
        )
        report = run(records, settings, lambda *_: bar.advance())
    _print_report(report, out)


def _print_report(report: ConvertReport, out: Path) -> None:
    from vlmpack.data.shards.naming import describe_keys

    say(f"read as {report.layout}")
    for item in report.skipped:
        say(f"left out ({item.error_class}): {item.place}: {item.reason}", err=True)
    if report.unknown_keys:
        say(f"keys of records that were not read: {describe_keys(report.unknown_keys)}", err=True)
    if report.put_first:
        say(
            f"{counted(report.put_first, 'record')} with images and no place for them: they stand "
            "before the first text of the user, where TRL and ms-swift put them",
            err=True,
        )
    if report.videos:
        frames = counted(report.frames, "frame")
        say(f"{counted(report.videos, 'video')} with {frames} in the samples")
    total = sum(shard.num_bytes for shard in report.shards)
    left_out = f", {len(report.skipped)} left out" if report.skipped else ""
    say(
        f"{counted(report.records, 'record')} -> {counted(report.samples, 'sample')} in "
        f"{counted(len(report.shards), 'shard')} ({size_text(total)}){left_out}: {out}-*.tar"
    )
