"""A packed preference step (DPO) against a padded one: same pairs, same weights, one run.

V is the time that padding does not touch (the tower, the optimizer), L the packed language model's
from embeddings to the loss and back, r = padded slots / packed slots; V is what the packed step
takes beyond L, so both are of this run. Packing removes padding and nothing else, so a step is at
best (V + L r) / (V + L) times as fast. The tower's calls are counted: images that it was given,
over those of the pairs; a trainer that encodes each answer by itself has 2.

The same pairs in rows where the answers share their prompt: how much faster the step is, beside how
many tokens are saved. All in CPU seconds: what an idle core takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from bench_step import batches_of, build, language_only
from models import ROOT
from models import TINY as MODEL
from timing import against_ideal, processor_medians
from torch import nn

from vlmpack.backends.hf.model import PackedVLM
from vlmpack.data.modes import InBatch
from vlmpack.encode import Encoder
from vlmpack.packing import Batch, PackCollator
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training.preference import PreferenceSums

PAIRS = str(ROOT / "assets" / "pairs" / "train-*.tar")
SUMS = PreferenceSums(section=ObjectiveSection(name="dpo"))
MOST_DIFFERENCE = 1e-4
"""Of the loss, relative: the padded step computes the same."""


class SharedPrefixes(InBatch):
    """Mode `in_batch` whose rows hold the prompt of a pair once."""

    def collator(self, *, pad_token_id: int, num_position_axes: int) -> PackCollator:
        """See PackingMode."""
        return PackCollator(
            pad_token_id=pad_token_id, num_position_axes=num_position_axes, share_prefix=True
        )


def with_reference(batches: Sequence[Batch]) -> list[Batch]:
    """The same with a reference that knows nothing, as it costs nothing."""
    return [
        replace(batch, reference=torch.zeros(len(batch.lengths), dtype=torch.float64))
        for batch in batches
    ]


def loss_of(vlm: PackedVLM, batch: Batch) -> torch.Tensor:
    """0-d: summed over the pairs of a micro-batch."""
    return SUMS(vlm(batch, batch.packed_seq_params()), batch)["loss_sum"]


def whole_step(vlm: PackedVLM, batches: Sequence[Batch]) -> Callable[[], None]:
    """Forward, loss, backward, clipping and the optimizer, of each micro-batch."""
    optimizer = torch.optim.AdamW(vlm.parameters(), lr=0.0, fused=True)

    def run() -> None:
        for batch in batches:
            optimizer.zero_grad(set_to_none=True)
            loss_of(vlm, batch).backward()
            nn.utils.clip_grad_norm_(vlm.parameters(), 1.0)
            optimizer.step()

    return run


def tower_calls(vlm: PackedVLM, batches: Sequence[Batch]) -> float:
    """Times that the tower is given an image of a pair, forward pass by forward pass."""
    seen: list[int] = []

    def count(_module: nn.Module, _args: Any, given: Any) -> None:
        seen.append(len(given["tower_inputs"].images.lengths))

    with (
        torch.no_grad(),
        vlm.vision.register_forward_pre_hook(count, with_kwargs=True),
    ):
        for batch in batches:
            vlm(batch, batch.packed_seq_params())
    return sum(seen) / sum(batch.media.num_images for batch in batches if batch.media is not None)


def bench_preference(
    rounds: int, *, width: int | None, micro_batch_size: int = 8
) -> dict[str, object]:
    """Packed against padded and shared against separate prefixes; how often the tower runs."""
    encoder = Encoder(MODEL).replace(pairs=True)
    vlm = build(encoder, width=width)
    packed, padded = (
        with_reference(batches_of(encoder, mode, micro_batch_size, 3, PAIRS))
        for mode in ("in_batch", "none")
    )
    shared = with_reference(
        batches_of(
            encoder.replace(share_prefix=True),
            "in_batch",
            micro_batch_size,
            3,
            PAIRS,
            kind=SharedPrefixes,
        )
    )
    layouts = (packed, padded, shared)
    assert all([b.keys for b in own] == [b.keys for b in packed] for own in layouts), "other pairs"
    with torch.no_grad():
        losses = [sum(float(loss_of(vlm, batch)) for batch in own) for own in layouts]
    for loss in losses[1:]:
        assert abs(losses[0] - loss) < MOST_DIFFERENCE * losses[0], f"losses differ: {losses}"
    seconds = processor_medians(
        {
            "language_packed": language_only(vlm, packed),
            "language_padded": language_only(vlm, padded),
            "step_packed": whole_step(vlm, packed),
            "step_padded": whole_step(vlm, padded),
            "step_shared": whole_step(vlm, shared),
        },
        rounds=rounds,
    )
    figures = against_ideal(
        seconds,
        num_batches=len(packed),
        real_tokens=sum(batch.num_slots for batch in packed),
        padded_slots=sum(batch.num_slots for batch in padded),
    )
    return {
        "model": "tiny-qwen2_5_vl" if width is None else f"its shape, width {width}, 8 layers",
        "pairs_a_micro_batch": micro_batch_size,
        "tower_calls_a_pair": tower_calls(vlm, packed),
        "tokens_separate_over_shared": (
            sum(batch.num_slots for batch in packed) / sum(batch.num_slots for batch in shared)
        ),
        "step_shared_speedup": seconds["step_packed"] / seconds["step_shared"],
    } | figures
