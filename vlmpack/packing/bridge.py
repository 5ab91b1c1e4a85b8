"""A padded batch that other code already holds -> one packed row.

The arguments are those of Megatron-Bridge's in-batch packing. Its bugs are the reason for every
check below. It guessed real lengths from the pad id, dropped real tokens of left-padded rows, and
lost rows of padding alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmpack.errors import PackingError
from vlmpack.packing.batch import IGNORE_INDEX, PackedBatch
from vlmpack.packing.collate import pack_rows, require_tensor
from vlmpack.packing.row_layout import RowLayout


def pack_padded_batch(
    tokens: Tensor,
    labels: Tensor | None,
    loss_mask: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    *,
    lengths: Tensor | None = None,
    pad_token_id: int = 0,
    pad_to_multiple_of: int = 1,
    padding_mask: Tensor | None = None,
) -> PackedBatch:
    """Pack the rows of a right-padded batch into one THD row.

    Args:
        tokens: (B, S) int64.
        labels: (B, S) int64, already shifted. None, with `loss_mask` None, on pipeline stages
            without a loss. The row is then the same, with every label IGNORE_INDEX.
        loss_mask: (B, S), 1 where a token has loss and 0 elsewhere. It alone decides; a label where
            it is 0 is ignored.
        attention_mask: (B, S), 1 = real, or None.
        position_ids: (B, S) or (A, B, S) int64.
        lengths: (B,) real lengths; or give exactly one mask.
        pad_token_id: fills alignment gaps. It is never compared with the tokens.
        pad_to_multiple_of: multiple of each segment (2*CP under context parallelism).
        padding_mask: (B, S), 1 = real, Megatron-Bridge's name for the same mask.

    Returns:
        The row; keys are "row-0", "row-1", ...

    Raises:
        PackingError: shapes that disagree; neither or both masks without `lengths`; a mask that is
            not two-dimensional, is left-padded, has a hole or an empty row, or disagrees with
            `lengths`; loss on padding or on an ignored label; labels without a loss mask, or a
            loss mask without labels.
    """
    given = {
        "tokens": tokens,
        "position_ids": position_ids,
        "labels": labels,
        "loss_mask": loss_mask,
        "attention_mask": attention_mask,
        "padding_mask": padding_mask,
        "lengths": lengths,
    }
    for name, value in given.items():
        if value is not None or name in ("tokens", "position_ids"):
            require_tensor(name, value)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise PackingError(
            f"tokens must be (B, S) with B, S >= 1, found shape {tuple(tokens.shape)}"
        )
    labels, loss_mask = _both_or_neither(labels, loss_mask, tokens)
    for name, value in (("labels", labels), ("loss_mask", loss_mask)):
        if value.shape != tokens.shape:
            raise PackingError(
                f"{name} has shape {tuple(value.shape)}, expected {tuple(tokens.shape)} like tokens"
            )
    positions = _positions_of(position_ids, tokens)
    real = _real_lengths(tokens, attention_mask, padding_mask, lengths)
    clean_labels = _labels_where_loss(labels, loss_mask, real)
    return pack_rows(
        [tokens[row, :n] for row, n in enumerate(real)],
        [clean_labels[row, :n] for row, n in enumerate(real)],
        [positions[:, row, :n] for row, n in enumerate(real)],
        layout=RowLayout(lengths=real, pad_to_multiple_of=pad_to_multiple_of),
        pad_token_id=pad_token_id,
        keys=tuple(f"row-{row}" for row in range(len(real))),
    )


def _positions_of(position_ids: Tensor, tokens: Tensor) -> Tensor:
    """(A, B, S), of as many axes as there are."""
    positions = position_ids[None] if position_ids.ndim == 2 else position_ids
    if positions.ndim != 3 or positions.shape[1:] != tokens.shape:
        rows, width = tokens.shape
        raise PackingError(
            f"position_ids have shape {tuple(position_ids.shape)}, expected {tuple(tokens.shape)} "
            f"or (A, {rows}, {width})"
        )
    return positions


def _both_or_neither(
    labels: Tensor | None, loss_mask: Tensor | None, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Labels and loss mask; without any loss where neither is given."""
    if labels is not None and loss_mask is not None:
        return labels, loss_mask
    if labels is None and loss_mask is None:
        return torch.full_like(tokens, IGNORE_INDEX), torch.zeros_like(tokens)
    given, missing = ("labels", "loss_mask") if loss_mask is None else ("loss_mask", "labels")
    raise PackingError(
        f"{given} without {missing}: give both, or neither (None) on a pipeline stage that has no "
        f"loss; which tokens have loss is never guessed"
    )


