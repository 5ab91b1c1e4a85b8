"""What the reader of a server's source works on: its files, classes, functions and objects."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any


class Unread(Exception):
    """The source does something that this reader does not follow."""


class Raised(Exception):
    """An exception of the code that is read.

    Args:
        kind: its class's name.
    """

    def __init__(self, kind: str, message: object) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Unknown:
    """A value that only a run would give; whatever is done with it is one too."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"<unknown {self.text}>"

    def __call__(self, *args: Any, **named: Any) -> Unknown:
        return self


class External(Unknown):
    """A name of another package, such as `torch.nn.Linear`."""


class Settings(Unknown):
    """Settings of a server, of which some are given."""

    def __init__(self, text: str, **known: Any) -> None:
        super().__init__(text)
        self.known = known


class Layer(External):
    """A class of layers whose parameters are given here, not read.

    Args:
        parameters: what its constructor is called with -> names of its parameters.
    """

    def __init__(self, text: str, parameters: Callable[..., tuple[str, ...]]) -> None:
        super().__init__(text)
        self.parameters = parameters

    def __call__(self, *args: Any, **named: Any) -> Any:
        made = Instance(self)
        self.fill(made, *args, **named)
        return made

    def fill(self, made: Instance, *args: Any, **named: Any) -> None:
        """Give an object the parameters; those that it has not are None, as in torch."""
        made.attributes |= {name: Parameter() for name in self.parameters(*args, **named)}
        if "output_sizes" in named:
            made.attributes["output_sizes"] = named["output_sizes"]
        made.attributes.setdefault("bias", None)


class Jump(Exception):
    """`return`, `break` or `continue`, with its value."""

    def __init__(self, kind: str, value: Any = None) -> None:
        super().__init__(kind)
        self.kind, self.value = kind, value


class Module:
    """A source file."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.is_package = path.name == "__init__.py"

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @cached_property
    def names(self) -> dict[str, ast.AST]:
        """What a name at the top of the file was last given by."""
        found: dict[str, ast.AST] = {}
        for statement in _top(self.tree.body):
            for name in _given(statement):
                found[name] = statement
        return found

    @cached_property
    def values(self) -> dict[str, Any]:
        """Names that were looked up."""
        return {}


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If | ast.Try):
            yield from _top(statement.body)
        else:
            yield statement


def _given(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [(a.asname or a.name).partition(".")[0] for a in statement.names]
    if isinstance(statement, ast.Assign):
        return [t.id for t in statement.targets if isinstance(t, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


class Class:
    """A class of the server."""

    def __init__(self, reader: Any, module: Module, node: ast.ClassDef) -> None:
        self.reader, self.module, self.node, self.name = reader, module, node, node.name
        self.values: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<class {self.module.name}.{self.name}>"

    @cached_property
    def members(self) -> dict[str, ast.stmt]:
        return {name: s for s in _top(self.node.body) for name in _given(s)}

    @cached_property
    def bases(self) -> list[Any]:
        scope = Scope({}, self.module)
        return [self.reader.evaluate(base, scope) for base in self.node.bases]

    @cached_property
    def line(self) -> list[Any]:
        """The order in which Python looks for a name: the class and those that it is made of."""
        found: list[Any] = [self]
        for base in self.bases:
            further = base.line if isinstance(base, Class) else [base]
            found = [x for x in found if x not in further] + further
        return found

    def is_a(self, name: str) -> bool:
        return any(last_name(one) == name for one in self.line)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.reader.make(self, args, named)


def last_name(one: Any) -> str:
    return one.name if isinstance(one, Class) else getattr(one, "text", "").rpartition(".")[2]


class Instance:
    """An object of one of the server's classes, or a layer of torch."""

    def __init__(self, cls: Any, **attributes: Any) -> None:
        self.cls, self.attributes = cls, attributes

    def __repr__(self) -> str:
        return f"<{last_name(self.cls)}>"

    @property
    def is_module(self) -> bool:
        line = self.cls.line if isinstance(self.cls, Class) else [self.cls]
        return any(
            isinstance(one, Layer) or last_name(one) in ("Module", "PreTrainedModel")
            for one in line
        )


class Parameter:
    """A parameter of the server's own list."""


class Function:
    """A function of the server, bound or not."""

    def __init__(self, reader: Any, node: Any, scope: Scope, owner: Class | None = None) -> None:
        self.reader, self.node, self.scope, self.owner = reader, node, scope, owner
        self.bound: list[Any] = []

    def bind(self, to: Any) -> Function:
        found = Function(self.reader, self.node, self.scope, self.owner)
        found.bound = [to]
        return found

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.reader.call_function(self, [*self.bound, *args], named)

    @cached_property
    def yields(self) -> bool:
        return any(isinstance(n, ast.Yield | ast.YieldFrom) for n in _own_nodes(self.node))


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield from _own_nodes(child)


class Super:
    """`super()` in a method."""

    def __init__(self, instance: Any, owner: Class) -> None:
        self.instance, self.owner = instance, owner


class Scope:
    """Names of a function, then of those around it, of its file, and Python's."""

    def __init__(self, names: dict[str, Any], module: Module, outer: Scope | None = None) -> None:
        self.names, self.module, self.outer = names, module, outer
        self.yielded: list[Any] = []
