"""CUDA_DEVICE_MAX_CONNECTIONS by layout, GPU and what the user has set; no GPU is needed."""

from __future__ import annotations

import ctypes
import logging
import os

import pytest

from vlmpack.distributed import launch_order as module
from vlmpack.distributed import start_process_group
from vlmpack.distributed.launch_order import VARIABLE, launch_order, set_launch_order

AMPERE, HOPPER, BLACKWELL = 8, 9, 10


@pytest.mark.parametrize(
    ("found", "layout", "generation", "set_to", "warning"),
    [
        (None, {"in_order": True}, HOPPER, "1", None),
        (None, {"in_order": True}, AMPERE, "1", None),
        (None, {"in_order": True}, BLACKWELL, None, None),
        (None, {"in_order": True}, None, None, None),
        (None, {}, HOPPER, None, None),
        (None, {"gathers_ahead": True}, HOPPER, None, None),
        ("1", {"in_order": True}, HOPPER, None, None),
        ("8", {"in_order": True}, HOPPER, None, "is 8: with parallelism.tensor"),
        ("32", {"in_order": True}, BLACKWELL, None, None),
        ("8", {"gathers_ahead": True}, HOPPER, None, None),
        ("1", {"gathers_ahead": True}, HOPPER, None, "is 1: parallelism.sharding: fsdp"),
        ("1", {"gathers_ahead": True}, BLACKWELL, None, "is 1: parallelism.sharding: fsdp"),
        ("1", {}, HOPPER, None, None),
    ],
)
def test_what_is_set_stays_and_what_is_not_is_set_where_it_matters(
    found, layout, generation, set_to, warning
):
    environment = {} if found is None else {VARIABLE: found}
    order = launch_order(environment, generation=generation, **layout)
    assert order.set_to == set_to
    assert (order.warning is None) == (warning is None)
    assert warning is None or warning in order.warning


def test_what_cuda_has_read_cannot_be_set_any_more():
    order = launch_order({}, in_order=True, generation=HOPPER, in_use=True)
    assert order.set_to is None and "CUDA has started in this process" in order.warning
    assert (
        launch_order({VARIABLE: "1"}, in_order=True, generation=HOPPER, in_use=True).warning is None
    )


@pytest.fixture
def hopper(monkeypatch):
    """A driver whose first GPU is of that generation."""
    monkeypatch.setenv(VARIABLE, "anything")  # put back what it was
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(module, "gpu_generation", lambda: HOPPER)


def test_it_is_set_before_a_process_group_asks_cuda_for_anything(hopper, monkeypatch):
    seen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: seen.append(os.environ.get(VARIABLE)))
    start_process_group()
    monkeypatch.setenv("WORLD_SIZE", "3")  # no multiple of 2: refused once CUDA was asked
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for layout in ({"tensor": 2}, {"context": 2}, {"context": 2, "sharded": True}):
        os.environ.pop(VARIABLE, None)
        with pytest.raises(Exception, match="3 processes, expected a multiple"):
            start_process_group(**layout)
    assert seen == [None, "1", "1", None]


def test_another_value_of_the_users_stays_with_a_warning(hopper, monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, "4")
    with caplog.at_level(logging.WARNING, "vlmpack"):
        set_launch_order(in_order=True)
    assert os.environ[VARIABLE] == "4"
    (record,) = caplog.records
    assert record.message.startswith(f"{VARIABLE} is 4: with parallelism.tensor")


class Driver:
    """NVML's library, of a machine with GPUs of some compute capability."""

    def __init__(self, major, *, status=0):
        self.major, self.status, self.closed = major, status, False

    def nvmlInit_v2(self):
        return self.status

    def nvmlShutdown(self):
        self.closed = True

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        return 2 if self.major is None else 0

    def nvmlDeviceGetCudaComputeCapability(self, device, major, minor):
        major._obj.value, minor._obj.value = self.major, 0
        return 0


def test_the_driver_says_the_generation_and_nobody_asks_cuda(monkeypatch):
    for driver, expected in ((Driver(9), 9), (Driver(None), None), (Driver(9, status=9), None)):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, driver=driver: driver)
        assert module.gpu_generation() == expected
        assert driver.closed == (driver.status == 0)

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert module.gpu_generation() is None
