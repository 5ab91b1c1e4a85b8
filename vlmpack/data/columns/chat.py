"""One record -> its turns as our shards hold them, and the images they show, in order.

Two formats are known, and `layouts.py` converts others to them. `messages` has role and content.
Content is text or a list of parts. A part is {"type": "text"}, {"type": "image", "image": ...},
{"type": "image_url", ...}, or a video's frames. `conversations` has from and value, as in LLaVA.

The parts of a record name its images, or `image` or `images` does. In the second case `<image>` in
the text marks the places, unless parts without a name do. In `conversations` it always does.

Images without a place go before the first text of the user, in order, in pairs and any other
`messages`. TRL and ms-swift do the same. LLaMA-Factory and LLaVA refuse such records, so theirs
(`conversations`) are refused here too. A record that marks only some places is refused, as in all
of them but ms-swift.

Pairs of answers become the turns of the prompt, and the two answers. LLaMA-Factory's
`conversations` with `chosen` and `rejected` already have our format.

    TRL       {"prompt": turns or text, "chosen": turns or text, "rejected": ...}
              {"chosen": [question, answer], "rejected": [question, other answer]}
    ms-swift  {"messages": [question, answer], "rejected_response": text}, or "rejected_messages"

An image may be text in the record. Base64 without a scheme counts as an image only where it cannot
be a path. It is longer than 256 characters, contains only base64 characters (a path has a dot),
decodes fully, and begins as a file of a supported format.

    data:image/png;base64,iVBORw0KGgo...      by its scheme, whatever its length
    iVBORw0KGgoAAAANSUhEUgAA...               base64 alone

Calls and results of tools may have the roles of other trainers. Calls that follow each other
directly form one turn.

    {"from": "function_call", "value": JSON of a call}       ShareGPT, LLaMA-Factory
    {"from": "observation", "value": "4 degrees"}
    {"role": "tool_call", "content": JSON of a call}         ms-swift
    {"role": "tool_response", "content": "4 degrees"}
    [{"name": "get", "parameters": {...}}]     the tools of ShareGPT and of LLaMA-Factory, as JSON
                                               text or not; with type "function" or without

Servers wrap such tools as {"type": "function", "function": ...} for the template, and so do these
trainers. With bare tools a model would later read another text than in training.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmpack.data.columns.layouts import PROMPT
from vlmpack.data.shards.naming import (
    BRANCHES,
    PAIR_KEYS,
    is_missing,
    listed,
    parse_json,
    parsed_text,
    refuse_unknown,
)
from vlmpack.data.shards.turn_parts import VIDEO, VIDEO_KEYS
from vlmpack.data.shards.turns import (
    CHAT_ROLES,
    IMAGE_MARKER,
    TURN_FIELDS,
    Dialect,
    conversation,
    named_images,
)
from vlmpack.encode.objects import Objects
from vlmpack.encode.rollouts import Rollout
from vlmpack.encode.sample import (
    NO_INPUTS,
    ImagePart,
    Message,
    Shown,
    TemplateInputs,
    TextPart,
    VideoPart,
)
from vlmpack.encode.turns import CALLS
from vlmpack.errors import schema_error
from vlmpack.words import counted, kind_of

_REJECTED = ("rejected_response", "rejected_messages")


def as_pair(record: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The record with its pair in our format, and whether its images were put into its turns here.

    Raises:
        DataError: (schema) turns without a prompt and an answer, one answer without the other, or
            images without a place.
    """
    swift = [name for name in _REJECTED if not is_missing(record.get(name))]
    if not swift and any(not is_missing(record.get(name)) for name in TURN_FIELDS):
        return with_images_first(dict(record))
    given = {name: value for name, value in record.items() if not is_missing(value)}
    if swift:
        return with_images_first(_of_swift(given, swift))
    answers = [name for name in PAIR_KEYS if name in given]
    if len(answers) == 1 and PROMPT in given:
        [missing] = {*PAIR_KEYS} - {*answers}
        amount = "no" if record.get(missing) is None else "an empty"
        raise schema_error(
            f"the record has {answers[0]!r}, but {amount} {missing!r} answer; expected both"
        )
    if len(answers) < 2:
        return dict(record), False
    return with_images_first(_of_trl(given))


