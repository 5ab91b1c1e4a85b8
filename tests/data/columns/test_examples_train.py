"""The example of each layout in the documentation is trained: batches, and steps of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from data.columns.example_layouts import FOLDER, WANTED
from support.recipes import rows
from support.shard_fakes import micro_batches, open_data
from support.shards import TINY_MODEL

import vlmpack
from vlmpack.data.columns.layouts import LAYOUTS
from vlmpack.encode import Encoder
from vlmpack.packing.batch import IGNORE_INDEX
from vlmpack.recipe.sources import Source

LEARNT = ("assistant", "chosen", "rejected")


@pytest.mark.cases(quick=("messages", "preference", "vqa", "caption"), slow="rounds")
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_example_becomes_batches_without_a_hole(
    name: str, encoder: Encoder, tmp_path: Path
) -> None:
    path = FOLDER / f"{name}.jsonl"
    count = len(path.read_text().splitlines())
    if name == "preference":
        encoder = Encoder(TINY_MODEL).replace(pairs=True)
    data = open_data(
        "",
        tmp_path,
        sources=(Source(name=name, path=str(path)),),
        encoder=encoder,
        micro_batch_size=1,
        global_batch_size=count,
    )
    assert data.steps_per_epoch() == 1
    found = micro_batches(data, 1)
    assert sorted(s.key for micro in found for s in micro.samples) == [
        f"{number:09d}" for number in range(count)
    ]
    for micro in found:
        assert not micro.skipped
        assert micro.batch.media is not None, "every sample of an example shows an image"
        (sample,) = micro.samples
        labels = micro.batch.labels[micro.batch.labels != IGNORE_INDEX]
        learnt = encoder.tokenizer.decode(labels).split("<|im_end|>")
        answers = [text for role, text in WANTED[name][int(sample.key)] if role in LEARNT]
        assert [*answers, ""] == [text.strip() for text in learnt], "the answers, and nothing else"


@pytest.mark.cases(slow="messages")
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    """Two steps over all its records: the second has less to learn, by weights that moved."""
    batch = len((FOLDER / f"{name}.jsonl").read_text().splitlines())
    recipe = {
        "model": {"path": str(TINY_MODEL)},
        "data": {
            "train": str(FOLDER / f"{name}.jsonl"),
            "index_dir": str(tmp_path / "index"),
            "num_workers": 0,
        },
        "objective": {"name": "dpo" if name == "preference" else "sft"},
        "packing": {"mode": "in_batch"},
        "training": {
            "seq_length": 512,
            "micro_batch_size": batch,
            "global_batch_size": batch,
            "max_steps": 2,
        },
        "optim": {"lr": 1e-3, "warmup_steps": 0},
        "logging": {"progress": "none"},
        "export": {"enabled": False},
        "run_dir": str(tmp_path / "run"),
    }
    result = vlmpack.finetune(recipe)
    (one, first), (two, second) = rows(result.run_dir, "num_samples", "loss")
    assert one == two == batch
    assert second < first, "the same samples once more"
