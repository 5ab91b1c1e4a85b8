"""What is wrong with pairs stops a run, or is left out and counted, with what a user can do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.pairs import raw_pairs, write_pairs
from support.recipes import rows, run_settings
from support.shards import with_answer

from vlmpack.api import resolve, run_recipe
from vlmpack.errors import DataError


def settings(root: Path, pairs, **changes):
    values = {
        "data__train": str(write_pairs(root / "pairs.tar", pairs)),
        "data__validation": None,
        "data__index_dir": str(root / "index"),
        "objective__name": "dpo",
        "training__micro_batch_size": 2,
        "training__max_steps": 1,
    }
    return run_settings(root, **(values | changes))


@pytest.mark.slow
def test_a_pair_over_budget_counts_both_of_its_sequences(tmp_path):
    """Each of them alone would fit."""
    pairs = raw_pairs()
    pairs[2] = tuple(with_answer(raw, "long " * 60) for raw in pairs[2])
    values = settings(tmp_path, pairs, training__seq_length=340)
    with pytest.raises(DataError) as caught:
        run_recipe(resolve(values, {}))
    assert "1 of 6 pairs is longer than training.seq_length 340 tokens" in str(caught.value)
    assert "(both sequences of a pair together)" in str(caught.value)
    assert "Raise training.seq_length, or set data.over_long" in str(caught.value)
    values["data"]["over_long"] = "drop"
    run_recipe(resolve(values, {}))
    assert rows(values["run_dir"], "num_samples") == [(4,)]
    assert "00002" in (Path(values["run_dir"]) / "data-errors.jsonl").read_text()


@pytest.mark.slow
def test_an_answer_without_a_token_to_learn_is_named_with_its_side(tmp_path):
    pairs = raw_pairs()
    chosen, rejected = pairs[1]
    pairs[1] = (chosen, replace(rejected, messages=with_answer(rejected, "").messages))
    with pytest.raises(DataError, match=r"00001.*rejected"):
        run_recipe(resolve(settings(tmp_path, pairs), {}))
