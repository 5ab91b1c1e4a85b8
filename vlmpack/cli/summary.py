"""The last lines of a run, for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmpack.terminal import open_console
from vlmpack.words import counted

if TYPE_CHECKING:
    from vlmpack.api import FinetuneResult


def print_result(result: FinetuneResult) -> None:
    """Print where everything is, and the figures that matter."""
    from rich.table import Table

    from vlmpack.data.loading.ledger import LEDGER_NAME

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("steps", f"{result.steps:,} in {result.train_seconds:,.0f} s of training")
    table.add_row("speed", f"{result.tokens_per_second:,.0f} real tokens/s")
    saved = 1 - result.real_tokens / max(1, result.padded_tokens)
    table.add_row(
        "tokens",
        f"{result.real_tokens:,} real; padded rows would hold {result.padded_tokens:,} "
        f"({saved:.0%} padding)",
    )
    if skipped := result.figures.get("skipped_samples"):
        samples = counted(skipped + result.figures["samples"], "sample")
        table.add_row("skipped", f"{skipped:,} of {samples}: {LEDGER_NAME} lists them, and why")
    for name, share in result.metrics_after.items():
        before = result.metrics_before.get(name)
        start = "" if before is None else f"{before:.1%} -> "
        table.add_row(name.replace("_", " "), f"{start}{share:.1%} on the test split")
    adapter = result.run_dir / "adapter"
    places = (
        ("model", result.export),
        ("adapter", adapter if adapter.is_dir() else None),
        ("report", result.report),
    )
    for name, path in places:
        if path is not None:
            table.add_row(name, str(path))
    table.add_row("run", str(result.run_dir))
    open_console().print(table)
