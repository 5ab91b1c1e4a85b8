"""The matrix of faults has every row, names tests that are there, and its page is current."""

from __future__ import annotations

import ast
from pathlib import Path

from faults.matrix import MATRIX
from faults.page import PAGE, page
from faults.run import Found, counted

ROOT = Path(__file__).resolve().parents[2]


def test_every_row_is_there_and_names_tests_that_are() -> None:
    assert [row.number for row in MATRIX] == [f"R{number}" for number in range(1, 31)]
    for row in MATRIX:
        assert row.tests, f"{row.number} has no test"
        for test in row.tests:
            file, _, name = test.partition("::")
            tree = ast.parse((ROOT / file).read_text())
            functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in functions, f"{row.number}: {test} is not there"


def test_the_page_is_that_of_the_committed_results() -> None:
    assert PAGE.read_text() == page(), "run `make reliability`"


def test_a_failed_case_is_silent_and_a_skipped_one_is_none() -> None:
    from xml.etree.ElementTree import fromstring

    found = Found()
    found.add(fromstring("<testcase/>"))
    found.add(fromstring("<testcase><skipped/></testcase>"))
    found.add(fromstring("<testcase><failure/></testcase>"))
    said = "".join(
        f'<property name="{name}" value="{value}"/>'
        for name, value in (("injections", 8), ("seconds", 1.5), ("steps_lost", 2))
    )
    found.add(fromstring(f"<testcase><properties>{said}</properties></testcase>"))
    figures = found.figures()
    assert (figures["injections"], figures["detected"], figures["silent"]) == (10, 9, 1)
    assert (figures["not_run"], figures["seconds"], figures["steps_lost"]) == (1, [1.5, 1.5], 2)
    assert counted({})["R1"]["injections"] == 0
