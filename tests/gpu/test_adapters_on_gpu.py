"""LoRA and QLoRA on CUDA: a step trains what it should, and the merged folder is the model.

Run on an H200 on 2026-11-26.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from support.engines import make_engine, make_stepper, policy, single_rank
from support.runs import relative_l2
from support.stock import StockProcessor

from vlmpack.packing import PackCollator, pin_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NEEDS_BITSANDBYTES = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
TOLERANCE = 1e-3
"""Relative L2 of logits; matmuls in float32 may use TF32 kernels of other shapes."""


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    "quantize", ["none", "int8", pytest.param("nf4", marks=NEEDS_BITSANDBYTES)]
)
def test_adapters_train_and_merge(tiny_folder, encoder, encoded, mixed, tmp_path, quantize, dora):
    from transformers import AutoModelForImageTextToText

    ranks = replace(single_rank(), device=torch.device("cuda", 0))
    chosen = policy("full", "full", "lora", quantize=quantize, dora=dora)
    engine = make_engine(tiny_folder, encoder, ranks=ranks, policy=chosen)
    stepper = make_stepper(engine, check=True)
    stepper.schedule = lambda step: 0.01
    collate = PackCollator(pad_token_id=561, num_position_axes=3, pad_to_multiple_of=8)
    losses = []
    for step in range(3):
        batch = pin_batch(collate(encoded))
        losses.append(stepper.train(step, [batch], num_skipped=0, stop=False)[0].loss)
    assert not stepper.check.pending
    assert losses[-1] < losses[0]
    engine.export(tmp_path / "merged", processor_from=tiny_folder, dtype=None)
    merged = AutoModelForImageTextToText.from_pretrained(
        str(tmp_path / "merged"), dtype=torch.float32
    )
    arguments = {
        name: value.to("cuda")
        for name, value in StockProcessor(tiny_folder)(mixed[0]).arguments().items()
    }
    with torch.no_grad(), engine.generation() as trained:
        ours = trained(**arguments).logits
        theirs = merged.eval().to("cuda")(**arguments).logits
    assert relative_l2(theirs, ours) < TOLERANCE
