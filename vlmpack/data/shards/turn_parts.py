"""What a record's turns have besides text and images: videos, tools, calls, thoughts and variables.

    {"tools": [{"type": "function", "function": {"name": "get_weather", "parameters": {...}}}],
     "chat_template_kwargs": {"enable_thinking": true},
     "messages": [{"role": "user", "content": "Oslo?"},
                  {"role": "assistant", "reasoning_content": "I must look.", "content": null,
                   "tool_calls": [{"id": "1", "type": "function", "function":
                                   {"name": "get_weather", "arguments": {"city": "Oslo"}}}]},
                  {"role": "tool", "tool_call_id": "1", "content": "4 degrees"},
                  {"role": "assistant", "content": "It has 4 degrees."}]}

They go to the template as `apply_chat_template` takes them. JSON in a text (tools, the arguments of
a call) is parsed first. Templates would write such a text with its quotes, but the model is to
learn the object.

A video is a list of frames, and when each was taken:

    {"type": "video", "frames": ["f0.jpg", "f1.jpg", "f2.jpg"], "fps": 2.0}
    {"type": "video", "frames": ["f0.jpg", "f1.jpg", "f2.jpg"], "times": [0.0, 0.5, 1.5]}

Frames are image files, named as images are. Nothing is decoded from a container in training, and
no frame is left out: what is stored is the sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from vlmpack.data.shards.naming import as_utf8, is_missing, parsed_text, refuse_unknown
from vlmpack.encode.sample import Message, TemplateInputs, VideoPart, strings
from vlmpack.encode.settings import is_variable
from vlmpack.encode.turns import CALLS, THOUGHTS
from vlmpack.errors import schema_error
from vlmpack.limits import LONGEST_SECONDS, MAX_VALUE_DEPTH
from vlmpack.words import counted, kind_of

FIELDS: Mapping[str, frozenset[str]] = {
    "assistant": frozenset((CALLS, *THOUGHTS)),
    "tool": frozenset(("tool_call_id", "name")),
}
"""Role -> the keys of its turns that go to the template with the content."""
FIELD_NAMES = frozenset().union(*FIELDS.values())
_CALL_KEYS = frozenset(("id", "type", "function", "name", "arguments", "index"))
_FUNCTION_KEYS = frozenset(("name", "arguments"))
VIDEO = "video"
VIDEO_KEYS = frozenset(("type", "frames", "fps", "times"))
CONTAINERS = (
    "this version trains on images, frames of videos and text. Give a video as its frames, "
    "{'type': 'video', 'frames': [...], 'fps': ...} in a list of parts. vlmpack data convert "
    "--video makes them of a container"
)


def inputs_of(record: Mapping[str, Any]) -> TemplateInputs:
    """Tools and variables of a record.

    Raises:
        DataError: (schema) neither is what the template takes.
    """
    tools = _tools(record.get("tools"))
    given = record.get("chat_template_kwargs")
    if is_missing(given):
        return TemplateInputs(tools)
    if isinstance(given, str):
        given = parsed_text(given, "'chat_template_kwargs'")
    if not isinstance(given, dict):
        raise schema_error(f"'chat_template_kwargs' is {kind_of(given)}; expected an object")
    for name in given:
        if not is_variable(name):
            raise schema_error(
                f"chat_template_kwargs has {name[:60]!r}, which is no variable of a template: "
                "expected such as enable_thinking or reasoning_effort"
            )
    _check_values(given, "chat_template_kwargs")
    return TemplateInputs(
        tools, {name: value for name, value in given.items() if value is not None}
    )


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    if is_missing(value):
        return ()
    tools = parsed_text(value, "'tools'") if isinstance(value, str) else value
    if not isinstance(tools, list):
        raise schema_error(f"'tools' is {kind_of(tools)}; expected a list of tools")
    for place, tool in enumerate(tools):
        if not isinstance(tool, dict) or not tool:
            raise schema_error(
                f"tools[{place}] is {kind_of(tool)}; expected an object with its JSON "
                "schema: {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
            )
    _check_values(tools, "tools")
    return tuple(tools)


def fields_of(turn: Mapping[str, Any], role: str, where: str) -> dict[str, Any]:
    """What the template gets of a turn in addition to its content.

    Raises:
        DataError: (schema) a key that is another role's, or a value that no template takes.
    """
    given = {key: turn[key] for key in turn if key in FIELD_NAMES and not is_missing(turn[key])}
    if not given:
        return {}
    for key in given:
        if key not in FIELDS.get(role, frozenset()):
            owner = next(name for name, keys in FIELDS.items() if key in keys)
            raise schema_error(
                f"{where} has the key {key!r}, which would be lost: it is a turn of the {role}, "
                f"and only the {owner}'s have one"
            )
    named = [key for key in given if key in THOUGHTS]
    if len(named) > 1:
        raise schema_error(f"{where} has {' and '.join(map(repr, named))}; expected one of them")
    fields: dict[str, Any] = {}
    for key, value in given.items():
        if key == CALLS:
            fields[key] = _calls(value, f"{where}.{key}")
        elif isinstance(value, str):
            fields[key] = value
        else:
            raise schema_error(f"{where}.{key} is {kind_of(value)}; expected a text")
    _check_values(fields, where)
    return fields


def _calls(value: object, where: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        value = parsed_text(value, where)
    if not isinstance(value, list):
        raise schema_error(f"{where} is {kind_of(value)}; expected a list of calls")
    return [_call(call, f"{where}[{place}]") for place, call in enumerate(value)]


def _call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise schema_error(f"{where} is {kind_of(call)}; expected an object")
    refuse_unknown(call, _CALL_KEYS, where)
    given = {key: item for key, item in call.items() if key == "arguments" or not is_missing(item)}
    function = given.get("function", given)
    if not isinstance(function, dict):
        raise schema_error(f"{where}.function is {kind_of(function)}; expected an object")
    if function is not given:
        refuse_unknown(function, _FUNCTION_KEYS, f"{where}.function")
        if "name" in given or not is_missing(given.pop("arguments", None)):
            raise schema_error(
                f"{where} has a name or arguments outside its 'function'; expected them in it"
            )
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise schema_error(f"{where} names no function; expected {{'function': {{'name': ...}}}}")
    function = {**function, "arguments": _arguments(function.get("arguments"), where)}
    return {**given, "function": function} if "function" in given else function


def _arguments(value: object, where: str) -> dict[str, Any]:
    """The arguments of a call, those of a text parsed: none where there is nothing."""
    if value is None or value == "":
        return {}
    arguments = parsed_text(value, f"{where}: its arguments") if isinstance(value, str) else value
    if not isinstance(arguments, dict):
        raise schema_error(
            f"{where} has arguments that are {kind_of(arguments)}; expected an object, or its JSON"
        )
    return arguments


def _check_values(value: object, where: str) -> None:
    """Raise DataError (schema) where a value is nested too deeply, or a text is none."""
    level = [value]
    for _ in range(MAX_VALUE_DEPTH):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            break
        level = inner
    else:
        raise schema_error(f"{where} is nested more than {MAX_VALUE_DEPTH} levels deep")
    for text in strings(value):
        as_utf8(text, where)


@dataclass(frozen=True, slots=True)
class FrameList:
    """A video's frame names, the time of each in seconds, and its rate where the part has one."""

    frames: tuple[Any, ...]
    times: tuple[float, ...]
    fps: float | None

    def part(self, index: int) -> VideoPart:
        """Its place in a message; `index` is that of its first frame among the record's images."""
        return VideoPart(index, self.times, self.fps)


