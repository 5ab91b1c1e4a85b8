"""The table of docs/servers.md, from the facts.

python -m tools.servers.page
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.servers.facts import read_facts
from vlmpack.capabilities.served import SERVED
from vlmpack.capabilities.servers import SERVERS
from vlmpack.whole_file import write_atomically

PAGE = Path(__file__).parents[2] / "docs/servers.md"
START, END = "<!-- table -->\n", "<!-- end of table -->\n"


def table(facts: Mapping[str, Any]) -> str:
    """A line for each family, and a column for each server."""
    lines = [
        f"| family | {' | '.join(one.title for one in SERVERS.values())} | GGUF |",
        f"|---|{'---|' * len(SERVERS)}---|",
    ]
    plain = (name for name in facts["vllm"]["families"] if "@" not in name)
    for name in sorted(plain, key=lambda name: (_place(name), name)):
        family, _, shape = name.partition("-")
        title = f"{SERVED[family].title} (`{family}`{f', {shape}' if shape else ''})"
        cells = (_cell(facts[server]["families"], name, server) for server in SERVERS)
        gguf = _converted(facts["gguf"]["families"][name])
        lines.append(f"| {title} | {' | '.join(cells)} | {gguf} |")
    return "\n".join(lines) + "\n"


def _converted(found: Mapping[str, Any]) -> str:
    parts = {part: found[part] for part in ("model", "tower") if part in found}
    done = [part for part, one in parts.items() if "fails" not in one]
    if len(done) == len(parts):
        return f"{' and '.join(done)}, {sum(parts[part]['tensors'] for part in done)} tensors"
    why = {_reason(one["fails"]) for one in parts.values() if "fails" in one}
    return f"{'; '.join(sorted(why))}{f'; {done[0]} alone' if done else ''}"


def _reason(fails: str) -> str:
    return "not known" if fails == "exit 1" else f"no: `{fails.strip().rstrip(':')}`"


def _place(name: str) -> int:
    return list(SERVED).index(name.partition("-")[0])


def _cell(families: Mapping[str, Any], name: str, server: str) -> str:
    found = families[name]
    if "unregistered" in found:
        return "no: no class"
    if "fails" in found:
        return "no: reads another config.json"
    with_names = families.get(f"{name}@{server}")
    if with_names is not None:
        return _taken(with_names, f"`--for {server}`, or published names")
    return _taken(found, "as it is")


def _taken(found: Mapping[str, Any], how: str) -> str:
    further = [
        f"{words} {', '.join(f'`{one}`' for one in found[key])}"
        for key, words in (("skipped", "left out:"), ("unfed", "not fed:"))
        if key in found
    ]
    return "; ".join((f"{how}, {len(found['ends'])} names", *further))


def with_table(page: str) -> str:
    """A page with the table of the committed facts."""
    before, _, rest = page.partition(START)
    return f"{before}{START}{table(read_facts())}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    write_atomically(PAGE, with_table(PAGE.read_text(encoding="utf-8")))
