"""Run in ranks: every family on the Megatron engine, in parallel layouts.

    torchrun --nproc-per-node N family_layouts.py FOLDER JOB [JOB ...]

FOLDER/<family> is a model folder. A job is a name of `JOBS`, a family and a layout, with colons in
between; what it writes begins with the job's text, in FOLDER.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support import layouts
from support.checkpoints import save_engine
from support.engines import make_stepper
from support.layouts import Layout, Trained, make_megatron, stepper_with, train
from support.of_all_ranks import write_of_all_ranks
from support.pairs import cooked_pair, raw_pairs
from support.stock import load_stock
from support.videos import Shot, Told

from vlmpack.distributed import Ranks, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.packing.batch import EncodedSample
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training.checkpoint import load_checkpoint, step_folder
from vlmpack.training.preference import dpo

FAMILY_LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tensor=2, sequence=True, recompute="full"),
    "tp2-whole": Layout(tensor=2, recompute=2),
    "cp2": Layout(context=2, distributed=True),
    "pp2": Layout(pipeline=2, recompute="full"),
    "dp2": Layout(dp=2, distributed=True),
    "ep2": Layout(dp=2, expert=2, distributed=True),
    "tp2-ep2": Layout(tensor=2, sequence=True, expert=2),
    "cp2-ep2": Layout(context=2, expert=2, distributed=True),
}

AUX_LOSS = 0.01
STEPS_BEFORE = 2
STEPS_AFTER = 3
"""Steps before and after a checkpoint."""

ROW = 512
"""A width that every row has room in."""


@dataclass(frozen=True)
class Job:
    """What one job works on.

    Args:
        text: of the command line.
        folder: everything is written there.
        family, name: model and layout.
        ranks: this process's place in the layout.
    """

    text: str
    folder: Path
    family: str
    name: str
    ranks: Ranks

    @property
    def layout(self) -> Layout:
        """By name."""
        return FAMILY_LAYOUTS[self.name]

    @property
    def model(self) -> Path:
        """The family's folder."""
        return self.folder / self.family

    @property
    def stem(self) -> Path:
        """Of the files written."""
        return stem_of(self.folder, self.text)

    def engine(self, **options: Any) -> Any:
        """On the pretrained weights."""
        return make_megatron(self.layout, self.ranks, self.model, **options)

    def train_and_save(self, engine: Any, optimizer: str, steps: int = layouts.STEPS) -> bool:
        """Rows and weights; whether all copies of a weight agree on this rank."""
        rows = train(stepper_with(engine, optimizer), self.layout, steps, self.model)
        weights, same = layouts.whole_weights(engine)
        if self.ranks.is_main:
            Trained(rows, weights).save(self.stem.with_name(f"{self.stem.name}-{optimizer}"))
        return same


def stem_of(folder: Path, text: str) -> Path:
    """The files of a job."""
    return folder / text.replace(":", "-")


def same_bits(engine: Any, folder: Path) -> list[str]:
    """Whole parameters that are not, bit for bit, those that transformers loads."""
    original = dict(load_stock(folder).named_parameters())
    whole = {name: value.clone() for name, value in engine.whole_tensors()}
    assert whole.keys() == original.keys()
    return [name for name, value in whole.items() if not torch.equal(value, original[name])]


def do_train(job: Job) -> None:
    """With both optimizers; facts of every rank. The weights are compared before any step."""
    facts: dict[str, Any] = {}
    for optimizer in layouts.OPTIMIZERS:
        engine = job.engine()
        if not facts:
            facts = {
                "changed": same_bits(engine, job.model),
                "experts": sum(
                    ".local_experts." in name for name, _ in engine.model.named_parameters()
                ),
                "elements": sum(p.numel() for p in engine.model.parameters()),
            }
        facts[f"copies agree, {optimizer}"] = job.train_and_save(engine, optimizer)
    write_of_all_ranks(facts, job.stem.with_suffix(".json"), job.ranks)


def do_export(job: Job) -> None:
    """The model as it was read."""
    job.engine().export(job.stem, processor_from=job.model, dtype=None)


def do_aux(job: Job) -> None:
    """SGD with the experts' auxiliary loss."""
    assert job.train_and_save(job.engine(aux_loss=AUX_LOSS), "sgd")


def do_save(job: Job) -> None:
    """AdamW, a checkpoint, and some steps more."""
    stepper = make_stepper(job.engine())
    train(stepper, job.layout, STEPS_BEFORE, job.model)
    save_engine(job.stem, STEPS_BEFORE, stepper.engine, keep=1, ranks=job.ranks)
    _go_on(job, stepper)


def do_resume(job: Job) -> None:
    """From the checkpoint that was saved at EP 2."""
    stepper = make_stepper(
        make_megatron(replace(job.layout, distributed=True), job.ranks, job.model)
    )
    saved = stem_of(job.folder, f"save:{job.family}:ep2")
    load_checkpoint(step_folder(saved, STEPS_BEFORE), stepper.engine, job.ranks)
    _go_on(job, stepper)


def do_pairs(job: Job) -> None:
    """SGD on pairs."""
    engine = job.engine()
    rows = train_pairs(engine, job.layout, job.model)
    weights, same = layouts.whole_weights(engine)
    assert same
    if job.ranks.is_main:
        Trained(rows, weights).save(job.stem)


