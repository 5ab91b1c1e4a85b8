"""Exports of a tiny model of each family, for those who compare names with servers.

PYTHONPATH=.:tests python -m support.exported_names FOLDER     all of them, by family
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from support.engines import make_engine
from support.families import FAMILIES, tiny_family_folder

from vlmpack.encode import Encoder


def write_exported(name: str, folder: Path) -> Path:
    """An export of one of `FAMILIES`, in a new folder."""
    with TemporaryDirectory() as tmp:
        base = tiny_family_folder(name, Path(tmp) / "base")
        engine = make_engine(base, Encoder(base))
        engine.export(folder, processor_from=base, dtype=None)
    return folder


if __name__ == "__main__":
    for family in FAMILIES:
        write_exported(family, Path(sys.argv[1]) / family)
