"""`vlmpack data stats | lint | convert | show | audit`: look after the samples of a run."""

from __future__ import annotations

import json
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vlmpack.activity import ACTIVITY
from vlmpack.cli.convert import convert
from vlmpack.cli.index import AS_USUAL, open_reading
from vlmpack.cli.options import (
    AsJson,
    Commands,
    Overrides,
    Processes,
    ReadOptions,
    RecipeOption,
    RecipeOrRun,
    Shards,
    argument,
    example,
    num_processes,
    option,
    takes,
)
from vlmpack.cli.progress import BytesBar, size_text
from vlmpack.errors import RecipeError, VlmpackError
from vlmpack.file_format import AUDIT
from vlmpack.recipe.objective import LEARN_PAIRS, LEARN_ROLLOUTS
from vlmpack.recipe.sources import Share, as_share
from vlmpack.terminal import open_console, say
from vlmpack.whole_file import write_atomically
from vlmpack.words import counted

if TYPE_CHECKING:
    from vlmpack.data.index.table import SampleRef
    from vlmpack.data.tools.stats import SourceStats
    from vlmpack.proof.audit import Audit


LABELS = {
    "num_tokens": "tokens a sample",
    "num_image_tokens": "of images",
    "num_label_tokens": "learnt",
    "num_patches": "vision patches",
}
MAX_KEYS_SHOWN = 20


@takes(ReadOptions)
def stats(
    source: Annotated[list[str], argument("stats.source")],
    model: Annotated[Path | None, option("stats.model")] = None,
    learn: Annotated[
        Literal["all_turns", "last_turn", "each_answer"], option("stats.learn")
    ] = "all_turns",
    objective: Annotated[Literal["sft", "dpo", "policy"], option("stats.objective")] = "sft",
    validation: Annotated[str | None, option("stats.validation")] = None,
    as_json: AsJson = False,
    given: ReadOptions = AS_USUAL,
) -> None:
    """Show what a source holds. The tables hold its layout, keys and images, with a model its
    lengths, and what a run would refuse and why. Exit code 1 if no sample can be used."""
    from vlmpack.data.files.source_form import describe_forms
    from vlmpack.data.tools.index_shards import parts_builder
    from vlmpack.data.tools.stats import source_stats
    from vlmpack.encode.coordinates import doubt_lines

    share, pairs = _share(validation), objective in LEARN_PAIRS
    if model is None and learn != "all_turns":
        raise RecipeError(f"--learn {learn}: needs --model, whose template says what is learnt")
    reading = open_reading(source, None, given)
    drawn = objective in LEARN_ROLLOUTS
    encoder = reading.encoder(model, learn=learn, pairs=pairs, rollouts=drawn)
    notes: list[str] = []
    if encoder is not None:
        from vlmpack.encode.template_notes import template_notes

        notes = template_notes(encoder.chat, encoder.settings.learn)
    folder = reading.index_folder(given.index_dir)
    folder.mkdir(parents=True, exist_ok=True)
    builder = parts_builder(reading.fetcher, reading.caps, folder, encoder)
    stamps = [shard.seen(reading.fetcher) for shard in reading.shards]
    with BytesBar("reading", len(stamps)) as bar:
        steps = source_stats(stamps, builder, folder, pairs=pairs)
        for stamp, found in zip(stamps, steps, strict=True):  # noqa: B007 - the last one
            bar.advance(stamp.size)
    notes += doubt_lines(found.doubts, found.samples)
    forms = list(dict.fromkeys(describe_forms([stamp]) for stamp in stamps))
    facts = {"files": len(stamps), "bytes": sum(s.size for s in stamps), "read_as": forms}
    if share is not None:
        facts["validation"] = found.num_held(share)
    if as_json:
        document = facts | found.as_json() | ({"notes": notes} if notes else {})
        say(json.dumps(document, indent=1, ensure_ascii=False))
    else:
        _print(facts, found)
        for note in notes:
            say(f"note: {note}")
    if sum(each.count for each in found.refused.values()) == found.samples:
        say(f"no usable sample of {counted(found.samples, 'sample')}", err=True)
        raise typer.Exit(1)


