"""Values that are no numbers are found in bytes and tensors, and no others are taken for them."""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors.torch import save_file

from vlmpack.model_folder import finite
from vlmpack.model_folder.finite import (
    non_finite_tensors,
    non_finite_values,
    non_finite_words,
    read_through,
)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
}
VALUES = {"NaN": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def data_of(value):
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern_of_bits_is_read_as_torch_reads_it(dtype):
    """All of those with 8 and 16 bits, and of wider ones all upper halves above some lower ones."""
    made = DTYPES[dtype]
    bits = 8 * made.itemsize
    patterns = [
        n << max(0, bits - 16) | low for n in range(1 << min(16, bits)) for low in (0, 1, 5)
    ]
    patterns = sorted({pattern & (1 << bits) - 1 for pattern in patterns})
    data = b"".join(pattern.to_bytes(bits // 8, "little") for pattern in patterns)
    values = torch.frombuffer(bytearray(data), dtype=made).double()
    size = bits // 8
    found = {"NaN": 0, "inf": 0, "-inf": 0}
    for place in torch.nonzero(~torch.isfinite(values)).flatten().tolist():
        value = float(values[place])
        wanted = "NaN" if value != value else str(value)
        assert non_finite_values(data[place * size : (place + 1) * size], dtype) == {wanted}
        found[wanted] += 1
    assert found["NaN"], "the case tests something"
    assert dtype == "F8_E4M3" or found["inf"] == found["-inf"] == 1
    numbers = values[torch.isfinite(values)].to(made)
    assert non_finite_values(data_of(numbers), dtype) == set(), "all that are finite, at once"


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_one_value_is_found_wherever_it_stands(dtype, name, monkeypatch):
    monkeypatch.setattr(finite, "_CHUNK_BYTES", 64)
    value = torch.randn(67, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    for place in range(67):
        one = value.clone()
        one[place] = VALUES[name]
        assert non_finite_values(data_of(one), dtype) == {name}
        assert non_finite_tensors([("w", one), ("v", value)]) == {"w": {name}}
    assert non_finite_values(b"", dtype) == set()


def test_numbers_alone_are_odd_by_no_rule():
    largest = torch.full((9,), torch.finfo(torch.float32).max)
    assert not torch.isfinite(largest.sum()), "their sum is no number, and they are"
    empty, scalar = torch.empty(0), torch.tensor(float("nan"))
    named = {"w": largest, "e": empty, "i": torch.arange(3), "c": torch.full((4,), 255).byte()}
    assert non_finite_tensors(named.items()) == {}
    assert non_finite_values(data_of(torch.full((8,), -1)), "I64") == set()
    turned = torch.tensor([[0.0, 1.0], [float("inf"), 2.0]]).T
    assert non_finite_tensors([("s", scalar), ("t", turned)]) == {"s": {"NaN"}, "t": {"inf"}}


def test_a_file_is_hashed_and_looked_at_in_one_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(finite, "_READ_BYTES", 64)
    path = tmp_path / "model.safetensors"
    tensors = {name: torch.randn(50, 3) for name in "abc"} | {"codes": torch.full((9,), 255).byte()}
    tensors["a"][49, 2], tensors["c"][0, 0], tensors["c"][7, 1] = (*VALUES.values(),)
    save_file(tensors, path)
    digest, odd = read_through(path)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert odd == {"a": {"NaN"}, "c": {"inf", "-inf"}}
    assert (
        non_finite_words(odd) == "2 tensors hold values that are no numbers: a (NaN), c (-inf, inf)"
    )
    assert non_finite_words({"a": {"NaN"}}) == "1 tensor holds values that are no numbers: a (NaN)"
    path.write_bytes(b"no header at all")
    assert read_through(path) == (hashlib.sha256(b"no header at all").hexdigest(), {})
