"""What `vlmpack export` does with a run, but for its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmpack.run.export import Exported, choose_export, write_export


def export_run(run: Path, **how: Any) -> Exported:
    """Choose and write; `how` is that of `choose_export`."""
    return write_export(choose_export(run, **how))
