"""`make gguf`: what llama.cpp's published converter makes of every family's export.

    python -m tools.servers.gguf_run EXPORTS SDIST PYTHON [--check]

SDIST is the source package of llama-cpp-python, which is never built. PYTHON is that of an
environment of its own, which runs `gguf_one.py`. The outcome by family is in `facts.json` under
`gguf`. Where an export has other names for vLLM, those are converted, since they are the published
ones. A family that the converter knows has its files' tensors compared with the export's: as many
numbers, the same vocabulary, the same chat template.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tools.servers.facts import FACTS, read_facts, shapes_of
from vlmpack.terminal import say

CONVERTER = "vendor/llama.cpp/"


def judged(folder: Path, part: Mapping[str, Any], *, with_text: bool) -> dict[str, Any]:
    """What a file holds, in short: its architecture, tensors and numbers, and how its tokens and
    template compare with the export's."""
    if "fails" in part:
        return {"fails": part["fails"]}
    shapes = part["tensors"]
    found: dict[str, Any] = {
        "architecture": part["architecture"],
        "tensors": len(shapes),
        "numbers": sum(math.prod(shape) for shape in shapes.values()),
    }
    if with_text:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        ids = {
            **content["model"]["vocab"],
            **{t["content"]: t["id"] for t in content["added_tokens"]},
        }
        tokens = part["tokens"] or []
        found["tokens"] = all(tokens[place] == token for token, place in ids.items())
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        found["template"] = part["template"] == template
    return found


def outcome(folder: Path, held: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome of a family's export."""
    found: dict[str, Any] = {
        part: judged(folder, held[part], with_text=part == "model") for part in held
    }
    found["export"] = sum(math.prod(shape) for shape in shapes_of(folder).values())
    return found


def convert(python: Path, converter: Path, folder: Path) -> dict[str, Any]:
    """Run the converter on one export, in its own environment."""
    with TemporaryDirectory() as out:
        command = [str(python), str(Path(__file__).with_name("gguf_one.py")), str(converter)]
        done = subprocess.run(
            [*command, str(folder), out], capture_output=True, text=True, timeout=300, check=False
        )
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not last.startswith("{"):
        return {"model": {"fails": done.stderr.strip().rpartition("\n")[2]}}
    held: dict[str, Any] = json.loads(last)
    return held


def main(arguments: Sequence[str]) -> int:
    """Convert every export, print a line for each, and write or compare."""
    parser = argparse.ArgumentParser(description="what llama.cpp's converter makes of exports")
    parser.add_argument("exports", type=Path)
    parser.add_argument("sdist", type=Path)
    parser.add_argument("python", type=Path)
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args(arguments)
    families: dict[str, Any] = {}
    with TemporaryDirectory() as tmp:
        with tarfile.open(chosen.sdist) as archive:
            wanted = [m for m in archive.getmembers() if f"/{CONVERTER}" in m.name]
            archive.extractall(tmp, wanted, filter="data")
        converter = next(Path(tmp).iterdir()) / CONVERTER
        for family in sorted(p.name for p in chosen.exports.iterdir() if "@" not in p.name):
            published = chosen.exports / f"{family}@vllm"
            folder = published if published.is_dir() else chosen.exports / family
            held = convert(chosen.python.absolute(), converter, folder)
            families[family] = outcome(folder, held)
            say(f"{family}: {json.dumps(families[family])}")
    digest = hashlib.sha256(chosen.sdist.read_bytes()).hexdigest()
    version = chosen.sdist.name.removesuffix(".tar.gz").rpartition("-")[2]
    facts = {"version": version, "file": chosen.sdist.name, "sha256": digest, "families": families}
    committed = read_facts()
    if chosen.check:
        same = committed.get("gguf") == facts
        say("the committed facts" if same else f"other facts than {FACTS.name} has")
        return 0 if same else 1
    text = json.dumps({**committed, "gguf": facts}, indent=1, sort_keys=True) + "\n"
    FACTS.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
