"""What the ranks of a run send each other in an optimizer step: figures, and what links carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]

SENT: dict[Kind, float] = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 1.0,
    "send": 1.0,
}
"""How often a ring sends the whole tensor, but for the part that a rank keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What a GPU sends at once, assumed: no run has measured it.

    Args:
        gpus_per_node: GPUs that the fast links join.
        node_gbs: GB/s of a GPU inside of a node.
        network_gbs: GB/s of a GPU between nodes, its share of the node's cards.
    """

    gpus_per_node: int = 8
    node_gbs: float = 300.0
    network_gbs: float = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One kind of message of one rank, over a step.

    Args:
        what: is sent.
        group: the ranks that take part, in words.
        kind: of collective.
        ranks: in the group.
        span: neighbours from the group's first rank to its last.
        calls: a step.
        num_bytes: of the whole tensors, before any algorithm: what an all-gather makes, what a
            reduce-scatter is given.
    """

    what: str
    group: str
    kind: Kind
    ranks: int
    span: int
    calls: int
    num_bytes: int

    @property
    def sent(self) -> int:
        """Bytes that a rank sends, by a ring."""
        part = 1.0 if self.kind == "send" else (self.ranks - 1) / self.ranks
        return round(SENT[self.kind] * part * self.num_bytes)

    def seconds(self, links: Links) -> float:
        """How long the links take for it, when nothing else goes over them."""
        speed = links.node_gbs if self.span <= links.gpus_per_node else links.network_gbs
        return self.sent / speed / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficFigures:
    """A rank's messages of a step.

    Args:
        where: which rank.
        parts: of one kind each.
        links: that times are for.
        overlapped: names of parts that run beside compute.
        notes: what the figures leave out.
    """

    where: str
    parts: tuple[Traffic, ...]
    links: Links
    overlapped: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """All of them, one after the other."""
        return sum(part.seconds(self.links) for part in self.parts)

    @property
    def exposed_seconds(self) -> float:
        """Those that compute waits for."""
        return sum(
            part.seconds(self.links) for part in self.parts if part.what not in self.overlapped
        )
