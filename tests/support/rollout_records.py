"""The `rollout` of a record as samplers write it, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rollout(drawn: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A record's `rollout` with other values of `sampling`, and others of its own."""
    sampling: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "log_probs": "raw",
    }
    return {
        "token_ids": [5, 7, 2],
        "log_probs": [-0.5, -1.25, -0.125],
        "prompt_token_ids": [1, 3, 3, 4],
        "reward": 1.0,
        "rewards": {"exact": 1.0},
        "group": "a",
        "number": 0,
        "policy_version": 3,
        "sampling": sampling | dict(drawn or {}),
        "finish": "stop",
        "server": {"name": "vllm", "version": "0.33.0"},
        **changes,
    }
