"""Captured rows in parallel layouts, layers that carry state and experts among them: the recorded
part runs the same operators for any row, and replays of other rows are that code run anew.

`test_decoder_graph.py` has the same in one process, by family.

Run in ranks: captured decoders on the Megatron engine, in parallel layouts.

    torchrun --nproc-per-node N test_captured_layouts.py FOLDER JOB [JOB ...]

A job is FAMILY:LAYOUT, or FAMILY:LAYOUT:FAULT for one of `FAULTS`, where the engine that replays
keeps something of the first row; FOLDER/<family> is a model folder. Rows of one shape, of several
samples and of one, go one after the other through an engine that replays a tape of the first, one
that runs the captured part anew each time and writes down its operators, and one that captures
nothing and has the same samples in rows of any shape. Writes what each rank found into
FOLDER/<job>.json, with dashes for colons.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from backends.mcore.launches import once, write_families
from support import layouts
from support.captured import StreamRecording, first_difference, host_reads
from support.engines import EVERYTHING, engine_of
from support.forked import check_ranks
from support.layouts import Layout
from support.of_all_ranks import write_of_all_ranks
from support.runs import errors_by_name
from torch import Tensor

from vlmpack.backends.decoder_graph import DecoderGraph, StaticRow, TapeRecording
from vlmpack.backends.mcore import decoder_graph
from vlmpack.backends.mcore.decoder_graph import ORDER, static_params
from vlmpack.distributed import Ranks, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.packing import PackedBatch
from vlmpack.recipe.schema import ModelSection
from vlmpack.training.objective import SFT

LAYOUTS = {
    "tp2": Layout(tensor=2, sequence=True, fixed=True),
    "cp2": Layout(context=2, fixed=True),
    "cp2-full": Layout(context=2, fixed=True, recompute="full"),
    "tp2-ep2": Layout(tensor=2, expert=2, sequence=True, fixed=True, recompute="selective"),
    "cp2-ep2": Layout(context=2, expert=2, fixed=True),
    "ep2": Layout(dp=2, expert=2, fixed=True, recompute="full"),
    "tp2-cp2": Layout(tensor=2, context=2, sequence=True, fixed=True),
}

BINS = ([0, 1, 2, 3], [5], [1, 4], [3, 0, 5])
"""Rows: indices into `layouts.samples`."""


def kept_order(row: StaticRow, rotate: Any) -> Any:
    """The natural order as a tensor of its own."""
    where = {**row.where, ORDER: KEPT.setdefault(ORDER, row.where[ORDER].clone())}
    return static_params(replace(row, where=where), rotate)


def kept_segments(row: StaticRow, rotate: Any) -> Any:
    """What recurrences are told, made in front of the recording."""
    made = static_params(row, rotate)
    segments = KEPT.setdefault("segments", made.segments)
    assert segments.seq_idx.shape and segments.offsets.shape
    return replace(made, segments=segments)


KEPT: dict[str, Any] = {}
"""Of the first row."""

FAULTS = {"order": kept_order, "segments": kept_segments}


def engine(layout: Layout, ranks: Ranks, folder: Path, recorder: Any) -> Any:
    """A float32 engine; with a recorder it captures."""
    model = ModelSection(
        path=str(folder),
        backend="mcore",
        dtype="float32",
        attention="segments" if recorder is None else "auto",
        activation_checkpointing=layout.recompute,
    )
    parts = (model, layout.sizes, Encoder(folder), ranks, EVERYTHING)
    with patch("vlmpack.backends.mcore.engine.recorder", lambda _: recorder):
        return engine_of(*parts, captures=recorder is not None)


def step(engine: Any, row: PackedBatch) -> tuple[float, dict[str, Tensor]]:
    """The loss of a row on this rank, and reduced gradients of what is trained."""
    engine.zero_gradients()
    (report,) = engine.forward_backward(SFT.step_with(), iter([row]), num_microbatches=1)
    return float(report.get("loss_sum", 0.0)), {
        name: parameter.main_grad.clone()
        for name, parameter in engine.model.named_parameters()
        if parameter.requires_grad
    }


def graphs_of(engine: Any) -> list[DecoderGraph]:
    """The decoder's one, or those of its mixers."""
    graph = engine.model.graph
    return [graph] if isinstance(graph, DecoderGraph) else graph.graphs


