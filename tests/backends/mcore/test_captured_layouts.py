"""Captured rows in parallel layouts, layers that carry state and experts among them: the recorded
part runs the same operators for any row, and replays of other rows are that code run anew.

`test_decoder_graph.py` has the same in one process, by family.
"""

from __future__ import annotations

import json

import pytest
from support import captured_layouts as worker
from support.forked import check_ranks
from support.launches import once, write_families

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
        processes = worker.LAYOUTS[jobs[0].split(":")[1]].processes
        check_ranks([worker.__file__, folder, *jobs], processes)

    def facts(job):
        launch(LAUNCH_OF[job])
        return json.loads((folder / f"{job.replace(':', '-')}.json").read_text())

    return facts


@pytest.mark.parametrize("job", marked(1))
def test_other_rows_are_replayed(found, job):
    """Bit for bit as the same code run anew; within 1e-6 of the loss and 1e-5 of each gradient as
    the same samples in rows of any shape, whose segments attention loops over."""
    family, name = job.split(":")
    layout = worker.LAYOUTS[name]
    ranks = found(job)
    assert len(ranks) == layout.processes
    for facts in ranks:
        assert facts["difference"] == [] and facts["host reads"] == []
        assert facts["other bits"] == []
        assert facts["captures"] == [1] and facts["replays"] == [len(worker.BINS)]
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
