"""transformers -> Megatron -> transformers, at TP 2 and PP 2, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import layouts
from support import round_trip_worker as worker
from support.forked import check_ranks
from support.shards import TINY_MODEL
from support.stock import load_stock

pytestmark = pytest.mark.slow

NAMES = worker.NAMES
VOCABULARY = 577
"""Odd, so that at TP 2 the embedding has a row of padding."""


def make_untied(folder: Path) -> None:
    """The tiny model with a head of its own, as larger models of the family have it."""
    shutil.copytree(TINY_MODEL, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    config["text_config"]["tie_word_embeddings"] = False
    config["text_config"]["vocab_size"] = VOCABULARY
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(str(folder / "model.safetensors"))
    draw = torch.Generator().manual_seed(0)
    embedding = tensors["model.embed_tokens.weight"]
    extra = torch.randn(VOCABULARY - 576, 128, generator=draw).to(embedding.dtype)
    tensors["model.embed_tokens.weight"] = torch.cat((embedding, extra))
    head = 0.2 * torch.randn(VOCABULARY, 128, generator=draw)
    tensors["lm_head.weight"] = head.to(embedding.dtype)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("round-trip")
    make_untied(folder / "untied")
    check_ranks([worker.__file__, folder], 2)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_exported_folder_has_the_bits_of_the_original(folder, name):
    original = load_stock(TINY_MODEL, dtype="auto").state_dict()
    exported = load_stock(folder / name, dtype="auto").state_dict()
    assert exported.keys() == original.keys()
    assert len(original) > 100
    for key, value in original.items():
        assert value.dtype == exported[key].dtype == torch.bfloat16
        assert torch.equal(exported[key], value), key
    files = [path.name for path in (folder / name).iterdir()]
    assert sorted(files) == sorted(path.name for path in TINY_MODEL.iterdir())
    ours, theirs = (
        load_file(str(path / "model.safetensors")) for path in (folder / name, TINY_MODEL)
    )
    assert sum(v.numel() for v in ours.values()) == sum(v.numel() for v in theirs.values())


@pytest.mark.parametrize("name", NAMES)
def test_generation_yields_the_stock_model_on_every_rank(folder, name):
    expected = worker.logits(load_stock(TINY_MODEL).eval())
    for rank in range(2):
        assert torch.equal(torch.load(folder / f"{name}-{rank}.pt"), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_head_of_its_own_and_a_padded_vocabulary(folder, name):
    """The padding row has no logit, no gradient and no place in the export."""
    found = layouts.Trained.load(folder / f"{name}-untied")
    expected = layouts.train_reference("sgd", folder=folder / "untied")
    start = layouts.start_weights(folder / "untied")
    assert start["lm_head.weight"].shape[0] == VOCABULARY
    errors = layouts.worst_errors(found, expected, start)
    print(f"\n{name} untied: {', '.join(f'{what} {error:.1e}' for what, error in errors.items())}")
    assert layouts.beyond_tolerance(errors) == {}
    exported = dict(load_stock(folder / f"{name}-untied").named_parameters())
    assert exported.keys() == found.weights.keys()
    for key, value in found.weights.items():
        assert torch.equal(exported[key], value), key
        assert not torch.equal(value, start[key]), f"{key} was not trained"
