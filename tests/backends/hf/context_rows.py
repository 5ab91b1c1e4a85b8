"""Run in ranks: the gradients of each family's rows, which two ranks or more share.

    torchrun --nproc-per-node N context_rows.py FOLDER CONTEXT SHARDING MODELS NAME[@U][+FAULT] ...

MODELS is a folder that has one of each name. U ranks exchange heads. Writes
FOLDER/NAME[@U][+FAULT].json (loss, and what ran) and .safetensors (gradients). A fault is a name of
`FAULTS`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from forecast import traffic as traffic_module
from forecast.traffic import Traffic
from safetensors.torch import save_file
from support.engines import make_engine
from support.shards import mixed_samples, text_samples
from torch import Tensor
from torch.distributed.tensor import DTensor

from vlmpack.backends.hf import context as shared
from vlmpack.backends.hf import ring
from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.packing import Batch, PackCollator, PackedBatch
from vlmpack.training.objective import SFT

ROWS = ([0, 2], [1, 4], [5], [], [3, 5], [])
"""Samples of each: images, text alone, one image, none at all, images, and none at all. Of two
replicas of two ranks one rank has an image of the second row of each, and no other has any."""


def rows_of(folder: Path) -> list[Batch]:
    """The rows of a family, of the same samples for all."""
    encoder = Encoder(folder)
    raw = mixed_samples() if encoder.takes_images else text_samples()
    samples = [encoder.encode(one.cooked()) for one in raw]
    collate = PackCollator(
        pad_token_id=encoder.pad_token_id,
        num_position_axes=encoder.num_position_axes,
        pad_to_multiple_of=8,
    )
    return [collate([samples[number] for number in row if number < len(samples)]) for row in ROWS]


def gradients(engine: Any, rows: Sequence[Batch]) -> tuple[float, dict[str, Tensor]]:
    """The loss of a global batch and its gradients. Collective."""
    ranks: Ranks = engine.ranks
    mine = rows[ranks.dp_rank :: ranks.dp_size]
    reports = engine.forward_backward(SFT.step_with(), iter(mine), num_microbatches=len(mine))
    totals = ranks.sum_over_world(SFT.add_up(reports, ranks.device)["loss_sum"])
    labels = torch.tensor(float(sum(row.num_label_tokens for row in rows)))
    engine.finish_gradients(labels, None)
    whole = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in engine.parameters()
        if p.grad is not None
    }
    return float(totals / labels), {name: value.clone() for name, value in whole.items()}


def other_heads() -> AbstractContextManager[Any]:
    """Each rank's heads come back as its neighbour's."""
    to_slots = shared.HeadExchange.to_slots

    def rolled(self: Any, output: Tensor) -> Tensor:
        return to_slots(self, output).roll(1, dims=1)

    return patch.object(shared.HeadExchange, "to_slots", rolled)


def other_slots() -> AbstractContextManager[Any]:
    """Embeddings, positions and labels are those of the neighbour's slots."""
    usual = shared.slice_for_context

    def sliced(batch: PackedBatch, *, rank: int, size: int, **more: Any) -> PackedBatch:
        row = usual(batch, rank=rank, size=size, **more)
        other = usual(batch, rank=(rank + 1) % size, size=size, **more)
        assert row.context is not None and other.context is not None
        return replace(row, context=replace(other.context, rank=rank))

    return patch.object(shared, "slice_for_context", sliced)


def twice() -> AbstractContextManager[Any]:
    """The tower's gradients are counted twice."""
    usual = shared.gather_features

    def gathered(local: Tensor, *of: Any, **more: Any) -> Tensor:
        return usual(2 * local - local.detach(), *of, **more)

    return patch.object(shared, "gather_features", gathered)


