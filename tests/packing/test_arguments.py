"""Arguments of the public packing functions that are none: a PackingError names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlmpack import pack_batch_sequences, pack_padded_batch
from vlmpack.errors import PackingError
from vlmpack.packing import EncodedSample, plan_packs

IDS = torch.arange(4)
GOOD: dict[str, Any] = {
    "key": "k",
    "input_ids": IDS,
    "labels": torch.tensor([1, 2, 3, -100]),
    "position_ids": IDS[None],
    "media_positions": torch.empty(0, dtype=torch.int64),
}
NO_MULTIPLE = (0, -1, 2.0, "2", None, True, 10**5000, 1 << 40)


@pytest.mark.parametrize("value", NO_MULTIPLE, ids=lambda value: f"{str(type(value))[8:-2]}")
def test_multiples_are_integers_above_zero(value: Any) -> None:
    sample = EncodedSample(**GOOD)
    padded = {"attention_mask": None, "lengths": torch.tensor([4]), "position_ids": IDS[None]}
    for name, call in {
        "pad_to_multiple_of": lambda: pack_batch_sequences(
            [sample], pad_token_id=0, pad_to_multiple_of=value
        ),
        "total_multiple_of": lambda: pack_batch_sequences(
            [sample], pad_token_id=0, total_multiple_of=value
        ),
        r"pad_to_multiple_of ": lambda: pack_padded_batch(
            IDS[None], None, None, pad_to_multiple_of=value, **padded
        ),
    }.items():
        with pytest.raises(PackingError, match=f"{name.strip()} is ") as caught:
            call()
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["input_ids", "labels", "position_ids", "media_positions"])
@pytest.mark.parametrize("value", [None, [1, 2], "x", torch.ones(4, device="meta")])
def test_samples_hold_tensors_with_values(name: str, value: Any) -> None:
    with pytest.raises(PackingError, match=f"sample 'k': {name} is "):
        pack_batch_sequences([EncodedSample(**(GOOD | {name: value}))], pad_token_id=0)


def test_pad_tokens_are_integers() -> None:
    for value in (None, 0.5, 2**63, "x"):
        with pytest.raises(PackingError, match="pad_token_id is "):
            pack_batch_sequences([EncodedSample(**GOOD)], pad_token_id=value)  # type: ignore[arg-type]
    assert pack_batch_sequences([EncodedSample(**GOOD)], pad_token_id=-1).num_tokens == 4


def test_capacities_beyond_every_memory() -> None:
    """All samples fit such a pack, which is planned as one of their size; rooms of a pack are
    counted one by one, so of very many units none is."""
    for capacity in (2**31, 2**70, 10**400):
        (pack,) = plan_packs([3, 5, 7], capacity)
        assert pack.tolist() == [0, 1, 2]
    assert len(plan_packs([3, 5, 7], 2**40, max_sequences=2)) == 2
    with pytest.raises(PackingError, match="at most 16,777,216 are planned; raise alignment"):
        plan_packs([2**40, 2**40], 2**41)
    assert len(plan_packs([2**40, 2**40], 2**40, alignment=2**30)) == 2


@pytest.mark.parametrize("lengths", [[[1], 2], ["a"], [10**400], [None], [1.5], 7, "x", {1: 2}])
def test_lengths_are_integers(lengths: Any) -> None:
    with pytest.raises(PackingError, match="lengths"):
        plan_packs(lengths, 64)
