"""Rows whose samples were all skipped (`data.on_error: skip`), on the Megatron engine in parallel
layouts: they teach nothing, and the steps are those of the hf engine in one process."""

from __future__ import annotations

from functools import cache

import pytest
from backends.mcore import family_layouts
from backends.mcore import hybrid_layouts as worker
from backends.mcore.launches import FamilyLaunches, write_families
from support import layouts
from support.shards import TINY_MODEL

pytestmark = pytest.mark.slow

VLM, MOE, HYBRID, MAMBA = "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "nemotron_h"

LAUNCHES = {
    "two": [f"holes:{MAMBA}:cp2-ep2", f"holes:{VLM}:pp2"],
    "more": [
        f"holes:{HYBRID}:tp2",
        *(f"holes:{VLM}:{name}" for name in ("tp2", "cp2", "dp2")),
        *(f"holes:{MOE}:{name}" for name in ("tp2-ep2", "cp2-ep2", "pp2", "ep2")),
        *(f"holes:{HYBRID}:{name}" for name in ("cp2", "pp2", "dp2", "tp2-selective")),
        *(f"holes:{MAMBA}:{name}" for name in ("tp2-ep2", "cp2", "ep2")),
        *(f"holes:{VLM}:{name}" for name in ("tp2-captured", "dp2-captured")),
    ],
    "four": [f"holes:{VLM}:{name}" for name in ("tp2-cp2", "tp2-pp2", "cp2-pp2")],
}
"""Jobs that share processes: each size that goes up, and layers of each kind."""

MARKS = {"two": (), "more": pytest.mark.soak, "four": pytest.mark.soak}

BINS = {
    "as they are": family_layouts.HOLES,
    "left out": [bin_ for bin_ in family_layouts.HOLES if bin_],
    "filled": [*family_layouts.HOLES[:-1], [5]],
}
"""What the hf engine is given: the same, no row where nothing is left, and a sample put there."""


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("holes")
    write_families(folder, (MOE, HYBRID, MAMBA))
    (folder / VLM).symlink_to(TINY_MODEL)
    return FamilyLaunches(worker.__file__, folder, LAUNCHES, worker.LAYOUTS)


@pytest.fixture(scope="module")
def expected(launches):
    @cache
    def steps(family, bins):
        with family_layouts.on_bins(BINS[bins]):
            folder = launches.folder / family
            return layouts.train_reference("sgd", family_layouts.STEPS_AFTER, folder)

    return steps


@pytest.mark.parametrize(
    "job",
    [pytest.param(job, marks=MARKS[launch]) for launch in LAUNCHES for job in LAUNCHES[launch]],
)
def test_a_row_without_samples_changes_nothing(launches, expected, job):
    """Losses, norms of gradients and what three steps of SGD change."""
    found, family = launches.trained(job, "sgd"), job.split(":")[1]
    for bins in BINS:
        errors = layouts.worst_errors(found, expected(family, bins), launches.start(family))
        print(f"\n{job}, {bins}: " + "  ".join(f"{n} {e:.1e}" for n, e in errors.items()))
        beyond = layouts.beyond_tolerance(errors).keys()
        assert beyond == (layouts.TOLERANCES.keys() if bins == "filled" else set())
