"""What other trainers call calls and results of tools, spelt as records have them here.

    {"from": "function_call", "value": JSON of a call}       ShareGPT, LLaMA-Factory
    {"from": "observation", "value": "4 degrees"}
    {"role": "tool_call", "content": JSON of a call}         ms-swift
    {"role": "tool_response", "content": "4 degrees"}

Calls that follow each other directly are those of one turn. Other turns stay as they are.

    [{"name": "get", "parameters": {...}}]     the tools of ShareGPT and of LLaMA-Factory, as JSON
                                               text or not; type "function" beside it or not

Servers hand such tools to the template inside {"type": "function", "function": ...}, and so do
these trainers: a model that is taught the bare ones reads other text later than in training.
"""

from __future__ import annotations

from typing import Any

from vlmpack.data.shards.json_text import parse_json
from vlmpack.data.shards.turns import TURN_FIELDS
from vlmpack.encode.changes import CALLS
from vlmpack.errors import schema_error

CALL_ROLES = ("function_call", "tool_call")
RESULT_ROLES = ("observation", "tool_response", "function_response")


def respelt(turns: list[Any], schema: str) -> list[Any]:
    """The turns with calls as `tool_calls` of the assistant, and results as turns of the tool.

    Args:
        turns: of a record.
        schema: a key of TURN_FIELDS.

    Raises:
        DataError: (schema) a call that is no JSON object with a name.
    """
    role, content = TURN_FIELDS[schema]
    found: list[Any] = []
    is_open = False
    for place, turn in enumerate(turns):
        name = turn.get(role) if isinstance(turn, dict) else None
        if name in CALL_ROLES:
            said = {**turn, role: "assistant", content: None}
            calls = _calls(turn.get(content), f"{schema}[{place}]")
            if is_open and _same(said, found[-1]):
                found[-1] = {**found[-1], CALLS: [*found[-1][CALLS], *calls]}
            else:
                found.append({**said, CALLS: calls})
        elif name in RESULT_ROLES:
            found.append({**turn, role: "tool"})
        else:
            found.append(turn)
        is_open = name in CALL_ROLES
    return found


def with_wrapped_tools(tools: object) -> object:
    """A record's tools, functions that stand there bare each in its wrapper.

    Args:
        tools: as the record has them; what is no list of tools stays as it is.
    """
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
        except (ValueError, RecursionError):  # the reader of records says so
            return tools
    return [_wrapped(tool) for tool in tools] if isinstance(tools, list) else tools


def _wrapped(tool: Any) -> Any:
    if not isinstance(tool, dict) or "function" in tool or not isinstance(tool.get("name"), str):
        return tool
    if tool.get("type", "function") != "function":
        return tool
    bare = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": bare}


def _same(turn: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether two turns of calls differ in nothing else, flags included."""
    return {**turn, CALLS: None} == {**before, CALLS: None}


def _calls(value: object, where: str) -> list[Any]:
    """The calls that a turn's content holds: one object, or a list of them."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except (ValueError, RecursionError) as error:
            raise schema_error(
                f"{where} is a call that is no JSON ({error}); expected "
                "{'name': ..., 'arguments': {...}}"
            ) from None
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise schema_error(
                f"{where} is a call without a name; expected {{'name': ..., 'arguments': {{...}}}}"
            )
    return [{"type": "function", "function": call} for call in calls]