def own_positions() -> AbstractContextManager[Any]:
    """Positions are those of the shard: 0, 1, 2 ... of each rank's slots."""
    usual = shared.slice_for_context

    def sliced(batch: PackedBatch, **more: Any) -> PackedBatch:
        row = usual(batch, **more)
        assert row.context is not None
        own, positions = row.context.row_index, row.position_ids.clone()
        positions[..., own] = torch.arange(own.numel())
        return replace(row, position_ids=positions)

    return patch.object(shared, "slice_for_context", sliced)


def owners_part() -> AbstractContextManager[Any]:
    """The tower gets the gradients of its own rank's tokens alone."""
    usual = shared.gather_features
    alone = SimpleNamespace(size=lambda: 1)

    def gathered(*of: Any, **more: Any) -> Tensor:
        return usual(*of, **{**more, "cp_group": alone})

    return patch.object(shared, "gather_features", gathered)


def forgotten_boundary() -> AbstractContextManager[Any]:
    """The last rank does not see where the first sample of a row ends."""
    usual = PackedBatch.packed_seq_params

    def joined(self: PackedBatch) -> Any:
        part, lengths = self.context, self.segment_lengths
        if part is None or part.rank != part.size - 1 or len(self.lengths) < 2:
            return usual(self)
        ends = torch.cat([self.cu_seqlens[:1], self.cu_seqlens[2:]])
        return usual(
            replace(
                self,
                cu_seqlens=ends,
                cu_seqlens_padded=None,
                segment_lengths=(lengths[0] + lengths[1], *lengths[2:]),
            )
        )

    return patch.object(PackedBatch, "packed_seq_params", joined)


def joined_keys() -> AbstractContextManager[Any]:
    """The last rank of the ring does not see where the first sample of a row ends in its own
    keys."""
    usual = ring.RingRow.sight

    def sight(self: Any, reader: int, owner: int, window: int | None) -> ring.Sight:
        if not reader == owner == self.group.size() - 1 or len(self.lengths) < 2:
            return usual(self, reader, owner, window)
        cut = (sum(self.lengths),) if self.by_row else self.lengths
        slots = ring.zigzag_index(cut, rank=reader, size=self.group.size())
        lengths = torch.tensor(self.lengths)
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        starts[: sum(self.lengths[:2])] = 0
        return ring.Sight.of(slots, slots, starts, window, self.device)

    return patch.object(ring.RingRow, "sight", sight)


