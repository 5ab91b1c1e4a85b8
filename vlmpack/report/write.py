"""Run folder -> report/.

    report/
      index.html            one page with everything below inside
      loss.png
      lengths.png           if the run left a data summary
      samples.png           if test questions with images were answered
      images/               the images of the sheet, so that the report can be made again

The same files give the same report; images are kept because the test shards may be elsewhere later.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vlmpack.encode.decode import suffix_of
from vlmpack.errors import RunDirError, writing
from vlmpack.evaluation.predictions import Prediction, Question
from vlmpack.report.document import render
from vlmpack.report.run_files import RunFiles, read_run
from vlmpack.report.run_pictures import draw_lengths, draw_loss, lengths_pictures, loss_picture
from vlmpack.report.samples import (
    Images,
    about_steps,
    best_row,
    choose,
    draw_samples,
    followed,
    head,
    metric_rows,
    sample_cards,
)
from vlmpack.report.tables import facts, headline, metric_tables, spread_rows, validation_rows
from vlmpack.report.text import Column, Section
from vlmpack.whole_file import regular_bytes, write_atomically


def render_page(run: RunFiles, images: Images) -> str:
    """The page as HTML.

    Raises:
        CapabilityError: matplotlib is not installed.
    """
    right_of, cards = sample_cards(run, images)
    loss = loss_picture(run)
    model, finished = run.result.get("model"), run.result.get("finished")
    about = (
        f"finetuned from {model}" if model else "",
        f"finished {finished}" if finished else "",
        "" if run.result else "no result.json: the run is not finished",
    )
    return render(
        "run.html",
        title=run.name,
        about=", ".join(filter(None, about)),
        figures=headline(run),
        pictures=[*([loss] if loss else []), *lengths_pictures(run)],
        asked="; ".join(filter(None, head(run))),
        right_of=right_of,
        cards=cards,
        followed=followed(run, images),
        about_steps=about_steps(run),
        sections=[section for section in _sections(run) if section.rows],
    )


def _sections(run: RunFiles) -> Iterator[Section]:
    for metric, rows in metric_tables(run).items():
        title = f"{metric.replace('_', ' ').capitalize()} by task"
        yield Section.of_figures(title, ("task", "counted", "before", "after"), rows)
    heads, by_step = metric_rows(run)
    marked, line = best_row(run, by_step)
    made = Section.of_figures("Metrics by step", heads, by_step, *([line] if line else []))
    yield replace(made, marked=marked)
    yield Section.of_figures("Validation", ("figure", "before", "after"), validation_rows(run))
    spread = ("each step", "least", "median", "most")
    yield Section.of_figures("While training", spread, spread_rows(run))
    columns = (Column("", is_text=True), Column("", is_text=True))
    yield Section(title="The run", columns=columns, rows=tuple(facts(run.result)))


SampleName = tuple[str, str]
"""(shard, key)."""


def write_report(run_dir: Path, test_samples: Iterable[Question] | None = None) -> Path:
    """Draw the pictures and write the page.

    Args:
        run_dir: a run folder; whatever it holds is shown, see `vlmpack.report.run_files`.
        test_samples: the questions, for their images. None: the images of an earlier report.

    Raises:
        RunDirError: nothing to report, a damaged file, or a folder that cannot be written.
        CapabilityError: matplotlib is not installed.
    """
    run = read_run(run_dir)
    folder = run_dir / "report"
    with writing(folder, RunDirError):
        folder.mkdir(exist_ok=True)
        images = _sheet_images(run, folder / "images", test_samples)
        drawn = {
            "loss.png": draw_loss(run),
            "lengths.png": draw_lengths(run),
            "samples.png": draw_samples(run, images),
        }
        for name, data in drawn.items():
            if data is None:
                (folder / name).unlink(missing_ok=True)
            else:
                write_atomically(folder / name, data)
        write_atomically(folder / "index.html", render_page(run, images))
    return folder


def _sheet_images(
    run: RunFiles, folder: Path, test_samples: Iterable[Question] | None
) -> dict[SampleName, Sequence[bytes]]:
    """Images of the questions on the sheet: from the questions, or kept by an earlier report."""
    wanted = choose([row for row in run.after or () if row.num_images])
    if test_samples is None:
        return {(row.shard, row.key): _kept(row, folder) for row in wanted}
    names = {(row.shard, row.key) for row in wanted}
    found = {
        (question.shard, question.key): question.images
        for question in test_samples
        if (question.shard, question.key) in names
    }
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if re.fullmatch(r"[0-9a-f]{16}-\d+\.\w+", old.name):
            old.unlink()
    for (shard, key), images in found.items():
        for index, data in enumerate(images):
            (folder / f"{_stem(shard, key)}-{index}.{suffix_of(data)}").write_bytes(data)
    return dict(found)


def _kept(row: Prediction, folder: Path) -> list[bytes]:
    stem = _stem(row.shard, row.key)
    paths = [path for i in range(row.num_images) for path in folder.glob(f"{stem}-{i}.*")]
    return [regular_bytes(path) for path in paths]


def _stem(shard: str, key: str) -> str:
    return hashlib.blake2b(f"{shard}\0{key}".encode(), digest_size=8).hexdigest()
