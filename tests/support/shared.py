"""Samples that begin alike, and what a row of them computed, sequence by sequence."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from support.pairs import cooked_pair, raw_pairs
from support.runs import Run
from support.shards import RawSample, with_answer

from vlmpack.backends.policy import is_untouched
from vlmpack.packing import EncodedSample, PackCollator, PackedBatch

QUESTIONS = ("how many", "who is it", "where to, and from where", "why", "a b c d e f g h")


def asked(raw: RawSample, key: str, question: str, answer: str) -> RawSample:
    """A question of its own behind what the first turn says and shows."""
    turns = [{**turn, "content": list(turn["content"])} for turn in raw.messages]
    turns[0]["content"].append({"type": "text", "text": question})
    return with_answer(RawSample(key, turns, raw.images), answer)


def questions(seed: int = 0) -> list[RawSample]:
    """Five about one image, one about another, three images and text alone."""
    pairs = raw_pairs(seed)
    alone, other = pairs[2][0], pairs[5][0]
    five = [
        asked(alone, f"q{place}", question, question[::-1])
        for place, question in enumerate(QUESTIONS)
    ]
    rest = [(other, "other"), (pairs[3][0], "three"), (pairs[1][0], "text")]
    return [*five, *(asked(raw, key, "what", "that is it") for raw, key in rest)]


def pairs_about_one_image(seed: int = 0) -> list[tuple[RawSample, RawSample]]:
    """Two pairs about one image, so that a row of them is a tree; one of three images, one of
    text."""
    pairs = raw_pairs(seed)
    raws = [(pairs[2], "one"), (pairs[2], "two"), (pairs[3], "three"), (pairs[1], "text")]
    found = []
    for place, (pair, key) in enumerate(raws):
        answers = ("right it is", "wrong") if place % 2 else ("yes", "no, not at all")
        found.append(tuple(asked(pair[0], key, f"what {key}", answer) for answer in answers))
    return found


def sequences(pairs: list[tuple[RawSample, RawSample]]) -> list[RawSample]:
    """Each answer as a conversation of its own, under names of their own."""
    return [
        RawSample(f"{raw.key}, {name}", raw.messages, raw.images)
        for pair in pairs
        for raw, name in zip(pair, ("chosen", "rejected"), strict=True)
    ]


def encoded_pairs(encoder: Any, pairs: list[tuple[RawSample, RawSample]]) -> list[EncodedSample]:
    """As training gets them."""
    return [encoder.encode(cooked_pair(*pair)) for pair in pairs]


def collators(encoder: Any, multiple: int = 1) -> tuple[PackCollator, PackCollator]:
    """(with shared prefixes, without)."""
    shared, separate = (
        PackCollator(
            pad_token_id=561,
            num_position_axes=encoder.num_position_axes,
            pad_to_multiple_of=multiple,
            share_prefix=share,
        )
        for share in (True, False)
    )
    return shared, separate


def names_of(batch: PackedBatch) -> list[str]:
    """Of the sequences: keys, of pairs as `sequences` has them."""
    if not batch.num_pairs:
        return [*batch.keys]
    return [f"{key}, {name}" for key in batch.keys for name in ("chosen", "rejected")]


def by_sequence(batch: PackedBatch, losses: torch.Tensor) -> dict[str, torch.Tensor]:
    """The losses of each sequence: of the segment that it ends in."""
    ends = [0, *accumulate(batch.segment_lengths)]
    at, found = batch.label_positions, {}
    for name, segments in zip(names_of(batch), batch.segments_of_sequences, strict=True):
        own = segments[-1]
        found[name] = losses[(at >= ends[own]) & (at < ends[own + 1])]
    assert sum(map(len, found.values())) == len(losses)
    return found


def run_row(vlm: Any, batch: PackedBatch) -> Run:
    """Our model on one row; gradients of the mean over all label tokens."""
    vlm.zero_grad(set_to_none=True)
    losses = vlm(batch, batch.packed_seq_params())
    (losses.sum() / batch.num_label_tokens).backward()
    starts = [0, *accumulate(batch.segment_lengths)]
    tokens = batch.segment_tokens
    positions = {
        name: torch.cat(
            [batch.position_ids[:, 0, starts[n] : starts[n] + tokens[n]] for n in segments], dim=1
        )
        for name, segments in zip(names_of(batch), batch.segments_of_sequences, strict=True)
    }
    gradients = {}
    for name, parameter in vlm.model.named_parameters():
        missing = 0.0 if is_untouched(name, vlm.paths) else float("nan")
        grad = parameter.grad
        gradients[name] = torch.full_like(parameter, missing) if grad is None else grad.clone()
    return Run(
        losses={key: value.detach() for key, value in by_sequence(batch, losses).items()},
        gradients=gradients,
        positions=positions,
        lengths=dict(zip(names_of(batch), batch.lengths, strict=True)),
    )
