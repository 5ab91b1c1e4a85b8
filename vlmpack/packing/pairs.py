"""Pairs of sequences that share their images: one sample, two segments of a row.

Rollouts have a sequence a sample, and what was known when it was drawn.

chosen, rejected           <image> What is it?  A cat.     <image> What is it?  A dog.
the pair                   c c c c c c c c c | r r r r r r r r r    sequences (9, 9)
images, features           once, f0 f1 f2
media_positions            0 1 2 9 10 11                    placed in both
media_sources of its row   0 1 2 0 1 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from vlmpack.errors import PackingError
from vlmpack.packing.batch import (
    IGNORE_INDEX,
    Batch,
    BatchT,
    DrawnAnswer,
    EncodedSample,
    ImageOwners,
    Media,
    PackedBatch,
    Rollouts,
)
from vlmpack.packing.image_owners import select_images


def join_pair(chosen: EncodedSample, rejected: EncodedSample) -> EncodedSample:
    """One sample of two sequences, which show the same images."""
    assert chosen.media is rejected.media
    both = (chosen, rejected)
    return EncodedSample(
        key=chosen.key,
        input_ids=torch.cat([each.input_ids for each in both]),
        labels=torch.cat([each.labels for each in both]),
        position_ids=torch.cat([each.position_ids for each in both], dim=1),
        media=chosen.media,
        media_positions=torch.cat(
            [chosen.media_positions, rejected.media_positions + chosen.length]
        ),
        sequences=(chosen.length, rejected.length),
    )


def sequences_of(sample: EncodedSample) -> tuple[EncodedSample, ...]:
    """Each sequence of a sample by itself, with all images of the sample.

    Raises:
        PackingError: sequences that are not the sample's tokens.
    """
    lengths = sample.sequences
    if not lengths:
        return (sample,)
    if sum(lengths) != sample.length or min(lengths) < 1 or len(lengths) != 2:
        raise PackingError(
            f"sample {sample.key!r}: sequences of {lengths} tokens, expected two that sum to its "
            f"{sample.length} input_ids"
        )
    ends = [*accumulate(lengths)]
    sequences = []
    for start, end in zip((0, *ends), ends, strict=False):
        places = sample.media_positions
        own = places[(places >= start) & (places < end)] - start
        sequences.append(
            replace(
                sample,
                input_ids=sample.input_ids[start:end],
                labels=sample.labels[start:end],
                position_ids=sample.position_ids[:, start:end],
                media_positions=own,
                sequences=(),
            )
        )
    return tuple(sequences)


def with_pairs(
    batch: BatchT, samples: Sequence[EncodedSample], parts: Sequence[EncodedSample]
) -> BatchT:
    """Mark which sequences of a batch form a pair; unchanged where no sample is a pair.

    Raises:
        PackingError: pairs mixed with samples that are none.
    """
    pairs = [sample for sample in samples if sample.sequences]
    if not pairs:
        return batch
    if len(pairs) < len(samples):
        other = next(sample for sample in samples if not sample.sequences)
        raise PackingError(
            f"sample {pairs[0].key!r} is a pair and sample {other.key!r} is none; expected one "
            "kind in a batch"
        )
    return replace(batch, label_sequences=label_sequences(parts))


def with_rollouts(batch: BatchT, samples: Sequence[EncodedSample]) -> BatchT:
    """Add what samplers said of the samples' answers; unchanged where no sample is a rollout.

    Raises:
        PackingError: rollouts mixed with samples that are none, or with other log-probabilities
            than label tokens.
    """
    drawn = [(sample, sample.drawn) for sample in samples if sample.drawn is not None]
    if not drawn:
        return batch
    if len(drawn) < len(samples):
        other = next(sample for sample in samples if sample.drawn is None)
        raise PackingError(
            f"sample {drawn[0][0].key!r} is a rollout and sample {other.key!r} is none; expected "
            "one kind in a batch"
        )
    for sample, answer in drawn:
        count = int((sample.labels != IGNORE_INDEX).sum())
        if answer.log_p.shape != (count,):
            raise PackingError(
                f"sample {sample.key!r}: {count} label tokens, but log-probabilities of the shape "
                f"{tuple(answer.log_p.shape)}; expected one for each"
            )
    temperatures = torch.tensor([one.temperature for _, one in drawn], dtype=torch.float64)
    rollouts = Rollouts(
        sampler=torch.cat([answer.log_p for _, answer in drawn]),
        temperatures=None if bool((temperatures == 1).all()) else temperatures,
        is_raw=any(answer.is_raw for _, answer in drawn),
    )
    return replace(batch, label_sequences=label_sequences(samples), rollouts=rollouts)


def label_sequences(parts: Sequence[EncodedSample]) -> Tensor:
    """(L,) int64: the sequence of each label token of a row."""
    counts = torch.tensor([int((part.labels != IGNORE_INDEX).sum()) for part in parts])
    return torch.repeat_interleave(torch.arange(len(parts)), counts)


def identical_pairs(batch: Batch) -> tuple[int, ...]:
    """The pairs of a batch on CPU whose two sequences are the same tokens, which teach nothing: the
    place of each among the batch's samples."""
    if batch.label_sequences is None:
        return ()
    if isinstance(batch, PackedBatch):
        starts, ids = accumulate(batch.segment_lengths, initial=0), batch.input_ids.flatten()
        tokens = batch.segment_tokens
        whole = [ids[at : at + length] for at, length in zip(starts, tokens, strict=False)]
        if batch.prefix_tree is not None:
            paths = batch.segments_of_sequences
            whole = [torch.cat([whole[place] for place in path]) for path in paths]
    else:
        whole = [row[:length] for row, length in zip(batch.input_ids, batch.lengths, strict=True)]
    pairs = zip(whole[::2], whole[1::2], strict=True)
    return tuple(place for place, pair in enumerate(pairs) if torch.equal(*pair))


