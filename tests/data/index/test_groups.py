"""Groups of samples, and the digests that they are told by."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from vlmpack.data.index.groups import group_numbers, joined_digests


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
