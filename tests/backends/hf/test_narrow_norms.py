"""Norms that make the dtype of products: what is learned under autocast is as near a float32 run as
with the stock norms. `test_as_near_as_stock.py` has the whole engine, by families and seeds."""

from __future__ import annotations

import pytest
import torch
from support.engines import EVERYTHING, engine_of, single_rank
from support.families import tiny_family_folder
from support.shards import mixed_samples, text_samples

from vlmpack.backends.fused import FusedOps
from vlmpack.backends.row_operators import rms_norm
from vlmpack.encode import Encoder
from vlmpack.packing import pack_batch_sequences
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.training.objective import SFT


def built(folder, encoder, dtype, ops, monkeypatch):
    monkeypatch.setattr("vlmpack.backends.hf.engine.choose_fused", lambda *_: (ops, "a test"))
    model = ModelSection(path=str(folder), dtype=dtype, attention="segments")
    return engine_of(model, ParallelismSection(), encoder, single_rank(), EVERYTHING)


def gradients(engine, batch):
    """The loss, and all gradients as one vector."""
    engine.zero_gradients()
    (report,) = engine.forward_backward(SFT.step_with(), iter([batch]), num_microbatches=1)
    found = [p.grad.flatten() for _, p in engine.parameters() if p.grad is not None]
    return float(report["loss_sum"]), torch.cat(found)


def distances(folder, seed, steps, monkeypatch, norm=rms_norm):
    """Of loss and gradient from float32's at the same weights, which a run in float32 makes: with
    stock norms and with ours. Means over steps."""
    encoder, draw = Encoder(folder), torch.Generator().manual_seed(seed)
    raw = mixed_samples() if encoder.takes_images else text_samples()
    samples = [encoder.encode(sample.cooked()) for sample in raw]
    exact = built(folder, encoder, "float32", None, monkeypatch)
    stock = built(folder, encoder, "bfloat16", None, monkeypatch)
    ours = built(folder, encoder, "bfloat16", FusedOps("ours", "a test", norm=norm), monkeypatch)
    assert ours.fused.narrowed > 3
    with torch.no_grad():
        for _, value in exact.parameters():
            value.add_(0.02 * torch.randn(value.shape, generator=draw))
    seen = {"stock": [], "ours": []}
    for _ in range(steps):
        some = torch.randperm(len(samples), generator=draw)[:3].tolist()
        batch = pack_batch_sequences(
            [samples[place] for place in some],
            pad_to_multiple_of=1,
            pad_token_id=encoder.pad_token_id,
        )
        weights = dict(exact.parameters())
        loss, gradient = gradients(exact, batch)
        for name, engine in (("stock", stock), ("ours", ours)):
            with torch.no_grad():
                for key, value in engine.parameters():
                    value.copy_(weights[key])
            own, found = gradients(engine, batch)
            off = (found.double() - gradient.double()).norm() / gradient.double().norm()
            seen[name].append((abs(own / loss - 1), off.item()))
        exact.finish_gradients(torch.tensor(float(batch.num_label_tokens)), 1.0)
        exact.step(1e-3)
    return {name: torch.tensor(each).mean(0).tolist() for name, each in seen.items()}


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_few_steps_are_as_near(family, tmp_path, monkeypatch):
    """The loss has the very bits: a narrow norm makes what a cast of the stock one's makes."""
    folder = tiny_family_folder(family, tmp_path)
    found = distances(folder, 0, 2, monkeypatch)
    assert found["ours"][0] == found["stock"][0] > 0
    assert 1e-3 < found["ours"][1] <= 1.05 * found["stock"][1]


def test_a_norm_that_loses_bits_is_found(tmp_path, monkeypatch):
    """The control: rows rounded to a few bits before they are normed."""

    def coarse(x, *others):
        return rms_norm(x.to(torch.float8_e4m3fn).to(x.dtype), *others)

    folder = tiny_family_folder("qwen2_5_vl", tmp_path)
    found = distances(folder, 0, 1, monkeypatch, norm=coarse)
    assert found["ours"][1] > 1.5 * found["stock"][1]
