"""What tells one version of a program's code from another: its source text, version and state.

In: a function or an object that a program handed over. Out: a digest that is the same in every
process and launch, and another one where any of these is:

    a function     its text, what it closes over, its defaults and attributes; a method's object
    an object      the text of its class, and of those that it inherits from; its state, as `pickle`
                   takes it apart, in an order that no hash seed decides
    in a state     numbers, texts, lists, dicts, sets, arrays, tensors, functions and objects again
    of a package   (the standard library, torch, numpy ...) functions and classes by name alone

A function that it calls by a global name, and a file that it reads, are not seen: who changes those
raises the `version` of what calls them.
"""

from __future__ import annotations

import copyreg
import hashlib
import inspect
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, type(Ellipsis)))
_CONTAINERS = frozenset((dict, list, tuple, set, frozenset, MappingProxyType))
_BY_NAME = sys.stdlib_module_names | {
    *("vlmpack", "torch", "torchvision", "transformers", "tokenizers", "accelerate", "peft"),
    *("datasets", "numpy", "PIL", "pyarrow", "pandas", "scipy", "pydantic", "pydantic_core"),
}
"""Packages of which functions and classes are known by name: another release of one of them is no
other objective."""


class _UnseenError(ValueError):
    """A part of a value that cannot be looked at."""


def fingerprint(value: object) -> str:
    """16 hex digits that stand for a function, an object, or a value that is made of some.

    Raises:
        ValueError: its text cannot be read or its state not be looked at, and it has no `version`;
            completes "'x' ...".
    """
    walk = _Walk()
    try:
        if isinstance(value, partial | Mapping | list | tuple) or _is_ours(value):
            texts = list(walk.parts(value))
        else:
            texts = list(walk.code(value, must_be_read=True))
    except RecursionError:
        raise ValueError(_unseen("it is nested too deeply")) from None
    except _UnseenError as error:
        raise ValueError(_unseen(str(error))) from None
    return _hashed(texts, size=8)


def _unseen(why: str) -> str:
    return (
        f"has a state that cannot be looked at ({why}), so a resume could not tell whether it has "
        "changed; give it a `version`, or leave that out in its __getstate__"
    )


def _hashed(texts: Iterable[str], *, size: int = 16) -> str:
    digest = hashlib.blake2b(digest_size=size)
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
    return digest.hexdigest()


