"""The Megatron engine's tests; they are skipped where megatron-core is not installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("megatron") else ["test_*.py"]
