"""pyproject.toml, constraints.txt and Makefile agree with the code and its messages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vlmpack.capabilities import versions
from vlmpack.capabilities.versions import (
    RANGES,
    TESTED,
    TRANSFORMER_ENGINE,
    TRANSFORMER_ENGINES,
    lacks_triton,
    release,
    version_limit,
)

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def requirements():
    """Every requirement of the package and its extras, by name, without the package itself; of
    some there are several, each for a range of Pythons."""
    lines = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    found = [Requirement(line) for line in lines if not line.startswith("vlmpack[")]
    by_name = {wanted.name: set() for wanted in found}
    for wanted in found:
        by_name[wanted.name].add(wanted.specifier)
    return by_name


def test_the_package_bounds_torch_from_below_alone():
    (torch,) = (line for line in map(Requirement, PROJECT["dependencies"]) if line.name == "torch")
    assert {spec.operator for spec in torch.specifier} == {">="}
    for version in ("2.13.0", "2.15.0", "3.0"):
        assert version in torch.specifier


def test_the_constraints_pin_what_the_package_leaves_open():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert [pin.name for pin in pins][:2] == ["torch", "transformers"]
    assert str(pins[1].specifier) == f"=={TESTED['transformers']}", "what the tables are made for"
    for pin in pins:
        (spec,) = pin.specifier
        assert spec.operator == "==" and all(spec.version in r for r in requirements()[pin.name])


def test_every_install_of_the_makefile_is_constrained():
    text = (ROOT / "Makefile").read_text()
    installs = re.findall(r"pip install.*", text)
    # `torch-next` has its own, made of these without their torch.
    free = [line for line in installs if not re.search(r"-c (\S+/)?constraints\.txt", line)]
    assert len(free) == 1 < len(installs)
    # Of the second oracle, whose versions are others by design, and pinned one by one.
    lines = (ROOT / "tests/support/second_packages.txt").read_text().splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert "--no-deps" in free[0] and all("==" in line for line in packages)
    stamp = re.search(r"^\$\(STAMP\):(.*)$", text, re.MULTILINE)
    assert {"pyproject.toml", "constraints.txt", "setup.py"} <= set(stamp[1].split())


def test_python_is_declared_from_its_lowest_to_its_newest():
    assert PROJECT["requires-python"] == ">=3.11"
    told = [line.rpartition(" ")[2] for line in PROJECT["classifiers"]]
    assert told == ["3.11", "3.12", "3.13"]


def advised():
    """Every requirement that a text of the package tells a user to install, with its file."""
    for path in sorted((ROOT / "vlmpack").rglob("*.py")):
        for line in re.findall(r"pip install '([^'{]+)'", path.read_text()):
            yield path.relative_to(ROOT), line
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        for line in re.findall(r"pip install '([^']+)'", path.read_text()):
            yield path.relative_to(ROOT), line
    limits = [version_limit(name, None) for name in (*RANGES, TRANSFORMER_ENGINE)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "find_spec", lambda _: None)
        limits.append(lacks_triton(TESTED["megatron-core"]))
    for limit in limits:
        (line,) = re.findall("'(.+)'", limit.would_do)
        yield Path("vlmpack/capabilities/versions.py"), line


def test_no_message_advises_to_install_what_no_index_has():
    found = list(advised())
    assert len(found) > 10
    declared = requirements()
    for file, line in found:
        wanted = Requirement(line)
        assert wanted.name != "vlmpack", f"{file}: vlmpack is on no index"
        assert wanted.specifier in declared[wanted.name], f"{file}: {line}"
    for path in (ROOT / "vlmpack").rglob("*.py"):
        assert "vlmpack[" not in path.read_text(), f"{path}: an extra of what is on no index"


def test_what_is_declared_beside_megatron_core_is_for_the_one_that_pip_takes():
    """0.17 and later say that they want Python 3.12, so pip takes 0.16 on 3.11, the newest else."""
    oldest, newest = (TRANSFORMER_ENGINES[minor] for minor in ("0.16", "0.19"))
    assert TESTED["megatron-core"].startswith("0.19.")
    for python, wanted, triton in (("3.11", oldest, 0), ("3.12", newest, 1), ("3.13", newest, 1)):
        found = {}
        for line in map(Requirement, (*EXTRAS["mcore"], *EXTRAS[TRANSFORMER_ENGINE])):
            if line.marker is None or line.marker.evaluate(
                {"python_version": python, "sys_platform": "linux"}
            ):
                found[line.name] = str(line.specifier)
        assert found[TRANSFORMER_ENGINE] == str(SpecifierSet(f">={wanted.lowest},<{wanted.below}"))
        assert ("triton" in found) == triton


def test_the_newest_megatron_core_that_is_tested_is_the_one_that_the_table_is_for():
    lines = (ROOT / "tests/support/megatron_packages.txt").read_text().splitlines()
    pins = [Requirement(line.split("#")[0]) for line in lines if not line.startswith("#")]
    assert [str(pin.specifier) for pin in pins if pin.name == "megatron-core"] == [
        f"=={TESTED['megatron-core']}"
    ]


@pytest.mark.parametrize("module", ["matplotlib", "sklearn"])
def test_no_module_of_the_package_imports_what_only_an_extra_brings(module):
    unguarded = re.compile(rf"^(import|from) {module}\b", re.MULTILINE)
    for path in (ROOT / "vlmpack").rglob("*.py"):
        assert not unguarded.search(path.read_text()), path


@pytest.mark.soak
@pytest.mark.parametrize(
    ("python", "minor"), [("3.11", (0, 16)), ("3.12", (0, 19)), ("3.13", (0, 19))]
)
def test_pip_takes_the_newest_megatron_core_that_wants_this_python(python, minor, tmp_path):
    """Asked of the index that pip is set up with, as a user of that Python asks; whatever Python
    runs this."""
    wanted = next(line for line in EXTRAS["mcore"] if line.startswith("megatron-core"))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--dest", tmp_path]
    asked = subprocess.run([*command, *options, wanted], capture_output=True, text=True)
    if asked.returncode and not re.search("from versions: [0-9]", asked.stderr):
        pytest.skip(f"no pip, or no index: {asked.stderr[-200:]}")
    assert asked.returncode == 0, asked.stderr
    (wheel,) = tmp_path.iterdir()
    assert release(wheel.name.split("-")[1])[:2] == minor


@pytest.mark.soak
@pytest.mark.parametrize("python", ["3.12", "3.13"])
def test_newer_pythons_compile_every_module(python):
    """Where one is found; a syntax that only 3.11 takes, or a warning, would stop there."""
    found = [
        shutil.which(f"python{python}"),
        *Path.home().glob(f".pyenv/versions/{python}.*/bin/python"),
    ]
    checked = "import sys; print(*sys.version_info[:2], sep='.')"
    for candidate in filter(None, found):
        said = subprocess.run([candidate, "-c", checked], capture_output=True, text=True)
        if said.stdout.strip() == python:
            break
    else:
        pytest.skip(f"no Python {python} here")
    code = (
        "import sys; from pathlib import Path; "
        "paths = [p for f in sys.argv[1:] for p in Path(f).rglob('*.py')]; "
        "[compile(p.read_bytes(), str(p), 'exec') for p in paths]; print(len(paths))"
    )
    folders = [ROOT / name for name in ("vlmpack", "tests", "tools", "benchmarks")]
    done = subprocess.run(
        [candidate, "-W", "error", "-c", code, *folders], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 500
