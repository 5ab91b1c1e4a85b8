"""A packed training step against a padded one: same samples, same weights, one run.

V is the time that padding does not touch (the vision tower, the optimizer), L the packed language
model's from embeddings to the loss and back, r = padded / real tokens. Packing removes padding and
nothing else, so the best possible speed-up of a step is (V + L r) / (V + L), and of L alone r.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from models import ROOT, wide_model
from models import TINY as MODEL
from timing import against_ideal, medians
from torch import nn

from vlmpack.alignment import Alignment
from vlmpack.attention import choose_attention
from vlmpack.backends.cross_entropy import linear_cross_entropy
from vlmpack.backends.hf.attention import register_attention
from vlmpack.backends.hf.load import load_model
from vlmpack.backends.hf.model import MergedInputs, PackedVLM
from vlmpack.data.config import DataConfig
from vlmpack.data.modes import MODES, PackingMode
from vlmpack.data.pipeline import TrainData
from vlmpack.encode import Encoder
from vlmpack.packing import Batch
from vlmpack.packing.budget import RowBudget
from vlmpack.recipe.data import DataSection
from vlmpack.recipe.schema import ModeName, PackingSection, TrainingSection
from vlmpack.recipe.sources import Source

SHARDS = str(ROOT / "assets" / "digits" / "train-*.tar")


def build(encoder: Encoder, *, width: int | None) -> PackedVLM:
    """The tiny model, or one of its shape with a wider, deeper, untrained language model."""
    model = load_model(MODEL) if width is None else wide_model(width)
    choice = choose_attention("auto", device=torch.device("cpu"), dtype=torch.float32)
    language = model.get_submodule(encoder.family.modules.language)
    language.set_attn_implementation(register_attention(choice))
    return PackedVLM(model, encoder.family, encoder.image_rule.smallest()).train()


def batches_of(
    encoder: Encoder,
    mode: ModeName,
    micro_batch_size: int,
    count: int,
    shards: str = SHARDS,
    kind: type[PackingMode] | None = None,
) -> list[Batch]:
    config = DataConfig(
        data=DataSection(train=(Source(name="digits", path=shards),), num_workers=0),
        training=TrainingSection(
            micro_batch_size=micro_batch_size, global_batch_size=micro_batch_size, seq_length=4096
        ),
        mode=(kind or MODES[mode])(
            packing=PackingSection(mode=mode),
            budget=RowBudget(max_tokens=4096),
            multiples=Alignment(1, 1),
        ),
    )
    data = TrainData.open(config, encoder)
    steps = data.batches(data.start(), rank=0, dp=1, max_steps=count)
    return [micro.batch for step in steps for micro in step.micro_batches]


def language_only(vlm: PackedVLM, batches: list[Batch]) -> Callable[[], None]:
    """Embeddings -> decoder -> head -> loss -> back to the embeddings."""
    embeds = [vlm.merge(batch).embeds.detach().requires_grad_() for batch in batches]

    def run() -> None:
        vlm.zero_grad(set_to_none=True)
        for batch, embed in zip(batches, embeds, strict=True):
            hidden = vlm.decode(batch, batch.packed_seq_params(), MergedInputs(embed))
            picked = hidden.index_select(0, batch.label_positions)
            targets = batch.labels.flatten().index_select(0, batch.label_positions)
            weight = vlm.model.get_output_embeddings().weight
            linear_cross_entropy(picked, weight, targets).sum().backward()

    return run


def _whole_step(vlm: PackedVLM, batches: list[Batch]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(vlm.parameters(), lr=0.0, fused=True)

    def run() -> None:
        for batch in batches:
            optimizer.zero_grad(set_to_none=True)
            vlm(batch, batch.packed_seq_params()).sum().backward()
            nn.utils.clip_grad_norm_(vlm.parameters(), 1.0)
            optimizer.step()

    return run


def bench_step(rounds: int, *, width: int | None, micro_batch_size: int = 16) -> dict[str, object]:
    """Packed against padded, whole step and language model alone."""
    encoder = Encoder(MODEL)
    vlm = build(encoder, width=width)
    packed = batches_of(encoder, "in_batch", micro_batch_size, 3)
    padded = batches_of(encoder, "none", micro_batch_size, 3)
    assert [b.keys for b in packed] == [b.keys for b in padded], "not the same samples"
    with torch.no_grad():
        losses = [
            float(sum(vlm(b, b.packed_seq_params()).sum() for b in batches))
            for batches in (packed, padded)
        ]
    assert abs(losses[0] - losses[1]) < 1e-4 * losses[0], f"losses differ: {losses}"
    seconds = medians(
        {
            "language_packed": language_only(vlm, packed),
            "language_padded": language_only(vlm, padded),
            "step_packed": _whole_step(vlm, packed),
            "step_padded": _whole_step(vlm, padded),
        },
        rounds=rounds,
    )
    figures = against_ideal(
        seconds,
        num_batches=len(packed),
        real_tokens=sum(batch.num_tokens for batch in packed),
        padded_slots=sum(batch.num_slots for batch in padded),
    )
    return {
        "model": "tiny-qwen2_5_vl" if width is None else f"its shape, width {width}, 8 layers",
        "micro_batch_size": micro_batch_size,
    } | figures
