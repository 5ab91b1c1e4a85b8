"""The sentinel on two processes: DDP, FSDP2, and Megatron's tensor, context and pipeline ranks.

Run in ranks: each case without a fault and with one, and a run with the sentinel and without.

    torchrun --nproc-per-node 2 test_sentinel_ranks.py FOLDER CASE [CASE ...]

FOLDER/<case>-<rank>.json has what a rank compared, said and ended with.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engines import make_engine, make_stepper
from support.forked import check_ranks
from support.layouts import LAYOUTS, batches_of, make_megatron, one_layout, whole_weights
from support.shards import TINY_MODEL
from torch.distributed.tensor import DTensor

from vlmpack.alignment import alignment
from vlmpack.backends.row_operators import rms_norm
from vlmpack.distributed import start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.errors import SentinelError
from vlmpack.packing.pairs import slots_of
from vlmpack.training import sentinel as module
from vlmpack.training.sentinel import Sentinel

HF = ("none", "fsdp")
MEGATRON = ("tp2-sp", "cp2", "pp2", "dp2")


@contextmanager
def case_of(name: str) -> Any:
    """What makes an engine, its layout, and its whole weights by name."""
    if name in HF:
        encoder, ranks = Encoder(TINY_MODEL), start_process_group()
        layout = LAYOUTS["dp2"]

        def whole(engine: Any) -> dict[str, Any]:
            return {
                n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
                for n, p in engine.parameters()
            }

        yield lambda: make_engine(TINY_MODEL, encoder, ranks=ranks, sharding=name), layout, whole
        return
    layout = LAYOUTS[name]
    with one_layout(layout) as ranks:
        yield lambda: make_megatron(layout, ranks), layout, lambda e: whole_weights(e)[0]


def watched(engine: Any, layout: Any) -> Any:
    stepper = make_stepper(engine)
    multiples = alignment(
        context_parallel=layout.context,
        tensor_parallel=layout.tensor,
        sequence_parallel=layout.sequence,
    )
    stepper.sentinel = Sentinel(
        engine=engine, interval=2, on_difference="stop", seed=1, multiples=multiples
    )
    return stepper


def plant(engine: Any) -> None:
    """A norm that is off by 2%, as a fused one of the layers of this process."""
    from vlmpack.backends.hf.fused_layers import _derived, _FusedNorm, _NormKernel, norm_form

    ops = SimpleNamespace(norm=lambda *args: 1.02 * rms_norm(*args))
    for part in [*engine.module.modules()]:
        if type(part).__name__ == "RMSNorm":  # ours in Megatron's layers
            part.ops = ops
        elif (form := norm_form(part)) is not None:
            ran = SimpleNamespace(add=lambda *_: None)
            part.fused = _NormKernel(ops, form, False, ran)
            part.__class__ = _derived(_FusedNorm, type(part))


def steps_of(stepper: Any, layout: Any, count: int) -> None:
    mine = batches_of(layout)[stepper.ranks.dp_rank :: layout.dp]
    for step in range(count):
        stepper.train(step, mine, num_skipped=0, stop=False)


def run_case(make: Callable[[], Any], layout: Any, whole: Callable[[Any], Any]) -> dict[str, Any]:
    """What a rank saw."""
    said, compared = list[str](), list[float]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vlmpack")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    own = module._error

    def error(*losses: float) -> float:
        compared.append(own(*losses))
        return compared[-1]

    module._error = error
    weights = []
    for has in (True, False):
        stepper = watched(make(), layout)
        sentinel = stepper.sentinel
        if not has:
            stepper.sentinel = None
        steps_of(stepper, layout, 6)
        weights.append(whole(stepper.engine))
    first = list(compared)
    found = {
        "equal": all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]),
        "tensors": len(weights[0]),
        "said": [line for line in said if "alone" in line],
        "labels": labels_of(sentinel, layout, stepper.ranks),
        "compared": len(first),
        "worst": max(first, default=0.0),
        "replica": stepper.ranks.dp_rank,
    }
    stepper = watched(make(), layout)
    stepper.sentinel.interval = 1
    plant(stepper.engine)
    before = whole(stepper.engine)
    try:
        steps_of(stepper, layout, 1)
        found["ended"] = "no error"
    except SentinelError as caught:
        found["ended"] = str(caught)
    after = whole(stepper.engine)
    found["moved"] = not all(torch.equal(before[name], after[name]) for name in before)
    module._error = own
    logger.removeHandler(handler)
    return found


def labels_of(sentinel: Any, layout: Any, ranks: Any) -> int:
    """Label tokens of the samples that a replica compares in steps 2, 4 and 6."""
    mine, total = batches_of(layout)[ranks.dp_rank :: layout.dp], 0
    for step in (1, 3, 5):
        number, place = sentinel._choose(step, mine)
        labels = set(mine[number].label_positions.tolist())
        total += len(labels.intersection(slots_of(mine[number], place).tolist()))
    return total


def main(folder: Path, names: list[str]) -> None:
    for name in names:
        with case_of(name) as (make, layout, whole):
            found = run_case(make, layout, whole)
            rank = torch.distributed.get_rank()
            (folder / f"{name}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    stop_process_group()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("sentinel")
    done: set[tuple[str, ...]] = set()

    def ask(name: str) -> list[dict[str, Any]]:
        names = HF if name in HF else MEGATRON
        if names not in done:
            check_ranks([Path(__file__), folder, *names], 2)
            done.add(names)
        return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]

    return ask


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HF, *MEGATRON])
def test_all_ranks_compare_and_stop_alike(answers: Any, name: str) -> None:
    if name in MEGATRON:
        pytest.importorskip("megatron.core")
    ranks = answers(name)
    assert all(rank["equal"] and rank["tensors"] > 20 for rank in ranks)
    replicas = len({rank["replica"] for rank in ranks})
    assert [len(rank["said"]) for rank in ranks] == [3, 0]
    whose = "1 sample alone" if replicas == 1 else "2 samples alone"
    assert all(whose in line for line in ranks[0]["said"])
    counts = [rank["compared"] for rank in ranks]
    labels = [rank["labels"] for rank in ranks]
    assert min(labels) > 0
    if replicas == 2 or name == "tp2-sp":
        assert counts == labels
    else:  # the last stage has all; context-parallel ranks have parts
        assert sum(counts) == labels[0]
    assert 0 <= max(rank["worst"] for rank in ranks) < 2e-5
    assert ranks[0]["ended"] == ranks[1]["ended"]
    assert ranks[0]["ended"].startswith("sentinel: step 1: sample ")
    assert not any(rank["moved"] for rank in ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
