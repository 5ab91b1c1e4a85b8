"""What the tests of the judge share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.judged import Case


@pytest.fixture(scope="package")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """A family -> its case, made once."""
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            made[name] = Case(name, tmp_path_factory.mktemp(name))
        return made[name]

    return case
