"""Ranks, groups and collectives. torch only."""

from vlmpack.distributed.ranks import Ranks as Ranks
from vlmpack.distributed.ranks import at_stop as at_stop
from vlmpack.distributed.ranks import process_group as process_group
from vlmpack.distributed.ranks import start_process_group as start_process_group
from vlmpack.distributed.ranks import stop_process_group as stop_process_group
from vlmpack.distributed.ranks import world_size_from_environment as world_size_from_environment
