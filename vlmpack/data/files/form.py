"""How the records of a file are read. The form is kept as text in the file's stamp, so all readers
agree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from vlmpack.addresses import registered_name
from vlmpack.data.columns.form import RecordForm
from vlmpack.recipe.data import DataSection
from vlmpack.recipe.sources import Source
from vlmpack.storage.fetch import ShardStamp


@dataclass(frozen=True, slots=True)
class FileForm:
    """How the records of a file are read, or the samples of a shard in another layout than turns.

    Args:
        image_root: folder or address that image paths start at; empty for the file's own folder.
        function: a program's, that makes these records of the file's, `NAME@FINGERPRINT`.
    """

    record: RecordForm
    image_root: str = ""
    function: str = ""

    def to_text(self) -> str:
        """As a stamp has it; its digest changes with what the layout's records are read as."""
        said = {
            key: value for key, value in asdict(self.record).items() if value or key != "ignored"
        }
        said |= {"images": self.image_root, "digest": self.record.digest}
        said |= {"function": self.function} if self.function else {}
        return json.dumps(said, sort_keys=True)

    @staticmethod
    @lru_cache(maxsize=256)
    def from_text(text: str) -> FileForm:
        """The form of a stamp."""
        said = json.loads(text)
        root, function = said.pop("images"), said.pop("function", "")
        del said["digest"]
        columns = tuple((role, name) for role, name in said.pop("columns"))
        ignored = tuple(said.pop("ignored", ()))
        return FileForm(RecordForm(columns=columns, ignored=ignored, **said), root, function)

    def root_of(self, stamp: ShardStamp) -> str:
        """Where the images of one file lie."""
        if not self.image_root and registered_name(stamp.path) is not None:
            return str(Path.cwd())
        return self.image_root or stamp.path.rpartition("/")[0] or "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOptions:
    """What the recipe says of the records of a source.

    Args:
        columns: the layout, or the columns by their roles; None to find it out.
        image_root: folder or address that image paths start at; None for each file's folder.
    """

    columns: str | Mapping[str, str] | None = None
    ignored: tuple[str, ...] = ()
    image_root: str | None = None
    key: str = "data.train"
    knob: str = "data.columns"

    @classmethod
    def of(cls, data: DataSection, source: Source, key: str) -> FormOptions:
        """The options of a recipe's source: its own, else those for all sources."""
        return cls(
            columns=source.columns or data.columns,
            ignored=data.ignore_columns,
            image_root=source.image_root or data.image_root,
            key=key,
        )
