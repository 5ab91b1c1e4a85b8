"""Four processes (gloo) take the steps of one, in every form that shares the model's memory out.

Run in ranks: optimizer steps in every form that the hf engine has for several processes.

    torchrun --nproc-per-node 4 test_sharding.py FOLDER

Rank 0 writes FOLDER/<form>.json: losses and gradient norms by step, steps behind a resume of the
form's checkpoint in another form, and what lies around of gradients. FOLDER/<form>/: checkpoints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.hf import replicas
from support.checkpoints import save_engine
from support.engines import make_engine, make_stepper, single_rank
from support.forked import check_ranks
from support.shards import TINY_MODEL
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.training.checkpoint import load_checkpoint, step_folder
from vlmpack.training.step import Stepper

DEAL: replicas.Deal = [[[0], [1]], [[2], []], [[3], [4]], [[5], []]]
STEPS = 3
FORMS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, gradients twice": {},
    "fsdp": {"sharding": "fsdp"},
    "fsdp, each": {"sharding": "fsdp", "gradient_sync": "micro_batch"},
    "hsdp": {"sharding": "fsdp", "replicate": 2},
    "hsdp, each": {"sharding": "fsdp", "replicate": 2, "gradient_sync": "micro_batch"},
}
RESUMED = {"fsdp": "hsdp", "hsdp": "fsdp"}
"""A form whose checkpoint is resumed in another."""


def stepper_of(form: str, ranks: Ranks) -> Stepper:
    """A fresh stepper; the form whose gradients lie twice has DDP as torch has it by default."""
    engine = make_engine(TINY_MODEL, Encoder(TINY_MODEL), ranks=ranks, **FORMS[form])
    if form == "ddp, gradients twice":
        engine.module = torch.nn.parallel.DistributedDataParallel(engine.vlm)
        engine.drops_gradients = True
    return make_stepper(engine)


def whole_gradients(engine: Any) -> int:
    """Elements of gradients that FSDP2 holds unsharded."""
    found = 0
    for module in engine.vlm.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for each in group.fsdp_params:
                gradient = each.unsharded_accumulated_grad
                if gradient is None and hasattr(each, "_unsharded_param"):
                    gradient = each._unsharded_param.grad
                found += 0 if gradient is None else gradient.numel()
    return found


def run(form: str, ranks: Ranks, samples: Any, folder: Path) -> dict[str, Any]:
    """A few steps, and what was seen on the way."""
    stepper = stepper_of(form, ranks)
    engine: Any = stepper.engine
    between: list[int] = []
    synchronise = engine._synchronise

    def watched(last: bool) -> Any:
        between.append(whole_gradients(engine))
        return synchronise(last)

    engine._synchronise = watched
    rows = replicas.train(stepper, DEAL, samples, count=STEPS)
    gradients = [p.grad for _, p in engine.parameters() if p.grad is not None]
    held = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in held}
    save_engine(folder / form, STEPS, engine, keep=1, ranks=ranks)
    owned = [box.lengths for kind, box, _ in engine.owned_slices() if kind == "model"]
    result = {
        "rows": rows,
        "processes": engine.description["processes"],
        "fused": engine.optimizer.defaults["fused"],
        "between": max(between[1::2]),
        "parameters": sum(p.numel() for _, p in engine.parameters()),
        "gradients": len(gradients),
        "storages": len(storages),
        "owned": [sum(map(_volume, boxes)) for boxes in ranks.gather_objects(owned)],
    }
    if form in RESUMED:
        other = stepper_of(RESUMED[form], ranks)
        load_checkpoint(step_folder(folder / form, STEPS), other.engine, ranks)
        result["next"] = replicas.train(stepper, DEAL, samples, start=STEPS, count=2)
        result["resumed"] = replicas.train(other, DEAL, samples, start=STEPS, count=2)
    return result


def _volume(lengths: tuple[int, ...]) -> int:
    found = 1
    for length in lengths:
        found *= length
    return found


def main(folder: Path) -> None:
    """Every form."""
    ranks = start_process_group()
    samples = replicas.encoded_samples()
    for form in FORMS:
        result = run(form, ranks, samples, folder)
        if ranks.is_main:
            (folder / f"{form}.json").write_text(json.dumps(result))
    stop_process_group()


pytestmark = pytest.mark.soak
ONE_ROW = [[[0, 1, 2, 3, 4, 5]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    check_ranks([__file__, folder], 4)
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in FORMS}
    return folder, found


@pytest.fixture(scope="module")
def expected(encoder, encoded):
    stepper = make_stepper(make_engine(TINY_MODEL, encoder))
    return replicas.train(stepper, ONE_ROW, encoded, count=STEPS + 2)


@pytest.mark.parametrize("form", FORMS)
def test_steps_are_those_of_one_process(results, expected, form):
    rows = results[1][form]["rows"]
    assert rows[0] != rows[-1], "nothing was learned"
    for ours, theirs in zip(rows, expected[:STEPS], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def test_gradients_lie_once_under_ddp_and_are_the_same_bit_for_bit(results):
    once, twice = results[1]["ddp"], results[1]["ddp, gradients twice"]
    assert once["rows"] == twice["rows"]
    assert twice["storages"] == twice["gradients"] > 10, "the control has a storage for each"
    assert once["storages"] < once["gradients"] / 10, "they are views of a few buckets"


def test_gradients_are_sharded_behind_each_micro_batch_where_asked(results):
    _, found = results
    for form in ("fsdp", "hsdp"):
        assert found[form]["between"] == found[form]["parameters"] > 0
        assert found[f"{form}, each"]["between"] == 0


def test_one_fused_kernel_updates_shards_too(results):
    assert all(result["fused"] for result in results[1].values())


def test_hsdp_has_copies_whose_shards_are_written_once(results, encoder, encoded, expected):
    folder, found = results
    assert found["hsdp"]["processes"] == "4 (HSDP: 2 copies over 2)"
    for form, result in found.items():
        assert sum(result["owned"]) == result["parameters"], form
        assert min(result["owned"]) > 0.8 * max(result["owned"]), form
    for form in RESUMED:  # into the other form, and into one process
        for ours, theirs in zip(found[form]["resumed"], found[form]["next"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
        one = make_stepper(make_engine(TINY_MODEL, encoder))
        saved = step_folder(folder / form, STEPS)
        load_checkpoint(saved, one.engine, single_rank())
        rows = replicas.train(one, ONE_ROW, encoded, start=STEPS, count=2)
        for ours, theirs in zip(rows, expected[STEPS:], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
