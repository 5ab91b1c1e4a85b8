"""Reads a server's source by its syntax tree: what a constructor makes, what a loader does.

Nothing of a server is imported or run. Statements are followed one by one on values of ours: an
`Instance` for an object of the server's classes, a `Weight` for a tensor of a file. `Unknown` is
what cannot be known without running it, such as an activation. A condition on it takes the branch
of False, and is noted in `Interpreter.undecided`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tools.servers.values import (
    Class,
    External,
    Function,
    Instance,
    Jump,
    Layer,
    Module,
    Parameter,
    Raised,
    Scope,
    Settings,
    Super,
    Unknown,
    Unread,
)

_BUILTINS: dict[str, Any] = {
    one.__name__: one
    for one in (
        *(len, range, zip, enumerate, int, float, str, bool, set, dict, list, tuple, frozenset),
        *(any, all, min, max, sorted, sum, abs, map, filter, reversed, iter, next, callable),
        *(round, divmod),
    )
}
OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: operator.contains(b, a),
    ast.NotIn: lambda a, b: not operator.contains(b, a),
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_COMMON = {"__name__": "server", "TYPE_CHECKING": False, "NotImplemented": None}


Kind = Callable[["Interpreter", Any, Scope], Any]
"""What is done with a node: (reader, node, names around it) -> its value, if it has one."""


class Interpreter:
    """Follows the source of one package.

    Args:
        root: the folder that holds the package.
        package: its name.
        hooks: what takes the place of a function or a class, by the end of its full name.
        followed: modules whose classes and functions are followed, by the start of their names.
            Others are `Unknown`, unless a hook stands for them.
        kinds: what is done with a node of the tree, by its kind (`statements.py`).
    """

    def __init__(
        self,
        root: Path,
        package: str,
        hooks: Mapping[str, Callable[..., Any]],
        followed: tuple[str, ...],
        kinds: Mapping[type[ast.AST], Kind],
    ) -> None:
        self.root, self.package, self.hooks, self.followed = root, package, hooks, followed
        self.kinds = kinds
        self.modules: dict[str, Module | None] = {}
        self.undecided: dict[str, None] = {}
        self.unread: dict[str, None] = {}
        self.depth = 0
        self.tolerant = False

    # Names

    def module(self, name: str) -> Module | None:
        """A module of the package; None where it has none of that name."""
        if name not in self.modules:
            path = self.root.joinpath(*name.split("."))
            files = (path.with_suffix(".py"), path / "__init__.py")
            file = next((one for one in files if one.is_file()), None)
            self.modules[name] = Module(name, file) if file else None
        return self.modules[name]

    def named(self, module: Module, name: str) -> Any:
        """What a name at the top of a file stands for.

        Raises:
            KeyError: there is none.
        """
        if name in module.values:
            return module.values[name]
        node = module.names[name]
        module.values[name] = Unknown(name)  # a circle of imports ends here
        module.values[name] = value = self._top_value(module, name, node)
        return value

    def _top_value(self, module: Module, name: str, node: ast.AST) -> Any:
        full = f"{module.name}.{name}"
        if not isinstance(node, ast.Import | ast.ImportFrom) and self._hook(full) is not None:
            return self._hook(full)
        scope = Scope({}, module)
        if isinstance(node, ast.ClassDef):
            return Class(self, module, node)
        if isinstance(node, ast.FunctionDef):
            return Function(self, node, scope)
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self._imported(module, node, name)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            return self.evaluate(node.value, scope)
        return Unknown(full)

    def _hook(self, full: str) -> Any:
        return self.hooks.get(full.rpartition(".")[2])

    def _imported(self, module: Module, node: ast.Import | ast.ImportFrom, name: str) -> Any:
        for alias in node.names:
            if (alias.asname or alias.name).partition(".")[0] != name:
                continue
            if isinstance(node, ast.Import):
                full = alias.name if alias.asname else name
                return External(full) if not full.startswith(self.package) else Unknown(full)
            start = node.module or ""
            if node.level:
                parts = module.name.split(".")
                parts = parts[: len(parts) - node.level + module.is_package]
                start = ".".join([*parts, *([start] if start else [])])
            return self.imported(start, alias.name)
        raise KeyError(name)

    def imported(self, start: str, name: str) -> Any:
        """What `from start import name` gives."""
        full = f"{start}.{name}"
        if start.partition(".")[0] != self.package:
            return External(full) if self._hook(full) is None else self._hook(full)
        if (within := self.module(start)) is not None and name in within.names:
            return self.named(within, name)
        if (found := self.module(full)) is not None:
            return found
        return Unknown(full) if self._hook(full) is None else self._hook(full)

    def lookup(self, name: str, scope: Scope | None, module: Module) -> Any:
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        if name in module.names:
            return self.named(module, name)
        if name in self.hooks:
            return self.hooks[name]
        if name in _BUILTINS:
            return _BUILTINS[name]
        return _COMMON[name] if name in _COMMON else Unknown(name)

    # Attributes

    def get(self, value: Any, name: str) -> Any:
        """An attribute.

        Raises:
            Raised: there is none.
        """
        if isinstance(value, Module):
            return self.imported(value.name, name)
        if isinstance(value, Settings) and name in value.known:
            return value.known[name]
        if isinstance(value, External):
            full = f"{value.text}.{name}"
            return self.hooks.get(full) or self.hooks.get(name) or External(full)
        if isinstance(value, Unknown):
            return Unknown(f"{value.text}.{name}")
        if isinstance(value, Instance):
            return self._of_instance(value, name)
        if isinstance(value, Class):
            return self._of_class(value.line, name, value, None)
        if isinstance(value, Super):
            line = value.instance.cls.line if isinstance(value.instance, Instance) else []
            after = line[line.index(value.owner) + 1 :] if value.owner in line else []
            return self._of_class(after, name, None, value.instance)
        if isinstance(value, Parameter):
            if name == "weight_loader":
                return self.hooks["weight_loader"](value)
            return Unknown(f"parameter.{name}")
        if isinstance(value, Function):
            return Unknown(name)
        try:
            return getattr(value, name)
        except AttributeError as error:
            raise Raised("AttributeError", error) from error

    def _of_instance(self, value: Instance, name: str) -> Any:
        if name in value.attributes:
            return value.attributes[name]
        if name == "__class__":
            return value.cls
        if isinstance(value.cls, Class):
            try:
                return self._of_class(value.cls.line, name, value.cls, value)
            except Raised:
                pass
        if value.is_module and (method := self.hooks.get(f"Module.{name}")) is not None:
            return lambda *args, **named: method(value, *args, **named)
        if name == "__dict__":
            return value.attributes
        raise Raised("AttributeError", f"{value} has no {name}")

    def _of_class(self, line: list[Any], name: str, cls: Class | None, instance: Any) -> Any:
        for one in line:
            if isinstance(one, Class) and name in one.members:
                return self._member(one, name, cls, instance)
            if isinstance(one, Layer) and name == "__init__":
                return partial(one.fill, instance)
        if name == "__init__":
            return Unknown("object.__init__")
        if name in ("__name__", "__qualname__") and cls is not None:
            return cls.name
        method = self.hooks.get(f"Module.{name}")
        if method is not None and isinstance(instance, Instance) and instance.is_module:
            return lambda *args, **named: method(instance, *args, **named)
        raise Raised("AttributeError", f"{cls} has no {name}")

    def _member(self, owner: Class, name: str, cls: Class | None, instance: Any) -> Any:
        node = owner.members[name]
        scope = Scope({}, owner.module)
        if isinstance(node, ast.FunctionDef):
            if name in self.hooks:
                return self.hooks[name]
            function = Function(self, node, scope, owner)
            kinds = {ast.unparse(d).rpartition(".")[2] for d in node.decorator_list}
            if "staticmethod" in kinds:
                return function
            if "classmethod" in kinds:
                return function.bind(cls or owner)
            if instance is None:
                return function
            bound = function.bind(instance)
            return bound() if kinds & {"property", "cached_property"} else bound
        if name not in owner.values:
            owner.values[name] = Unknown(name)
            if isinstance(node, ast.ClassDef):
                owner.values[name] = Class(self, owner.module, node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                if node.value is None:
                    del owner.values[name]
                    raise Raised("AttributeError", f"{owner} only annotates {name}")
                inner = Scope(_Members(self, owner), owner.module)
                owner.values[name] = self.evaluate(node.value, inner)
                if owner.is_a("Enum") or owner.is_a("IntEnum"):
                    owner.values[name] = Instance(owner, value=owner.values[name], name=name)
        return owner.values[name]

    # Calls

    def make(self, cls: Class, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """An object of a class."""
        if not cls.module.name.startswith(self.followed):
            self.unread[f"{cls.module.name}.{cls.name}"] = None
            return Unknown(f"{cls.module.name}.{cls.name}()")
        made = Instance(cls)
        if cls.is_a("Struct") or any(
            "dataclass" in ast.unparse(d) for d in cls.node.decorator_list
        ):
            self._fill(made, cls, args, named)
            return made
        if cls.is_a("Enum"):
            return Unknown(cls.name)
        self.get(made, "__init__")(*args, **named)
        return made

    def _fill(self, made: Instance, cls: Class, args: tuple[Any, ...], named: Any) -> None:
        fields = [
            name
            for one in reversed(cls.line)
            if isinstance(one, Class)
            for name, node in one.members.items()
            if isinstance(node, ast.AnnAssign)
        ]
        made.attributes.update(zip(dict.fromkeys(fields), args, strict=False))
        made.attributes.update(named)
        for name in fields:
            if name not in made.attributes:
                made.attributes[name] = self._default(cls, name)

    def _default(self, cls: Class, name: str) -> Any:
        node = next(c.members[name] for c in cls.line if isinstance(c, Class) and name in c.members)
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call) and ast.unparse(value.func).lower().endswith("field"):
            given = {k.arg: k.value for k in value.keywords}
            scope = Scope({}, cls.module)
            if "default_factory" in given:
                return self.evaluate(given["default_factory"], scope)()
            if "default" in given:
                return self.evaluate(given["default"], scope)
            return Unknown(name)
        return self._member(cls, name, cls, None)

    def call_function(self, function: Function, args: list[Any], named: dict[str, Any]) -> Any:
        """Follow a function; one that yields gives an iterator, of what it
        yields when followed to its end."""
        if not function.scope.module.name.startswith(self.followed):
            return Unknown(f"{getattr(function.node, 'name', 'lambda')}()")
        scope = Scope({}, function.scope.module, function.scope)
        scope.names |= {"__class__": function.owner, "__self__": args[0] if args else None}
        self._bind(function, scope, args, named)
        node = function.node
        if isinstance(node, ast.Lambda):
            return self.evaluate(node.body, scope)
        self.depth += 1
        if self.depth > 60:
            raise Unread(f"{node.name}: it calls itself without end")
        try:
            self.execute(node.body, scope)
            value = None
        except Jump as jump:
            value = jump.value
        finally:
            self.depth -= 1
        return iter(scope.yielded) if function.yields else value

    def _bind(self, function: Function, scope: Scope, args: list[Any], named: Any) -> None:
        node, outer = function.node.args, function.scope
        names = [a.arg for a in (*node.posonlyargs, *node.args)]
        first = len(names) - len(node.defaults)
        defaults = dict(zip(names[first:], node.defaults, strict=True))
        defaults |= {
            a.arg: d
            for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True)
            if d is not None
        }
        given = dict(zip(names, args, strict=False))
        every = [*names, *(a.arg for a in node.kwonlyargs)]
        rest = {name: value for name, value in named.items() if name not in every}
        given |= {name: value for name, value in named.items() if name in every}
        for name in every:
            if name in given:
                scope.names[name] = given[name]
            elif name in defaults:
                scope.names[name] = self.evaluate(defaults[name], outer)
            else:
                scope.names[name] = Unknown(name)
        if node.vararg:
            scope.names[node.vararg.arg] = tuple(args[len(names) :])
        if node.kwarg:
            scope.names[node.kwarg.arg] = rest

    def truth(self, value: Any, node: ast.AST, scope: Scope) -> bool:
        """Whether a condition holds; False for what cannot be known, which is noted."""
        if isinstance(value, Unknown):
            text = f"{scope.module.name.rpartition('.')[2]}: {ast.unparse(node)}"
            self.undecided[text] = None
            return False
        return bool(value) if not isinstance(value, Instance) else True

    def execute(self, body: list[ast.stmt], scope: Scope) -> None:
        """Follow statements one after the other.

        Raises:
            Unread: one of a kind that is not followed.
        """
        for statement in body:
            self._kind(statement)(self, statement, scope)

    def evaluate(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression.

        Raises:
            Unread: it is of a kind that is not followed.
        """
        return self._kind(node)(self, node, scope)

    def _kind(self, node: ast.AST) -> Kind:
        if type(node) not in self.kinds:
            raise Unread(f"{ast.unparse(node)[:80]}: a {type(node).__name__} is not followed")
        return self.kinds[type(node)]


class _Members(dict[str, Any]):
    """Names of a class body, for what is assigned in it."""

    def __init__(self, reader: Interpreter, owner: Class) -> None:
        super().__init__()
        self.reader, self.owner = reader, owner

    def __contains__(self, name: object) -> bool:
        return name in self.owner.members

    def __getitem__(self, name: str) -> Any:
        return self.reader._member(self.owner, name, None, None)
