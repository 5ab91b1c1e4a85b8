"""pyproject.toml, constraints.txt and Makefile agree with the code and its messages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from vlmpack.capabilities.versions import BESIDE_MEGATRON, RANGES, version_limit

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def requirements():
    """Every requirement of the package and its extras, by name, without the package itself."""
    lines = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    found = [Requirement(line) for line in lines if not line.startswith("vlmpack[")]
    return {wanted.name: wanted.specifier for wanted in found}


def test_the_package_bounds_torch_from_below_alone():
    (torch,) = (line for line in map(Requirement, PROJECT["dependencies"]) if line.name == "torch")
    assert {spec.operator for spec in torch.specifier} == {">="}
    for version in ("2.13.0", "2.15.0", "3.0"):
        assert version in torch.specifier


def test_the_constraints_pin_what_the_package_leaves_open():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert [pin.name for pin in pins] == ["torch"]
    for pin in pins:
        (spec,) = pin.specifier
        assert spec.operator == "==" and spec.version in requirements()[pin.name]


def test_every_install_of_the_makefile_is_constrained():
    text = (ROOT / "Makefile").read_text()
    installs = re.findall(r"pip install.*", text)
    assert installs and all("-c constraints.txt" in line for line in installs)
    stamp = re.search(r"^\$\(STAMP\):(.*)$", text, re.MULTILINE)
    assert {"pyproject.toml", "constraints.txt", "setup.py"} <= set(stamp[1].split())


def test_python_is_declared_from_its_lowest_to_its_newest():
    assert PROJECT["requires-python"] == ">=3.11"
    told = [line.rpartition(" ")[2] for line in PROJECT["classifiers"]]
    assert told == ["3.11", "3.12", "3.13"]


def test_the_old_name_of_an_extra_is_an_empty_alias():
    assert EXTRAS["convert"] == []
    assert Version(PROJECT["version"]) < Version("0.2"), "remove the extra `convert`"


def advised():
    """Every requirement that a text of the package tells a user to install, with its file."""
    for path in sorted((ROOT / "vlmpack").rglob("*.py")):
        for line in re.findall(r"pip install '([^'{]+)'", path.read_text()):
            yield path.relative_to(ROOT), line
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        for line in re.findall(r"pip install '([^']+)'", path.read_text()):
            yield path.relative_to(ROOT), line
    for name in (*RANGES, *BESIDE_MEGATRON):
        (line,) = re.findall("'(.+)'", version_limit(name, None).would_do)
        yield Path("vlmpack/capabilities/versions.py"), line


def test_no_message_advises_to_install_what_no_index_has():
    found = list(advised())
    assert len(found) > 10
    declared = requirements()
    for file, line in found:
        wanted = Requirement(line)
        assert wanted.name != "vlmpack", f"{file}: vlmpack is on no index"
        assert wanted.specifier == declared[wanted.name], f"{file}: {line}"
    for path in (ROOT / "vlmpack").rglob("*.py"):
        assert "vlmpack[" not in path.read_text(), f"{path}: an extra of what is on no index"


@pytest.mark.parametrize("module", ["webdataset", "matplotlib", "sklearn"])
def test_no_module_of_the_package_imports_what_only_an_extra_brings(module):
    unguarded = re.compile(rf"^(import|from) {module}\b", re.MULTILINE)
    for path in (ROOT / "vlmpack").rglob("*.py"):
        assert not unguarded.search(path.read_text()), path
