"""The door of a run folder: its small files, each damaged by lot, and whoever reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from support.fake_runs import answers, write_run
from support.fuzz import Door, changed, damaged

from vlmpack.build.data import LISTING_NAME
from vlmpack.data.loading.checked_lines import checked_line
from vlmpack.errors import VlmpackError
from vlmpack.evaluation.predictions import write_predictions
from vlmpack.file_format import RUN, SAMPLE_RECORD
from vlmpack.handed_over import left_behind, words_of
from vlmpack.proof.audit import Audit, EpochCount
from vlmpack.recipe.show import PublicRecipe
from vlmpack.report.compare import compare_runs, sections, write_page
from vlmpack.report.write import write_report
from vlmpack.run.card import card_of
from vlmpack.training.model_watch import ModelRecord
from vlmpack.training.run_dir import RunDir
from vlmpack.training.run_lock import RunLock
from vlmpack.training.trackers import IDS_NAME, read_ids

Go = Callable[[random.Random], object]
STEPS = 8
AUDIT = Audit(STEPS, 1, [EpochCount(0, 8, 8)], ["k3 is lost"], ["a note"], 1).as_json()
VERIFY = {
    "passes": True,
    "conclusion": "the same",
    "checks": [{"name": "loss", "status": "ok", "measured": 1e-7, "bound": 1e-6}],
}


def write_folder(folder: Path) -> list[Path]:
    """A finished run with every small file that a run may have; the files."""
    asked = write_run(folder, num_steps=STEPS, num_questions=6)
    write_predictions(folder / "predictions-step-00000004.jsonl", answers(asked, 0.5))
    run_dir = RunDir(folder)
    result = json.loads(run_dir.result.read_text())
    best = {"figure": "validation_loss", "value": 0.5, "step": 4, "waited": 1}
    result |= {"best": best, "exported_step": 4, "stopped_early": None, "loss": 0.5}
    jsons = {
        run_dir.result: result,
        run_dir.identity: RUN.mark(
            {"model.path": "m", "training.seed": 1, "data.date": "2026-01-01"}
        ),
        folder / LISTING_NAME: RUN.mark({"shards": [["/d/a.tar", 512, "1-2"]]}),
        folder / IDS_NAME: {"wandb": "x1"},
        folder / "trainable.json": {"language": {"mode": "full", "parameters": 7}},
        run_dir.audit: AUDIT,
        run_dir.verify / "verify.json": VERIFY,
        run_dir.lock: {"pid": 4194303, "host": "h", "since": "2026-01-01", "locked": True},
        folder / "calling-0.json": {"pid": 7, "host": "h", "step": 3, "calls": ["callback X"]},
    }
    run_dir.verify.mkdir(exist_ok=True)
    for path, value in jsons.items():
        path.write_text(json.dumps(value))
    record = ModelRecord(config={"hidden_size": 64}, weights={"w": "00"})
    run_dir.model.write_text(record.to_json())
    (folder / "recipe.yaml").write_text("model: {path: m}\ntraining: {max_steps: 8}\n")
    samples = folder / "samples"
    samples.mkdir()
    launch = {"launch": 1, "start": 0, "dp": 1, "state": {}}
    (samples / "launches.jsonl").write_bytes(checked_line(SAMPLE_RECORD.mark(launch)))
    steps = [
        {"launch": 1, "batch": n, "epoch": 0, "shards": {"0": "a.tar"}, "bins": [[f"0/k{n}"]]}
        for n in range(STEPS)
    ]
    (samples / "rank-0000.jsonl").write_bytes(b"".join(map(checked_line, steps)))
    return sorted(path for path in folder.rglob("*") if path.is_file())


def broken(good: bytes, path: Path, draw: random.Random) -> bytes:
    """A file's bytes with damage, of its values half of the time."""
    if path.suffix in (".json", ".lock", ".jsonl") and draw.random() < 0.6:
        lines = good.split(b"\n") if path.suffix == ".jsonl" else [good]
        at = draw.randrange(len(lines))
        try:
            lines[at] = json.dumps(changed(json.loads(lines[at]), draw)).encode()
        except ValueError:
            return good[: len(good) // 2]
        return b"\n".join(lines)
    return damaged(good, draw, [good])


def readers(folder: Path, other: Path) -> list[Callable[[], object]]:
    """Whoever reads a run folder without its data."""
    run_dir = RunDir(folder)
    recipe = PublicRecipe(text="model: {path: m}", folders=())

    def lock() -> None:
        held = RunLock(run_dir.lock)
        held.take()
        held.release()

    return [
        lambda: sections(compare_runs(folder, other)),
        lambda: card_of(run_dir, folder, recipe, adapter=False, step=STEPS),
        run_dir.recorded_identity,
        run_dir.final_figures,
        run_dir.figures,
        run_dir.run_id,
        lock,
        lambda: ModelRecord.read(run_dir.model),
        lambda: [words_of(entry) for entry in left_behind(folder)],
        lambda: read_ids(folder),
    ]


def drawers(folder: Path, other: Path) -> list[Callable[[], object]]:
    """Whoever draws pictures of one."""
    return [
        lambda: write_report(folder),
        lambda: write_page(compare_runs(other, folder), folder / "page.html"),
    ]


def _door(read: Callable[[Path, Path], list[Callable[[], object]]]) -> Callable[[Path], Go]:
    def opened(root: Path) -> Go:
        folder, other = root / "run", root / "other"
        write_folder(other)
        files = write_folder(folder)
        good = {path: path.read_bytes() for path in files}
        calls = read(folder, other)

        def go(draw: random.Random) -> None:
            path = draw.choice(files)
            path.write_bytes(broken(good[path], path, draw))
            named: list[VlmpackError] = []
            try:
                for call in calls:
                    try:
                        call()
                    except VlmpackError as error:
                        named.append(error)
            finally:
                path.write_bytes(good[path])
            if named:
                raise named[0]

        return go

    return opened


DOORS = [
    Door("run folder", 0.3, _door(readers)),
    Door("pictures of a run", 0.01, _door(drawers)),
]
