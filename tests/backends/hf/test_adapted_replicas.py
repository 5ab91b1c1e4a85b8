"""Adapters on two replicas, whole and sharded, take the steps that peft's own forward takes in one
process.

Run in ranks: optimizer steps with adapters, whole and sharded.

    torchrun --nproc-per-node 2 test_adapted_replicas.py FOLDER

Writes FOLDER/<sharding>-<kind>.json, loss and gradient norm by step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from backends.hf.replicas import COLLATE, encoded_samples
from support.engines import engine_of, make_stepper, policy
from support.families import tiny_family_folder
from support.forked import check_ranks
from support.shards import TINY_MODEL

from vlmpack.backends.hf import adapters
from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.recipe.schema import ModelSection, ParallelismSection

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"dora": True},
    "half": {"dora": True},
    "in full": {
        "rank_pattern": {"q_proj": 2},
        "modules_to_save": ("embed_tokens", "lm_head", "input_layernorm"),
    },
    "experts": {"targets": ("attention", "experts")},
}
"""`half` is in bfloat16: FSDP2 then gathers matrices and magnitudes in it. `experts` is a mixture,
in the folder `mixture`."""
TOLERANCES = {"plain": 1e-5, "dora": 1e-5, "half": 2e-2, "in full": 1e-5, "experts": 1e-5}


def steps(folder: Path, kind: str, sharding: Any, ranks: Ranks) -> list[list[float]]:
    """Of three samples on each of two ranks, or of all six on one; layers are recomputed."""
    path = folder / "mixture" if kind == "experts" else TINY_MODEL
    model = ModelSection(
        path=str(path),
        dtype="bfloat16" if kind == "half" and ranks.world_size > 1 else "float32",
        attention="segments",
        activation_checkpointing="full",
    )
    chosen = policy("frozen", "full", "lora", **KINDS[kind])
    split = ParallelismSection(sharding=sharding)
    engine = engine_of(model, split, Encoder(path), ranks, chosen)
    stepper = make_stepper(engine)
    stepper.schedule = lambda step: 0.01
    samples, count = encoded_samples(path), 6 // ranks.world_size
    mine = samples[ranks.rank * count : (ranks.rank + 1) * count]
    taken = [
        stepper.train(step, [COLLATE(mine)], num_skipped=0, stop=False)[0] for step in range(3)
    ]
    return [[sums.loss, sums.grad_norm] for sums in taken]


def main(folder: Path) -> None:
    """Both kinds, whole and sharded."""
    ranks = start_process_group()
    for sharding in ("none", "fsdp"):
        for kind in KINDS:
            rows = steps(folder, kind, sharding, ranks)
            if ranks.is_main:
                (folder / f"{sharding}-{kind}.json").write_text(json.dumps(rows))
    stop_process_group()


@pytest.mark.slow
def test_two_replicas_take_the_steps_of_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_family_folder("qwen3_vl_moe", tmp_path / "mixture")
    check_ranks([__file__, tmp_path], 2)
    monkeypatch.setattr(adapters, "fuse_adapters", lambda model: None)
    monkeypatch.setattr(adapters, "fuse_experts", lambda model: None)
    for kind in KINDS:
        expected = steps(tmp_path, kind, "none", Ranks())
        assert expected[0][0] - expected[-1][0] > 0.1, "nothing was learnt"
        for sharding in ("none", "fsdp"):
            found = json.loads((tmp_path / f"{sharding}-{kind}.json").read_text())
            for ours, theirs in zip(found, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=TOLERANCES[kind]), (kind, sharding)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
