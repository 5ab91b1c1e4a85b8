"""Run under torchrun: the resident memory of each process of a layout at its peaks.

    torchrun --nproc-per-node N checkpoint_memory.py FOLDER LAYOUT

FOLDER/model is a model folder. Writes FOLDER/<layout>.json, by rank: what an engine's tensors take,
and the resident bytes before, at the peak of and after building it, a step, a save, a load, and a
save in the background.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.checkpoints import content_of
from support.engines import make_stepper
from support.layouts import LAYOUTS, make_megatron, train
from support.of_all_ranks import write_of_all_ranks
from torch import Tensor

from vlmpack.distributed import start_process_group, stop_process_group
from vlmpack.training.checkpoint import Saver, load_checkpoint, step_folder

LIBC = ctypes.CDLL(None)


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"{field}:\s+(\d+)", text)
    assert found is not None
    return int(found[1]) * 1024


def give_back_freed_tensors() -> None:
    """Have malloc map each tensor on its own, so that the resident set is what is in use.

    Otherwise a freed tensor leaves a hole in the heap, and later ones spread over the holes.
    """
    mmap_threshold = -3
    assert LIBC.mallopt(mmap_threshold, 1 << 16) == 1


def measured(work: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """What some work returned, and the resident bytes before it, at its peak and after it.

    What malloc still keeps of freed memory is handed back first: it could hide new memory.
    """
    gc.collect()
    LIBC.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # sets VmHWM to VmRSS
    before = _status("VmRSS")
    result = work()
    peak = _status("VmHWM")
    gc.collect()
    LIBC.malloc_trim(0)
    return result, {"before": before, "peak": peak, "after": _status("VmRSS")}


def checksum(tensors: list[Tensor]) -> list[float]:
    """To see whether values came back."""
    return [float(tensor.double().sum()) for tensor in tensors]


def moments_of(engine: Any) -> list[Tensor]:
    """Of this rank."""
    return [
        state[name]
        for part in engine.optimizer.parts
        for state in part.optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    ]


def main(folder: Path, name: str) -> None:
    """Build, step, save, load; one file for all ranks."""
    layout = replace(LAYOUTS[name], distributed=True)
    ranks = start_process_group(
        tensor=layout.tensor, context=layout.context, pipeline=layout.pipeline
    )
    engine, build = measured(lambda: make_megatron(layout, ranks, folder / "model"))
    stepper = make_stepper(engine)
    _, step = measured(lambda: train(stepper, layout, 1))
    saver = Saver(folder / name, ranks, keep=1)
    _, save = measured(lambda: saver.save(content_of(engine, 1), engine.owned_slices))
    parameters = [parameter.detach() for parameter in engine.model.parameters()]
    moments = moments_of(engine)
    expected = checksum(parameters + moments)
    storages = [tensor.data_ptr() for tensor in parameters]
    for tensor in parameters + moments:
        tensor.zero_()
    moment_bytes = sum(tensor.numel() * tensor.element_size() for tensor in moments)
    del moments, tensor
    _, load = measured(lambda: load_checkpoint(step_folder(folder / name, 1), engine, ranks))
    assert checksum(parameters + moments_of(engine)) == expected, "not what was saved"
    assert [tensor.data_ptr() for tensor in parameters] == storages, "parameters were replaced"

    def save_in_background() -> None:
        saver.save_in_background(content_of(engine, 2), engine.owned_slices)
        saver.finish()

    _, background = measured(save_in_background)
    facts = {
        "parameters": sum(tensor.numel() * tensor.element_size() for tensor in parameters),
        "moments": moment_bytes,
        "written": sum(
            value.numel() * value.element_size() for _, _, value in engine.owned_slices()
        ),
        "largest": max(tensor.numel() * tensor.element_size() for tensor in parameters),
        "build": build,
        "step": step,
        "save": save,
        "load": load,
        "background": background,
    }
    write_of_all_ranks(facts, folder / f"{name}.json", ranks)
    stop_process_group()


if __name__ == "__main__":
    give_back_freed_tensors()
    main(Path(sys.argv[1]), sys.argv[2])
