"""Replicas (gloo) that share a global batch of pairs take the stock model's step, in double; and so
do ranks that share each row of pairs.

Run in ranks: the gradients of one preference step in double, the pairs dealt to all replicas.

    torchrun --nproc-per-node 2 test_preference_replicas.py FOLDER CONTEXT JOB ...

A job is ROW[+FAULT], by `ROWS` and `FAULTS`. Reads FOLDER/reference.safetensors; writes
FOLDER/<world size>-<context>-<job>.safetensors (gradients) and .json (loss, pairs, log p of each
sequence, how ranks share rows).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.doubles import stock_double, stock_log_p, stock_loss, use_double
from support.engines import make_engine, make_stepper
from support.forked import check_ranks
from support.pairs import cooked_pair, raw_pairs
from support.runs import relative_l2
from support.shards import TINY_MODEL

from vlmpack.backends import collectives
from vlmpack.backends.hf import context
from vlmpack.backends.hf import engine as engine_module
from vlmpack.distributed import start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.packing import IGNORE_INDEX, Batch, EncodedSample, PackCollator, PadCollator
from vlmpack.packing.pairs import sequences_of
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training import objective
from vlmpack.training.preference import dpo
from vlmpack.training.reference import log_probabilities

COLLATE = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)
ROWS: dict[str, Callable[[Sequence[EncodedSample]], Batch]] = {
    "padding between": COLLATE,
    "little between": replace(COLLATE, pad_to_multiple_of=4, total_multiple_of=8),
    "padded": PadCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8),
}
"""Sequences of a row padded to multiples of eight and of four slots, and rows of one sequence."""
KNOBS = ObjectiveSection(name="dpo", beta=0.2, label_smoothing=0.1, sft_weight=0.3)
DEALS: dict[int, list[list[list[int]]]] = {
    1: [[[2, 0], [], [1, 4], [3, 5]]],
    2: [[[0, 4, 1], []], [[3], [5, 2]]],
    4: [[[0, 3]], [[1, 4, 5]], [[]], [[2]]],
}
"""By the number of replicas, by rank, by micro-batch: numbers of pairs; 1 and 4 are text."""


def summed_again() -> AbstractContextManager[Any]:
    """The gradient of the sum over a row's ranks is summed once more."""

    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * torch.distributed.get_world_size(), None

    return patch.object(collectives._SumParts, "backward", staticmethod(backward))


def parts_alone() -> AbstractContextManager[Any]:
    """Each rank takes its part of a sequence's log p for the whole."""
    return patch.object(context, "sum_parts", lambda part, group: part)


def every_rank_reports() -> AbstractContextManager[Any]:
    """A row's sums are counted as often as ranks share it."""
    own = objective.forward_step
    alone = lambda *given, of_rows, **more: own(*given, of_rows=False, **more)  # noqa: E731
    return patch.object(objective, "forward_step", alone)


FAULTS = {
    "": nullcontext,
    "summed again": summed_again,
    "parts alone": parts_alone,
    "every rank reports": every_rank_reports,
}


