"""Rows of 4,096 slots filled with lengths like those that PackMamba was measured on.

Published (Xu et al., PackMamba, arXiv 2408.03865, 2024): samples of 57 to 2,048 tokens, 646 on
average; 19.1% of the slots are padding where rows are filled as samples come, 0.44% where they are
sorted and filled greedily. The lengths themselves are not published; these have the range and the
mean, and nothing else of them.
"""

from __future__ import annotations

import numpy as np
import pytest

from vlmpack.packing import StreamPacker, plan_packs

LEAST, MOST, MEAN, SEED = 57, 2048, 646, 0
COUNT, WINDOW, ROW = 20_000, 4096, 4096


@pytest.fixture(scope="module")
def lengths():
    """(COUNT,) integers: a Beta distribution over the range, of that mean."""
    share = (MEAN - LEAST) / (MOST - LEAST)
    drawn = np.random.default_rng(SEED).beta(1.2, 1.2 / share - 1.2, COUNT)
    found = np.rint(LEAST + (MOST - LEAST) * drawn).astype(np.int64)
    assert LEAST <= found.min() < LEAST + 10
    assert MOST - 100 < found.max() <= MOST
    assert abs(found.mean() - MEAN) < 0.01 * MEAN
    return found


def fill(lengths, rows):
    """Tokens over slots of rows of fixed width, every sample in one of them."""
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(len(lengths)))
    assert max(int(lengths[row].sum()) for row in rows) <= ROW
    return int(lengths.sum()) / (len(rows) * ROW)


def as_they_come(lengths):
    """A row is closed by the first sample that has no room in it."""
    rows, room = [[]], ROW
    for number, length in enumerate(lengths.tolist()):
        if length > room:
            rows.append([])
            room = ROW
        rows[-1].append(number)
        room -= length
    return rows


def streamed(lengths):
    """As a run plans them, shuffle window by shuffle window."""
    rows = []
    for start in range(0, len(lengths), WINDOW):
        packer = StreamPacker(ROW)
        found = [row for n in lengths[start : start + WINDOW].tolist() for row in packer.push(n)]
        rows += [np.asarray(row) + start for row in found + packer.flush()]
    return rows


def test_rows_are_at_least_99_percent_full(lengths):
    assert fill(lengths, plan_packs(lengths, ROW, alignment=1)) >= 0.99
    assert fill(lengths, streamed(lengths)) >= 0.99
    assert 0.80 < fill(lengths, as_they_come(lengths)) < 0.92, "nothing here is easy to fill"
