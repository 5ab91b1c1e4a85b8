"""Exports of a tiny model of each family, for those who compare names with servers.

PYTHONPATH=.:tests python -m support.exported_names FOLDER     all of them, by family
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from support.engines import make_engine
from support.families import FAMILIES, model_type_of, tiny_family_folder

from vlmpack.capabilities.servers import SERVERS
from vlmpack.encode import Encoder
from vlmpack.model_folder.extra_shards import rename_tensors


def write_exported(name: str, folder: Path) -> Path:
    """An export of one of `FAMILIES`, in a new folder; `FAMILY@SERVER` is one for a server."""
    family, _, server = name.partition("@")
    with TemporaryDirectory() as tmp:
        base = tiny_family_folder(family, Path(tmp) / "base")
        engine = make_engine(base, Encoder(base))
        engine.export(folder, processor_from=base, dtype=None)
    if server:
        rename_tensors(folder, partial(SERVERS[server].name, model_type_of(family)))
    return folder


FOR_SERVERS = [
    f"{name}@{server}"
    for server, one in SERVERS.items()
    for name in one.renamed
    if name not in one.refused
]
"""Exports whose names a server has others for."""


if __name__ == "__main__":
    for each in (*FAMILIES, *FOR_SERVERS):
        write_exported(each, Path(sys.argv[1]) / each)
