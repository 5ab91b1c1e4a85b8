"""The first module of the server that loader processes fork from.

The server only imports and forks, so it never collects garbage. Its children do, but not among
what they share with it: a collection would write to every page of that. In any other process that
imports this, nothing happens.
"""

from __future__ import annotations

import gc
import os
import sys

if any("multiprocessing.forkserver" in each for each in sys.orig_argv):
    gc.disable()
    os.register_at_fork(before=gc.freeze, after_in_child=gc.enable)
