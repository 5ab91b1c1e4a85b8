"""The tables of docs/servers.md, from the facts.

python -m tools.servers.page
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.servers.facts import read_facts
from vlmpack.capabilities.served import SERVED
from vlmpack.capabilities.servers import SERVERS
from vlmpack.whole_file import write_atomically

PAGE = Path(__file__).parents[2] / "docs/servers.md"
TABLES = ("table", "adapters")
"""What stands in the comments before the tables of the page."""


def table(facts: Mapping[str, Any]) -> str:
    """A line for each family, and a column for each server."""
    lines = [
        f"| family | {' | '.join(one.title for one in SERVERS.values())} | GGUF |",
        f"|---|{'---|' * len(SERVERS)}---|",
    ]
    for name, title in _families(facts):
        cells = (_cell(facts[server]["families"], name, server) for server in SERVERS)
        gguf = _converted(facts["gguf"]["families"][name])
        lines.append(f"| {title} | {' | '.join(cells)} | {gguf} |")
    return "\n".join(lines) + "\n"


def _families(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    plain = (name for name in facts["vllm"]["families"] if "@" not in name)
    for name in sorted(plain, key=lambda name: (_place(name), name)):
        family, _, shape = name.partition("-")
        yield name, f"{SERVED[family].title} (`{family}`{f', {shape}' if shape else ''})"


def adapters(facts: Mapping[str, Any]) -> str:
    """A line for each family, and what servers compute of its adapters."""
    lines = [f"| family | {' | '.join(one.title for one in SERVERS.values())} |", "|---|---|---|"]
    for name, title in _families(facts):
        cells = (_adapter(facts[server]["families"][name], name, server) for server in SERVERS)
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _adapter(found: Mapping[str, Any], name: str, key: str) -> str:
    server, model_type = SERVERS[key], name.partition("-")[0]
    if "adapters" not in found:
        return "no: the model itself"
    layers = found["adapters"]["layers"]
    pattern, why = server.layers.get(model_type, (None, ""))
    if pattern == "":
        return f"no: {why}"
    refused = sorted({one.rpartition(".")[2] for one in layers.get("refused", ())})
    said = f"all but {', '.join(f'`{one}`' for one in refused)}" if refused else "all"
    if layers.get("asks_for_all"):
        said += ", with `--lora-target-modules all`"
    form = server.expert_form(model_type)
    if form in found["adapters"]:
        takes = not found["adapters"][form].get("refused")
        said += f"; experts as `{form}`" if takes else "; experts: no"
    return said


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


def with_tables(page: str) -> str:
    """A page with the tables of the committed facts."""
    for word, made in zip(TABLES, (table, adapters), strict=True):
        start, end = f"<!-- {word} -->\n", f"<!-- end of {word} -->\n"
        before, _, rest = page.partition(start)
        page = f"{before}{start}{made(read_facts())}{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    write_atomically(PAGE, with_tables(PAGE.read_text(encoding="utf-8")))
