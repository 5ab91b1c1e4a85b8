"""What a launch says of the rows that it will train."""

from __future__ import annotations

import logging

import pytest
from support.recipes import run_settings

from vlmpack.api import resolve
from vlmpack.data.modes import packing_mode
from vlmpack.run.data_summary import log_graphs

ONLINE = {"packing__mode": "online", "training__micro_batch_size": 1, "packing__max_tokens": 2048}


@pytest.mark.parametrize(
    ("graphs", "words"),
    [
        ({}, []),
        (
            {"training__cuda_graphs": "decoder", "training__cuda_graph_max_sequences": 8},
            ["rows of up to 8 samples", "filled up to 2,048 tokens", "num_eager_rows"],
        ),
    ],
)
def test_a_launch_says_which_rows_are_replayed(graphs, words, tmp_path, caplog):
    mode = packing_mode(resolve(run_settings(tmp_path, **ONLINE, **graphs), {}))
    with caplog.at_level(logging.INFO, "vlmpack"):
        log_graphs(mode)
    assert len(caplog.messages) == bool(words)
    assert all(word in message for message in caplog.messages for word in words)
