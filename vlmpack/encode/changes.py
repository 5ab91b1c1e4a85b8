"""What of a text changes with a turn that calls tools or thinks.

    assistant  thoughts "R"  words "Let me look."  calls get({"city": "Oslo"})
    text       ...assistant\\n<think>\\nR\\n</think>\\n\\nLet me look.\\n<tool_call>{... "Oslo"}...
                                   [--                                            ---)

Each of the three is replaced by other words, and the texts are compared. The names of calls stay:
a template may write them into the results too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from vlmpack.encode.sample import Message, TextPart
from vlmpack.errors import DataError

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of a turn's thoughts, those that transformers knows."""

CALLS = "tool_calls"

Render = Callable[[tuple[Message, ...]], str]
"""A template: turns -> their text."""


@dataclass(frozen=True, slots=True)
class Changed:
    """The stretch of a text that changes with a turn.

    Args:
        start: its first character.
        end: the one behind its last.
        by_call: whether the arguments of a call are what it begins with: what the template writes
            before them, which does not change, lies before the stretch.
    """

    start: int
    end: int
    by_call: bool


def changed(text: str, turn: Message, render: Callable[[Message], str]) -> Changed | None:
    """Where a text changes with a turn; None where it does not.

    Args:
        text: of a conversation with the turn.
        turn: the assistant's.
        render: the same conversation with another turn in its place -> its text.
    """
    found: list[tuple[int, int, bool]] = []
    silent = CALLS in turn.fields and not turn.text.strip()
    for by_call, versions in _versions(turn):
        try:
            first, second = (render(version) for version in versions)
        except DataError:  # a template that wants something of this
            continue
        if first == second:  # not written at all
            continue
        start = min(shared(first, second), shared(first, text))
        tail = min(shared(first[::-1], second[::-1]), shared(first[::-1], text[::-1]))
        # Words that a turn with calls has not: they may begin it, but where they stand behind the
        # results of the calls (Gemma 4) it does not reach so far.
        is_word = versions[0].fields == turn.fields
        found.append((start, 0 if silent and is_word else max(start, len(text) - tail), by_call))
    if not found:
        return None
    start, _, by_call = min(found)
    return Changed(start, max(start, *(end for _, end, _ in found)), by_call)


def _versions(turn: Message) -> Iterator[tuple[bool, list[Message]]]:
    """(whether its calls, the turn with one of its three replaced, in two ways)."""
    yield False, [replace(turn, parts=(TextPart(word),)) for word in "yz"]
    for name in THOUGHTS:
        if name in turn.fields:
            yield False, [with_field(turn, name, word) for word in "yz"]
    if CALLS in turn.fields:
        yield True, [with_arguments(turn, {word: word}) for word in "yz"]


def written_for(
    text: str, messages: tuple[Message, ...], at: int, other: Message, render: Render
) -> str:
    """What a template writes for a turn: the stretch of a text that is another one where another
    turn that shares no character with it stands in its place; empty where it is not written.

    Args:
        text: of the conversation.
        messages: the conversation.
        at: the turn's place.
        other: the one in its place.
        render: the template.
    """
    start, tail = difference(text, render((*messages[:at], other, *messages[at + 1 :])))
    return text[start : len(text) - tail]


def with_field(turn: Message, name: str, value: Any) -> Message:
    """The turn with another value of a field."""
    return replace(turn, fields={**turn.fields, name: value})


def with_arguments(turn: Message, arguments: dict[str, Any]) -> Message:
    """The turn with other arguments in all of its calls."""
    calls = []
    for call in turn.fields[CALLS]:
        if "function" in call:
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        else:
            calls.append({**call, "arguments": arguments})
    return with_field(turn, CALLS, calls)


def difference(first: str, second: str) -> tuple[int, int]:
    """How many characters two texts share at the start, and how many after that at the end."""
    start = shared(first, second)
    return start, shared(first[start:][::-1], second[start:][::-1])


def shared(first: str, second: str) -> int:
    """How many characters two texts share at the start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))
