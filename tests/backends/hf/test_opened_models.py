"""Two ranks (gloo) that shard a model read what they hold of it, and nothing more.

Run in ranks: sharded engines whose ranks read their shards, beside ones that load whole models.

    torchrun --nproc-per-node 2 test_opened_models.py FOLDER

FOLDER/models/<name> are model folders, `wide` one that is large against noise. Rank 0 writes
FOLDER/found.json: by case, what differs between the two engines and what was logged; and of the
wide model, by rank, the bytes of its shards and how far building each engine raised the peak.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import layouts
from support.checkpoint_memory import give_back_freed_tensors, measured
from support.engines import EVERYTHING, make_engine, policy
from support.families import tiny_family_folder
from support.of_all_ranks import write_of_all_ranks
from support.wide import write_wide_model
from torch import Tensor

from vlmpack.backends.hf import engine as engine_module
from vlmpack.backends.hf import sharding
from vlmpack.backends.hf.load import load_model
from vlmpack.backends.hf.sharding import local_part
from vlmpack.distributed import Ranks, start_process_group, stop_process_group
from vlmpack.encode import Encoder
from vlmpack.errors import ModelError

CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "tied": ("qwen2_vl", EVERYTHING, {}),
    "copies": ("qwen2_vl", EVERYTHING, {"replicate": 2}),
    "experts": ("qwen3_vl_moe", EVERYTHING, {}),
    "buffers of its own": ("nemotron_h", EVERYTHING, {}),
    "adapters": ("qwen3_vl_moe", policy(language="lora", vision="frozen"), {}),
    "adapters with magnitudes": ("qwen2_vl", policy(language="lora", dora=True), {}),
}
"""By case: the model folder, what is trained, and how it is shared out."""


@contextmanager
def loaded_whole() -> Iterator[None]:
    """Every rank loads the whole model, as one process does."""
    with patch.object(engine_module, "open_model", lambda folder, *, whole="": load_model(folder)):
        yield


class Lines(logging.Handler):
    """What is logged while it is open."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Lines:
        logging.getLogger("vlmpack").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("vlmpack").removeHandler(self)


def held_tensors(engine: Any) -> dict[str, Tensor]:
    """What this rank holds of parameters and buffers, under every name."""
    named = [
        *engine.vlm.model.named_parameters(remove_duplicate=False),
        *engine.vlm.model.named_buffers(),
    ]
    return {name: local_part(value) for name, value in named}


def facts_of(engine: Any) -> dict[str, Any]:
    """What else is to be the same: kinds, what is trained, and names of one tensor."""
    named = list(engine.vlm.model.named_parameters(remove_duplicate=False))
    groups: dict[int, list[str]] = {}
    for name, value in named:
        groups.setdefault(id(value), []).append(name)
    return {
        "kinds": {name: (type(p).__name__, p.requires_grad, tuple(p.shape)) for name, p in named},
        "tied": sorted(names for names in groups.values() if len(names) > 1),
        "trained": [name for name, _ in engine.parameters()],
    }


def compare(build: Callable[[], Any]) -> dict[str, Any]:
    """One case on this rank."""
    with Lines() as logged:
        mine = build()
    with loaded_whole():
        theirs = build()
    ours, expected = held_tensors(mine), held_tensors(theirs)
    facts = facts_of(mine)
    return {
        "lines": logged.lines,
        "same_facts": facts == facts_of(theirs) and list(ours) == list(expected),
        "different": [n for n in expected if not torch.equal(ours[n], expected[n])],
        "compared": len(expected),
        "tied": facts["tied"],
    }


def said_of_a_lost_file(build: Callable[[], Any]) -> str:
    """What a rank is told whose file can no longer be read once the model was opened."""

    def lost(*_: Any) -> None:
        raise OSError("the disk is gone")

    with patch.object(sharding, "read_box", lost):
        try:
            build()
        except ModelError as error:
            return str(error)
    return "nothing"


def rise(build: Callable[[], Any]) -> dict[str, int]:
    """How far building an engine raised the peak, and what of it the engine holds."""
    engine, bytes_ = measured(build)
    held = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for value in map(local_part, engine.vlm.parameters())
    }
    return {
        "peak": bytes_["peak"] - bytes_["before"],
        "share": sum(held.values()),
        "whole": sum(4 * value.numel() for value in engine.vlm.parameters()),
        "largest": max(4 * value.numel() for value in engine.vlm.parameters()),
    }


def builder(folder: Path, ranks: Ranks, how: Any, split: dict[str, Any]) -> Callable[[], Any]:
    """Builds an engine of a model folder."""
    encoder = Encoder(folder)
    return lambda: make_engine(folder, encoder, ranks=ranks, policy=how, sharding="fsdp", **split)


def main(folder: Path) -> None:
    """Every case, then the memory; one file for all ranks."""
    ranks = start_process_group()
    models = folder / "models"
    found: dict[str, Any] = {
        name: compare(builder(models / model, ranks, how, split))
        for name, (model, how, split) in CASES.items()
    }
    tied = builder(models / "qwen2_vl", ranks, EVERYTHING, {})
    found["lost"] = said_of_a_lost_file(tied)
    build = builder(models / "wide", ranks, EVERYTHING, {})
    found["by shards"] = rise(build)
    with loaded_whole():
        found["whole"] = rise(build)
    write_of_all_ranks(found, folder / "found.json", ranks)
    stop_process_group()


pytestmark = pytest.mark.soak
MIB = 1 << 20


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found; real processes, since their memory is measured."""
    folder = tmp_path_factory.mktemp("opened")
    models = folder / "models"
    for name in {model for model, _, _ in CASES.values()}:
        made = tiny_family_folder(name, tmp_path_factory.mktemp(name))
        shutil.copytree(made, models / name)
    write_wide_model(models / "wide", width=512, layers=16)
    layouts.torchrun(__file__, 2, str(folder))
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_shards_are_those_of_the_whole_model_bit_for_bit(found, case):
    for rank in found:
        assert rank[case]["different"] == []
        assert rank[case]["same_facts"]
        assert rank[case]["compared"] > 30


def test_what_is_tied_stays_tied(found):
    names = [["lm_head.weight", "model.language_model.embed_tokens.weight"]]
    assert [[sorted(group) for group in rank["tied"]["tied"]] for rank in found] == [names] * 2


def test_where_whole_weights_are_needed_a_line_says_so(found):
    for rank in found:
        for case in CASES:
            lines = rank[case]["lines"]
            if case != "adapters with magnitudes":
                assert lines == []
                continue
            (line,) = lines
            assert line == (
                "every process loads the whole model in float32 on its host: DoRA begins with the "
                "norms of its weights"
            )


def test_a_file_that_goes_after_the_model_was_opened_is_named_by_its_parameter(found):
    for rank in found:
        assert rank["lost"].startswith("model.path: model.model.")
        assert rank["lost"].endswith("cannot be read: the disk is gone")


def test_a_rank_needs_one_tensor_beyond_its_shards(found):
    """The negative control loads the whole model, as every rank did before."""
    for rank in found:
        ours, control = rank["by shards"], rank["whole"]
        print("\n" + ", ".join(f"{key} {value / MIB:.1f} MiB" for key, value in ours.items()))
        print(f"whole: peak {control['peak'] / MIB:.1f} MiB")
        assert ours["share"] == pytest.approx(ours["whole"] / 2, rel=0.01)
        bound = ours["share"] + ours["largest"] + 8 * MIB
        assert ours["peak"] < bound
        assert control["peak"] > ours["whole"] > 1.5 * bound


if __name__ == "__main__":
    give_back_freed_tensors()
    main(Path(sys.argv[1]))
