"""docs/servers.md: its table is that of the facts."""

from __future__ import annotations

from support.families import FAMILIES

from tools.servers.facts import read_facts
from tools.servers.page import PAGE, table, with_table


def test_the_table_is_that_of_the_facts():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "python -m tools.servers.page"
    lines = table(read_facts()).splitlines()
    assert len(lines) == 2 + len(FAMILIES)
    gemma = next(line for line in lines if "(`gemma3`)" in line)
    assert "`--for vllm`" in gemma and "`--for sglang`" in gemma
    assert next(x for x in lines if "(`internvl`)" in x).endswith("| no: no class | not known |")
