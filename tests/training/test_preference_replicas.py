"""Replicas (gloo) that share a global batch of pairs take the stock model's step, in double.

Run in ranks: the gradients of one preference step in double, the pairs dealt to all replicas.

    torchrun --nproc-per-node 2 test_preference_replicas.py FOLDER

Reads FOLDER/reference.safetensors; writes FOLDER/<world size>.safetensors (rank 0's gradients) and
.json (loss and pairs).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.doubles import stock_double, stock_log_p, stock_loss, use_double
from support.engines import make_engine, make_stepper
from support.forked import check_ranks
from support.pairs import cooked_pair, raw_pairs
from support.runs import relative_l2
from support.shards import TINY_MODEL

from vlmpack.backends.hf import engine as engine_module
from vlmpack.distributed import start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.packing import IGNORE_INDEX, PackCollator
from vlmpack.packing.pairs import sequences_of
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training.preference import dpo

COLLATE = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)
KNOBS = ObjectiveSection(name="dpo", beta=0.2, label_smoothing=0.1, sft_weight=0.3)
DEALS: dict[int, list[list[list[int]]]] = {
    2: [[[0, 4, 1], []], [[3], [5, 2]]],
    4: [[[0, 3]], [[1, 4, 5]], [[]], [[2]]],
}
"""By the number of replicas, by rank, by micro-batch: numbers of pairs; 1 and 4 are text."""


def main(folder: Path) -> None:
    """One step."""
    use_double(setattr)
    stock = engine_module.load_model
    engine_module.load_model = lambda path: stock(path).double()
    ranks = start_process_group()
    encoder = Encoder(TINY_MODEL).replace(pairs=True)
    pairs = [encoder.encode(cooked_pair(*pair)) for pair in raw_pairs()]
    reference = load_file(folder / "reference.safetensors")["reference"]
    engine = make_engine(TINY_MODEL, encoder, ranks=ranks)
    stepper = make_stepper(engine, objective=dpo(KNOBS), max_grad_norm=None)
    stepper.schedule = lambda step: 0.0
    batches = [
        replace(
            COLLATE([pairs[place] for place in row]),
            reference=reference[[2 * place + k for place in row for k in (0, 1)]],
        )
        for row in DEALS[ranks.dp_size][ranks.dp_rank]
    ]
    sums, _ = stepper.train(0, batches, num_skipped=0, stop=False)
    if ranks.is_main:
        gradients = {name: parameter.grad for name, parameter in engine.parameters()}
        save_file(gradients, folder / f"{ranks.world_size}.safetensors")
        figures = {"loss": sums.loss, "num_pairs": sums.totals["num_pairs"]}
        (folder / f"{ranks.world_size}.json").write_text(json.dumps(figures))
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
    return folder, float(loss.detach()), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "replicas",
    [
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.soak),
    ],
)
def test_replicas_take_the_step_of_each_pair_alone(replicas, stock):
    """With an empty row, and a replica that has nothing else."""
    folder, loss, wanted = stock
    dealt = [place for rank in DEALS[replicas] for row in rank for place in row]
    assert sorted(dealt) == [*range(6)]
    check_ranks([__file__, folder], replicas)
    figures = json.loads((folder / f"{replicas}.json").read_text())
    assert figures["num_pairs"] == 6
    assert figures["loss"] == pytest.approx(loss, abs=1e-13, rel=0)
    found = load_file(folder / f"{replicas}.safetensors")
    assert found.keys() == wanted.keys()
    assert max(relative_l2(found[name], wanted[name]) for name in wanted) < 1e-12


if __name__ == "__main__":
    main(Path(sys.argv[1]))
