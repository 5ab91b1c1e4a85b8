"""Options of a command as the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints


def takes(*groups: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that dataclasses have as fields: typer shows each by its own name,
    and the command gets one value of each class, behind its own arguments.

    Args:
        groups: dataclasses whose fields are annotated as parameters of typer's are; each has a
            default.
    """

    def wrapped(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = list(inspect.signature(command).parameters.values())[: -len(groups)]
        parameters = [one.replace(annotation=hints[one.name]) for one in own]
        for group in groups:
            kinds = get_type_hints(group, include_extras=True)
            for each in fields(group):
                assert each.default is not MISSING, each.name
                parameters.append(
                    inspect.Parameter(
                        each.name,
                        inspect.Parameter.POSITIONAL_OR_KEYWORD,
                        default=each.default,
                        annotation=kinds[each.name],
                    )
                )

        def run(**given: Any) -> None:
            values = [
                group(**{each.name: given.pop(each.name) for each in fields(group)})
                for group in groups
            ]
            command(*(given[one.name] for one in own), *values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return wrapped