def _real_lengths(
    tokens: Tensor,
    attention_mask: Tensor | None,
    padding_mask: Tensor | None,
    lengths: Tensor | None,
) -> tuple[int, ...]:
    """One length per row, from `lengths` or the one mask, both checked against each other."""
    rows, width = tokens.shape
    masks = {"attention_mask": attention_mask, "padding_mask": padding_mask}
    given = {name: mask for name, mask in masks.items() if mask is not None}
    if len(given) > 1:
        raise PackingError("give attention_mask or padding_mask, not both: they say the same")
    from_lengths: tuple[int, ...] | None = None
    if lengths is not None:
        if lengths.shape != (rows,):
            raise PackingError(
                f"lengths has shape {tuple(lengths.shape)}, expected ({rows},), one per row"
            )
        from_lengths = tuple(int(n) for n in lengths.tolist())
        for row, n in enumerate(from_lengths):
            if not 1 <= n <= width:
                raise PackingError(
                    f"row {row}: length {n} is not in 1..{width} (the width of tokens)"
                )
    if not given:
        if from_lengths is None:
            raise PackingError(
                "real lengths are unknown: pass lengths=, or one 2-D attention_mask or "
                "padding_mask (1 = real); they are never guessed from pad_token_id"
            )
        return from_lengths
    ((name, mask),) = given.items()
    from_mask = _lengths_of_mask(name, mask, tokens)
    if from_lengths is not None and from_lengths != from_mask:
        row = next(
            i for i, (a, b) in enumerate(zip(from_lengths, from_mask, strict=True)) if a != b
        )
        raise PackingError(
            f"row {row}: lengths says {from_lengths[row]} tokens, {name} says {from_mask[row]}"
        )
    return from_mask


def _lengths_of_mask(name: str, mask: Tensor, tokens: Tensor) -> tuple[int, ...]:
    if mask.ndim != 2 or mask.shape != tokens.shape:
        raise PackingError(
            f"{name} has shape {tuple(mask.shape)}, expected {tuple(tokens.shape)}: a 2-D mask "
            f"with 1 = real (a 4-D attention mask does not say where rows end; pass lengths=)"
        )
    ones = mask != 0
    if bool(((mask != 0) & (mask != 1)).any()):
        raise PackingError(f"{name} must hold only 0 and 1 (1 = real token)")
    counts = ones.sum(dim=1)
    right_padded = torch.arange(tokens.shape[1], device=mask.device)[None] < counts[:, None]
    for row in range(tokens.shape[0]):
        if int(counts[row]) == 0:
            raise PackingError(f"row {row}: {name} marks no real token; drop the row")
        if not torch.equal(ones[row], right_padded[row]):
            kind = "padded at the left" if not bool(ones[row, 0]) else "has a hole"
            raise PackingError(
                f"row {row}: {name} {kind}; real tokens must come first, then the padding"
            )
    return tuple(int(n) for n in counts.tolist())


def _labels_where_loss(labels: Tensor, loss_mask: Tensor, real: tuple[int, ...]) -> Tensor:
    """(B, S) labels with IGNORE_INDEX wherever the loss mask is 0."""
    if bool(((loss_mask != 0) & (loss_mask != 1)).any()):
        raise PackingError("loss_mask must hold only 0 and 1; weights per token are not supported")
    on = loss_mask != 0
    if bool((on & (labels == IGNORE_INDEX)).any()):
        raise PackingError(
            f"loss_mask is 1 on a token whose label is {IGNORE_INDEX}: nothing to predict there"
        )
    for row, n in enumerate(real):
        if bool(on[row, n:].any()):
            raise PackingError(f"row {row}: loss_mask is 1 on padding (beyond {n} real tokens)")
    return torch.where(on, labels, torch.full_like(labels, IGNORE_INDEX))
