"""Whether an export of a class reloads: the engine's weights, moved a little, against what
transformers loads from the folder that was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmpack.backends.hf.load import load_model
from vlmpack.build.data import open_split
from vlmpack.build.engine import build_engine
from vlmpack.build.setup import Setup
from vlmpack.data.loading.ledger import Ledger
from vlmpack.encode import Encoder
from vlmpack.families.base import stock_arguments
from vlmpack.packing import EncodedSample
from vlmpack.proof.finite import require_finite_losses
from vlmpack.proof.verify.figures import relative_l2
from vlmpack.proof.verify.samples import choose_samples

MOVED = 0.01
"""What is added to each weight, times noise of deviation 1: an export of the source's own weights
is not what is looked for."""

BOUND = 1e-6


def wrong_export(setup: Setup, folder: Path) -> str:
    """What is wrong with logits of the reloaded export; empty where nothing is.

    Args:
        setup: of one process.
        folder: written anew.
    """
    train = open_split(setup, "data.train", Ledger(None))
    assert train is not None  # data.train is required
    try:
        samples = [each.sample for each in choose_samples(train, 4, min_labels=0)]
    finally:
        train.split.close()
    sample = max(samples, key=lambda one: len(one.media.grid_thw) if one.media is not None else 0)
    engine: Any = build_engine(setup)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(MOVED * torch.randn(parameter.shape, generator=draw))
    source = setup.encoder.folder
    engine.export(folder, processor_from=source, dtype=torch.float32)
    with engine.generation() as model:
        ours = _logits(model, setup.encoder, sample)
    theirs = _logits(load_model(folder).eval(), setup.encoder, sample)
    before = _logits(load_model(source).eval(), setup.encoder, sample)
    error, moved = relative_l2(ours, theirs), relative_l2(before, theirs)
    if moved < 100 * BOUND:
        return f"the export's logits are those of the model before training ({moved:.1e})"
    if not error <= BOUND:
        return f"the export reloads with other logits than the trained model's ({error:.1e})"
    return ""


@torch.no_grad()
def _logits(model: Any, encoder: Encoder, sample: EncodedSample) -> Tensor:
    """(s, V) of one sample, by the class's own forward pass."""
    given = stock_arguments(encoder.family, sample, **encoder.placeholders)
    logits: Tensor = model(use_cache=False, **given).logits[0]
    name = f"the model on {sample.key}"
    require_finite_losses(name, model, [logits], lambda: model(use_cache=False, **given))
    return logits.float()
