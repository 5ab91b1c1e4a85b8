"""Packages of `.references` on the path of another process, each without those beside it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from support.shards import ROOT

REFERENCES = ROOT / ".references"


def path_of(packages: str, folder: Path) -> dict[str, str]:
    """An environment in which tests, this package and others can be imported.

    torchvision, which lies beside the others, would change pixels.

    Args:
        packages: names with spaces between them.
        folder: where links to the package are made.
    """
    path, alone = [ROOT / "tests", ROOT], folder / "packages"
    for package in packages.split():
        if importlib.util.find_spec(package) is not None:
            continue
        parts = [*REFERENCES.glob(f"{package}*"), *REFERENCES.glob(f"apart/{package}*")]
        if not parts:
            pytest.skip(f"make references installs {package}, which is not there")
        alone.mkdir(exist_ok=True)
        for part in parts:
            (alone / part.name).symlink_to(part)
    if alone.is_dir():
        path.insert(0, alone)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
