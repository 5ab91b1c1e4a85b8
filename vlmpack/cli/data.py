"""`vlmpack data stats | lint | convert | show | audit`: look after the samples of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vlmpack.activity import ACTIVITY
from vlmpack.cli.commands import Commands, example
from vlmpack.cli.convert import convert
from vlmpack.cli.options import (
    AsJson,
    ColumnsOption,
    IgnoreColumns,
    ImagesOption,
    IndexDir,
    MaxImagePixels,
    Overrides,
    Processes,
    RecipeOption,
    RecipeOrRun,
    Shards,
    Storage,
    num_processes,
)
from vlmpack.cli.progress import BytesBar, size_text
from vlmpack.cli.stats import stats
from vlmpack.cli.stores import open_reading
from vlmpack.errors import VlmpackError
from vlmpack.file_format import AUDIT
from vlmpack.terminal import open_console, say
from vlmpack.whole_file import write_atomically
from vlmpack.words import counted

if TYPE_CHECKING:
    from vlmpack.data.index.table import SampleRef
    from vlmpack.proof.audit import Audit

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    epilog=example("vlmpack data stats records.jsonl"),
    help="Check shards, convert to them, show and prove what a run saw.",
)


LINT_BYTES_A_SECOND = 10_000_000
"""One process's rate, without a model: only a hint."""


@app.command(epilog=example("vlmpack data lint 'shards/*.tar' --model path/to/model"))
def lint(  # noqa: PLR0913 - the options of a command
    shards: Shards = None,
    recipe: RecipeOption = None,
    storage: Storage = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="DIR",
            help="Model folder, if not the recipe's: samples are encoded for it too.",
        ),
    ] = None,
    processes: Processes = None,
    max_image_pixels: MaxImagePixels = None,
    index_dir: IndexDir = None,
    objective: Annotated[
        Literal["sft", "dpo"] | None,
        typer.Option(
            help="What SHARDS are for: dpo holds every record to a pair of answers, sft to none. "
            "With --recipe it is the recipe's.",
            show_default="either form passes",
        ),
    ] = None,
    columns: ColumnsOption = None,
    ignore_columns: IgnoreColumns = None,
    images: ImagesOption = None,
    as_json: AsJson = False,
) -> None:
    """Check shards, or files of records, down to the pixels: one line a reason with its count and
    first place, exit code 1 if there is any. --json has each fault."""
    from vlmpack.data.tools.lint import LintOne, LintReport, lint_lines, lint_shards, lint_summary
    from vlmpack.recipe.objective import LEARN_PAIRS

    reading = open_reading(
        shards,
        recipe=recipe,
        storage=storage,
        max_image_pixels=max_image_pixels,
        objective=objective,
        columns=columns,
        ignore_columns=ignore_columns,
        image_root=images,
    )
    refuses_pairs = reading.objective not in (None, *LEARN_PAIRS)
    encoder = reading.encoder(model)
    pair_encoder = None if encoder is None or refuses_pairs else encoder.replace(pairs=True)
    preload: tuple[str, ...] = ()
    if encoder is not None:
        from vlmpack.build.worker_server import WORKER_PRELOAD

        preload = WORKER_PRELOAD
    paths = reading.paths
    reports: list[LintReport] = []
    refuse = reading.recipe is not None and reading.recipe.data.unknown_keys == "refuse"
    work = LintOne(
        reading.fetcher,
        reading.caps,
        encoder,
        refuse_unknown_keys=refuse,
        index_dir=reading.index_folder(index_dir),
        pair_encoder=pair_encoder,
        paired=reading.paired,
        refuse_pairs=refuses_pairs,
    )
    try:
        with BytesBar("checking", len(paths)) as bar:
            count = num_processes(processes, paths, LINT_BYTES_A_SECOND)
            for report in lint_shards(reading.shards, work, processes=count, preload=preload):
                reports.append(report)
                bar.advance(report.num_bytes)
    finally:  # what was found before an interrupt is shown
        for line in () if as_json else lint_lines(reports):
            say(line)
    summary = lint_summary(reports)
    _print_lint(summary, reading.objective, as_json=as_json)
    if summary["findings"]:
        raise typer.Exit(1)


def _print_lint(summary: dict[str, Any], objective: str | None, *, as_json: bool) -> None:
    """The figures, on stderr: findings alone are on stdout. Or one JSON object of all."""
    if as_json:
        say(json.dumps(summary, indent=1))
        return
    from vlmpack.data.shards.keys import describe_keys

    if summary["unknown_keys"]:
        known = describe_keys(summary["unknown_keys"])
        say(f"keys of records that are not read: {known}", err=True)
    if bare := summary["samples_without_image"]:
        say(f"{counted(bare, 'sample')} without a fault and without an image", err=True)
    if some := summary["records_sharing_an_image"]:
        say(
            f"{counted(some, 'record')} with an image that another one has too; "
            f"{summary['records_sharing_all_images']:,} with the very images of another, in their "
            "order, which data.group_by: image puts together within a source",
            err=True,
        )
    if objective is None and summary["samples"]:
        say(
            f"pairs of answers: {summary['pairs']:,} of {counted(summary['samples'], 'sample')}; "
            "pairs were not asked for, nor refused: --objective dpo, sft or --recipe does",
            err=True,
        )
    classes = ", ".join(f"{count} {name}" for name, count in summary["by_class"].items())
    say(
        f"{counted(summary['shards'], 'file')}, {counted(summary['samples'], 'sample')}, "
        + f"{counted(summary['images'], 'image')}, {size_text(summary['bytes']) or 0}: "
        + (f"{counted(len(summary['findings']), 'fault')} ({classes})" if classes else "no fault"),
        err=True,
    )


