"""Every family takes adapters: every one of them is asked, and the merged folder is the model."""

from __future__ import annotations

import pytest
import torch
from support.engines import make_engine, make_stepper, policy
from support.families import FAMILIES, TEXT_FAMILIES, TINY, tiny_family_folder
from support.runs import GRADIENT_TOLERANCE, relative_l2
from support.shards import text_samples
from support.stock import StockProcessor

from vlmpack.encode import Encoder
from vlmpack.packing import PackCollator

OFTEN = ("qwen3_vl_moe", "gemma3", "llava_onevision", "llama")
"""Experts, tied embeddings, an unused layer with a bare parameter, and no tower."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in OFTEN else pytest.mark.soak)
        for name in FAMILIES
    ],
)
def test_every_adapter_has_a_gradient_and_merges(name, mixed, tmp_path):
    folder = tiny_family_folder(name, tmp_path / "model")
    encoder = Encoder(folder)
    alone = name in TEXT_FAMILIES
    samples = text_samples() if alone else mixed
    modes = {"language": "lora"} if alone else dict.fromkeys(("vision", "projector"), "lora")
    if not alone and not has_linear_projector(encoder, folder):
        modes["projector"] = "full"
    engine = make_engine(folder, encoder, policy=policy(**(modes | {"language": "lora"})))
    stepper = make_stepper(engine, check=True)
    stepper.schedule = lambda step: 0.01
    collate = PackCollator(
        pad_token_id=encoder.pad_token_id, num_position_axes=encoder.num_position_axes
    )
    batch = collate([encoder.encode(sample.cooked()) for sample in samples])
    for step in range(2):
        stepper.train(step, [batch], num_skipped=0, stop=False)
    groups = [m.group for m in engine.vlm.model.modules() if getattr(m, "group", None)]
    assert groups, "guard"
    assert not [group for group in groups if group.kept], "outputs outlive their forward pass"
    unused = TINY[name].unused if name in TINY else ()
    adapters = {
        n: p
        for n, p in engine.parameters()
        if ".lora_" in n and not any(part in n for part in unused)
    }
    idle = [n for n, p in adapters.items() if p.grad is None or not bool(p.grad.any())]
    assert idle == []
    assert len(adapters) >= 2 * 7
    check_merged(engine, folder, samples, tmp_path)


def has_linear_projector(encoder, folder):
    from vlmpack.backends.hf.adapters import adapter_targets
    from vlmpack.backends.skeleton import model_skeleton
    from vlmpack.errors import CapabilityError

    model = model_skeleton(encoder.family.auto_class(), folder)
    try:
        return bool(adapter_targets(model, encoder.family.modules, policy(projector="lora")))
    except CapabilityError:
        return False


def check_merged(engine, folder, samples, tmp_path):
    """Logits of the exported folder, by transformers alone."""
    engine.export(tmp_path / "merged", processor_from=folder, dtype=None)
    auto = engine.vlm.family.auto_class()
    merged, base = (
        auto.from_pretrained(str(path), dtype=torch.float32).eval()
        for path in (tmp_path / "merged", folder)
    )
    processor = StockProcessor(folder)
    for sample in samples[:2]:
        arguments = processor(sample).arguments()
        with torch.no_grad(), engine.generation() as trained:
            ours = trained(**arguments).logits
            assert relative_l2(merged(**arguments).logits, ours) < GRADIENT_TOLERANCE
            assert relative_l2(base(**arguments).logits, ours) > 1e-3, "no lesson"
