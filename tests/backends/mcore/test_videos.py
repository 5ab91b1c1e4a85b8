"""A row with videos takes the optimizer steps of the hf engine on the Megatron engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
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
    Told("video", ("x", Shot(SIZE, 4, fps=2.0), "?"), "abcd"),
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
