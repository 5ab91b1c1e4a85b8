"""Slots of varlen calls over a tree of prefixes, against a search through all pairs of segments; on
CPU once, and where the row is after that."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from vlmpack.errors import CapabilityError
from vlmpack.packing import EncodedSample, Prefix, move_batch, pack_batch_sequences
from vlmpack.packing.prefix_tree import PrefixLevel, PrefixTree, prefix_levels


def searched(
    prefix_tree: PrefixTree, physical: list[int]
) -> list[list[tuple[list[int], list[int]]]]:
    """By depth, each segment's branches and its own slots: whoever has it on its path, in order."""
    starts = [*accumulate(physical, initial=0)]
    levels: dict[int, list[tuple[list[int], list[int]]]] = {}
    for number, tokens in enumerate(prefix_tree.lengths):
        behind = [n for n in range(len(physical)) if number in prefix_tree.path(n)]
        queries = [slot for n in behind for slot in range(starts[n], starts[n + 1])]
        if behind:
            keys = [*range(starts[number], starts[number] + tokens)]
            levels.setdefault(len(prefix_tree.path(number)), []).append((queries, keys))
    return [levels[depth] for depth in sorted(levels)]


def stretches(path: PrefixLevel) -> list[tuple[list[int], list[int]]]:
    """The same of a path that was made; its bounds are checked on the way."""
    found = []
    for slots, cu, most in (
        (path.branches, path.cu_branches, path.max_branches),
        (path.prefixes, path.cu_prefixes, path.max_prefixes),
    ):
        assert (slots.dtype, cu.dtype) == (torch.int64, torch.int32)
        pieces = [piece.tolist() for piece in slots.tensor_split(cu[1:-1].long())]
        assert (most, int(cu[-1])) == (max(map(len, pieces)), len(slots))
        found.append(pieces)
    return [*zip(*found, strict=True)]


def drawn(rng: random.Random) -> tuple[PrefixTree, list[int]]:
    """A row whose branches stand behind what they go on from."""
    parents, path = [], []
    for number in range(rng.randint(1, 40)):
        path = path[: rng.randint(0, len(path))] if rng.random() < 0.7 else path
        parents.append(path[-1] if path else -1)
        path = [*path, number]
    lengths = [rng.randint(1, 9) for _ in parents]
    return PrefixTree(tuple(parents), tuple(lengths)), [-(-n // 4) * 4 for n in lengths]


def test_slots_are_those_of_a_search() -> None:
    rng, depths = random.Random(0), set()
    for _ in range(200):
        prefix_tree, physical = drawn(rng)
        theirs = searched(prefix_tree, physical)
        assert [stretches(path) for path in prefix_levels(prefix_tree, physical)] == theirs
        depths.add(len(theirs))
    assert depths >= {0, 1, 2, 3, 4}


@pytest.mark.parametrize("parents", [(-1, -1, 0), (-1, 0, -1, 0), (-1, 0, 0, 1)])
def test_branches_elsewhere_are_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(CapabilityError, match="side by side"):
        prefix_levels(PrefixTree(parents, (2,) * len(parents)), (2,) * len(parents))


def questions() -> list[EncodedSample]:
    """Three of one prompt."""
    ids = torch.arange(9)
    sample = EncodedSample(
        key="a",
        input_ids=ids,
        labels=torch.where(ids < 8, ids, -100).where(ids > 5, -100),
        position_ids=ids[None],
        media_positions=torch.empty(0, dtype=torch.int64),
        prefixes=(Prefix(5, b"prompt"),),
    )
    return [replace(sample, key=key) for key in "abc"]


def test_a_row_brings_them_along_and_they_move_with_it() -> None:
    batch = pack_batch_sequences(
        questions(), pad_token_id=0, pad_to_multiple_of=4, share_prefix=True
    )
    (path,) = batch.prefix_levels
    assert stretches(path) == [([*range(8, 20)], [*range(5)])]
    again = pickle.loads(pickle.dumps(batch))
    assert stretches(again.prefix_levels[0]) == stretches(path)
    (moved,) = move_batch(batch, torch.device("meta")).packed_seq_params().prefix_levels
    for name in ("branches", "prefixes", "cu_branches", "cu_prefixes"):
        assert getattr(moved, name).is_meta, name
    assert (moved.max_branches, moved.max_prefixes) == (12, 5)
    alone = pack_batch_sequences(questions(), pad_token_id=0)
    assert alone.prefix_levels == alone.packed_seq_params().prefix_levels == ()
