"""Recurrences that are listened to: each call, with its arguments under the names of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from torch import Tensor

from vlmpack.recurrence.choose import KINDS, Chosen, Kind, RecurrenceChoice
from vlmpack.recurrence.convolution import segment_convolution
from vlmpack.recurrence.delta_rule import segment_delta_rule
from vlmpack.recurrence.rows import RowSegments
from vlmpack.recurrence.scan import segment_scan

FORMS: Mapping[Kind, Callable[..., Tensor]] = {
    "convolution": segment_convolution,
    "delta_rule": segment_delta_rule,
    "scan": segment_scan,
}
"""The torch form of each kind, whose arguments all others have too."""


@dataclass(frozen=True, slots=True)
class HeardCall:
    """A recurrence that a layer of a packed row asked for.

    Args:
        kind: which.
        row: the segments that it was told.
        given: its other arguments, by name.
        output: what the layer got.
    """

    kind: Kind
    row: RowSegments
    given: Mapping[str, Any]
    output: Tensor


Listener = Callable[[HeardCall], None]
"""What is called behind every recurrence of a packed row."""


def heard_by(listener: Listener, choice: RecurrenceChoice) -> RecurrenceChoice:
    """A choice that runs the same, and tells of every call."""

    def heard(kind: Kind, chosen: Chosen[Any]) -> Chosen[Any]:
        arguments = signature(FORMS[kind])

        def function(*args: Any, **kwargs: Any) -> Tensor:
            output: Tensor = chosen.function(*args, **kwargs)
            given = dict(arguments.bind(*args, **kwargs).arguments)
            listener(HeardCall(kind, given.pop("row"), given, output))
            return output

        return replace(chosen, function=function)

    kinds: dict[str, Any] = {kind: heard(kind, getattr(choice, kind)) for kind in KINDS}
    return replace(choice, **kinds)
