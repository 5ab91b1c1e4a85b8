"""Masks of segments in which the tokens of an image see one another in both directions.

One segment with a block of three tokens. A row is a query, and 1 marks a key that it sees:

    a b I I I c             with a window of 3
    1 . . . . .             1 . . . . .
    1 1 . . . .             1 1 . . . .
    1 1 1 1 1 .             1 1 1 1 1 .
    1 1 1 1 1 .             . 1 1 1 1 .
    1 1 1 1 1 .             . . 1 1 1 .
    1 1 1 1 1 1             . . . 1 1 1

A window hides keys that lie that many tokens back or more, inside a block too, but nothing that
lies ahead. The rule is window AND (causal OR same block), as in `create_masks_for_vision_model` of
transformers' Gemma 3. Gemma 4 applies it in layers with a window, and its other layers are causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from vlmpack.packing.batch import Span


class BlockMasks:
    """The masks of one micro-batch, each made when a layer first asks for it and read by the rest.

    Args:
        segment_lengths: physical lengths of the row's segments, or the widths of padded rows.
        blocks: where blocks lie in the flattened row, in order.
        in_windows_alone: whether a layer without a sliding window is causal inside blocks too.

    Raises:
        ValueError: a block that is not inside one segment.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        blocks: Sequence[Span],
        device: torch.device,
        *,
        in_windows_alone: bool = False,
    ) -> None:
        self.lengths = tuple(segment_lengths)
        self.of_segment = _by_segment(self.lengths, blocks)
        self._device = device
        self._in_windows_alone = in_windows_alone
        self._made: dict[tuple[int, tuple[Span, ...], int | None], Tensor] = {}
        self._rows: dict[int | None, Tensor | None] = {}

    @property
    def is_causal(self) -> bool:
        """Whether layers without a sliding window are causal throughout."""
        return self._in_windows_alone or not any(self.of_segment)

    def mask(self, length: int, blocks: tuple[Span, ...], window: int | None) -> Tensor | None:
        """(length, length) bool, True where a query (row) sees a key; None where plain causal
        attention is the same.

        Args:
            length: of the segment.
            blocks: an entry of `of_segment`, counted from the segment's start.
            window: sliding window in tokens, the token itself included; None for none.
        """
        if window is None and self._in_windows_alone:
            blocks = ()
        if window is not None and window >= length:
            window = None
        if not blocks and window is None:
            return None
        made = self._made.get((length, blocks, window))
        if made is None:
            made = torch.ones(length, length, dtype=torch.bool, device=self._device).tril_()
            for start, stop in blocks:
                made[start:stop, start:stop] = True
            if window is not None:
                made.triu_(1 - window)
            self._made[length, blocks, window] = made
        return made

    def rows(self, window: int | None) -> Tensor | None:
        """(B, 1, S, S) bool masks of padded rows; None where plain causal attention is the same."""
        if window not in self._rows:
            self._rows[window] = self._stacked(window)
        return self._rows[window]

    def _stacked(self, window: int | None) -> Tensor | None:
        masks = [
            self.mask(length, blocks, window)
            for length, blocks in zip(self.lengths, self.of_segment, strict=True)
        ]
        if all(mask is None for mask in masks):
            return None
        width = self.lengths[0]
        causal = torch.ones(width, width, dtype=torch.bool, device=self._device).tril_()
        return torch.stack([causal if mask is None else mask for mask in masks])[:, None]


def _by_segment(lengths: Sequence[int], blocks: Sequence[Span]) -> tuple[tuple[Span, ...], ...]:
    """The blocks of each segment, counted from its start."""
    spans: list[tuple[Span, ...]] = []
    place = 0
    for start, end in pairwise(accumulate(lengths, initial=0)):
        inside: list[Span] = []
        while place < len(blocks) and blocks[place][0] < end:
            first, stop = blocks[place]
            if first < start or stop > end:
                raise ValueError(
                    f"an image's tokens, slots {first} to {stop - 1}, are not inside one segment: "
                    f"the nearest is {start} to {end - 1}"
                )
            inside.append((first - start, stop - start))
            place += 1
        spans.append(tuple(inside))
    if place < len(blocks):
        raise ValueError(
            f"an image's tokens start at slot {blocks[place][0]}, behind the row's "
            f"{sum(lengths)} slots"
        )
    return tuple(spans)
