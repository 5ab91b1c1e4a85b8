"""The first module of the server that loader processes fork from.

The server only imports and forks, so it never collects garbage. Its children do, but not among
what they share with it: a collection would write to every page of that.
"""

from __future__ import annotations

import gc
import os

gc.disable()
os.register_at_fork(before=gc.freeze, after_in_child=gc.enable)
