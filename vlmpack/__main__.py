"""`python -m vlmpack` and `torchrun -m vlmpack`."""

from vlmpack.collector import collector_paused
from vlmpack.interrupt import interrupt_ends_at_once

with interrupt_ends_at_once(), collector_paused():
    from vlmpack.cli import main

if __name__ == "__main__":
    main()
