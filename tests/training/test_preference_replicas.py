"""Replicas (gloo) that share a global batch of pairs take the stock model's step, in double."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import pair_replicas
from support.doubles import stock_double, stock_log_p, stock_loss, use_double
from support.forked import check_ranks
from support.pairs import cooked_pair, raw_pairs
from support.runs import relative_l2
from support.shards import TINY_MODEL

from vlmpack.encode import Encoder
from vlmpack.packing import IGNORE_INDEX
from vlmpack.packing.pairs import sequences_of


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
        loss = stock_loss(log_p, reference, tokens, pair_replicas.KNOBS)
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
    dealt = [place for rank in pair_replicas.DEALS[replicas] for row in rank for place in row]
    assert sorted(dealt) == [*range(6)]
    check_ranks([pair_replicas.__file__, folder], replicas)
    figures = json.loads((folder / f"{replicas}.json").read_text())
    assert figures["num_pairs"] == 6
    assert figures["loss"] == pytest.approx(loss, abs=1e-13, rel=0)
    found = load_file(folder / f"{replicas}.safetensors")
    assert found.keys() == wanted.keys()
    assert max(relative_l2(found[name], wanted[name]) for name in wanted) < 1e-12