def main(folder: Path, size: int, jobs: Sequence[str]) -> None:
    """One step a job."""
    use_double(setattr)
    stock = engine_module.load_model
    engine_module.load_model = lambda path: stock(path).double()
    ranks = start_process_group(context=size)
    encoder = Encoder(TINY_MODEL).replace(pairs=True)
    pairs = [encoder.encode(cooked_pair(*pair)) for pair in raw_pairs()]
    reference = load_file(folder / "reference.safetensors")["reference"]
    for job in jobs:
        rows, _, fault = job.partition("+")
        engine = make_engine(TINY_MODEL, encoder, ranks=ranks, context=size)
        batches = [
            replace(
                ROWS[rows]([pairs[place] for place in row]),
                reference=reference[[2 * place + k for place in row for k in (0, 1)]],
            )
            for row in DEALS[ranks.dp_size][ranks.dp_rank]
        ]
        assert not batches[0].keys or sum(batches[0].lengths) < batches[0].num_slots
        with FAULTS[fault]():
            computed = [log_probabilities(engine, batch) for batch in batches]
            stepper = make_stepper(engine, objective=dpo(KNOBS), max_grad_norm=None)
            stepper.schedule = lambda step: 0.0
            sums, _ = stepper.train(0, batches, num_skipped=0, stop=False)
        if ranks.is_main:
            gradients = {name: parameter.grad for name, parameter in engine.parameters()}
            save_file(gradients, folder / f"{ranks.world_size}-{size}-{job}.safetensors")
            figures = {
                "loss": sums.loss,
                "num_pairs": sums.totals["num_pairs"],
                "log_p": [*chain(*computed)],
                "processes": engine.description["processes"],
            }
            (folder / f"{ranks.world_size}-{size}-{job}.json").write_text(json.dumps(figures))
    stop_process_group()


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """(folder with the reference, loss, gradients by name), one sequence at a time."""
    with pytest.MonkeyPatch.context() as patch:
        use_double(patch.setattr)
        encoder = Encoder(TINY_MODEL).replace(pairs=True)
        pairs = [encoder.encode(cooked_pair(*pair)) for pair in raw_pairs()]
        model = stock_double()
        log_p = stock_log_p(model, encoder, pairs)
        noise = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        reference = log_p.detach() + 5 * noise
        parts = [part for pair in pairs for part in sequences_of(pair)]
        tokens = torch.tensor([int((part.labels != IGNORE_INDEX).sum()) for part in parts])
        loss = stock_loss(log_p, reference, tokens, KNOBS)
        loss.backward()
    folder = tmp_path_factory.mktemp("replicas")
    save_file({"reference": reference}, folder / "reference.safetensors")
    gradients = {n: p.grad for n, p in model.named_parameters()}
    return folder, float(loss.detach()), gradients, log_p.detach()


SHARED = {
    (2, 2): "2 share each row by exchange of heads",
    (4, 4): "exchange of heads between 2, and a ring of 2 such groups",
    (4, 2): "2 share each row by exchange of heads",
}
"""By the world size and how many ranks share a row; the last has two replicas."""


@pytest.fixture(scope="module")
def found(stock):
    """What ranks found in a job, and how far log p, the loss and gradients are from the stock
    model's. One launch for all jobs of a world."""
    folder, loss, wanted, log_p = stock
    faults = [f"padding between+{fault}" for fault in FAULTS if fault]

    @cache
    def launch(world, size):
        jobs = [*ROWS, *(faults if size == world == 2 else ())] if size > 1 else [*ROWS][:1]
        check_ranks([__file__, folder, str(size), *jobs], world)

    def far(world, size, job):
        launch(world, size)
        figures = json.loads((folder / f"{world}-{size}-{job}.json").read_text())
        ours = load_file(folder / f"{world}-{size}-{job}.safetensors")
        places = [2 * place + k for place in chain(*DEALS[world // size][0]) for k in (0, 1)]
        of_ranks = torch.tensor(figures["log_p"], dtype=torch.float64)
        assert ours.keys() == wanted.keys() and len(of_ranks) == len(places) > 1
        errors = {
            "log_p": float((of_ranks - log_p[places]).abs().max()),
            "loss": abs(figures["loss"] - loss),
            "gradients": max(relative_l2(ours[name], wanted[name]) for name in wanted),
        }
        return figures, errors

    return far


def check(found):
    """The step, and log p as the reference's pass computes it."""
    figures, errors = found
    assert figures["num_pairs"] == 6
    assert errors["loss"] < 1e-13 and errors["log_p"] < 1e-11
    assert errors["gradients"] < 1e-12


@pytest.mark.parametrize(
    "replicas",
    [
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.soak),
    ],
)
def test_replicas_take_the_step_of_each_pair_alone(replicas, found):
    """With an empty row, and a replica that has nothing else."""
    dealt = [place for rank in DEALS[replicas] for row in rank for place in row]
    assert sorted(dealt) == [*range(6)]
    check(found(replicas, 1, "padding between"))


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("world", "size"), SHARED)
def test_ranks_that_share_rows_take_the_step_of_each_pair_alone(world, size, rows, found):
    figures, errors = found(world, size, rows)
    check((figures, errors))
    assert SHARED[world, size] in figures["processes"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault])
def test_a_fault_of_shared_rows_is_found(fault, found):
    figures, errors = found(2, 2, f"padding between+{fault}")
    if fault == "parts alone":
        assert min(errors.values()) > 0.01
    elif fault == "summed again":
        assert errors["loss"] < 1e-13 and errors["gradients"] == pytest.approx(1.0, abs=1e-9)
    else:
        assert errors["loss"] == pytest.approx(figures["loss"] / 2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
