"""transformers -> Megatron -> transformers, at TP 2 and PP 2, bit for bit.

Run in ranks: export, generation, and steps of a model whose head is its own.

    torchrun --nproc-per-node 2 test_round_trip.py FOLDER

FOLDER/untied holds a model. Writes FOLDER/<layout>/ (the exported folder of the tiny model),
FOLDER/<layout>-<rank>.pt (logits of the model that `generation` yields), FOLDER/<layout>-untied.*
(see `support.layouts.Trained`) and FOLDER/<layout>-untied/ (the trained model, exported).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import layouts
from support.forked import check_ranks
from support.layouts import LAYOUTS, Trained, make_megatron, one_layout, stepper_with, train
from support.layouts import whole_weights as collect_weights
from support.shards import TINY_MODEL, mixed_samples
from support.stock import StockProcessor, load_stock
from torch import Tensor

from vlmpack.distributed import Ranks, stop_process_group

NAMES = ("tp2", "pp2")


def logits(model: Any) -> Tensor:
    """Of a sample with two images."""
    inputs = StockProcessor(TINY_MODEL)(mixed_samples()[0])
    with torch.no_grad():
        return model(
            input_ids=inputs.input_ids,
            attention_mask=torch.ones_like(inputs.input_ids),
            mm_token_type_ids=inputs.mm_token_type_ids,
            use_cache=False,
            **inputs.media,
        ).logits


def export_and_generate(name: str, folder: Path, ranks: Ranks) -> None:
    """The tiny model as it was read."""
    engine = make_megatron(LAYOUTS[name], ranks)
    engine.export(folder / name, processor_from=TINY_MODEL, dtype=torch.bfloat16)
    with engine.generation() as model:
        assert not model.training
        torch.save(logits(model), folder / f"{name}-{ranks.rank}.pt")


def train_untied(name: str, folder: Path, ranks: Ranks) -> None:
    """The usual steps with SGD."""
    layout = LAYOUTS[name]
    engine = make_megatron(layout, ranks, folder / "untied")
    rows = train(stepper_with(engine, "sgd"), layout)
    weights, same = collect_weights(engine)
    assert same, "copies of a weight have drifted apart"
    if ranks.is_main:
        Trained(rows, weights).save(folder / f"{name}-untied")
    engine.export(folder / f"{name}-untied", processor_from=TINY_MODEL, dtype=None)


def main(folder: Path) -> None:
    """Both, in each layout."""
    for name in NAMES:
        with one_layout(LAYOUTS[name]) as ranks:
            export_and_generate(name, folder, ranks)
            train_untied(name, folder, ranks)
    stop_process_group()


pytestmark = pytest.mark.slow

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
    check_ranks([__file__, folder], 2)
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
    expected = logits(load_stock(TINY_MODEL).eval())
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
