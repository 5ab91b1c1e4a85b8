"""docs/servers.md: its tables are those of the facts."""

from __future__ import annotations

from support.families import FAMILIES

from tools.servers.facts import read_facts
from tools.servers.page import PAGE, adapters, table, with_tables


def test_the_tables_are_those_of_the_facts():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "python -m tools.servers.page"
    lines = table(read_facts()).splitlines()
    assert len(lines) == 2 + len(FAMILIES)
    gemma = next(line for line in lines if "(`gemma3`)" in line)
    assert "`--for vllm`" in gemma and "`--for sglang`" in gemma
    assert next(x for x in lines if "(`internvl`)" in x).endswith("| no: no class | not known |")
    lines = adapters(read_facts()).splitlines()
    assert len(lines) == 2 + len(FAMILIES)
    glm = next(line for line in lines if "(`glm4_moe`)" in line)
    assert glm.endswith("all, with `--lora-target-modules all`; experts as `matrices` |")
