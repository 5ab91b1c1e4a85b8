"""What a rank sends in a step, as a titled table of text."""

from __future__ import annotations

from vlmpack.forecast.communication import Traffic, TrafficFigures
from vlmpack.report.forecast.section import Column, Section
from vlmpack.words import sized


def traffic_section(traffic: TrafficFigures) -> Section:
    """By part: who takes part, messages, bytes, and how long the links take."""
    links = traffic.links

    def row(part: Traffic) -> tuple[str, ...]:
        beside = " *" if part.what in traffic.overlapped else ""
        milliseconds = 1000 * part.seconds(links)
        return (
            part.what + beside, f"{part.group} {part.ranks}", part.kind, f"{part.calls:,}",
            sized(part.num_bytes), sized(part.sent), f"{milliseconds:.3g}",
        )  # fmt: skip

    hidden = traffic.seconds - traffic.exposed_seconds
    return Section(
        title=f"What {traffic.where} sends in an optimizer step, an estimate",
        columns=(
            *(Column(name, is_text=True) for name in ("what", "ranks", "how")),
            *map(Column, ("messages", "tensors", "sent", "ms")),
        ),
        rows=tuple(map(row, traffic.parts)),
        lines=(
            "tensors: whole, before any algorithm; sent: by a ring; ms: at "
            f"{links.node_gbs:g} GB/s a GPU between the {links.gpus_per_node} of a node and "
            f"{links.network_gbs:g} GB/s between nodes, assumed (--node-gbs, --network-gbs)",
            f"{1000 * traffic.seconds:.3g} ms in all, one after the other"
            + (f"; *: {1000 * hidden:.3g} ms of them beside compute" if hidden else ""),
            *traffic.notes,
        ),
    )
