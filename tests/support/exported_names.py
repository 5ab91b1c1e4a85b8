"""Exports and adapters of a tiny model of each family, for those who compare names with servers.

PYTHONPATH=.:tests python -m support.exported_names FOLDER     all of them, by family

Adapters lie in `adapters` of each export, by what they are on (`FORMS`).
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from support.engines import make_engine, policy
from support.families import FAMILIES, model_type_of, tiny_family_folder

from vlmpack.capabilities.servers import SERVERS
from vlmpack.encode import Encoder
from vlmpack.errors import CapabilityError
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


FORMS = {
    "layers": ("all-linear",),
    "parameters": ("experts",),
    "matrices": ("experts",),
}
"""Adapters of a language model, by what they are on: their targets. Routed experts' have two forms.
"""


def write_adapters(name: str, folder: Path) -> dict[str, Path]:
    """The adapters of a family of `FAMILIES`, each in a new folder; by `FORMS` that it has."""
    found = {}
    with TemporaryDirectory() as tmp:
        base = tiny_family_folder(name, Path(tmp) / "base")
        for form, targets in FORMS.items():
            lora = {
                "targets": targets,
                "expert_form": form if "experts" in targets else "parameters",
            }
            chosen = policy("frozen", "frozen", "lora", **lora)
            try:
                engine = make_engine(base, Encoder(base), policy=chosen)
            except CapabilityError:
                if "experts" not in targets:
                    raise
                continue  # it has none
            engine.export_adapter(folder / form, base=str(base))
            found[form] = folder / form
    return found


FOR_SERVERS = [
    f"{name}@{server}"
    for server, one in SERVERS.items()
    for name in one.renamed
    if name not in one.refused
]
"""Exports whose names a server has others for."""


if __name__ == "__main__":
    for each in (*FAMILIES, *FOR_SERVERS):
        exported = write_exported(each, Path(sys.argv[1]) / each)
        if "@" not in each:
            write_adapters(each, exported / "adapters")