def _of_trl(given: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's: the prompt is a column, or what both conversations begin with."""
    rest = {name: value for name, value in given.items() if name != PROMPT}
    if PROMPT in given:
        prompt = given[PROMPT]
        turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        return {**rest, "messages": turns}
    chosen, rejected = (given[name] for name in PAIR_KEYS)
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise schema_error(
            "the record has 'chosen' and 'rejected', but no 'prompt' and no turns before them. "
            "Expected one of these, or both answers as whole conversations that begin alike"
        )
    shared = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        shared += 1
    shared = min(shared, len(chosen) - 1, len(rejected) - 1)
    if shared < 1:
        raise schema_error(
            "'chosen' and 'rejected' are conversations that do not begin with the same turns; "
            "expected one prompt that both answer"
        )
    return {
        **rest,
        "messages": chosen[:shared],
        "chosen": chosen[shared:],
        "rejected": rejected[shared:],
    }


def _of_swift(given: Mapping[str, Any], swift: list[str]) -> dict[str, Any]:
    """ms-swift's: the chosen answer is the end of the turns."""
    if len(swift) > 1 or any(name in given for name in PAIR_KEYS):
        named = ", ".join(map(repr, [*swift, *(name for name in PAIR_KEYS if name in given)]))
        raise schema_error(f"the record says its answers twice: {named}; expected one of these")
    schema = next((name for name in TURN_FIELDS if isinstance(given.get(name), list)), None)
    if schema is None:
        raise schema_error(f"the record has {swift[0]!r}, but no list of turns that it belongs to")
    turns, role = given[schema], TURN_FIELDS[schema][0]
    last = turns[-1].get(role) if turns and isinstance(turns[-1], dict) else None
    if last not in ("assistant", "gpt") or len(turns) < 2:
        raise schema_error(
            f"the record has {swift[0]!r}, and its turns end with {last!r}; expected the chosen "
            "answer as the last of them"
        )
    rest = {name: value for name, value in given.items() if name not in swift}
    pair = {**rest, schema: turns[:-1], "chosen": turns[-1:], "rejected": given[swift[0]]}
    if swift[0] == "rejected_messages":
        other = given[swift[0]]
        if not isinstance(other, list) or other[: len(turns) - 1] != turns[:-1]:
            raise schema_error(
                "'rejected_messages' does not begin with the turns that the chosen answer follows; "
                "expected one prompt that both answer"
            )
        pair["rejected"] = other[len(turns) - 1 :]
    return pair


def with_images_first(record: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The record with its images shown in its `messages`, and whether that changed it.

    Raises:
        DataError: (schema) the prompt of a pair has no text of the user that they could go before.
    """
    turns = record.get("messages")
    if not isinstance(turns, list) or not (count := len(named_images(record))):
        return record, False
    if any(map(_shows, _contents(turns))):
        return record, False
    pair = [record.get(name) for name in PAIR_KEYS]
    if any(_shows(content) for one in pair for content in _contents(one)):
        return record, False
    of_users = [n for n, t in enumerate(turns) if isinstance(t, dict) and t.get("role") == "user"]
    is_text = all(isinstance(content, str | None) for content in _contents(turns))
    if not is_text or not of_users or not isinstance(turns[of_users[0]].get("content"), str):
        if all(map(is_missing, pair)):
            return record, False  # the reader of turns says what is missing
        raise schema_error(
            f"the record names {counted(count, 'image')}, and no turn of its prompt shows one. "
            f"Expected an image part ({{'type': 'image'}}) or {IMAGE_MARKER} at the place of "
            "each. If the turns are texts alone, images go before the first of the user's"
        )
    first = turns[of_users[0]]
    content = [{"type": "image"}] * count + [{"type": "text", "text": first["content"]}]
    changed = [*turns[: of_users[0]], {**first, "content": content}, *turns[of_users[0] + 1 :]]
    return {**record, "messages": changed}, True


def _contents(turns: object) -> list[object]:
    """What turns say: those of a list, of one turn, or a text that stands for one."""
    every: Iterable[object] = turns if isinstance(turns, list) else [turns]
    return [turn.get("content") if isinstance(turn, dict) else turn for turn in every]


def _shows(content: object) -> bool:
    """Whether a content has an image, or marks the place of one."""
    if isinstance(content, str):
        return IMAGE_MARKER in content
    parts = content if isinstance(content, list) else ()
    return any(
        part.get("type") in ("image", "image_url") or _shows(part.get("text"))
        for part in parts
        if isinstance(part, dict)
    )


SHORTEST_BARE = 257
"""Texts without a scheme must be at least this long to be read as base64."""
_MAGIC = (
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"RIFF",
    b"GIF87a",
    b"GIF89a",
    b"BM",
    b"II*\0",
    b"MM\0*",
)
"""How files of the formats that are read begin."""
_ALPHABET = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*", re.ASCII)
_SHOWN = 40
CALL_ROLES = ("function_call", "tool_call")
RESULT_ROLES = ("observation", "tool_response", "function_response")
ImageSource = str | bytes
"""A path relative to the image root, or the encoded file itself."""
Rewrite = Callable[[dict[str, Any]], dict[str, Any]]
"""What is done to a record with turns before they are read."""
_IMAGE_NAMES = ("image", "url", "path")
_FILE_KEYS = frozenset(("bytes", "path"))
_URL_KEYS = frozenset(("url",))
_PART_KEYS = {
    "text": frozenset(("type", "text")),
    "image": frozenset(("type", "index", *_IMAGE_NAMES)),
    "image_url": frozenset(("type", "image_url")),
    VIDEO: VIDEO_KEYS,
}


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """A record without its image bytes.

    Args:
        unknown_keys: those of the record that are not read.
        inputs: what the chat template gets beside the turns.
        branches: of a record of several samples, the turns of each behind these.
        put_first: whether the places of the images were chosen here, since the record has none.
        objects: boxes and points of the record.
        rollout: what a sampler said of the last answer.
    """

    turns: tuple[Message, ...]
    images: tuple[ImageSource, ...]
    unknown_keys: tuple[str, ...] = ()
    inputs: TemplateInputs = NO_INPUTS
    answers: tuple[tuple[Message, ...], ...] = ()
    branches: tuple[tuple[Message, ...], ...] = ()
    put_first: bool = False
    objects: Objects | None = None
    rollout: Rollout | None = None

    def document(self, names: Sequence[str]) -> dict[str, Any]:
        """A shard's JSON, its images under these member names."""
        document: dict[str, Any] = {"messages": _written(self.turns, names)}
        for name, turns in zip(PAIR_KEYS, self.answers, strict=False):
            document[name] = _written(turns, names)
        if self.branches:
            document[BRANCHES] = [_written(turns, names) for turns in self.branches]
        if self.inputs.tools:
            document["tools"] = list(self.inputs.tools)
        if self.inputs.variables:
            document["chat_template_kwargs"] = dict(self.inputs.variables)
        if self.objects is not None:
            document["objects"] = self.objects.document()
        if self.rollout is not None:
            document["rollout"] = self.rollout.document()
        return document


def _written(turns: Sequence[Message], names: Sequence[str]) -> list[dict[str, Any]]:
    """Turns as a shard's JSON has them."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        content: list[dict[str, Any]] | str | None = [_part(part, names) for part in turn.parts]
        if len(turn.parts) < 2 and not turn.shown:
            content = turn.text
        if not turn.parts and CALLS in turn.fields:
            content = None
        flag = {} if turn.learn else {"loss": False}
        messages.append({"role": turn.role, "content": content, **turn.fields, **flag})
    return messages


def _part(part: TextPart | Shown, names: Sequence[str]) -> dict[str, Any]:
    match part:
        case ImagePart():
            return {"type": "image", "image": names[part.index]}
        case VideoPart():
            frames = list(names[part.index : part.index + len(part.times)])
            rate = {"times": list(part.times)} if part.fps is None else {"fps": part.fps}
            return {"type": VIDEO, "frames": frames, **rate}
        case TextPart():
            return {"type": "text", "text": part.text}


def chat_turns(record: dict[str, Any], rewrite: Rewrite | None = None) -> ChatTurns:
    """Turns and images of a record.

    Raises:
        DataError: class `schema`; says what was found and what was expected. What `rewrite` raises.
    """
    parsed, put_first = as_pair(_parsed(record))
    said = conversation(parsed if rewrite is None else rewrite(parsed), _FILES)
    images = tuple(source for source in said.images if source is not None)
    if unnamed := len(said.images) - len(images):
        raise schema_error(
            f"{counted(unnamed, 'place')} for images in the turns ({IMAGE_MARKER} or image parts) "
            "without a name, nor does the record name any ('image' or 'images')"
        )
    return ChatTurns(
        said.messages,
        images,
        said.unknown_keys,
        said.inputs,
        said.answers,
        said.branches,
        put_first,
        said.objects,
        said.rollout,
    )


def _parsed(record: dict[str, Any]) -> dict[str, Any]:
    """Parse turns and tools of a record into our own format."""
    texts = {name: record[name] for name in TURN_FIELDS if isinstance(record.get(name), str)}
    for schema, text in texts.items():
        record = record | {schema: parsed_text(text, repr(schema))}
    if "images" in record:
        record = record | {"images": listed(record["images"], "'images'")}
    for name in ("objects", "rollout"):
        if isinstance(text := record.get(name), str) and text:
            record = record | {name: parsed_text(text, repr(name))}
    if "tools" in record:
        record = record | {"tools": with_wrapped_tools(record["tools"])}
    lists = {name: record[name] for name in TURN_FIELDS if isinstance(record.get(name), list)}
    return record | {schema: respelt(turns, schema) for schema, turns in lists.items()}


def _part_image(part: Mapping[str, Any], where: str) -> ImageSource | None:
    if part["type"] == "image_url":
        url = part.get("image_url")
        if isinstance(url, dict):
            # The resolution that OpenAI's files ask for, where they ask for one.
            detail = None if url.get("detail") == "auto" else url.get("detail")
            refuse_unknown({**url, "detail": detail}, _URL_KEYS, where)
            url = url.get("url")
        return _source(url, where)
    name = only_name(part, _IMAGE_NAMES, where, "image")
    return None if name is None else _source(part[name], where)


def only_name(part: Mapping[str, Any], names: Sequence[str], where: str, noun: str) -> str | None:
    """The key of a part that names its file; None where no key does.

    Raises:
        DataError: (schema) several do.
    """
    given = [name for name in names if not is_missing(part.get(name))]
    if len(given) > 1:
        raise schema_error(
            f"{where} names its {noun} by {' and '.join(given)}; expected one of them"
        )
    return given[0] if given else None


def named_file(value: object, where: str) -> object:
    """What a Hugging Face file has, `bytes` or else `path`; any other value as it is.

    Raises:
        DataError: (schema) it has another key.
    """
    if not isinstance(value, dict):
        return value
    refuse_unknown(value, _FILE_KEYS, where)
    data = value.get("bytes")
    return value.get("path") if data is None else data


def _source(value: object, where: str) -> ImageSource:
    """A path, the file's bytes, a Hugging Face image (`bytes` and `path`), or base64."""
    value = named_file(value, where)
    if isinstance(value, str) and value:
        data = inline_image(value, where)
        return value if data is None else data
    if isinstance(value, bytes):
        return value
    raise schema_error(
        f"{where} is {kind_of(value)}; expected a path, or an object with bytes or path"
    )


_FILES = Dialect(
    roles={
        "messages": CHAT_ROLES,
        "conversations": {**CHAT_ROLES, "human": "user", "gpt": "assistant"},
    },
    part_keys={"messages": _PART_KEYS, "conversations": _PART_KEYS},
    image=_source,
    part_image=_part_image,
    marks_messages=True,
)
"""How other people's records are read: their images are files, or bytes in the record."""


def respelt(turns: list[Any], schema: str) -> list[Any]:
    """The turns with calls as `tool_calls` of the assistant, and results as turns of the tool.

    Raises:
        DataError: (schema) a call that is no JSON object with a name.
    """
    role, content = TURN_FIELDS[schema]
    written: list[Any] = []
    is_open = False
    for place, turn in enumerate(turns):
        name = turn.get(role) if isinstance(turn, dict) else None
        if name in CALL_ROLES:
            said = {**turn, role: "assistant", content: None}
            calls = _calls(turn.get(content), f"{schema}[{place}]")
            if is_open and _same(said, written[-1]):
                written[-1] = {**written[-1], CALLS: [*written[-1][CALLS], *calls]}
            else:
                written.append({**said, CALLS: calls})
        elif name in RESULT_ROLES:
            written.append({**turn, role: "tool"})
        else:
            written.append(turn)
        is_open = name in CALL_ROLES
    return written


def with_wrapped_tools(tools: object) -> object:
    """A record's tools, with bare functions wrapped; anything that is no list stays as it is."""
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


def inline_image(text: str, where: str) -> bytes | None:
    """The image file that a text holds; None where the text is a path.

    Raises:
        DataError: (schema) a data URI that is no image in base64.
    """
    if text[:5].lower() == "data:":
        return _of_uri(text, where)
    if len(text) < SHORTEST_BARE or not _ALPHABET.fullmatch(text):
        return None
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error:
        return None
    return data if starts_as_image(data) else None


def starts_as_inline(text: str) -> bool:
    """Whether a text begins as an image does. The rest may be damaged."""
    if text[:11].lower() == "data:image/":
        return True
    head = text[: SHORTEST_BARE - 1]
    if len(text) < SHORTEST_BARE or not _ALPHABET.fullmatch(head):
        return False
    bare = "".join(head.split())
    try:
        return starts_as_image(base64.b64decode(bare[: len(bare) // 4 * 4], validate=True))
    except binascii.Error:
        return False


def starts_as_image(data: bytes) -> bool:
    """Whether a file begins as those of the formats that are read."""
    return data.startswith(_MAGIC) and (data[:4] != b"RIFF" or data[8:12] == b"WEBP")


def _of_uri(text: str, where: str) -> bytes:
    head, comma, body = text.partition(",")
    kind, *parameters = head[5:].lower().split(";")
    if not comma or not kind.startswith("image/") or parameters[-1:] != ["base64"]:
        raise schema_error(
            f"{where} is the data URI {head[:_SHOWN]!r}; expected data:image/...;base64,..."
        )
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except binascii.Error as error:
        raise schema_error(f"{where} is a data URI whose base64 is damaged: {error}") from None
