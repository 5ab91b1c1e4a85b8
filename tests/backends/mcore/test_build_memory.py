"""An engine is built from slices: a rank's host needs its share of the model and about one tensor.

Two processes at TP 2, real ones, since their memory is measured.

Run under torchrun: how far building an engine at TP 2 raises a process's resident memory.

    torchrun --nproc-per-node 2 test_build_memory.py FOLDER

FOLDER/model is large against noise. Writes FOLDER/found.json, by rank and by way of reading.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from safetensors import safe_open
from support.checkpoint_memory import give_back_freed_tensors, measured
from support.layouts import LAYOUTS, make_megatron, torchrun
from support.of_all_ranks import write_of_all_ranks
from support.shards import TINY_MODEL
from support.wide import write_wide_model

from vlmpack.backends.hf import deferred
from vlmpack.distributed import start_process_group, stop_process_group

LAYOUT = replace(LAYOUTS["tp2"], distributed=True)


@contextmanager
def mapped() -> Iterator[None]:
    """Boxes of a file that stays mapped."""
    with ExitStack() as files:
        opened: dict[Path, Any] = {}

        def read_into(target: Any, stored: Any, index: Any) -> None:
            if stored.file not in opened:
                file = safe_open(str(stored.file), framework="pt")
                opened[stored.file] = files.enter_context(file)
            target.copy_(opened[stored.file].get_slice(stored.name)[index])

        with patch.object(deferred, "read_into", read_into):
            yield


def rise(ranks: Any, folder: Path) -> dict[str, int]:
    """Of one engine, beside its gradients, which are there from the beginning."""
    engine, bytes_ = measured(lambda: make_megatron(LAYOUT, ranks, folder))
    held = [parameter.nbytes for parameter in engine.model.parameters()]
    gradients = sum(buffer.grad_data.nbytes for buffer in engine.ddp.buffers)
    return {
        "peak": bytes_["peak"] - bytes_["before"] - gradients,
        "share": sum(held),
        "largest": max(held),
        "whole": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
    }


def main(folder: Path) -> None:
    """Twice, once everything has been imported."""
    ranks = start_process_group(tensor=2)
    make_megatron(LAYOUT, ranks, TINY_MODEL)
    found = {"by boxes": rise(ranks, folder / "model")}
    with mapped():
        found["mapped"] = rise(ranks, folder / "model")
    write_of_all_ranks(found, folder / "found.json", ranks)
    stop_process_group()


pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not Path("/proc/self/clear_refs").exists(), reason="reads Linux's peak counter"
    ),
]

MIB = 1 << 20


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    write_wide_model(folder / "model", width=512, layers=16)
    torchrun(__file__, 2, str(folder))
    return json.loads((folder / "found.json").read_text())


def test_a_rank_needs_one_tensor_beyond_its_share(found):
    """The control is the safetensors library, whose maps hold all pages that were read."""
    for rank in found:
        ours, control = rank["by boxes"], rank["mapped"]
        for how, numbers in rank.items():
            parts = (f"{name} {value / MIB:.1f}" for name, value in numbers.items())
            print(f"\n{how}, MiB: {', '.join(parts)}")
        assert ours["share"] < 0.55 * ours["whole"]
        bound = ours["share"] + ours["largest"] + 8 * MIB
        assert ours["peak"] < bound
        assert control["peak"] > 1.5 * bound


if __name__ == "__main__":
    give_back_freed_tensors()
    main(Path(sys.argv[1]))