def train_pairs(engine: Any, layout: Layout, folder: Path) -> list[list[float]]:
    """(loss, gradient norm, what else is reported) of some steps of preference training, four pairs
    each; the reference of a model that knows no answer from another."""
    stepper = stepper_with(engine, "sgd")
    stepper.objective = dpo(ObjectiveSection(name="dpo", beta=0.05, sft_weight=1.0))
    encoder = Encoder(folder).replace(pairs=True)
    pairs = [encoder.encode(cooked_pair(*pair)) for pair in raw_pairs(least=4)]
    collate = layouts.collator(layout, pairs[0].position_ids.shape[0])
    mine = [[0, 3], [1], [2], []][stepper.ranks.dp_rank :: layout.dp]
    rows = []
    for step in range(STEPS_AFTER):
        batches = [
            replace(
                collate([pairs[place] for place in places]),
                reference=torch.full((2 * len(places),), -50.0, dtype=torch.float64),
            )
            for places in mine
        ]
        sums, _ = stepper.train(step, batches, num_skipped=0, stop=False)
        assert sums.totals["num_pairs"] == 4
        rows.append([sums.loss, sums.grad_norm, *stepper.reported(sums).values()])
    return rows


SIZE = (112, 112)
TOLD = (
    Told("first", ("x", Shot((224, 112), 4, fps=2.0), "?"), "abcd"),
    Told("text", ("hello",), "zzq"),
    Told("both", (SIZE, "y", Shot(SIZE, 5, fps=3.0), Shot((112, 56), 2, fps=0.5)), "qwer"),
    Told("still", (SIZE, "z"), "tyui"),
    Told("more text", ("so",), "ab"),
    Told("alone", (Shot((56, 112), 6, times=(0.0, 0.5, 1.0, 1.5, 2.0, 2.5)), "?"), "uvw"),
)
"""For the places of `layouts.BINS`: the row of the last has one video, fewer than the ranks that
share it out."""


def video_samples(folder: Path, *, backwards: bool = False) -> list[EncodedSample]:
    """Six samples, three of them with videos.

    Args:
        folder: of the model.
        backwards: put the patches of images and videos the other way round.
    """
    encoder = Encoder(folder)
    found = [encoder.encode(told.cooked()) for told in TOLD]
    if not backwards:
        return found
    return [
        each
        if each.media is None
        else replace(each, media=replace(each.media, pixel_values=each.media.pixel_values.flip(0)))
        for each in found
    ]


def on_videos(*, backwards: bool = False) -> AbstractContextManager[Any]:
    """Trains on those."""
    told = cache(partial(video_samples, backwards=backwards))
    return patch.object(layouts, "samples", told)


def do_videos(job: Job) -> None:
    """SGD on videos among images and text."""
    with on_videos():
        assert job.train_and_save(job.engine(), "sgd", steps=STEPS_AFTER)


HOLES: list[list[int]] = [[], [0, 1, 2, 3], [4, 1, 5], []]
"""Micro-batches of a step, the first and the last without a sample left: all were skipped. Of two
replicas each has one of them, beside a row of the other's."""


def on_bins(bins: list[list[int]]) -> AbstractContextManager[Any]:
    """Trains on those micro-batches."""
    return patch.object(layouts, "BINS", bins)


def do_holes(job: Job) -> None:
    """SGD beside rows without samples, after a step of AdamW that has no other rows."""
    engine = job.engine()
    with on_bins([[] for _ in HOLES]):
        nothing = train(stepper_with(engine, "adamw"), job.layout, 1, job.model)
    assert nothing == [[None, 0.0]]
    with on_bins(HOLES):
        assert job.train_and_save(engine, "sgd", steps=STEPS_AFTER)


def _go_on(job: Job, stepper: Any) -> None:
    rows = train(stepper, job.layout, STEPS_AFTER, job.model)
    if job.ranks.is_main:
        job.stem.with_suffix(".json").write_text(json.dumps(rows), encoding="utf-8")


def equal_rows() -> AbstractContextManager[Any]:
    """Rows of one width: features of another micro-batch then fit where they do not belong."""
    collator = layouts.collator
    return patch.object(
        layouts, "collator", lambda *of: replace(collator(*of), total_multiple_of=ROW)
    )


def do_travel(job: Job) -> None:
    """One step over rows of one width."""
    with equal_rows():
        job.train_and_save(job.engine(), "sgd", steps=1)


def do_behind(job: Job) -> None:
    """The same with the features of the micro-batch before."""
    from vlmpack.backends.mcore import model

    latest: dict[int, Any] = {}

    def add(number: int, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        own = kwargs["packed_seq_params"].deep[number]
        before, latest[number] = latest.get(number, own), own.detach()
        return output[0] + before, output[1]

    with equal_rows(), patch.object(model, "_add", add):
        job.train_and_save(job.engine(), "sgd", steps=1)


JOBS: dict[str, Callable[[Job], None]] = {
    "train": do_train,
    "export": do_export,
    "aux": do_aux,
    "save": do_save,
    "resume": do_resume,
    "travel": do_travel,
    "behind": do_behind,
    "pairs": do_pairs,
    "videos": do_videos,
    "holes": do_holes,
}


def main(folder: Path, texts: list[str]) -> None:
    """One job after another."""
    for text in texts:
        kind, family, name = text.split(":")
        with layouts.one_layout(FAMILY_LAYOUTS[name]) as ranks:
            JOBS[kind](Job(text, folder, family, name, ranks))
    stop_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