def run(layout: Layout, ranks: Ranks, folder: Path, fault: str) -> dict[str, Any]:
    """All rows through the three engines."""
    KEPT.clear()
    samples = layouts.samples(folder)
    axes = samples[0].position_ids.shape[0]
    fixed, free = (layouts.collator(each, axes) for each in (layout, replace(layout, fixed=False)))
    taped, eager, plain = (
        engine(layout, ranks, folder, recorder)
        for recorder in (TapeRecording, StreamRecording, None)
    )
    other: set[str] = set()
    worst = {"loss": 0.0, "gradients": 0.0, "scale": 0.0}
    for number in range(len(BINS)):
        # Replicas have other rows at a time.
        row = [samples[n] for n in BINS[(number + ranks.dp_rank) % len(BINS)]]
        with patch.object(decoder_graph, "static_params", FAULTS.get(fault, static_params)):
            found = step(taped, fixed(row))
        anew = step(eager, fixed(row))
        expected = step(plain, free(row))
        if found[0] != anew[0]:
            other.add("loss")
        other |= {name for name, value in found[1].items() if not torch.equal(value, anew[1][name])}
        worst["loss"] = max(worst["loss"], abs(found[0] - expected[0]) / max(abs(expected[0]), 1.0))
        errors = errors_by_name(found[1], expected[1])
        worst["gradients"] = max(worst["gradients"], *errors.values())
        worst["scale"] = max(worst["scale"], *(float(v.norm()) for v in expected[1].values()))
    streams = [graph.recording.streams for graph in graphs_of(eager)]
    return {
        "other bits": sorted(other),
        "captures": sorted({graph.captures for graph in graphs_of(taped)}),
        "replays": sorted({graph.replays for graph in graphs_of(taped)}),
        "recordings": len(streams),
        "operators": min(len(stream) for each in streams for stream in each),
        "collectives": sum("c10d" in op for each in streams for op in each[0]),
        "difference": [d for each in streams if (d := first_difference(each)) is not None],
        "host reads": [read for each in streams for read in host_reads(each)][:3],
        **worst,
    }


def main(folder: Path, jobs: list[str]) -> None:
    """One job after another."""
    for job in jobs:
        family, name, fault = [*job.split(":"), ""][:3]
        with layouts.one_layout(LAYOUTS[name]) as ranks:
            found = run(LAYOUTS[name], ranks, folder / family, fault)
            write_of_all_ranks(found, folder / f"{job.replace(':', '-')}.json", ranks)
    stop_process_group()


pytestmark = pytest.mark.slow

DENSE, MOE, OTHER = "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"
MAMBA, OMNI = "nemotron_h", "nemotron_h_omni"
RECORDINGS = {DENSE: 1, MOE: 4, OTHER: 4, MAMBA: 3, OMNI: 3}
"""One of all layers, or one of each mixer where there are experts."""

LAUNCHES = {
    "two": [
        f"{DENSE}:cp2",
        f"{DENSE}:cp2:order",
    ],
    "more": [
        f"{MAMBA}:cp2-ep2",
        f"{DENSE}:cp2:segments",
        f"{DENSE}:tp2",
        f"{MOE}:cp2-ep2",
        f"{MOE}:tp2-ep2",
        f"{MAMBA}:tp2-ep2",
        f"{OMNI}:cp2-ep2",
        f"{MOE}:ep2",
        f"{DENSE}:cp2-full",
        f"{OTHER}:cp2-ep2",
        f"{OMNI}:cp2-ep2:segments",
    ],
    "four": [f"{OTHER}:tp2-cp2"],
}
"""Jobs that share processes."""

MARKS = {"two": (), "more": pytest.mark.soak, "four": pytest.mark.soak}
LAUNCH_OF = {job: launch for launch, jobs in LAUNCHES.items() for job in jobs}


def marked(colons):
    """Jobs with so many colons, each with the mark of its launch."""
    jobs = LAUNCH_OF.items()
    return [pytest.param(job, marks=MARKS[at]) for job, at in jobs if job.count(":") == colons]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a job found; all of a launch run when the first is asked for."""
    folder = tmp_path_factory.mktemp("captured")
    write_families(folder, [*RECORDINGS])

    @once
    def launch(name):
        jobs = LAUNCHES[name]
        processes = LAYOUTS[jobs[0].split(":")[1]].processes
        check_ranks([__file__, folder, *jobs], processes)

    def facts(job):
        launch(LAUNCH_OF[job])
        return json.loads((folder / f"{job.replace(':', '-')}.json").read_text())

    return facts


@pytest.mark.parametrize("job", marked(1))
def test_other_rows_are_replayed(found, job):
    """Bit for bit as the same code run anew; within 1e-6 of the loss and 1e-5 of each gradient as
    the same samples in rows of any shape, whose segments attention loops over."""
    family, name = job.split(":")
    layout = LAYOUTS[name]
    ranks = found(job)
    assert len(ranks) == layout.processes
    for facts in ranks:
        assert facts["difference"] == [] and facts["host reads"] == []
        assert facts["other bits"] == []
        assert facts["captures"] == [1] and facts["replays"] == [len(BINS)]
        assert facts["recordings"] == RECORDINGS[family]
        assert facts["operators"] > (3000 if family == DENSE else 150), "forward and backward"
        assert (facts["collectives"] > 0) == (layout.tensor * layout.context > 1)
        assert facts["loss"] <= 1e-6 and facts["gradients"] <= 1e-5
        assert facts["scale"] > 1, "nothing to compare"


@pytest.mark.parametrize("job", marked(2))
def test_what_is_kept_of_the_first_row_is_found(found, job):
    for facts in found(job):
        assert facts["other bits"]
        assert facts["gradients"] > 1e-2


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
