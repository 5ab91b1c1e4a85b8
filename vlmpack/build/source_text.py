"""Fingerprints of a program's code, from its source text and `version`.

A fingerprint is the same in every process and launch. It digests the pickled value, with the text
of each function and class in place of its name. Functions and classes of packages count by name
alone. An object with a `version` counts by its text and version if its state cannot be pickled.

Functions called by a global name, and files that are read, are not seen. Whoever changes those must
raise the `version` of their caller.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import pickle
import sys
from collections.abc import Callable
from types import CodeType, FunctionType, MappingProxyType
from typing import Any

import torch

_BY_NAME = sys.stdlib_module_names | {
    *("vlmpack", "torch", "torchvision", "transformers", "tokenizers", "accelerate", "peft"),
    *("datasets", "numpy", "PIL", "pyarrow", "pandas", "scipy", "pydantic", "pydantic_core"),
}
"""Packages of which functions and classes are known by name: another release of one of them is no
other objective."""


def fingerprint(value: object) -> str:
    """16 hex digits that stand for a function, an object, or a value that is made of some.

    Raises:
        ValueError: its text cannot be read or its state not be looked at, and it has no `version`;
            completes "'x' ...".
    """
    try:
        said = _said(value)
    except _NoTextError:
        raise ValueError(
            "has no source text that can be read, so a resume could not tell whether it has "
            "changed. Give it a `version`, or define it in a file"
        ) from None
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, RecursionError):
            why = "it is nested too deeply"
        raise ValueError(
            f"has a state that cannot be looked at ({why}), so a resume could not tell whether it "
            "has changed. Give it a `version`, or leave that out in its __getstate__"
        ) from None
    return hashlib.blake2b(said, digest_size=8).hexdigest()


class _NoTextError(Exception):
    """A function or class whose text cannot be read."""


def _said(value: object) -> bytes:
    stream = io.BytesIO()
    _Sayer(stream).dump(value)
    return stream.getvalue()


class _Sayer(pickle.Pickler):
    """Pickles equal values alike, whether or not they are one object."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=4)
        self.fast = True

    def persistent_id(self, value: Any) -> Any:
        """What stands for a value in place of pickle's own form; None for that."""
        if isinstance(value, set | frozenset):  # in an order that no hash seed decides
            return "set", sorted(map(_said, value))
        if isinstance(value, MappingProxyType):
            return "mapping", dict(value)
        if isinstance(value, torch.Tensor):
            held = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            return "tensor", str(value.dtype), tuple(value.shape), held.numpy().tobytes()
        if isinstance(value, FunctionType):
            return None if _is_by_name(value) else _function(value)
        if isinstance(value, type):
            return None if _is_by_name(value) else _class(value)
        if isinstance(value, CodeType):
            return "code", value.co_code, value.co_names, value.co_consts
        version = getattr(value, "version", None)
        if version is None or _is_by_name(type(value)):
            return None
        return "object", type(value), version, _if_seen(lambda: value.__reduce_ex__(4))


def _function(function: FunctionType) -> tuple[Any, ...]:
    cells = [cell.cell_contents if _is_full(cell) else () for cell in function.__closure__ or ()]
    others: list[Any] = [cells, function.__defaults__, function.__kwdefaults__, vars(function)]
    if function.__name__ == "<lambda>":  # whose text is the whole line, with others
        others.append(function.__code__)
    version = getattr(function, "version", None)
    text = _text(function, has_version=version is not None)
    return "function", version, text, others if version is None else _if_seen(lambda: others)


def _if_seen(state: Callable[[], Any]) -> bytes:
    """The state of a value with a `version`, which replaces a state that cannot be pickled."""
    try:
        return _said(state())
    except Exception:
        return b"not looked at"


def _class(of: type) -> tuple[Any, ...]:
    version = getattr(of, "version", None)
    bases = [base for base in of.__mro__[1:] if not _is_by_name(base)]
    texts = [_text(base, has_version=True) for base in bases]
    return "class", version, _text(of, has_version=version is not None), texts


def _text(of: Any, *, has_version: bool = False) -> str:
    try:
        return _source(of)
    except (OSError, TypeError):
        if not has_version:
            raise _NoTextError from None
        return f"{of.__module__}.{of.__qualname__}"


def _source(of: Any) -> str:
    """The text of a function or class; for a class of a notebook, the text of its methods."""
    try:
        # A decorated function is not the one that it decorates, which inspect takes it for.
        return inspect.getsource(of.__code__ if isinstance(of, FunctionType) else of)
    except (OSError, TypeError):
        methods = [item for item in vars(of).values() if inspect.isfunction(item)]
        if not inspect.isclass(of) or not methods:
            raise
        return "\n".join(inspect.getsource(method) for method in methods)


def _is_by_name(of: Any) -> bool:
    package = (of.__module__ or "").partition(".")[0]
    return package in _BY_NAME and "<locals>" not in of.__qualname__


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - asking is the test
    except ValueError:
        return False
    return True


def why_not_pickled(value: object) -> str | None:
    """Why a value cannot be sent to a process that starts fresh; None where it can."""
    main = __import__("__main__")
    of = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    if getattr(of, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
        return "it is defined in an interactive session, which other processes cannot import"
    try:
        pickle.dumps(value)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None
