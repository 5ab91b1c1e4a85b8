"""A process with secrets where experiment trackers look by themselves.

    python tracked.py TRACKER RUN_DIR --api-key planted-argument

logs a point to one tracker in a clone whose remote has a token, and speaks on both streams.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from accelerate import PartialState

from vlmpack.recipe.schema import LoggingSection
from vlmpack.training.trackers import Trackers

REMOTE = "https://bob:planted-token@host.example/x.git"


def clone(folder: Path) -> Path:
    """A repository with one commit, as `git clone` with a token leaves it."""
    folder.mkdir()
    for arguments in (
        ("init", "-q"),
        ("remote", "add", "origin", REMOTE),
        ("-c", "user.name=bob", "-c", "user.email=b@c", "commit", "-q", "--allow-empty", "-m", "a"),
    ):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    return folder


def main(name: str, run_dir: str) -> None:
    PartialState()  # an engine has made it by then
    print("planted-before", flush=True)
    section = LoggingSection(trackers=(name,), project="digits", offline=True)  # type: ignore[arg-type]
    trackers = Trackers(section, Path(run_dir), {"training.seed": 3})
    print("planted-out", flush=True)
    print("planted-error", file=sys.stderr, flush=True)
    trackers.log({"loss": 1.0}, 1)
    trackers.close()
    kept = trackers.at_work
    sys.exit(0 if kept == [name] else "it was dropped")


if __name__ == "__main__":
    main(*sys.argv[1:3])