class _Walk:
    """A way through a value and all that it is made of; each object is looked at once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, str]] = {}  # with the object, whose id would be reused
        self._above: list[int] = []

    def of(self, value: Any) -> str:
        """A text that stands for a value."""
        kind = type(value)
        if kind in _PLAIN:
            return repr(value)
        place = id(value)
        if place in self._known:
            return self._known[place][1]
        if place in self._above:  # it holds itself
            return f"#{len(self._above) - self._above.index(place)} above"
        self._above.append(place)
        try:
            if kind in _CONTAINERS:  # of records there may be millions
                return self._container(kind, value)
            found = "#" + _hashed(self.parts(value))
        finally:
            self._above.pop()
        self._known[place] = value, found
        return found

    def _container(self, kind: type, value: Any) -> str:
        if kind is dict or kind is MappingProxyType:
            names, items = self._all(value), self._all(value.values())
            return f"{{{', '.join(sorted(map(': '.join, zip(names, items, strict=True))))}}}"
        items = self._all(value)
        if kind is list:
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)})" if kind is tuple else f"set({', '.join(sorted(items))})"

    def _all(self, values: Iterable[Any]) -> list[str]:
        # Without a call for each of the texts and numbers that records mostly are.
        return [repr(one) if type(one) in _PLAIN else self.of(one) for one in values]

    def parts(self, value: Any) -> Iterator[str]:
        """All that a value is, in a fixed order."""
        kind = type(value)
        yield kind.__qualname__
        if kind in _CONTAINERS:
            yield self._container(kind, value)
        elif kind is partial:
            yield from (self.of(value.func), self.of(value.args), self.of(value.keywords))
        elif isinstance(value, np.ndarray | np.generic):
            yield from self._array(np.asarray(value))
        elif isinstance(value, torch.Tensor) and _is_dense(value):
            whole = value.detach().cpu().contiguous().flatten()
            yield f"{value.dtype} {tuple(value.shape)}"
            yield from self._array(whole.view(torch.uint8).numpy())
        elif isinstance(value, ModuleType):
            yield value.__name__
        elif isinstance(value, Enum):
            yield f"{_named(kind)} {value.name}"
        elif is_dataclass(value) and _is_ours(value):
            for entry in fields(value):
                yield entry.name
                yield self.of(getattr(value, entry.name))
        elif isinstance(value, CodeType):
            yield f"{value.co_code!r} {value.co_names!r} {self.of(value.co_consts)}"
        else:
            yield from self.code(value)

    def code(self, value: Any, *, must_be_read: bool = False) -> Iterator[str]:
        """Text, version and state of a function, or of an object of somebody's class.

        Args:
            value: to look at.
            must_be_read: whether its text has to be there, unless it has a `version`: it is what
                was handed over, and no part of that.
        """
        if isinstance(value, MethodType):
            yield from self.code(value.__func__, must_be_read=must_be_read)
            yield from self._seen([value.__self__], getattr(value, "version", None))
            return
        is_code = inspect.isroutine(value) or inspect.isclass(value)
        of, version = value if is_code else type(value), None
        by_name = _is_known_by_name(of) and not must_be_read
        if by_name:
            yield _named(of)
        else:
            version = getattr(value, "version", None)
            yield f"version {self.of(version)}"
            yield from _text(of, may_be_absent=version is not None or not must_be_read)
        if isinstance(value, FunctionType):
            if not by_name or "<locals>" in value.__qualname__:
                yield from self._seen(self._around(value), version)
        elif not is_code or not _is_own(value):
            yield from self._seen(self._state(value), version)

    def _seen(self, parts: Iterable[Any], version: object) -> list[str]:
        """The texts of some parts; where one cannot be looked at, a `version` stands for them."""
        try:
            return [self.of(part) for part in parts]
        except (_UnseenError, RecursionError):
            if version is None:
                raise
            return ["not looked at"]

    def _around(self, function: FunctionType) -> Iterator[Any]:
        """What decides beside its text what a function does; nothing of a plain one."""
        if function.__name__ == "<lambda>" or not _can_be_read(function):
            yield function.__code__  # a lambda's text is the whole line, with others
        attributes = {key: item for key, item in vars(function).items() if key != "version"}
        cells = [
            cell.cell_contents if _is_full(cell) else () for cell in function.__closure__ or ()
        ]
        for name, found in (
            ("closure", dict(zip(function.__code__.co_freevars, cells, strict=True))),
            ("defaults", function.__defaults__),
            ("keyword defaults", function.__kwdefaults__),
            ("attributes", attributes),
        ):
            if found:
                yield name, found

    def _state(self, value: Any) -> Iterator[Any]:
        """What `pickle` would make an object anew from."""
        reduce: Callable[[Any], Any] | None = copyreg.dispatch_table.get(type(value))
        try:
            made: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception as error:
            raise _UnseenError(f"{type(error).__name__}: {error}") from None
        if isinstance(made, str):
            yield made
            return
        for place, part in enumerate(made):  # maker, arguments, state; items and pairs to be put in
            yield [*part] if place in (3, 4) and part is not None else part

    def _array(self, array: np.ndarray) -> Iterator[str]:
        yield f"{array.dtype.descr if array.dtype.names else array.dtype.str} {array.shape}"
        if array.dtype.hasobject:
            yield self.of(array.tolist())
        else:
            whole = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            yield hashlib.blake2b(whole.data, digest_size=16).hexdigest()


def _text(of: Any, *, may_be_absent: bool) -> Iterator[str]:
    """The text of a function, or of a class and those that it inherits from."""
    try:
        yield _source(of)
    except (OSError, TypeError):
        if not may_be_absent:
            raise ValueError(
                "has no source text that can be read, so a resume could not tell whether it has "
                "changed; give it a `version`, or define it in a file"
            ) from None
        yield _named(of)
    for base in of.__mro__[1:] if inspect.isclass(of) else ():
        if not _is_known_by_name(base):
            yield from _text(base, may_be_absent=True)


def _source(of: Any) -> str:
    """The text of a function or class; of a class of a notebook, that of its methods."""
    try:
        # A decorated function is not the one that it decorates, which inspect takes it for.
        return inspect.getsource(of.__code__ if isinstance(of, FunctionType) else of)
    except (OSError, TypeError):
        methods = [item for item in vars(of).values() if inspect.isfunction(item)]
        if not inspect.isclass(of) or not methods:
            raise
        return "\n".join(inspect.getsource(method) for method in methods)


def _can_be_read(function: FunctionType) -> bool:
    try:
        return bool(_source(function))
    except (OSError, TypeError):
        return False


def _named(of: Any) -> str:
    return f"{getattr(of, '__module__', None)}.{getattr(of, '__qualname__', of)}"


def _is_known_by_name(of: Any) -> bool:
    """Whether a function or class is one of a package."""
    return (getattr(of, "__module__", None) or "builtins").partition(".")[0] in _BY_NAME


def _is_own(routine: Any) -> bool:
    """Whether a class or routine is bound to no object: a builtin's is its module."""
    bound = getattr(routine, "__self__", None)
    return bound is None or isinstance(bound, ModuleType)


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - asking is the test
    except ValueError:
        return False
    return True


def _is_dense(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    )


def _is_ours(value: object) -> bool:
    return is_dataclass(value) and type(value).__module__.startswith("vlmpack.")


def why_not_pickled(value: object) -> str | None:
    """Why a value cannot be sent to a process that starts fresh; None where it can.

    Args:
        value: a program's source or function.
    """
    main = __import__("__main__")
    of = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    if getattr(of, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
        return "it is defined in an interactive session, which other processes cannot import"
    try:
        pickle.dumps(value)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None
