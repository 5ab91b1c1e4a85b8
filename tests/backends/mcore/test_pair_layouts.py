"""Pairs in parallel layouts train what the stock model does, one sequence at a time, in double.

The bounds are 1e-11 for log p, 1e-13 for the loss, 1e-12 for every gradient (relative L2).
"""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from backends.mcore import pair_layouts
from backends.mcore.launches import once
from backends.mcore.pair_layouts import CONTROLS, KNOBS, ROWS
from support.doubles import stock_double, stock_log_p, stock_loss, use_double
from support.forked import check_ranks
from support.layouts import LAYOUTS
from support.runs import relative_l2

from vlmpack.packing.pairs import sequences_of

pytestmark = pytest.mark.slow

CI = ("tp2:packed", "cp2:packed", "pp2:packed")
SOAK = (
    "cp2:padded",
    *("tp2-sp:packed", "tp2-sp:padded", "tp2-cp2:packed", "tp2-cp2:padded"),
    *("cp2-pp2:packed", "tp2-pp2:packed", "tp2-cp2-pp2:packed"),
)
BROKEN = {
    "factor of ranks": "cp2",
    "parts alone": "cp2",
    "labels shifted after slicing": "cp2",
    "every rank reports": "cp2",
    "no sum over the vocabulary": "tp2",
}
JOBS = [*CI, *(pytest.param(job, marks=pytest.mark.soak) for job in SOAK)]


@pytest.fixture(scope="module")
def stock():
    """(log p, reference, losses by name, gradients by name)."""
    encoder, pairs = pair_layouts.four_pairs()
    with pytest.MonkeyPatch.context() as patch:
        use_double(patch.setattr)
        model = stock_double()
        log_p = stock_log_p(model, encoder, pairs)
        noise = torch.randn(len(log_p), generator=torch.Generator().manual_seed(0)).double()
        reference = log_p.detach() + 5 * noise
        tokens = [int((part.labels != -100).sum()) for pair in pairs for part in sequences_of(pair)]
        losses, gradients = {}, {}
        for name, knobs in KNOBS.items():
            model.zero_grad(set_to_none=True)
            loss = stock_loss(log_p, reference, torch.tensor(tokens), knobs)
            loss.backward(retain_graph=True)
            losses[name] = float(loss.detach())
            gradients[name] = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert min(tokens) == 1
    return log_p.detach(), reference, losses, gradients


@pytest.fixture(scope="module")
def found(stock, tmp_path_factory):
    """What the ranks wrote for a job; jobs of as many processes and one mark share a launch."""
    folder = tmp_path_factory.mktemp("layouts-of-pairs")
    torch.save(stock[1], folder / "reference.pt")

    def place(job):
        return LAYOUTS[job.partition(":")[0]].processes, job in SOAK

    @once
    def launch(processes, soak):
        every = [*CI, *SOAK, *(f"{layout}:{name}" for name, layout in BROKEN.items())]
        jobs = [job for job in every if place(job) == (processes, soak)]
        check_ranks([pair_layouts.__file__, folder, *jobs], processes)

    def load(job):
        launch(*place(job))
        return torch.load(folder / f"{job}.pt")

    return load


def log_p_of(job, stock):
    rows = ROWS.get(job.partition(":")[2], ROWS["packed"])
    return stock[0][[2 * place + k for place in chain(*rows) for k in (0, 1)]]


def furthest(gradients, wanted):
    """Relative L2 of all gradients as one vector."""
    assert gradients.keys() == wanted.keys()
    far = torch.cat([(gradients[n] - wanted[n]).flatten() for n in wanted]).norm()
    return float(far / torch.cat([g.flatten() for g in wanted.values()]).norm())


@pytest.mark.parametrize("job", JOBS)
def test_a_layout_trains_what_the_stock_model_does(job, found, stock):
    result = found(job)
    error = float((result["log_p"] - log_p_of(job, stock)).abs().max())
    assert error < 1e-11
    for name in KNOBS:
        loss, totals, gradients, evaluated = result["steps"][name]
        wanted = stock[3][name]
        worst = max(relative_l2(gradients[n], wanted[n]) for n in wanted)
        print(
            f"\n{job} {name}: log p {error:.1e} loss {abs(loss - stock[2][name]):.1e} {worst:.1e}"
        )
        assert gradients.keys() == wanted.keys()
        assert loss == pytest.approx(stock[2][name], abs=1e-13)
        assert worst < 1e-12
        assert evaluated == pytest.approx(loss, rel=1e-13)
        assert totals["num_pairs"] == totals["num_samples"] == 4
        assert min(float(g.norm()) for g in wanted.values()) > 1e-9, "each is trained"


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_found(name, found, stock):
    assert BROKEN.keys() == CONTROLS.keys()
    result = found(f"{BROKEN[name]}:{name}")
    far = float((result["log_p"] - log_p_of("cp2:packed", stock)).abs().max())
    loss, _, gradients, _ = result["steps"]["sigmoid"]
    off = abs(loss - stock[2]["sigmoid"])
    error = furthest(gradients, stock[3]["sigmoid"])
    print(f"\n{name}: log p {far:.1e} loss {off:.1e} gradients {error:.1e}")
    if name == "factor of ranks":
        assert error == pytest.approx(1.0, abs=1e-9), "twice what they are"
        assert off < 1e-12
    elif name == "every rank reports":
        assert loss == pytest.approx(2 * stock[2]["sigmoid"])
    else:
        assert min(far, off, error) > 0.01
