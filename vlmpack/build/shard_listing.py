"""The shards of a run's last launch, so that a resume on other data says which of them changed.

The run's identity holds how many shards there are and a digest. This list names them and nothing
relies on it: where it is missing or damaged, a message is shorter.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from vlmpack.data.splits.survey import Survey
from vlmpack.errors import RunDirError
from vlmpack.file_format import RUN
from vlmpack.whole_file import read_json, write_atomically
from vlmpack.words import counted

logger = logging.getLogger("vlmpack")

LISTING_NAME = "shards.json"
MAX_LISTED = 100_000
MAX_NAMED = 5


class ShardListing:
    """The file of one run folder.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep(self, survey: Survey) -> None:
        """Writes the shards down; more than MAX_LISTED are not worth it."""
        shards = _listed(survey)
        if len(shards) > MAX_LISTED or shards == self._read():
            return
        rows = [[path, *version] for path, version in shards.items()]
        text = json.dumps(RUN.mark({"shards": rows}), indent=0)
        try:
            write_atomically(self.path, text + "\n")
        except OSError as error:  # one rank's failure alone, so the others would wait for it
            logger.warning("note: %s cannot be written: %s", self.path, error)

    def changes(self, survey: Survey) -> list[str]:
        """What differs from the last launch, a line for each kind; empty where nothing is known."""
        before, now = self._read(), _listed(survey)
        if not before:
            return []
        kinds = {
            "gone": [path for path in before if path not in now],
            "new": [path for path in now if path not in before],
            "rewritten": [p for p in now if p in before and before[p] != now[p]],
        }
        return [_line(kind, paths) for kind, paths in kinds.items() if paths]

    def _read(self) -> dict[str, tuple[int, str]]:
        try:
            content = read_json(self.path)
            RUN.take(content, self.path, RunDirError)
            rows = content["shards"]
            return {str(path): (int(size), str(version)) for path, size, version in rows}
        except (OSError, ValueError, TypeError, KeyError):
            return {}


def _listed(survey: Survey) -> dict[str, tuple[int, str]]:
    return {
        stamp.path: (stamp.size, str(stamp.version))
        for shards in survey.sources
        for stamp in shards
    }


def _line(kind: str, paths: Sequence[str]) -> str:
    more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
    names = ", ".join(paths[:MAX_NAMED])
    return f"{kind} since the last launch: {counted(len(paths), 'shard')}: {names}{more}"
