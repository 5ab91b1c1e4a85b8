"""Names of every family's export, against what servers were seen to take (`make servers`)."""

from __future__ import annotations

import pytest
from support.exported_names import write_exported
from support.families import FAMILIES, QUICK_FAMILIES

from tools.servers.facts import read_facts, shapes_of, unknown_names

FACTS = read_facts()
REFUSED = {("vllm", "gemma3"), ("vllm", "llava_onevision"), ("vllm", "nemotron_h_omni")}
"""Families whose exports a server does not take as they are; docs/guides/serving.md says why."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK_FAMILIES else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_servers_have_a_place_for_every_name(name, tmp_path):
    names = shapes_of(write_exported(name, tmp_path / "export"))
    assert len(names) > 10, "guard"
    for server, facts in FACTS.items():
        family = facts["families"][name]
        if (server, name) in REFUSED:
            assert "refused" in family or "unread" in family
            continue
        assert unknown_names(names, family) == [], server
        assert family.keys() <= {"ends", "skipped"}, (server, "refused, or a parameter is not fed")
        changed = {name.replace("norm.", "normal."): shape for name, shape in names.items()}
        assert unknown_names(changed, family), "a name that is changed is not known"


def test_every_family_has_facts_of_every_server():
    assert FACTS
    for facts in FACTS.values():
        assert facts["families"].keys() == set(FAMILIES)
        assert facts["version"] and len(facts["sha256"]) == 64
