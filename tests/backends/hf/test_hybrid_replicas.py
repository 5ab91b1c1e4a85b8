"""Two replicas (gloo) of a model whose layers carry state take the steps that one process takes,
where one rank has no image and its second row no sample."""

from __future__ import annotations

import json

import pytest
from backends.hf import replicas
from backends.hf.replicas import whole_weights
from safetensors.torch import load_file
from support.families import tiny_family_folder
from support.forked import check_ranks
from support.runs import NO_GRADIENT, relative_l2

ONE_ROW = [[[0, 1, 2, 3, 4, 5]]]
STEP_TOLERANCE = 1e-5
"""Relative, loss and gradient norm: the stated bound of the project."""
UPDATE_TOLERANCE = 1e-3
"""Relative L2 of what the AdamW steps changed, as in `test_replicas.py`."""
DEALS = ("image-less rank, empty bin", "one each")
STEPS = 4


def compare(name, deals, tmp_path):
    """All deals, replicated and sharded, against one row in this process."""
    (tmp_path / "model").mkdir()
    model = tiny_family_folder(name, tmp_path / "model")
    check_ranks([replicas.__file__, tmp_path, ";".join(deals), model, str(STEPS)], 2)
    stepper = replicas.fresh("none", model=model)
    before = whole_weights(stepper)
    samples, collate = replicas.encoded_samples(model), replicas.collator(model)
    rows = replicas.train(stepper, ONE_ROW, samples, count=STEPS, collate=collate)
    after = whole_weights(stepper)
    assert rows[0][0] > rows[-1][0], "nothing was learned"
    assert any("A_log" in key for key in after), "no layer carries state"
    for sharding, processes in (("none", "2 (DDP)"), ("fsdp", "2 (FSDP2)")):
        for deal in deals:
            result = json.loads((tmp_path / f"{sharding}-{deal}.json").read_text(encoding="utf-8"))
            assert processes in result["processes"]
            for ours, theirs in zip(result["rows"], rows, strict=True):
                assert ours == pytest.approx(theirs, rel=STEP_TOLERANCE)
            theirs = load_file(str(tmp_path / f"{sharding}-{deal}.safetensors"))
            assert theirs.keys() == after.keys()
            updates = {
                key: relative_l2(theirs[key] - before[key], after[key] - before[key])
                for key in after
                if not NO_GRADIENT.search(key)  # AdamW makes steps of what is rounding alone
            }
            worst = max(updates, key=lambda key: updates[key])
            print(f"\n{name}, {sharding}, {deal}: {worst} {updates[worst]:.1e}")
            assert updates[worst] <= UPDATE_TOLERANCE


@pytest.mark.soak
def test_two_replicas_of_a_hybrid_take_the_steps_of_one_process(tmp_path):
    compare("qwen3_5", DEALS[:1], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "nemotron_h_omni"])
def test_two_replicas_of_every_hybrid_take_the_steps_of_one_process(tmp_path, name):
    compare(name, DEALS, tmp_path)
