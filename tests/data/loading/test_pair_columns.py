"""Metrics of pairs by source: each column is that of the source's pairs alone."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.pairs import cooked_pair, raw_pairs, write_pairs
from support.recipes import run_settings
from support.recorders import HostReads
from support.shards import TINY_MODEL

from vlmpack.api import resolve, run_recipe
from vlmpack.encode import Encoder
from vlmpack.packing import PackCollator
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training.preference import REPORT, SUMS, PreferenceSums, dpo

COLLATE = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)
KNOBS = ObjectiveSection(name="dpo", beta=0.3)


@pytest.fixture(scope="module")
def pairs():
    encoder = Encoder(TINY_MODEL).replace(pairs=True)
    return [encoder.encode(cooked_pair(*pair)) for pair in raw_pairs()]


def test_sums_of_a_source_are_those_of_its_pairs_alone(pairs):
    draw = torch.Generator().manual_seed(0)
    whole = COLLATE(pairs)
    losses = torch.rand(whole.num_label_tokens, generator=draw)
    reference = torch.randn(12, generator=draw).double()
    batch = replace(whole, reference=reference, sources=torch.tensor([1, 0, 1, 1, 0, 1]))
    with HostReads() as reads:
        found = PreferenceSums(section=KNOBS, sources=("a", "b", "none"))(losses, batch)
    assert reads.reads == []
    for place, name in enumerate(("a", "b")):
        own = [n for n in range(6) if int(batch.sources[n]) == place]
        sequences = [2 * n + k for n in own for k in (0, 1)]
        of_own = torch.isin(batch.label_sequences, torch.tensor(sequences))
        alone = replace(COLLATE([pairs[n] for n in own]), reference=reference[sequences])
        expected = PreferenceSums(section=KNOBS)(losses[of_own], alone)
        for column in SUMS:
            assert float(found[f"{column}/{name}"]) == pytest.approx(float(expected[column]))
    assert all(float(found[f"{column}/none"]) == 0.0 for column in SUMS)
    objective = dpo(KNOBS, ("a", "b", "none"))
    assert set(found) == set(objective.sum_names)
    totals = {n: float(x) for n, x in found.items()}
    totals |= {name: count(batch) for name, count in objective.counts.items()}
    said = objective.reported(totals)
    assert {name for name in said if "/" in name} == {f"{c}/{s}" for c in REPORT for s in "ab"}
    assert dpo(KNOBS, ("alone",)).by_source == {}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder, log) of a run on two sources, the second of which has a pair of equal answers;
    validation is of the first and a third."""
    root = tmp_path_factory.mktemp("sources")
    shards = {}
    for seed, name in enumerate(("plain", "same", "held")):
        made = raw_pairs(seed)
        if name == "same":
            chosen, rejected = made[0]
            made[0] = (chosen, replace(rejected, messages=chosen.messages))
        shards[name] = str(write_pairs(root / f"{name}.tar", made))
    listed = {name: {"path": path, "name": name} for name, path in shards.items()}
    values = run_settings(
        root,
        data__train=[listed["plain"], listed["same"]],
        data__validation=[listed["plain"], listed["held"]],
        data__index_dir=str(root / "index"),
        objective__name="dpo",
        training__micro_batch_size=2,
        training__global_batch_size=12,
        training__max_steps=2,
        logging__interval_steps=1,
    )
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vlmpack")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        run_recipe(resolve(values, {}))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return Path(values["run_dir"]), "\n".join(said)


@pytest.mark.slow
def test_a_run_reports_each_source_of_training_and_validation(run):
    lines = [json.loads(line) for line in (run[0] / "metrics.jsonl").read_text().splitlines()]
    steps, checks = [r for r in lines if "loss" in r], [r for r in lines if "validation_loss" in r]
    assert len(steps) == 2
    for row, prefix, names in (
        *((row, "", ("plain", "same")) for row in steps),
        (checks[-1], "validation_", ("plain", "held")),
    ):
        own = {name.partition("/")[2] for name in row if "/" in name}
        assert own == set(names)
        for column in REPORT:  # as many pairs of each
            mean = sum(row[f"{prefix}{column}/{name}"] for name in names) / 2
            assert row[prefix + column] == pytest.approx(mean, rel=1e-9, abs=1e-12)
    assert steps[0]["preference_loss/same"] == pytest.approx(math.log(2), abs=1e-4)
    assert steps[1]["margin/plain"] != pytest.approx(steps[1]["margin/same"], abs=1e-3)
    assert steps[0]["identical"] == pytest.approx(1 / 12)


@pytest.mark.slow
def test_the_log_says_each_source_and_identical_answers_once(run):
    text = run[1]
    [line] = [line for line in text.splitlines() if "two answers of the same tokens" in line]
    assert line.startswith("note: step 1: 1 pair has two answers of the same tokens: it teaches")
    assert line.endswith("same.tar)") and ", 00000 (" in line
    assert "step 1: same  " in text
    assert "step 2: validation of held  " in text
