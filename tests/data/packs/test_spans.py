"""A pack's span that contradicts itself is a DataError, whatever its columns say."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from vlmpack.data.packs.spans import SavedSample, read_pack, write_span
from vlmpack.data.shards.tar import read_members
from vlmpack.data.shards.writer import ShardWriter
from vlmpack.errors import DataError
from vlmpack.packing.batch import EncodedSample, Prefix

LENGTHS = (5, 9, 3)
NUMBERS = (-1, 0, 1, 7, 2**31 - 1, -(2**31))


def samples() -> list[SavedSample | None]:
    found: list[SavedSample | None] = []
    for number, length in enumerate(LENGTHS):
        ids = torch.arange(length) + 10
        encoded = EncodedSample(
            key=f"k{number}",
            input_ids=ids,
            labels=ids.clone(),
            position_ids=torch.arange(length)[None],
            media_positions=torch.tensor([], dtype=torch.int64),
            prefixes=(Prefix(2, b"12345678"),),
        )
        found.append(SavedSample.of(encoded))
    return [*found, None]


SPAN = write_span(4, samples(), 1)


def tensors() -> dict[str, Any]:
    [member, *_] = read_members(io.BytesIO(SPAN + bytes(1024)), len(SPAN) + 1024, shard="s",
                                max_member_bytes=1 << 20)  # fmt: skip
    assert member.data is not None
    return load(member.data)


def crafted(columns: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    writer = ShardWriter(stream)
    writer.write("000000004", {"safetensors": save(columns, {"keys": "[]"})})
    size = writer.size
    writer.close()
    return stream.getvalue()[:size]


def test_a_span_is_read_as_it_was_written() -> None:
    found = read_pack(crafted(tensors()), shard="s.tar", offset=0)
    assert [one and one.tokens.length for one in found] == [*LENGTHS, None]


@pytest.mark.parametrize(
    ("column", "values", "why"),
    [
        ("lengths", [5, 9, -3, 0], "a count below 0"),
        ("num_images", [0, -1, 1, 0], "a count below 0"),
        ("lengths", [5, 9, 4, 0], "do not fit each other"),
        ("num_media_tokens", [1, 0, 0, 0], "do not fit each other"),
        ("lengths", [5, 9, 3], "do not fit each other"),
        ("num_prefixes", [9, 9, 9, 9], "do not fit each other"),
    ],
)
def test_columns_that_contradict_each_other(column: str, values: list[int], why: str) -> None:
    with pytest.raises(DataError, match=f"the pack at byte 512 of s.tar has .*{why}"):
        read_pack(crafted(tensors() | {column: torch.tensor(values)}), shard="s.tar", offset=512)


def test_no_columns_end_in_a_bare_exception() -> None:
    good, ends = tensors(), {"named": 0, "read": 0}
    for number in range(400):
        draw = random.Random(number)
        columns = {name: value.clone() for name, value in good.items()}
        name = draw.choice([*columns])
        kind = draw.randrange(4)
        if kind == 0:
            columns[name] = columns[name].float()
        elif kind == 1:
            columns[name] = columns[name].reshape(-1)[: draw.randrange(4)].contiguous()
        elif kind == 2:
            columns[name] = columns[name][None].contiguous()
        elif columns[name].numel():
            columns[name].view(-1)[draw.randrange(columns[name].numel())] = draw.choice(NUMBERS)
        try:
            read_pack(crafted(columns), shard="s.tar", offset=0)
            ends["read"] += 1
        except DataError:
            ends["named"] += 1
    assert min(ends.values()) > 50, ends
