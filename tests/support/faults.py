"""What a FaultServer can do wrong, and how that is drawn by lot."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

KINDS = (
    "status",  # answers `status`
    "truncate",  # announces the whole body, sends a part of it, closes
    "short",  # announces no length, sends a part of the body, closes
    "reset",  # announces the whole body, sends a part of it, resets the connection
    "stall",  # announces the whole body, sends a part of it, then nothing for `seconds`
    "slow",  # sends the body at `bytes_per_second`
    "latency",  # waits `seconds` first
    "drip",  # sends its headers byte by byte, `seconds` between them, and no body
    "etag",  # another ETag and other bytes, whatever the request's conditions
    "redirect",  # answers 302 to `location`
)


@dataclass(slots=True)
class Fault:
    """What goes wrong, where, and how often.

    Args:
        kind: one of KINDS.
        times: requests that it hits; None for all.
        match: only paths that contain this.
        methods: only these.
        status: for `status`.
        part: for `truncate`, `short`, `reset`, `stall`: the share of the body that is sent.
        seconds: for `stall`, `latency` and `drip`.
        bytes_per_second: for `slow`.
        location: for `redirect`.
        headers: of the answer, for `status`.
    """

    kind: str
    times: int | None = 1
    match: str = ""
    methods: tuple[str, ...] = ("GET",)
    status: int = 503
    part: float = 0.5
    seconds: float = 60.0
    bytes_per_second: int = 1 << 20
    location: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


@dataclass(frozen=True, slots=True)
class SeededFaults:
    """Faults by lot: the same for the same seed, whichever thread asks first.

    Args:
        seed: of the draws.
        share: of the requests that fail.
        faults: drawn from.
        attempts: what ends at the same byte of a file fails at most so often; then it is served.
    """

    seed: int
    share: float
    faults: tuple[Fault, ...]
    attempts: int = 3

    def draw(self, path: str, end: str, attempt: int) -> Fault | None:
        """The fault of one request, if any."""
        if attempt >= self.attempts:
            return None
        draw = random.Random(f"{self.seed}|{path}|{end}|{attempt}")
        return draw.choice(self.faults) if draw.random() < self.share else None
