"""Every module of the package is found from its name: `make test-map` says which tests are its."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.shards import ROOT
from support.which_tests import Found, Names, lines_about

BY_HAND = {
    "vlmpack.backends.mcore": "backends/mcore/test_engine_build.py",
    "vlmpack.build.engine": "integration/test_bad_models.py",
    "vlmpack.build.objective": "integration/test_extended_runs.py",
    "vlmpack.cli.convert": "storage/test_store_messages.py",
    "vlmpack.cli.data": "data/tools/test_stats.py",
    "vlmpack.data.files.texts": "data/files/test_record_files.py",
    "vlmpack.forecast.open": "integration/test_plan_runs.py",
    "vlmpack.recipe.messages": "recipe/test_recipe_load.py",
    "vlmpack.run.result": "integration/test_evaluated_runs.py",
    "vlmpack.run.launch": "integration/test_launch.py",
    "vlmpack.storage.objects": "storage/test_stores_reads.py",
}
"""Modules that tests reach through the registry of families, a command or the public functions
alone, and the file that does so. Naming the module in a test is better than a line here."""


@pytest.mark.slow
def test_every_module_is_found() -> None:
    found = Names(ROOT / "vlmpack", ROOT / "tests").find()
    nowhere = {name for name, where in found.items() if not where.files and not where.through}
    assert nowhere - BY_HAND.keys() == set(), "no test names them, nor what imports them"
    assert BY_HAND.keys() <= found.keys()
    assert sum(bool(where.files) for where in found.values()) > 0.7 * len(found)
    missing = [file for file in BY_HAND.values() if not (ROOT / "tests" / file).is_file()]
    assert missing == []


def test_a_module_is_found_by_whatever_names_it(tmp_path: Path) -> None:
    written = {
        "house/__init__.py": "from house.public import run\n",
        "house/public.py": "run = 1\n",
        "house/empty/__init__.py": '"""Nothing but words."""\n',
        "house/room/__init__.py": "from house.room.handed import thing\n",
        "house/room/handed.py": "thing = 1\n",
        "house/room/imported.py": "from house.room import hidden\n",
        "house/room/hidden.py": "x = 1\n",
        "house/room/mentioned.py": "x = 1\n",
        "house/room/twin.py": "x = 1\n",
        "house/room/helped.py": "x = 1\n",
        "house/room/lost.py": "x = 1\n",
        "house/other/stranger.py": "import house.room.lost\n",
        "tests/support/helper.py": "from support import deeper\n",
        "tests/support/deeper.py": "from house.room.helped import x\n",
        "tests/test_a.py": "from house.room import thing\nimport house.room.imported\n",
        "tests/test_c.py": "import house\nhouse.run\n",
        "tests/test_b.py": "patch('house.room.mentioned.x')\nfrom support.helper import y\n",
        "tests/room/test_script.py": "run(HERE / 'worker.py')\n",
        "tests/room/worker.py": "import house.room.worked\n",
        "house/room/worked.py": "x = 1\n",
        "tests/house/test_lost.py": "import house.room.lost\n",
        "tests/room/test_twin.py": "import house.other.stranger\n",
    }
    for name, text in written.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert Names(tmp_path / "house", tmp_path / "tests").find() == {
        "house": Found(["test_c.py"]),
        "house.public": Found(["test_c.py"]),
        "house.other.stranger": Found(["room/test_twin.py"]),
        "house.room": Found(["test_a.py"]),
        "house.room.handed": Found(["test_a.py"]),
        "house.room.helped": Found(["test_b.py"]),
        "house.room.hidden": Found([], ["house.room.imported"]),
        "house.room.imported": Found(["test_a.py"]),
        "house.room.lost": Found([]),
        "house.room.mentioned": Found(["test_b.py"]),
        "house.room.worked": Found(["room/test_script.py"]),
        "house.room.twin": Found(["room/test_twin.py"]),
    }


def test_the_map_as_text() -> None:
    found = {
        "house.a": Found(["test_a.py", "room/test_b.py"]),
        "house.ab": Found([], ["house.a"]),
        "house.c": Found(["test_c.py"]),
    }
    assert list(lines_about(found, "house.a")) == [
        "house.a",
        "    test_a.py",
        "    room/test_b.py",
        "house.ab",
        "    through house.a",
    ]
    assert len(list(lines_about(found, ""))) == 7
