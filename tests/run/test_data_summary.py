"""What a launch says of the rows that it will train."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from support.recipes import run_settings

from vlmpack.api import resolve
from vlmpack.build.data import packing_mode
from vlmpack.data.config import DataConfig
from vlmpack.data.plan.rank_bins import token_cost
from vlmpack.data.splits.summary import DataSummary
from vlmpack.run.splits import _test_also_in, log_data, log_graphs

NUMBERS = {field.name: 0 for field in dataclasses.fields(DataSummary)}
ONLINE = {"packing__mode": "online", "training__micro_batch_size": 1, "packing__max_tokens": 2048}


def replayed_summary(fewest: int) -> DataSummary:
    return DataSummary(**NUMBERS | {"fewest_row_samples": fewest})


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
        log_graphs(mode, replayed_summary(8))
    assert len(caplog.messages) == bool(words)
    assert all(word in message for message in caplog.messages for word in words)


@pytest.mark.parametrize(("fewest", "warned"), [(8, False), (9, True)])
def test_a_launch_warns_where_the_graph_replays_next_to_no_row(fewest, warned, tmp_path, caplog):
    graphs = {"training__cuda_graphs": "decoder", "training__cuda_graph_max_sequences": 8}
    mode = packing_mode(resolve(run_settings(tmp_path, **ONLINE, **graphs), {}))
    with caplog.at_level(logging.WARNING, "vlmpack"):
        log_graphs(mode, replayed_summary(fewest))
    assert len(caplog.messages) == warned
    for message in caplog.messages:
        assert "19 of 20 rows hold 9 samples or more and run eagerly" in message
        assert "up to 8 (training.cuda_graph_max_sequences). Set it to 16 or more" in message


@pytest.mark.parametrize(
    ("dropped", "bad", "words"),
    [
        (0, {}, ("data           32 samples, ",)),
        (
            1,
            {},
            (
                "data           31 samples (1 of 32 left out), ",
                "left out       1 too long; data.over_long: error would stop",
            ),
        ),
        (
            1,
            {"schema": 2},
            (
                "data           29 samples (3 of 32 left out), ",
                "left out       2 bad (schema), 1 too long; the first that is bad is 'x': no turn; "
                "data.on_error.schema: raise or data.over_long: error would stop",
            ),
        ),
    ],
)
def test_a_launch_says_why_samples_are_left_out(dropped, bad, words, tmp_path, caplog):
    usable = 32 - dropped - sum(bad.values())
    summary = DataSummary(
        **NUMBERS
        | {
            "num_samples": 32,
            "num_usable": usable,
            "num_dropped": dropped,
            "num_bad": bad,
            "first_fault": "; the first that is bad is 'x': no turn" if bad else "",
            "length_percentiles": {0: 8, 50: 9, 100: 10},
            "unknown_keys": {},
        }
    )
    resolved = resolve(run_settings(tmp_path), {})
    config = DataConfig(
        data=resolved.data,
        key="data.train",
        training=resolved.training,
        mode=packing_mode(resolved),
        row_cost=token_cost,
    )
    with caplog.at_level(logging.INFO, "vlmpack"):
        log_data(config, summary)
    pairs = zip(caplog.messages, words, strict=False)
    assert all(message.startswith(start) for message, start in pairs), caplog.messages
    assert not any("no image" in message for message in caplog.messages)
    caplog.clear()
    with caplog.at_level(logging.INFO, "vlmpack"):
        log_data(config, dataclasses.replace(summary, num_without_image=5))
    assert f"images         5 of {usable} samples have no image" in caplog.messages


def test_splits_that_hold_shards_of_the_test_split_are_known() -> None:
    a, b, c = {"a.tar"}, {"b.tar", "s3://x/b.tar"}, {"c.tar"}
    splits = {"data.train": a, "data.validation": b, "data.test": c}
    assert _test_also_in(splits) == []
    assert _test_also_in(splits | {"data.test": {*b, "d.tar"}}) == ["data.validation"]
    assert _test_also_in(splits | {"data.test": a | b}) == ["data.train", "data.validation"]
    assert _test_also_in({"data.train": a, "data.test": a}) == ["data.train"]
    assert _test_also_in({"data.train": a, "data.validation": b}) is None, "nothing was asked"
    assert _test_also_in(splits | {"data.train": set()}) is None, "packs that hold their samples"
