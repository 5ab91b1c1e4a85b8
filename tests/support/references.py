"""Packages of `.references` on the path of another process, each without those beside it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from support.shards import ROOT

REFERENCES = ROOT / ".references"


def path_of(package: str, folder: Path) -> dict[str, str]:
    """An environment in which tests, this package and another one can be imported.

    torchvision, which lies beside the others, would change pixels.

    Args:
        folder: where links to the package are made.
    """
    path = [ROOT / "tests", ROOT]
    if importlib.util.find_spec(package) is None:
        parts = [*REFERENCES.glob(f"{package}*"), *REFERENCES.glob(f"apart/{package}*")]
        if not parts:
            pytest.skip(f"make references installs {package}, which is not there")
        alone = folder / "packages"
        alone.mkdir()
        for part in parts:
            (alone / part.name).symlink_to(part)
        path.insert(0, alone)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
