"""`make servers`: what vLLM and SGLang do with the names of every family's export.

    python -m tools.servers.run EXPORTS WHEEL... [--check]

EXPORTS has a folder for each family, and for some with another server's names. Adapters lie in
`adapters` of a folder (`tests/support/exported_names.py`). The wheels are read
(`interpreter.py`), never installed. The facts are in `facts.json`: for each server its version and
file, for each family what `outcome` and `adapter_facts` say, and digests of the functions of
`adapters.BY_HAND`. With `--check` nothing is written, and other facts than the committed ones are
an error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tools.servers.adapters import Adapted, digests
from tools.servers.facts import FACTS, adapters_outcome, outcome, read_facts, shapes_of
from tools.servers.loading import NotRegistered, load
from tools.servers.sglang import Sglang
from tools.servers.values import Raised, Unread
from tools.servers.vllm import Vllm
from vlmpack.terminal import say

SERVERS: Mapping[str, type[Any]] = {"sglang": Sglang, "vllm": Vllm}

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "moe_layer_freq": 1},
    "glm4_moe_lite": {"first_k_dense_replace": 1, "moe_layer_freq": 1},
    "qwen3_vl_moe": {"norm_topk_prob": True},
}
"""By model_type, what published files of a config.json have, the class in transformers has not, and
servers read. Exports keep it."""


def config_of(folder: Path) -> Any:
    """The configuration that a server reads."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(str(folder))
    for key, value in PUBLISHED.get(config.model_type, {}).items():
        setattr(config.get_text_config(), key, value)
    return config


def facts_of(kind: type[Any], root: Path, exports: Path) -> dict[str, Any]:
    """Every family's outcome at one server, and what could not be read."""
    found: dict[str, Any] = {}
    server = kind(root)
    for folder in sorted(exports.iterdir()):
        if folder.name.partition("@")[2] not in ("", kind.__name__.lower()):
            continue
        config = config_of(folder)
        try:
            loaded = load(server, config, shapes_of(folder))
        except NotRegistered as error:
            found[folder.name] = {"unregistered": str(error)}
            continue
        except (Raised, Unread, TypeError) as error:
            found[folder.name] = {"fails": str(error)}
            continue
        found[folder.name] = outcome(loaded)
        if adapters := sorted(folder.glob("adapters/*")):
            model = server.build(config_of(folder))
            found[folder.name]["adapters"] = {
                one.name: adapter_facts(partial(server.adapted, model), one) for one in adapters
            }
    reader = server.reader
    return {
        "by_hand": digests(reader),
        "families": found,
        "undecided": sorted(reader.undecided),
        "not_followed": sorted(reader.unread),
    }


def adapter_facts(adapted: Callable[..., Adapted], folder: Path) -> dict[str, Any]:
    """What a server does with an adapter. `needs` has each end of names of which it refuses others
    where an adapter has not that one."""
    shapes = shapes_of(folder)
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    whole = adapters_outcome(adapted(shapes, config))
    needs = {}
    for end in sorted({name.rpartition(".")[2] for name in whole.get("ends", ())}):
        fewer = {name: shape for name, shape in shapes.items() if f".{end}.lora_" not in name}
        kept = [n for n in config["target_modules"] if n.rpartition(".")[2] != end]
        rest = adapters_outcome(adapted(fewer, {**config, "target_modules": kept}))
        lost = whole["ends"].keys() & rest.get("refused", {}).keys()
        if lost:
            needs[end] = sorted({name.rpartition(".")[2] for name in lost})
    return whole | ({"needs": needs} if needs else {})


def read_wheel(wheel: Path, exports: Path) -> tuple[str, dict[str, Any]]:
    """A server's name and facts."""
    name, version = wheel.name.split("-")[:2]
    with TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [n for n in archive.namelist() if n.endswith(".py")])
        facts = facts_of(SERVERS[name], Path(folder), exports)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return name, {"version": version, "file": wheel.name, "sha256": digest, **facts}


def main(arguments: Sequence[str]) -> int:
    """Read, print a line for each family, and write or compare."""
    parser = argparse.ArgumentParser(description="what servers do with the names of exports")
    parser.add_argument("exports", type=Path)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    found = dict(read_wheel(wheel, chosen.exports) for wheel in chosen.wheels)
    for server, facts in found.items():
        for name, one in facts["families"].items():
            said = ", ".join(f"{len(value)} {key}" for key, value in one.items())
            say(f"{server} {facts['version']} {name}: {said}")
    committed = read_facts() if FACTS.is_file() else {}
    if chosen.check:
        same = {server: committed.get(server) for server in found} == found
        say("the committed facts" if same else f"other facts than {FACTS.name} has")
        return 0 if same else 1
    text = json.dumps({**committed, **found}, indent=1, sort_keys=True) + "\n"
    FACTS.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
