"""Groups of samples, and the digests that they are told by."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pyarrow as pa

from vlmpack.data.index.groups import group_numbers, joined_digests, shared_images


def test_a_group_is_named_after_its_first_sample_and_nothing_joins_those_without() -> None:
    digests = np.array([7, 0, -3, 7, 0, -3, 5])
    found = group_numbers(np.arange(10, 17, dtype=np.int64), digests)
    assert found.tolist() == [10, 11, 12, 10, 14, 12, 16]


def test_the_digest_of_a_record_is_of_all_its_images_in_order() -> None:
    lists = pa.array([[5], [], [5, 7], [7, 5], [5, 7], [-5], [5, 5], []], pa.list_(pa.int64()))
    found = joined_digests(lists).tolist()
    assert found[1] == found[7] == 0 and found[2] == found[4]
    assert len(set(found)) == 6
    assert joined_digests(lists.slice(2, 3)).tolist() == found[2:5]
    assert joined_digests(lists.slice(1, 1)).tolist() == [0]


def test_samples_that_share_an_image_are_counted_one_by_one() -> None:
    """Against plain counting, on lists with images that come twice and in another order."""
    draw, seen = random.Random(0), set()
    digests = [draw.randrange(-(2**63), 2**63) for _ in range(8)]
    for _ in range(200):
        lists = [
            tuple(draw.choice(digests) for _ in range(draw.choice((0, 1, 1, 2, 3))))
            for _ in range(draw.randrange(8))
        ]
        owners = Counter(digest for each in lists for digest in set(each))
        some = sum(any(owners[digest] > 1 for digest in each) for each in lists)
        same = sum(bool(each) and lists.count(each) > 1 for each in lists)
        found = shared_images(pa.array(lists, pa.list_(pa.int64())))
        assert found == (some, same), lists
        seen.add((some > 0, same > 0, some > same))
    assert len(seen) == 4, "cases are missing"
