"""What a stock model cannot compute is an error that says so."""

from __future__ import annotations

import pytest
import torch
from transformers import MptConfig, MptForCausalLM

from vlmpack.errors import CapabilityError
from vlmpack.proof.verify.reference import computing

TABLE = 8


def test_a_table_of_alibi_that_is_too_short_is_named() -> None:
    model = MptForCausalLM(
        MptConfig(d_model=16, n_heads=2, n_layers=1, max_seq_len=TABLE, vocab_size=32)
    )
    ids = torch.arange(TABLE + 4)[None]
    with computing(TABLE):
        model(input_ids=ids[:, :TABLE], use_cache=False)
    with (
        pytest.raises(CapabilityError, match=r"12 tokens, .*max_seq_len"),
        computing(TABLE + 4),
    ):
        model(input_ids=ids, use_cache=False)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(KeyError), computing(3):
        raise KeyError("x")
    with pytest.raises(torch.OutOfMemoryError), computing(3):
        raise torch.OutOfMemoryError