def slots_of(batch: Batch, place: int) -> Tensor:
    """(s,) int64, the flattened slots of a sample's tokens, as `EncodedSample` has them.

    Args:
        place: of the sample in `batch.keys`.
    """
    each = len(batch.lengths) // len(batch.keys)
    sequences = range(place * each, (place + 1) * each)
    if isinstance(batch, PackedBatch):
        starts = [*accumulate(batch.segment_lengths, initial=0)]
        paths = batch.segments_of_sequences
        runs = [(starts[n], batch.segment_tokens[n]) for one in sequences for n in paths[one]]
    else:
        width = batch.input_ids.shape[1]
        runs = [(one * width, batch.lengths[one]) for one in sequences]
    return torch.cat([torch.arange(start, start + length) for start, length in runs])


def sample_in(batch: Batch, place: int) -> EncodedSample:
    """A sample as it was before it came into a batch, which is on CPU.

    Args:
        place: of the sample in `batch.keys`.
    """
    slots, given = slots_of(batch, place), batch.media_positions
    each = len(batch.lengths) // len(batch.keys)
    lengths = batch.lengths[place * each : (place + 1) * each]
    sources = batch.media_sources
    features = torch.full((batch.num_slots,), -1)
    features[given] = torch.arange(len(given)) if sources is None else sources
    shown = features[slots]
    media = None
    if batch.media is not None:
        first = shown[: lengths[0]]  # the other sequence of a pair shows the same images
        media = _images_of(batch.media, first[first >= 0])
    return EncodedSample(
        key=batch.keys[place],
        input_ids=batch.input_ids.flatten()[slots],
        labels=batch.labels.flatten()[slots],
        position_ids=batch.position_ids.flatten(1)[:, slots],
        media=media,
        media_positions=(shown >= 0).nonzero()[:, 0],
        sequences=lengths if batch.num_pairs else (),
        drawn=_drawn(batch, place),
    )


def _drawn(batch: Batch, place: int) -> DrawnAnswer | None:
    """What a sampler said of a sample's answer; None where samples are no rollouts."""
    given = batch.rollouts
    if given is None:
        return None
    temperature = 1.0 if given.temperatures is None else float(given.temperatures[place])
    own = given.sampler[batch.label_sequences == place]
    return DrawnAnswer(log_p=own, temperature=temperature, is_raw=given.is_raw)


def _images_of(media: Media, features: Tensor) -> Media | None:
    """The images that these features are all of; None for no features."""
    ends = torch.tensor(media.num_tokens).cumsum(0)
    numbers = torch.searchsorted(ends, features, right=True).unique_consecutive().tolist()
    chosen, owners = select_images(media, numbers), media.owners
    if chosen is None or owners is None:
        return chosen
    ranks = tuple(owners.ranks[n] for n in numbers)
    return replace(chosen, owners=ImageOwners(ranks, owners.rank, owners.size))
