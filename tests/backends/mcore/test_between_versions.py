"""A run that one version of megatron-core has begun goes on under the other, optimizer included,
and in another layout. What is saved has transformers' names, so none of Megatron's matter.

The Pythons that have different versions of megatron-core here: the environment's own, and the
one of `make megatron`, with the newest before what the environment has.
"""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from backends.mcore.launches import write_families
from backends.mcore.relayout import STEPS_BEFORE, file_of
from support.forked import check_ranks
from support.layouts import STEPS, TESTS, torchrun, train_reference
from support.shards import ROOT

from vlmpack.capabilities.versions import TESTED, release

OWN = ROOT / ".venv/bin/python"
NEWEST = ROOT / ".megatron/bin/python"
WANTED = ROOT / "tests/support/megatron_packages.txt"
ASK = "from importlib.metadata import version; print(version('megatron-core'))"


def version_of(python: Path) -> str:
    """The megatron-core that a Python finds; empty where there is none."""
    asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def why_not_two() -> str | None:
    """One phrase, where there are not two versions here."""
    stamp = NEWEST.parents[1] / ".installed"
    if not stamp.exists():
        return "make megatron installs the newest megatron-core: .megatron is not there"
    if stamp.read_text() != WANTED.read_text():
        return "make megatron installs other versions than .megatron has (megatron_packages.txt)"
    if not OWN.exists():
        return "the environment of the Makefile, .venv, is not there"
    found = version_of(OWN), version_of(NEWEST)
    return None if all(found) and found[0] != found[1] else f"both Pythons have {found[0]!r}"


WHY_NOT = why_not_two()

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]

TOLERANCE = 1e-5
"""Relative, of losses and gradient norms: the stated bound of the project."""


DELTA, MAMBA = "tp2@qwen3_5", "dp2@nemotron_h"
"""Layers that carry state, of either kind: they are ours, on what each version has around them."""


def the_other():
    """The Python with the version that this process does not have."""
    return OWN if metadata.version("megatron-core") == TESTED["megatron-core"] else NEWEST


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the models that jobs name."""
    folder = tmp_path_factory.mktemp("versions")
    write_families(folder, [job.partition("@")[2] for job in (DELTA, MAMBA)])
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    """Losses and gradient norms by job: what two replicas with a sharded optimizer save under one
    version goes on under TP 2 and the other, and the other way round."""
    worker = TESTS / "backends/mcore/relayout.py"
    check_ranks([worker, folder, "save:tp2"], 2)
    saves = [f"save:{name}" for name in ("dp2", DELTA, MAMBA)]
    torchrun(worker, 2, str(folder), *saves, "resume:dp2:tp2", python=the_other())
    resumes = ["resume:tp2:dp2", "forget:tp2:dp2", f"resume:tp2-sp@nemotron_h:{MAMBA}"]
    check_ranks([worker, folder, *resumes], 2)

    def of(job):
        found = json.loads(file_of(folder, job).read_text())
        assert len(found) == STEPS
        return found

    return of


def test_the_two_are_the_environments_and_the_newest():
    assert release(version_of(OWN)) < release(version_of(NEWEST))
    assert version_of(NEWEST) == TESTED["megatron-core"]
    assert {metadata.version("megatron-core"), version_of(the_other())} == set(
        map(version_of, (OWN, NEWEST))
    )


@pytest.mark.parametrize(
    ("saved", "resumed"), [("dp2", "tp2"), ("tp2", "dp2"), (MAMBA, "tp2-sp@nemotron_h")]
)
def test_a_run_goes_on_under_the_other_version(rows, saved, resumed):
    unbroken = rows(f"save:{saved}")
    assert abs(unbroken[-1][0] - unbroken[0][0]) > 100 * TOLERANCE * unbroken[0][0], "nothing moved"
    for before, after in zip(unbroken, rows(f"resume:{resumed}:{saved}"), strict=True):
        assert after == pytest.approx(before, rel=TOLERANCE)


@pytest.mark.parametrize("name", [DELTA, MAMBA])
def test_the_other_version_takes_the_steps_of_the_hf_engine(rows, folder, name):
    """Of layers that carry state: their other tests run on one version alone."""
    steps = STEPS_BEFORE + STEPS
    expected = train_reference("adamw", steps, folder / name.partition("@")[2]).rows
    for ours, theirs in zip(rows(f"save:{name}"), expected[STEPS_BEFORE:], strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)


def test_weights_alone_would_not_do(rows):
    """The control: without the moments the first loss is the same, and the next is another."""
    unbroken, without = rows("save:dp2"), rows("forget:tp2:dp2")
    assert without[0][0] == pytest.approx(unbroken[0][0], rel=TOLERANCE)
    assert abs(without[1][0] - unbroken[1][0]) > 10 * TOLERANCE * unbroken[1][0]
