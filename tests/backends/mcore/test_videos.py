"""A row with videos takes the optimizer steps of the hf engine on the Megatron engine, in one
process and in parallel layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from backends.mcore import family_layouts as worker
from backends.mcore.launches import FamilyLaunches, write_families
from support import layouts
from support.engines import make_engine, make_stepper
from support.families import tiny_family_folder
from support.layouts import Layout, make_megatron
from support.runs import pack
from support.shards import TINY_MODEL
from support.videos import Shot, Told

from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder

SIZE = (224, 112)
SAMPLES = (
    Told("video", ("x", Shot(SIZE, 4, fps=0.5), "?"), "abcd"),
    Told("text", ("hello",), "zzq"),
    Told("both", (SIZE, "y", Shot(SIZE, 5, fps=3.0), Shot((112, 112), 2, fps=0.5)), "qwer"),
)


def steps(engine, batch):
    """(loss, gradient norm) of three steps on one row."""
    stepper = make_stepper(engine)
    found = [stepper.train(n, [batch], num_skipped=0, stop=False)[0] for n in range(3)]
    return [(sums.loss, sums.grad_norm) for sums in found]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_videos_train_as_on_the_other_engine(tmp_path, family):
    folder = TINY_MODEL if family == "qwen2_5_vl" else tiny_family_folder(family, tmp_path)
    encoder = Encoder(folder)
    samples = [encoder.encode(told.cooked()) for told in SAMPLES]
    row = pack(samples, alignment=8)
    theirs = steps(make_engine(folder, encoder), row)
    ours = steps(make_megatron(Layout(), Ranks(), folder), row)
    for found, expected in zip(ours, theirs, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert ours[0][0] == pytest.approx(theirs[0][0], rel=1e-6)
    # With the patches of a video in another order it is another step.
    media = samples[0].media
    backwards = replace(samples[0], media=replace(media, pixel_values=media.pixel_values.flip(0)))
    wrong = steps(make_megatron(Layout(), Ranks(), folder), pack([backwards, *samples[1:]]))
    assert wrong[0][0] != pytest.approx(theirs[0][0], rel=1e-5)


FAMILIES = {"qwen3_vl": ("cp2", "tp2", "pp2", "dp2"), "qwen2_5_vl": ("cp2", "tp2", "pp2")}
LAUNCHES = {
    "one": ["videos:qwen3_vl:cp2"],
    "more": [
        f"videos:{family}:{name}"
        for family, names in FAMILIES.items()
        for name in names
        if (family, name) != ("qwen3_vl", "cp2")
    ],
}
MARKS = {"one": pytest.mark.slow, "more": pytest.mark.soak}


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    write_families(folder, ("qwen3_vl",))
    (folder / "qwen2_5_vl").symlink_to(TINY_MODEL)
    return FamilyLaunches(worker.__file__, folder, LAUNCHES, worker.FAMILY_LAYOUTS)


@pytest.mark.parametrize(
    "job",
    [pytest.param(job, marks=MARKS[launch]) for launch in LAUNCHES for job in LAUNCHES[launch]],
)
def test_parallel_layouts_train_videos_as_one_process(launches, job):
    """Context, tensor and pipeline parallelism, and replicas: losses, gradients and what three
    steps of SGD change. Patches the other way round are other steps."""
    found, family = launches.trained(job, "sgd"), job.split(":")[1]
    steps = worker.STEPS_AFTER
    for backwards in (False, True):
        with worker.on_videos(backwards=backwards):
            expected = layouts.train_reference("sgd", steps, launches.folder / family)
        errors = layouts.worst_errors(found, expected, launches.start(family))
        print(f"\n{job}: " + "  ".join(f"{name} {error:.1e}" for name, error in errors.items()))
        assert (layouts.beyond_tolerance(errors) == {}) != backwards