def _print(facts: dict[str, Any], figures: SourceStats) -> None:
    from rich.table import Table
    from rich.text import Text

    from vlmpack.data.shards.naming import describe_keys
    from vlmpack.data.tools.stats import percentiles

    table = Table(show_header=False, box=None, pad_edge=False)
    size = size_text(facts["bytes"]) or 0
    table.add_row("files", f"{facts['files']:,} ({size})")
    for form in facts["read_as"]:
        table.add_row("layout", Text(form if "read as" in form else f"{form}, read as turns"))
    refused = sum(each.count for each in figures.refused.values())
    table.add_row("samples", f"{figures.samples:,}, {refused:,} of them refused")
    keys = figures.keys.most_common(MAX_KEYS_SHOWN)
    more = len(figures.keys) - len(keys)
    table.add_row(
        "keys",
        Text(
            ", ".join(f"{key} {count:,}" for key, count in keys)
            + (f" and {more} more" if more else "")
        ),
    )
    if figures.unknown_keys:
        table.add_row("not read", Text(describe_keys(figures.unknown_keys)))
    counts = ", ".join(f"{n}: {figures.images[n]:,}" for n in sorted(figures.images)[:12])
    table.add_row("images", f"{figures.sizes.shape[0]:,}; a sample has {counts or 'none'}")
    for name, column in (("width", figures.sizes[:, 0]), ("height", figures.sizes[:, 1])):
        _add_percentiles(table, f"  {name}", percentiles(column))
    if "validation" in facts:
        table.add_row("validation", f"{facts['validation']:,} of {figures.samples:,} held back")
    table.add_row(
        "no image", f"{figures.images[0]:,} of {counted(figures.images.total(), 'sample')}"
    )
    for name, label in LABELS.items():
        if name in figures.lengths:
            _add_percentiles(table, label, percentiles(figures.lengths[name]))
    console = open_console()
    console.print(table)
    for kind, each in sorted(figures.refused.items()):
        say(f"refused ({kind}): {counted(each.count, 'sample')}")
        for reason, (count, first) in each.reasons.items():
            say(f"  {count:,}: {reason} ({first})")


def _share(text: str | None) -> Share | None:
    try:
        return None if text is None else as_share(text)
    except ValueError as error:
        raise RecipeError(f"--validation: {error}") from None


def _add_percentiles(table: Any, label: str, values: dict[int, int]) -> None:
    if values:
        said = ", ".join(f"{p}%: {value:,}" for p, value in values.items())
        table.add_row(label, said)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    epilog=example("vlmpack data stats records.jsonl"),
    help="Check shards, convert to them, show and prove what a run saw.",
)


LINT_BYTES_A_SECOND = 10_000_000
"""One process's rate, without a model: only a hint."""


