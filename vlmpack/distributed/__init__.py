"""Ranks, groups and collectives. torch only."""

from vlmpack.distributed.ranks import (
    Ranks,
    at_stop,
    process_group,
    start_process_group,
    stop_process_group,
    world_size_from_environment,
)

__all__ = [
    "Ranks",
    "start_process_group",
    "at_stop",
    "process_group",
    "stop_process_group",
    "world_size_from_environment",
]
