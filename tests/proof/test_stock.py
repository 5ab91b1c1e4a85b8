"""What a stock model cannot compute is an error that says so."""

from __future__ import annotations

import pytest
import torch
from transformers import MptConfig, MptForCausalLM

from vlmpack.errors import CapabilityError
from vlmpack.proof.stock import computing

TABLE = 8


def short() -> MptForCausalLM:
    return MptForCausalLM(
        MptConfig(d_model=16, n_heads=2, n_layers=1, max_seq_len=TABLE, vocab_size=32)
    )


def test_a_table_of_alibi_that_is_too_short_is_named() -> None:
    model = short()
    ids = torch.arange(TABLE + 4)[None]
    with computing(model, TABLE):
        model(input_ids=ids[:, :TABLE], use_cache=False)
    with (
        pytest.raises(
            CapabilityError, match=r"12 tokens, .*max_seq_len of config\.json is 8: lower"
        ),
        computing(model, TABLE + 4),
    ):
        model(input_ids=ids, use_cache=False)


def test_another_fault_of_a_sample_that_fits_has_no_advice_about_length() -> None:
    with (
        pytest.raises(CapabilityError, match=r"8 tokens, .*no kernel \(test_stock.py, line \d+\)$"),
        computing(short(), TABLE),
    ):
        raise RuntimeError("no kernel")


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(KeyError), computing(short(), 3):
        raise KeyError("x")
    with pytest.raises(torch.OutOfMemoryError), computing(short(), 3):
        raise torch.OutOfMemoryError
