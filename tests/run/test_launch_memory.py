"""What a launch says of its memory, before a weight is read."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from support.recipes import changed, run_settings

from vlmpack.activity import ACTIVITY
from vlmpack.api import resolve, run_recipe
from vlmpack.errors import DeviceMemoryError
from vlmpack.recipe.schema import ModelSection, ParallelismSection
from vlmpack.run import launch_memory
from vlmpack.run.launch_memory import Room, out_of_memory_named, room_of
from vlmpack.training.step import Stepper

GIB = 2**30


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A machine of 64 GiB whose process lies in the control group /pod/run."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(launch_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(launch_memory, "CGROUPS", tmp_path / "cgroup")
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/pod/run\n")
    write(tmp_path / "cgroup/pod/run/memory.max", "max\n")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


def room():
    found = room_of(torch.device("cpu"))
    return found.size // GIB, found.where.split()[1]


def test_a_machine_without_limits_has_what_it_has(system):
    assert room() == (64, "machine")


def test_the_least_limit_around_a_process_counts(system):
    write(system / "cgroup/pod/memory.max", f"{8 * GIB}\n")
    assert room() == (8, "container")
    write(system / "cgroup/pod/run/memory.max", f"{4 * GIB}\n")
    assert room() == (4, "container")
    write(system / "cgroup/memory.max", f"{2 * GIB}\n")
    assert room() == (2, "container")


def test_groups_of_the_first_version_count_too(system):
    write(system / "proc/self/cgroup", "5:cpu:/\n7:memory,x:/docker/abc\n0::/\n")
    write(system / "cgroup/memory/docker/abc/memory.limit_in_bytes", f"{3 * GIB}\n")
    assert room() == (3, "container")
    write(system / "cgroup/memory/docker/abc/memory.limit_in_bytes", "9223372036854771712\n")
    assert room() == (64, "machine")


def test_processes_of_a_machine_share_it(system, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert room_of(torch.device("cpu")).processes == 4


@pytest.mark.slow
def test_a_launch_that_needs_more_than_there_is_says_so_with_the_knobs(
    tmp_path, monkeypatch, caplog
):
    small = Room(20 * 2**20, "this container (the memory limit of its cgroup)", 1)
    monkeypatch.setattr(launch_memory, "room_of", lambda device: small)
    settings = run_settings(tmp_path, training__max_steps=1)
    with caplog.at_level(logging.INFO, "vlmpack"):
        run_recipe(resolve(settings, {}))
    (told,) = [one for one in caplog.records if one.getMessage().startswith("memory")]
    assert told.levelno == logging.WARNING
    for words in ("this container", "has 20.0 MiB", "weights", "training.micro_batch_size", "fsdp"):
        assert words in told.getMessage()
    caplog.clear()
    monkeypatch.setattr(launch_memory, "room_of", lambda device: Room(64 * GIB, "this machine", 2))
    with caplog.at_level(logging.INFO, "vlmpack"):
        run_recipe(resolve(changed(settings, run_dir=str(tmp_path / "other")), {}))
    (told,) = [one for one in caplog.records if one.getMessage().startswith("memory")]
    assert told.levelno == logging.INFO
    assert "this machine has 64.0 GiB, for 2 processes" in told.getMessage()


def spec_of(value):
    model = ModelSection(path="somewhere", activation_checkpointing=value)
    ranks = SimpleNamespace(device=torch.device("cuda", 0))
    return SimpleNamespace(model=model, parallelism=ParallelismSection(), ranks=ranks)


CUDA_SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"


@pytest.mark.parametrize(
    ("value", "less"),
    [("none", "selective"), ("selective", "full"), (9, "4"), (4, "3"), (2, "full"), ("auto", "")],
)
def test_a_step_without_room_names_what_takes_less(value, less, monkeypatch):
    """As the kernel's own message does not. `auto` that nobody resolved is `full`."""
    monkeypatch.setattr(ACTIVITY, "phase", "forward and backward")  # another test may have left it
    with pytest.raises(DeviceMemoryError) as raised, out_of_memory_named(spec_of(value)):
        raise torch.OutOfMemoryError(CUDA_SAYS)
    said = str(raised.value)
    assert (
        "cuda:0" in said and "Tried to allocate 2.00 GiB" in said and "total capacity" not in said
    )
    assert (f"model.activation_checkpointing: {less}," in said) is bool(less)
    assert "packing.max_tokens" in said


def test_validation_without_room_is_not_called_a_step(monkeypatch):
    """It has no backward pass, so computing layers again would not help it."""
    monkeypatch.setattr(ACTIVITY, "phase", "validation")
    with pytest.raises(DeviceMemoryError) as raised, out_of_memory_named(spec_of("none")):
        raise torch.OutOfMemoryError(CUDA_SAYS)
    said = str(raised.value)
    assert said.startswith("validation does not fit") and "activation_checkpointing" not in said


def test_another_error_is_left_as_it_is():
    with pytest.raises(RuntimeError, match="another"), out_of_memory_named(spec_of("none")):
        raise RuntimeError("another")


@pytest.mark.slow
def test_a_run_whose_step_has_no_room_ends_with_the_knob(tmp_path, monkeypatch):
    def step(*_, **__):
        raise torch.OutOfMemoryError(CUDA_SAYS)

    monkeypatch.setattr(Stepper, "train", step)
    with pytest.raises(DeviceMemoryError, match="activation_checkpointing: selective"):
        run_recipe(resolve(run_settings(tmp_path, training__max_steps=1), {}))
    assert not list((tmp_path / "run").glob("checkpoints/step*"))


def test_a_gpu_has_what_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 80 * GIB))
    room = room_of(torch.device("cuda", 0))
    assert (room.size, room.processes) == (60 * GIB, 1) and "free on cuda:0" in room.where