def frame_list(part: Mapping[str, Any], where: str) -> FrameList:
    """The frames of a part of type `video`.

    Raises:
        DataError: (schema) no frames, or not a time for each.
    """
    if not is_missing(part.get(VIDEO)):
        raise schema_error(f"{where} names a video ({str(part[VIDEO])[:60]!r}); {CONTAINERS}")
    refuse_unknown(part, VIDEO_KEYS, where)
    frames = part.get("frames")
    if not isinstance(frames, list) or not frames:
        raise schema_error(f"{where}.frames is {kind_of(frames)}; expected a list of image files")
    given = [name for name in ("fps", "times") if part.get(name) not in (None, [])]
    if len(given) != 1:
        which = "both" if given else "neither"
        raise schema_error(
            f"{where} is a video with {which} of 'fps' and 'times'. Expected one of them. Models "
            "need the time of frames, as frames a second or as the time of each frame in seconds"
        )
    if given == ["fps"]:
        fps = _number(part["fps"], f"{where}.fps")
        if fps <= 0:
            raise schema_error(f"{where}.fps is {part['fps']!r}; expected more than 0")
        times = tuple(n / fps for n in range(len(frames)))
        if not times[-1] <= LONGEST_SECONDS:
            raise schema_error(
                f"{where}.fps is {part['fps']!r}, so that its last frame is at {times[-1]:,.0f} "
                f"seconds; expected times up to {LONGEST_SECONDS:,.0f}"
            )
        return FrameList(tuple(frames), times, fps)
    return FrameList(tuple(frames), _times(part["times"], len(frames), f"{where}.times"), None)


def _times(values: object, count: int, where: str) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != count:
        what = counted(len(values), "number") if isinstance(values, list) else kind_of(values)
        raise schema_error(f"{where} is {what}; expected {count}, one for each frame")
    times = tuple(_number(value, f"{where}[{place}]") for place, value in enumerate(values))
    for place in range(1, count):
        if times[place] <= times[place - 1]:
            raise schema_error(
                f"{where}[{place}] is {times[place]!r}, after {times[place - 1]!r}; expected times "
                "that increase"
            )
    return times


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise schema_error(f"{where} is {kind_of(value)}; expected a number")
    if not isfinite(value) or not 0 <= value <= LONGEST_SECONDS:
        raise schema_error(f"{where} is {value!r}; expected 0 to {LONGEST_SECONDS:,.0f}")
    return float(value)


def refuse_video_of_others(message: Message, where: str) -> None:
    """Raise DataError (schema) where another's turn than the user's shows a video."""
    if message.role != "user" and any(isinstance(part, VideoPart) for part in message.parts):
        raise schema_error(
            f"{where} is the {message.role}'s and shows a video; expected videos in a user's turn"
        )
