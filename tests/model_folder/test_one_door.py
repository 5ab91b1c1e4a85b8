"""The package loads from a model folder through `vlmpack.model_folder` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vlmpack

ROOT = Path(vlmpack.__file__).parent
DOOR = ROOT / "model_folder" / "load.py"

LOADING = {
    "from_pretrained",
    "from_config",
    "_from_config",
    "for_model",
    "get_config_dict",
    "get_image_processor_dict",
    "load_adapter",
    "load_custom_generate",
    "get_class_from_dynamic_module",
}
"""Methods and functions of transformers and peft that read a folder or choose a class by it."""

UNPICKLING = {("torch", "load"), ("pickle", "load"), ("pickle", "loads")}


def loading_calls(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that would load past the door, by attribute, import or name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) if name in LOADING:
                yield node.lineno, name
            case ast.Attribute(value=ast.Name(id=module), attr=name) if (module, name) in (
                UNPICKLING
            ):
                yield node.lineno, f"{module}.{name}"
            case ast.ImportFrom(names=names):
                yield from ((node.lineno, n.name) for n in names if n.name in LOADING)
            case ast.Constant(value=str(name)) if name in LOADING:  # getattr(x, "from_pretrained")
                yield node.lineno, name


@pytest.mark.parametrize(
    "planted",
    [
        "AutoProcessor.from_pretrained(folder)",
        "family.auto_class().from_config(config)",
        "load = AutoModel.from_pretrained",
        'getattr(auto, "from_pretrained")(folder)',
        "from transformers.dynamic_module_utils import get_class_from_dynamic_module",
        "torch.load(path)",
        "model.load_adapter(folder)",
    ],
)
def test_the_rule_sees_a_planted_call(planted: str) -> None:
    assert len(list(loading_calls(planted))) == 1


@pytest.mark.slow
def test_no_module_loads_past_the_door() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 300
    found = {
        str(path.relative_to(ROOT)): calls
        for path in files
        if (calls := list(loading_calls(path.read_text(encoding="utf-8"))))
    }
    at_the_door = found.pop(str(DOOR.relative_to(ROOT)))
    assert {name for _, name in at_the_door} == {
        "from_pretrained",
        "from_config",
        "_from_config",
        "for_model",
    }
    assert found == {}


def test_every_call_of_the_door_says_that_code_is_not_trusted() -> None:
    """`**_AS_DATA` or `trust_remote_code=False`, in the call itself."""
    loading = [
        node
        for node in ast.walk(ast.parse(DOOR.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config")
    ]
    assert len(loading) == 6
    for call in loading:
        said = [ast.unparse(keyword) for keyword in call.keywords]
        assert "**_AS_DATA" in said or "trust_remote_code=False" in said, ast.unparse(call)
