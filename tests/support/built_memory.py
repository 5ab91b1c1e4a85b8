"""Run under torchrun: how far building an engine at TP 2 raises a process's resident memory.

    torchrun --nproc-per-node 2 built_memory.py FOLDER

FOLDER/model is large against noise. Writes FOLDER/found.json, by rank and by way of reading.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from safetensors import safe_open
from support.checkpoint_memory import give_back_freed_tensors, measured
from support.layouts import LAYOUTS, make_megatron
from support.of_all_ranks import write_of_all_ranks
from support.shards import TINY_MODEL

from vlmpack.backends.mcore import pretrained
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

        with patch.object(pretrained, "read_into", read_into):
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


if __name__ == "__main__":
    give_back_freed_tensors()
    main(Path(sys.argv[1]))
