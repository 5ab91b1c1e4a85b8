"""Decoders captured as CUDA graphs: replays are the steps of the same engine without graphs.

Run on an H200 on 2026-11-26. On a CPU the same is held, by tapes, in tests/backends.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.captured import rows_of
from support.engines import EVERYTHING, engine_of, single_rank
from support.runs import relative_l2

from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.training.objective import SFT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)
DEVICE = torch.device("cuda", 0)
LOSS_TOLERANCE = 2e-2
"""Relative, per row: five roundings of bfloat16's 8 bits."""
GRADIENT_TOLERANCE = 5e-2
"""Relative L2, per parameter: a dozen roundings, and kernels that add up in any order."""


def _step(engine, rows):
    engine.zero_gradients()
    reports = engine.forward_backward(SFT.step_with(), iter(rows), num_microbatches=len(rows))
    losses = [float(report["loss_sum"]) for report in reports]
    gradients = {
        name: parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }
    return losses, {name: each.clone() for name, each in gradients.items() if each is not None}


@pytest.mark.parametrize("backend", ["hf", pytest.param("mcore", marks=needs_megatron)])
def test_replays_are_the_steps_without_graphs(backend, tiny_folder, encoder):
    model = ModelSection(path=str(tiny_folder), backend=backend)
    ranks = replace(single_rank(), device=DEVICE)
    made = partial(engine_of, model, ParallelismSection(), encoder, ranks, EVERYTHING)
    captured, plain = made(captures=True), made()
    rows = rows_of(encoder).fixed
    for _ in range(2):
        (losses, gradients), (wanted, reference) = (_step(e, rows) for e in (captured, plain))
        assert losses == pytest.approx(wanted, rel=LOSS_TOLERANCE)
        assert gradients.keys() == reference.keys() and len(gradients) > 50
        for name, theirs in reference.items():
            assert relative_l2(gradients[name], theirs) <= GRADIENT_TOLERANCE, name
        for engine in (captured, plain):  # the next pass is of other weights
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.mul_(1.01)
    graph = captured.graph if backend == "hf" else captured.model.graph
    assert graph.captures == 1 and graph.replays == 2 * len(rows)
