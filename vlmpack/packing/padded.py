"""Samples of one bin -> padded rows: mode `none`, the baseline. A pair is two rows, one below the
other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmpack.alignment import round_up
from vlmpack.errors import PackingError
from vlmpack.packing.batch import IGNORE_INDEX, EncodedSample, PaddedBatch
from vlmpack.packing.collate import check_sample
from vlmpack.packing.media import each_once, image_blocks
from vlmpack.packing.pairs import sequences_of, with_pairs


def pad_batch_sequences(
    samples: Sequence[EncodedSample], *, pad_token_id: int, pad_to_multiple_of: int = 1
) -> PaddedBatch:
    """Pad samples at the right to one width: mode `none`.

    Args:
        samples: at least one; each with its labels already shifted.
        pad_token_id: the id that fills rows.
        pad_to_multiple_of: the width S becomes a multiple of this.

    Returns:
        (B, S) rows, S being the longest sequence rounded up.

    Raises:
        PackingError: as `pack_batch_sequences`.
    """
    if not samples:
        raise PackingError("nothing to pad: the list of samples is empty")
    for sample in samples:
        check_sample(sample)
    parts = [part for sample in samples for part in sequences_of(sample)]
    width = round_up(max(part.length for part in parts), pad_to_multiple_of)

    def rows(pieces: list[Tensor], fill: int) -> Tensor:
        out = pieces[0].new_full((*pieces[0].shape[:-1], len(pieces), width), fill)
        for row, piece in enumerate(pieces):
            out[..., row, : piece.shape[-1]] = piece
        return out

    labels = rows([part.labels for part in parts], IGNORE_INDEX)
    loss_mask = labels != IGNORE_INDEX
    slots = torch.cat([part.media_positions + row * width for row, part in enumerate(parts)])
    media, sources = each_once([part.media for part in parts])
    batch = PaddedBatch(
        input_ids=rows([part.input_ids for part in parts], pad_token_id),
        labels=labels,
        loss_mask=loss_mask,
        position_ids=rows([part.position_ids for part in parts], 0),
        label_positions=loss_mask.flatten().nonzero().squeeze(1),
        media=media,
        media_positions=slots,
        keys=tuple(s.key for s in samples),
        lengths=tuple(part.length for part in parts),
        image_blocks=image_blocks([part.media for part in parts], slots),
        media_sources=sources,
    )
    return with_pairs(batch, samples, parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PadCollator:
    """Mode `none`: the samples of one bin become rows of one width.

    Args:
        pad_token_id: fills rows.
        num_position_axes: A, for empty bins.
        pad_to_multiple_of: multiple of the width.
    """

    pad_token_id: int
    num_position_axes: int
    pad_to_multiple_of: int = 1

    @property
    def fixed(self) -> None:
        """Padded rows are as wide as their longest sample."""

    def __call__(self, samples: Sequence[EncodedSample]) -> PaddedBatch:
        """Pad one bin; an empty one becomes `empty()`."""
        if not samples:
            return self.empty()
        return pad_batch_sequences(
            samples, pad_token_id=self.pad_token_id, pad_to_multiple_of=self.pad_to_multiple_of
        )

    def empty(self) -> PaddedBatch:
        """One row of padding without a label, so that collectives stay aligned."""
        width = self.pad_to_multiple_of
        return PaddedBatch(
            input_ids=torch.full((1, width), self.pad_token_id),
            labels=torch.full((1, width), IGNORE_INDEX),
            loss_mask=torch.zeros(1, width, dtype=torch.bool),
            position_ids=torch.zeros(self.num_position_axes, 1, width, dtype=torch.int64),
            label_positions=torch.empty(0, dtype=torch.int64),
            media=None,
            media_positions=torch.empty(0, dtype=torch.int64),
            keys=(),
            lengths=(),
        )