@app.command(epilog=example("vlmpack data lint 'shards/*.tar' --model path/to/model"))
@takes(ReadOptions)
def lint(
    shards: Shards = None,
    recipe: RecipeOption = None,
    model: Annotated[Path | None, option("lint.model")] = None,
    processes: Processes = None,
    objective: Annotated[Literal["sft", "dpo", "policy"] | None, option("lint.objective")] = None,
    as_json: AsJson = False,
    given: ReadOptions = AS_USUAL,
) -> None:
    """Check shards, or files of records, down to the pixels. Prints one line a reason, with its
    count and first place. Exit code 1 if there is any. --json has each fault."""
    from vlmpack.build.data import evaluation_mode, packing_mode
    from vlmpack.data.tools.lint import LintOne, LintReport, lint_lines, lint_shards, lint_summary

    reading = open_reading(shards, recipe, given, objective=objective)
    refuses_pairs = reading.objective not in (None, *LEARN_PAIRS)
    encoder = reading.encoder(model)
    pair_encoder = None if encoder is None or refuses_pairs else encoder.replace(pairs=True)
    learns_drawn = encoder is not None and reading.objective in (None, *LEARN_ROLLOUTS)
    rollout_encoder = encoder.replace(rollouts=True) if encoder and learns_drawn else None
    preload: tuple[str, ...] = ()
    if encoder is not None:
        from vlmpack.build.worker_server import WORKER_PRELOAD

        preload = WORKER_PRELOAD
    paths = reading.paths
    reports: list[LintReport] = []
    read, data, limits = reading.recipe, None, {}
    if read is not None:
        data = read.data
        for split, held in reading.splits.items():  # the strictest last
            mode = (packing_mode if split == "train" else evaluation_mode)(read)
            if split != "test" or read.evaluation.generate:
                limits.update(dict.fromkeys(held, mode.limits(read.training.seq_length)))
    work = LintOne(
        reading.fetcher,
        reading.caps,
        encoder,
        refuse_unknown_keys=data is not None and data.unknown_keys == "refuse",
        index_dir=reading.index_folder(given.index_dir),
        pair_encoder=pair_encoder,
        paired=reading.paired,
        rollout_encoder=rollout_encoder,
        drawn=reading.drawn,
        refuse_pairs=refuses_pairs,
        limits=limits,
        refuse_long=data is not None and data.over_long == "error",
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
    from vlmpack.data.shards.naming import describe_keys
    from vlmpack.encode.coordinates import doubt_lines

    classes = ", ".join(f"{count} {name}" for name, count in summary["by_class"].items())
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
    if objective is None and (pairs := summary["pairs"]):
        said = f"{pairs:,} of {counted(summary['samples'], 'sample')} are pairs of answers"
        say(f"{said} (for DPO); --objective sft refuses them", err=True)
    for line in doubt_lines(summary["coordinates"], summary["samples"]):
        say(f"note: {line}", err=True)
    if (long := summary["too_long"]) and "too_long" not in classes:
        say(f"{counted(long, 'sample')} too long for a run; data.over_long decides", err=True)
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
    batch: Annotated[int | None, option("show.batch")] = None,
    row_: Annotated[int | None, option("show.row")] = None,
    key: Annotated[str | None, option("show.key")] = None,
    shard: Annotated[str | None, option("show.shard")] = None,
    draw: Annotated[Path | None, option("show.draw")] = None,
) -> None:
    """Rebuild what the model sees of a global batch, or of one sample, as text. Exit code 1 if a
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
    from vlmpack.proof.rows.opening import find_samples, load_row, rows_of_batch, save_pictures

    ACTIVITY.enter_alone("opening the data")

    number = row_
    if (batch is None) == (key is None):
        raise VlmpackError("expected one of --batch N and --key KEY")
    if (number is not None and batch is None) or (shard is not None and key is None):
        raise VlmpackError("--row goes with --batch, --shard with --key")
    run_dir = run_folder(recipe)
    values = read_recipe(recipe, overrides or ())
    train, encoder = open_recipe(values, state=last_state(run_dir))
    rows: list[tuple[tuple[SampleRef, ...], str]]
    if key is not None:
        refs = find_samples(train, key, shard)
        key = refs[0].key
        rows = [((ref,), f"sample {key} alone") for ref in refs]
    else:
        assert batch is not None
        check_batch(values, train, batch, run_dir)
        found = rows_of_batch(train, batch, number, run_dir)
        rows = [(one.samples, one.title) for one in found]
    if encoder.chat_template_kwargs:
        say(f"data.chat_template_kwargs: {as_text(encoder.chat_template_kwargs)}")
    failed = False
    for samples, title in rows:
        row = load_row(train, encoder, samples, title, values.parallelism.context)
        for line in row.shown.lines():
            say(line)
        for file in save_pictures(row.shown, draw) if draw is not None else ():
            say(f"drawn    {file}")
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
    run: Annotated[Path, argument("audit.run")],
    as_json: AsJson = False,
) -> None:
    """Prove which samples a run trained, which it skipped, and which are still to come. Exit code 1
    if that cannot be proven. What it finds lies in audit.json of the run folder, for model
    cards."""
    from vlmpack.build.look import open_train
    from vlmpack.proof.audit import audit_run
    from vlmpack.training.run_dir import RunDir

    ACTIVITY.enter_alone("planning the run anew")

    train, _ = open_train(run)
    run_dir = RunDir(run)
    audited = audit_run(run_dir, train)
    text = json.dumps(AUDIT.mark(audited.as_json()), indent=1)
    try:
        write_atomically(run_dir.audit, text + "\n")
    except OSError as error:
        say(f"note: {run_dir.audit} cannot be written: {error.strerror}", err=True)
    if as_json:
        say(text)
    else:
        _print_audit(audited)
    if audited.num_problems:
        raise typer.Exit(1)


COUNTS = ("planned", "trained", "skipped", "pending", "lost")


def _print_audit(audited: Audit) -> None:
    from rich.table import Table

    console = open_console()
    table = Table("epoch", *COUNTS, box=None)
    for column in table.columns:
        column.justify = "right"
    for counts, alike in groupby(audited.epochs, attrgetter(*COUNTS)):
        first, *others = [epoch.epoch for epoch in alike]
        name = f"{first}-{others[-1]}, each" if others else str(first)
        table.add_row(name, *(f"{count:,}" for count in counts))
    console.print(table)
    for note in audited.notes:
        say(f"note: {note}")
    for problem in audited.problems:
        say(f"problem: {problem}")
    if audited.num_problems > len(audited.problems):
        say(f"and {audited.num_problems - len(audited.problems)} more problems")
    launches = "1 launch" if audited.launches == 1 else f"{audited.launches} launches"
    what = f"{audited.batches} global batches in {launches}"
    say(
        f"NOT PROVEN: {audited.num_problems} problems in {what}"
        if audited.num_problems
        else f"proven: {what}; every draw of an epoch is there once, or accounted for"
    )
