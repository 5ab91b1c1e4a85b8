"""Whom the ranks of a world name, and which of them speaks; all in one process, on one store."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from vlmpack.activity import Activity
from vlmpack.distributed.pulse import MOST_NAMED, Pulse

SECONDS = 0.8
WORLD = 7


class Ranks:
    """Pulses of a whole world; `stop` is what SIGSTOP does to one."""

    def __init__(self, store):
        self.activities = [Activity() for _ in range(WORLD)]
        self.pulses = [
            Pulse(activity, rank=rank, world_size=WORLD, seconds=SECONDS, store=store)
            for rank, activity in enumerate(self.activities)
        ]
        for rank, activity in enumerate(self.activities):
            activity.step, activity.samples = 8, [f"sample-of-{rank}"]
            activity.enter("forward and backward")
        self.living = {pulse.rank for pulse in self.pulses}
        for pulse in self.pulses:
            pulse.__enter__()

    def stop(self, rank):
        self.pulses[rank].__exit__(None, None, None)
        self.living.discard(rank)

    def speakers(self):
        return [rank for rank in sorted(self.living) if self.pulses[rank].speaks()]


@pytest.fixture
def world():
    made = Ranks(dist.HashStore())
    time.sleep(SECONDS / 2)
    yield made
    for rank in list(made.living):
        made.stop(rank)


def test_the_first_rank_speaks_and_names_the_one_that_is_stopped(world):
    assert world.speakers() == [0]
    assert world.pulses[0].lines()[:1] != []
    world.stop(5)
    time.sleep(0.9 * SECONDS)
    (line,) = world.pulses[0].lines()
    assert line.startswith("rank 5 (process ")
    assert "has given no sign of life for 1 s" in line
    assert "last heard of at step 8, forward and backward, last samples: sample-of-5" in line
    assert world.speakers() == [0]


@pytest.mark.slow
def test_the_next_rank_speaks_where_the_first_is_stopped(world):
    world.stop(0)
    time.sleep(0.9 * SECONDS)
    assert world.speakers() == [1]
    assert [line[:6] for line in world.pulses[1].lines()] == ["rank 0"]
    world.stop(1)
    time.sleep(0.9 * SECONDS)
    assert world.speakers() == [2]


@pytest.mark.slow
def test_who_hangs_is_named_by_where_he_stands_and_his_stack(world):
    world.activities[4].enter("waiting for data")
    time.sleep(0.7 * SECONDS)
    (line,) = world.pulses[0].lines()
    assert line.startswith("rank 4 (process ")
    assert "stands at step 8, waiting for data, last samples: sample-of-4, for" in line
    assert "in test_who_hangs" in line, "the stack of the thread that works"
    for activity in world.activities[:6]:
        activity.step = 9
    world.activities[4].enter("forward and backward")
    time.sleep(0.5 * SECONDS)
    (line,) = world.pulses[0].lines()
    assert line.startswith("rank 6 (process "), "the one at the earliest step"


def test_of_ranks_in_one_phase_the_one_that_waits_for_another_thing_is_named(world):
    for rank, activity in enumerate(world.activities):
        activity.enter("waiting for data")
        wait = "waiting for http://a/b.tar" if rank == 5 else "waiting for the others"
        activity._waits[rank] = lambda wait=wait: wait
    time.sleep(0.7 * SECONDS)
    (line,) = world.pulses[0].lines()
    assert line.startswith("rank 5 (process ") and "waiting for http://a/b.tar, last" in line


def test_who_has_ended_is_known_at_once(world):
    assert world.pulses[0].ended() == []
    world.pulses[0]._entries[5] = world.pulses[0]._entries[5] | {"pid": 2**22 + 1}
    (line,) = world.pulses[0].ended()
    assert line.startswith("rank 5 (process 4194305 on ")
    assert line.endswith(" has ended, last heard of at step 8, forward and backward")


def test_a_rank_before_its_first_step_is_not_at_step_0(world):
    for activity in world.activities:
        activity.step, activity.samples = 0, ()
        activity.enter("launch")
    world.activities[4].enter("loading the model")
    time.sleep(0.7 * SECONDS)
    (line,) = world.pulses[0].lines()
    assert ") stands before its first step, loading the model, for " in line
    world.stop(4)
    world.pulses[0]._entries[5] = world.pulses[0]._entries[5] | {"pid": 2**22 + 1}
    (line,) = world.pulses[0].ended()
    assert line.endswith(" has ended, last heard of before its first step, launch")
    time.sleep(0.9 * SECONDS)
    (line,) = world.pulses[0].lines()
    assert line.endswith("It was last heard of before its first step, loading the model")


def test_many_are_counted(world):
    for rank in range(1, WORLD):
        world.stop(rank)
    time.sleep(0.9 * SECONDS)
    lines = world.pulses[0].lines()
    assert len(lines) == MOST_NAMED + 1
    assert lines[-1] == "and 2 more ranks"


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_news_and_ends_nothing():
    class Silent:
        def set(self, key, value):
            time.sleep(3 * SECONDS)
            raise RuntimeError("closed")

    activity = Activity()
    with Pulse(activity, rank=1, world_size=2, seconds=SECONDS, store=Silent()) as pulse:
        time.sleep(0.3 * SECONDS)
        assert not pulse.speaks()
        time.sleep(0.4 * SECONDS)
        assert pulse.speaks(), "nobody else can be heard"
        assert "the launcher's store has not answered for 1 s" in pulse.lines()[0]
