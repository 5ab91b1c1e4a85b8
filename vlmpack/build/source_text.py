"""What tells one version of a program's code from another: its source text, version and state.

A function that it calls, and a file that it reads, are not seen: who changes those raises the
`version` of what calls them.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any


def fingerprint(value: object) -> str:
    """16 hex digits that stand for a function, an object, or a value that is made of some.

    Raises:
        ValueError: its text cannot be read, and it has no `version`; completes "'x' ...".
    """
    digest = hashlib.blake2b(digest_size=8)
    for text in _texts(value):
        digest.update(f"{len(text)}:{text}".encode())
    return digest.hexdigest()


def _texts(value: object) -> Iterator[str]:
    """All that a value is, in a fixed order."""
    if isinstance(value, partial):
        yield from _texts(value.func)
        yield from _texts(list(value.args))
        yield from _texts(value.keywords)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif is_dataclass(value) and not isinstance(value, type) and _is_ours(value):
        for entry in fields(value):
            yield entry.name
            yield from _texts(getattr(value, entry.name))
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        yield repr(value)
    else:
        yield from _code(value)


def _code(value: object) -> Iterator[str]:
    """Text, version and state of a function, or of an object of somebody's class."""
    of = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    version = getattr(value, "version", None)
    yield f"version {version!r}"
    try:
        yield _source(of)
    except (OSError, TypeError):
        if version is None:
            raise ValueError(
                "has no source text that can be read, so a resume could not tell whether it has "
                "changed; give it a `version`, or define it in a file"
            ) from None
    if of is not value:
        yield _state(value)
    elif getattr(value, "__name__", "") == "<lambda>":  # its text is the whole line, with others
        code = getattr(value, "__code__")  # noqa: B009 - no name of type object
        yield f"{code.co_code!r} {code.co_consts!r} {code.co_names!r}"


def _source(of: Any) -> str:
    """The text of a function or class; of a class of a notebook, that of its methods."""
    try:
        return inspect.getsource(of)
    except (OSError, TypeError):
        methods = [item for item in vars(of).values() if inspect.isfunction(item)]
        if not inspect.isclass(of) or not methods:
            raise
        return "\n".join(inspect.getsource(method) for method in methods)


def _state(value: object) -> str:
    try:
        return hashlib.blake2b(pickle.dumps(value, protocol=4), digest_size=16).hexdigest()
    except Exception:  # whether it must be pickled is asked elsewhere
        return "not pickled"


def _is_ours(value: object) -> bool:
    return type(value).__module__.startswith("vlmpack.")


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