app.command(epilog=example("vlmpack data convert records.jsonl shards --images photos"))(convert)
app.command(epilog=example("vlmpack data stats records.jsonl --model path/to/model"))(stats)


@app.command(epilog=example("vlmpack data show runs/mine --batch 0"))
def show(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=0, help="Global batch, counted from 0 since the run's start."),
    ] = None,
    row_: Annotated[
        int | None, typer.Option("--row", min=0, help="One row of it; all of them otherwise.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="A sample, by its key.")] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", help="With --key: a part of its shard's path.")
    ] = None,
) -> None:
    """Rebuild what the model sees of a global batch, or of one sample, as text; exit code 1 if a
    check fails. `vlmpack inspect` draws a row."""
    from vlmpack.build.look import (
        check_batch,
        last_state,
        open_recipe,
        read_recipe,
        run_folder,
        trained_in,
    )
    from vlmpack.encode.fingerprint import as_text
    from vlmpack.proof.rows.checks import check_row
    from vlmpack.proof.rows.opening import find_samples, load_row, rows_of_batch

    ACTIVITY.enter_alone("opening the data")

    number = row_
    if (batch is None) == (key is None):
        raise VlmpackError("expected one of --batch N and --key KEY")
    if (number is not None and batch is None) or (shard is not None and key is None):
        raise VlmpackError("--row goes with --batch, --shard with --key")
    run_dir = run_folder(recipe)
    values = read_recipe(recipe, overrides or ())
    train, encoder = open_recipe(values, state=last_state(run_dir))
    wanted: list[tuple[tuple[SampleRef, ...], str]]
    if key is not None:
        refs = find_samples(train, key, shard)
        key = refs[0].key
        wanted = [((ref,), f"sample {key} alone") for ref in refs]
    else:
        assert batch is not None
        check_batch(values, train, batch, run_dir)
        found = rows_of_batch(train, batch, number, run_dir)
        wanted = [(one.samples, one.title) for one in found]
    if encoder.chat_template_kwargs:
        say(f"data.chat_template_kwargs: {as_text(encoder.chat_template_kwargs)}")
    failed = False
    for samples, title in wanted:
        row = load_row(train, encoder, samples, title, values.parallelism.context)
        for line in row.shown.lines():
            say(line)
        for check in check_row(row):
            if check.fails:
                failed = True
                say(f"\u2717 {check.name}: {check.sentence}")
    if key is not None and run_dir is not None:
        for trained, epoch, path in trained_in(run_dir, key):
            say(f"trained in batch {trained}, epoch {epoch} ({path})")
    if failed:
        raise typer.Exit(1)


@app.command(epilog=example("vlmpack data audit runs/mine"))
def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: AsJson = False,
) -> None:
    """Prove which samples a run trained, skipped, and has still to come; exit code 1 if that
    cannot be proven. What it finds lies in audit.json of the run folder, for model cards."""
    from vlmpack.build.look import open_train
    from vlmpack.proof.audit import audit_run
    from vlmpack.training.run_dir import RunDir

    ACTIVITY.enter_alone("planning the run anew")

    train, _ = open_train(run)
    run_dir = RunDir(run)
    found = audit_run(run_dir, train)
    text = json.dumps(AUDIT.mark(found.as_json()), indent=1)
    try:
        write_atomically(run_dir.audit, text + "\n")
    except OSError as error:
        say(f"note: {run_dir.audit} cannot be written: {error.strerror}", err=True)
    if as_json:
        say(text)
    else:
        _print_audit(found)
    if found.num_problems:
        raise typer.Exit(1)


def _print_audit(found: Audit) -> None:
    from rich.table import Table

    console = open_console()
    table = Table("epoch", "planned", "trained", "skipped", "pending", "lost", box=None)
    for column in table.columns:
        column.justify = "right"
    for epoch in found.epochs:
        counts = (epoch.planned, epoch.trained, epoch.skipped, epoch.pending, epoch.lost)
        table.add_row(str(epoch.epoch), *(f"{count:,}" for count in counts))
    console.print(table)
    for note in found.notes:
        say(f"note: {note}")
    for problem in found.problems:
        say(f"problem: {problem}")
    if found.num_problems > len(found.problems):
        say(f"and {found.num_problems - len(found.problems)} more problems")
    launches = "1 launch" if found.launches == 1 else f"{found.launches} launches"
    what = f"{found.batches} global batches in {launches}"
    say(
        f"NOT PROVEN: {found.num_problems} problems in {what}"
        if found.num_problems
        else f"proven: {what}; every draw of an epoch is there once, or accounted for"
    )
