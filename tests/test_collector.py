"""The garbage collector rests while packages are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from vlmpack.collector import collector_paused


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.enable()
    gc.unfreeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if frozen:
            gc.freeze()
        (gc.enable if enabled else gc.disable)()


def held(generation: int, value: object) -> bool:
    return any(each is value for each in gc.get_objects(generation=generation))


def test_it_rests_inside_and_works_behind_an_error() -> None:
    with pytest.raises(ImportError), collector_paused():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_what_is_made_inside_is_old_at_once() -> None:
    with collector_paused():
        inside: list[object] = [[]]
        assert held(0, inside)
    assert held(2, inside)
    behind: list[object] = [[]]
    assert held(0, behind), "the control: else it is young"


def test_garbage_of_inside_is_found_by_a_full_collection() -> None:
    with collector_paused():
        gone: list[object] = []
        gone.append(gone)
        number = id(gone)
        del gone
    assert any(id(each) == number for each in gc.get_objects(generation=2))
    gc.collect()
    assert not any(id(each) == number for each in gc.get_objects(generation=2))


def test_a_program_that_has_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    with collector_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_what_a_program_has_frozen_stays_so() -> None:
    kept: list[object] = [[]]
    gc.freeze()
    with collector_paused():
        pass
    assert gc.get_freeze_count() > 0
    assert not any(held(generation, kept) for generation in range(3))