def other_channels() -> AbstractContextManager[Any]:
    """The weights of each rank's channels and heads are its neighbour's."""
    usual = shared.HeadExchange.own

    def rolled(self: Any, channels: Tensor) -> Tensor:
        return usual(self, channels.roll(channels.shape[0] // self.group.size(), dims=0))

    return patch.object(shared.HeadExchange, "own", rolled)


def skipped_block() -> AbstractContextManager[Any]:
    """The last rank of the ring skips the keys of the first, which a segment crosses."""
    usual = ring.RingRow.sight

    def sight(self: Any, reader: int, owner: int, window: int | None) -> ring.Sight:
        found = usual(self, reader, owner, window)
        if (reader, owner) != (self.group.size() - 1, 0):
            return found
        return replace(found, queries=found.queries[:0], keys=found.keys[:0], tiles=())

    return patch.object(ring.RingRow, "sight", sight)


def other_blocks() -> AbstractContextManager[Any]:
    """Each reader takes the first rank's keys to be in another order."""
    usual = ring.RingRow.sight

    def sight(self: Any, reader: int, owner: int, window: int | None) -> ring.Sight:
        found = usual(self, reader, owner, window)
        return replace(found, keys=found.keys.roll(len(found.keys) // 2)) if owner == 0 else found

    return patch.object(ring.RingRow, "sight", sight)


def no_mask() -> AbstractContextManager[Any]:
    """Queries of a tile see all of its keys."""
    usual = ring._tiles

    def tiles(*of: Any) -> Any:
        return ((*tile[:4], False) for tile in usual(*of))

    return patch.object(ring, "_tiles", tiles)


def by_segments() -> AbstractContextManager[Any]:
    """No fault: each segment is cut, whatever it costs. Rows as short as these are cut whole."""
    return patch.object(shared, "cuts_by_row", lambda lengths, **_: False)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "other heads": other_heads,
    "other channels": other_channels,
    "other slots": other_slots,
    "own positions": own_positions,
    "owner's part": owners_part,
    "twice": twice,
    "forgotten boundary": forgotten_boundary,
    "joined keys": joined_keys,
    "skipped block": skipped_block,
    "other blocks": other_blocks,
    "no mask": no_mask,
    "by segments": by_segments,
}


LEAKING = ("forgotten boundary", "joined keys")
"""Faults by which a segment sees another."""


def leaks(engine: Any, row: Any) -> list[float]:
    """How far the losses of each segment move with the tokens of the others, over all ranks. The
    last one is how far they move with its own. Collective."""
    spans = list(pairwise(accumulate(row.segment_lengths, initial=0)))

    def losses(batch: Any) -> list[Tensor]:
        part = engine.context.part_of(batch)
        with torch.no_grad():
            found = engine.vlm(part, part.packed_seq_params())
        slots = part.context.row_index[part.context.label_positions]
        return [found[(slots >= start) & (slots < stop)] for start, stop in spans]

    def moved(batch: Any, number: int) -> float:
        change = (losses(batch)[number] - usual[number]).abs().sum().reshape(1)
        return float(engine.ranks.sum_over_world(change))

    usual = losses(row)
    found = []
    for number, (start, stop) in enumerate(spans):
        ids = row.input_ids.flip(1)
        ids[:, start:stop] = row.input_ids[:, start:stop]
        found.append(moved(replace(row, input_ids=ids), number))
    return [*found, moved(replace(row, input_ids=row.input_ids.flip(1)), 0)]


def main(folder: Path, size: int, sharding: str, models: Path, cases: list[str]) -> None:
    ranks = start_process_group(context=size)
    for case in cases:
        which, _, fault = case.partition("+")
        name, _, heads = which.partition("@")
        model = models / name
        encoder, rows = Encoder(model), rows_of(model)
        with FAULTS[fault]():
            split = {"context": size, "context_heads": int(heads) if heads else None}
            engine = make_engine(model, encoder, ranks=ranks, sharding=sharding, **split)
            group = engine.context
            groups = SimpleNamespace(cp=group.group, cp_heads=group.heads, cp_ring=group.ring)
            counted = SimpleNamespace(groups=groups)
            with patch.object(traffic_module, "SMALL", 0), Traffic(counted) as traffic:
                loss, ours = gradients(engine, rows)
            text = next(row for row in rows if len(row.keys) > 1 and row.media is None)
            looked = fault in ("", "by segments", *LEAKING)
            seen = leaks(engine, text) if sharding == "none" and looked else []
        by_ring = torch.tensor(float(traffic.bytes["CP ring", "send"]))
        by_ring = ranks.sum_over_world(by_ring) / ranks.dp_size
        if ranks.is_main:
            facts = {"loss": loss, **engine.description}
            sent = {
                kind: [traffic.calls[group, kind], traffic.bytes[group, kind]]
                for group, kind in traffic.calls
                if group.startswith("CP")
            }
            facts |= {"sent": sent, "slots": sum(row.input_ids.numel() for row in rows)}
            facts |= {"by_ring": float(by_ring), "leaks": seen, "slot": group.slot}
            facts["images"] = [row.media.num_images if row.media is not None else 0 for row in rows]
            facts["lengths"] = [row.segment_lengths for row in rows]
            (folder / f"{case}.json").write_text(json.dumps(facts))
            save_file(ours, folder / f"{case}.safetensors")
    stop_process_group()


if __name__ == "__main__":
    to, count, way, of, *given = sys.argv[1:]
    main(Path(to), int(count), way, Path(of), given)
