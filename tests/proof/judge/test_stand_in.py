"""benchmarks/conformance: the stand-in for flash-attn is what sdpa is, and sees boundaries."""

from __future__ import annotations

import pytest
import torch
from support.families import tiny_family_folder
from support.foreign import features, packing, padded
from transformers import modeling_flash_attention_utils

from benchmarks.conformance import stand_in
from vlmpack.encode import Encoder
from vlmpack.proof.stock import token_losses


@pytest.fixture
def losses(tmp_path, monkeypatch):
    """(batch, attention) -> the losses of its label tokens."""
    for name in ("_lazy_imports", "_loaded_implementation", "_flash_varlen_fn"):  # put back
        value = getattr(modeling_flash_attention_utils, name)
        monkeypatch.setattr(modeling_flash_attention_utils, name, value)
    encoder = Encoder(tiny_family_folder("qwen3", tmp_path))
    samples = features(encoder, images=False)[:4]

    def of(batch, attention):
        model = encoder.family.auto_class().from_pretrained(
            encoder.folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        if attention == "flash":
            stand_in.install(model)
        given = {name: value for name, value in batch.items() if name != "labels"}
        with torch.no_grad():
            return token_losses(model(**given, use_cache=False).logits, batch["labels"])

    of.samples, of.encoder = samples, encoder
    return of


def test_it_is_sdpa_on_padded_rows_and_apart_where_it_is_told(losses):
    model = losses.encoder.family.auto_class().from_pretrained(losses.encoder.folder)
    batches = {"padded": padded(losses.samples), "packed": packing(model)(losses.samples)}
    alone = losses(batches["padded"], "sdpa")
    assert len(alone) > 20
    for batch in batches.values():
        found = losses(batch, "flash")
        assert float((found - alone).abs().max()) < 1e-5
    told = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids")
    joined = {name: value for name, value in batches["packed"].items() if name not in told}
    assert float((losses(joined, "flash") - alone).abs().max()) > 1e-2
