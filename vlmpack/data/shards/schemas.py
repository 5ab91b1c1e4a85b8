"""Two ways to write a conversation down, cooked into one VLMSample.

    chat:   {"messages": [{"role": "user", "content": [{"type": "image", "image": "0.jpg"},
                                                       {"type": "text", "text": "What is it?"}]},
                          {"role": "assistant", "content": "A cat."}]}
    LLaVA:  {"conversations": [{"from": "human", "value": "<image>\\nWhat is it?"},
                               {"from": "gpt", "value": "A cat."}], "image": "0.jpg"}

The JSON's own keys choose the schema. In `messages` a literal `<image>` is text; in
`conversations` it marks the place of an image. Images may stand in any turn, the system's and the
assistant's too, before, between and after its text. Those without a name take the sample's image
members in order: by number where they are numbered, else as they lie in the file. Videos and sounds
are refused. A "system" beside the turns is the system's turn, a turn's "loss", "train" or "weight"
says whether it is learnt (turns.py), an optional "task" groups evaluation figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vlmpack.data.shards.json_text import parse_json
from vlmpack.data.shards.keys import is_absent, refuse_unknown, unknown_record_keys
from vlmpack.data.shards.naming import JSON_FIELD, is_image
from vlmpack.data.shards.raw import RawSample
from vlmpack.data.shards.turns import TURN_FIELDS, is_learnt, placed_turns, refuse_foreign
from vlmpack.encode.sample import ImagePart, Message, Role, TextPart, VLMSample
from vlmpack.errors import DataError, schema_error
from vlmpack.words import counted

IMAGE_MARKER = "<image>"
VIDEO_MARKER = "<video>"

OTHER_MEDIA = ("video", "videos", "audio", "audios")

_CHAT_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
_LLAVA_ROLES: dict[str, Role] = {"system": "system", "human": "user", "gpt": "assistant"}


@dataclass(frozen=True, slots=True)
class CookedText:
    """A sample without its image bytes.

    Args:
        sample: the VLMSample with `images` empty.
        image_fields: the member that each image part shows, in token order.
        unknown_keys: those of the record that are not read.
    """

    sample: VLMSample
    image_fields: tuple[str, ...]
    unknown_keys: tuple[str, ...] = ()

    @property
    def num_text_bytes(self) -> int:
        """UTF-8 bytes of all text parts."""
        return sum(len(message.text.encode("utf-8")) for message in self.sample.messages)


_PART_KEYS = {"text": frozenset(("type", "text")), "image": frozenset(("type", "image", "index"))}

_AS_TEXT = "a literal {} is written in the 'messages' schema, where it is text"


_LEAVE_OUT = "; or leave such samples out (data.on_error.schema: skip)"


def cook(raw: RawSample) -> VLMSample:
    """A whole sample, with its images.

    Raises:
        DataError: class `integrity` or `schema`.
    """
    raw.check()
    text = cook_text(raw.key, raw.shard, raw.payload(JSON_FIELD), raw.fields)
    return replace(text.sample, images=tuple(raw.payload(name) for name in text.image_fields))


def cook_text(key: str, shard: str, document: bytes, fields: Sequence[str]) -> CookedText:
    """The conversation from the JSON member and the names of the other members.

    Args:
        key: the sample's key.
        shard: its path, for messages.
        document: the JSON member's bytes.
        fields: all members' fields, in file order.

    Raises:
        DataError: class `schema`; the reason gives what was found and what was expected.
    """
    try:
        value = _parse(document)
        unknown = unknown_record_keys(value)
        messages, names = _conversation(value)
        if messages[0].role == "assistant":
            raise schema_error(
                "the conversation starts with the assistant; expected a user's turn first"
            )
        answers = [message for message in messages if message.role == "assistant"]
        if not any(message.learn for message in answers):
            raise schema_error(
                f"the data excludes {counted(len(answers), 'turn')} of the assistant, and there is "
                "no other, so nothing can be learned"
                if answers
                else f"none of the {len(messages)} turns is the assistant's, so nothing can be "
                "learned"
            )
        image_fields = _resolve(names, [name for name in fields if is_image(name)], key)
        task = value.get("task")
        if task is not None and not isinstance(task, str):
            raise schema_error(f"'task' is {kind_of(task)}; expected a string")
    except DataError as fault:
        raise fault.located(key=key, shard=shard) from None
    sample = VLMSample(key=key, url=shard, messages=messages, task=task, image_names=image_fields)
    return CookedText(sample, image_fields, unknown)


def _parse(document: bytes) -> dict[str, object]:
    try:
        value = parse_json(document.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise schema_error(f"the '.json' member cannot be parsed: {error}") from None
    if not isinstance(value, dict):
        raise schema_error(f"the '.json' member is {kind_of(value)}; expected an object")
    return value


def _conversation(value: dict[str, object]) -> tuple[tuple[Message, ...], list[str | None]]:
    """The messages, and per image part the name it gives (None for the next one in order)."""
    schemas = [name for name in ("messages", "conversations") if name in value]
    if len(schemas) != 1:
        found = ", ".join(repr(name) for name in sorted(value)[:8]) or "nothing"
        raise schema_error(
            f"expected one of 'messages' and 'conversations', found {found}"
            if not schemas
            else "both 'messages' and 'conversations'; expected one of them"
        )
    for name in OTHER_MEDIA:
        if name in value and not is_absent(value[name]):
            raise schema_error(f"the sample has {name!r}; {other_media(name)}{_LEAVE_OUT}")
    turns = value[schemas[0]]
    if not isinstance(turns, list) or not turns:
        raise schema_error(f"{schemas[0]!r} is {kind_of(turns)}; expected a list of turns")
    names: list[str | None] = []
    chat = schemas[0] == "messages"
    messages = tuple(
        (_chat_turn if chat else _llava_turn)(turn, where, names)
        for where, turn in placed_turns(value, schemas[0], turns)
    )
    return messages, _named_beside(value, names, chat)


def _chat_turn(turn: object, where: str, names: list[str | None]) -> Message:
    role = turn_role(turn, "messages", _CHAT_ROLES, where)
    assert isinstance(turn, dict)
    learn = is_learnt(turn, role, where)
    content = turn.get("content")
    if isinstance(content, str):
        return Message(role, (_text(content, where),), learn)
    if not isinstance(content, list) or not content:
        raise schema_error(
            f"{where}.content is {kind_of(content)}; expected text or a list of parts"
        )
    parts: list[TextPart | ImagePart] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _PART_KEYS:
            refuse_unknown(part, _PART_KEYS[kind], f"{where}.content[{number}]")
        if kind == "text":
            parts.append(_text(part.get("text"), f"{where}.content[{number}]"))
        elif kind == "image":
            name = part.get("image")
            if name is not None and not isinstance(name, str):
                raise schema_error(
                    f"{where}.content[{number}].image is {kind_of(name)}; expected a member's name"
                )
            check_place(part, len(names), f"{where}.content[{number}]")
            parts.append(ImagePart(len(names)))
            names.append(name)
        elif kind in OTHER_MEDIA:
            raise schema_error(
                f"{where}.content[{number}] has the type {kind!r}; {other_media(kind)}{_LEAVE_OUT}"
            )
        else:
            raise schema_error(
                f"{where}.content[{number}] has the type {kind!r}; expected 'text' or 'image'"
            )
    return Message(role, tuple(parts), learn)


def _llava_turn(turn: object, where: str, names: list[str | None]) -> Message:
    role = turn_role(turn, "conversations", _LLAVA_ROLES, where)
    assert isinstance(turn, dict)
    learn = is_learnt(turn, role, where)
    value = turn.get("value")
    if not isinstance(value, str):
        raise schema_error(f"{where}.value is {kind_of(value)}; expected text")
    if VIDEO_MARKER in value:
        raise schema_error(f"{where} {marks_video('conversations')}{_LEAVE_OUT}")
    parts: list[TextPart | ImagePart] = []
    for number, text in enumerate(value.split(IMAGE_MARKER)):
        if number:
            parts.append(ImagePart(len(names)))
            names.append(None)
        if text:
            parts.append(_text(text, where))
    return Message(role, tuple(parts), learn)


def _named_beside(
    value: dict[str, object], places: list[str | None], chat: bool
) -> list[str | None]:
    """The name of each image, where the record names them beside its turns.

    Args:
        value: the record.
        places: per image part or marker in order, the name that it gives itself.
        chat: whether the schema is `messages`.
    """
    given = named_images(value)
    if given is None:
        return places
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise schema_error(f"'image' is {kind_of(given)}; expected a name or a list of names")
    if len(names) != len(places):
        place = "image part" if chat else f"{IMAGE_MARKER} marker"
        raise schema_error(
            f"{counted(len(places), place)} in the conversation, but "
            f"{counted(len(names), 'image')} named; {_AS_TEXT.format(IMAGE_MARKER)}"
        )
    if any(place not in (None, name) for place, name in zip(places, names, strict=True)):
        raise schema_error("images are named by the parts and by the record, and not the same ones")
    return list(names)


def named_images(value: Mapping[str, object]) -> object:
    """What stands beside the turns under `images` or `image`; None where there is none: a null or
    an empty list is as good as absent.

    Raises:
        DataError: (schema) both, and not the same.
    """
    given = [value[name] for name in ("images", "image") if value.get(name) not in (None, [])]
    as_lists = [item if isinstance(item, list) else [item] for item in given]
    if len(given) == 2 and as_lists[0] != as_lists[1]:
        raise schema_error(
            "the record has 'images' and 'image', and not the same ones; expected one of them",
        )
    return given[0] if given else None


def check_place(part: Mapping[str, object], place: int, where: str) -> None:
    """Whether the `index` of an image part, in files of Hugging Face's, is where it stands anyway.

    Args:
        part: with its keys.
        place: images before it in the record.
        where: its own place, for messages.

    Raises:
        DataError: (schema) it is another.
    """
    index = part.get("index")
    if is_absent(index):
        return
    if isinstance(index, bool) or index != place:
        raise schema_error(
            f"{where}.index is {index!r}, and it is image {place} of the record, counted from 0; "
            "images are shown in their order: put the parts into that of the images",
        )


def marks_video(schema: str) -> str:
    """Why a text that marks the place of a video is refused.

    Args:
        schema: that of its record, `messages` or `conversations`.
    """
    literal = (
        _AS_TEXT.format(VIDEO_MARKER)
        if schema == "conversations"
        else f"a literal {VIDEO_MARKER} is text beside image parts ({{'type': 'image'}})"
    )
    return f"marks a video ({VIDEO_MARKER}); {other_media('video')}; {literal}"


def other_media(kind: str) -> str:
    """Why videos and sounds are refused, and what would do.

    Args:
        kind: one of `OTHER_MEDIA`.
    """
    instead = (
        "frames of it, as images, would do"
        if kind.startswith("video")
        else "what is said in it, as text, would do"
    )
    return f"this version trains on images and text: {instead}"


def _resolve(names: Sequence[str | None], members: list[str], key: str) -> tuple[str, ...]:
    """The member of each image part; every image member must be used."""
    base = key.rpartition("/")[2].lower()
    known: dict[str, str] = {}
    for member in members:
        known[member] = known[f"{base}.{member}"] = member
    resolved: list[str | None] = []
    for name in names:
        plain = None if name is None else name.rpartition("/")[2].lower()
        if plain is not None and plain not in known:
            shown = ", ".join(repr(member) for member in members) or "none"
            raise schema_error(f"the image {name!r} is no member; image members are {shown}")
        resolved.append(None if plain is None else known[plain])
    named = {name for name in resolved if name is not None}
    unnamed = sum(name is None for name in resolved)
    free = [member for member in members if member not in named]
    if unnamed != len(free):
        raise schema_error(
            f"{counted(len(names), 'image placeholder')} in the conversation, but "
            f"{counted(len(members), 'image member')} in the sample "
            f"({', '.join(members) or 'none'})"
        )
    rest = iter(_in_order(free))
    return tuple(name if name is not None else next(rest) for name in resolved)


def _in_order(members: list[str]) -> list[str]:
    """File order, except that numbered members (`0.jpg` .. `10.jpg`) go by their numbers.

    webdataset's writer sorts members by name, which puts `10.jpg` before `2.jpg`.
    """
    stems = [member.partition(".")[0] for member in members]
    if all(stem.isascii() and stem.isdigit() and len(stem) < 19 for stem in stems):
        return [member for _, member in sorted(zip(map(int, stems), members, strict=True))]
    return members


def turn_role(turn: object, schema: str, roles: Mapping[str, Role], where: str) -> Role:
    """Whose a turn is.

    Args:
        turn: of a record.
        schema: a key of TURN_FIELDS.
        roles: what the schema calls them.
        where: its place, for messages.

    Raises:
        DataError: (schema) no object, another role, or a key that is not read.
    """
    if not isinstance(turn, dict):
        raise schema_error(f"{where} is {kind_of(turn)}; expected an object")
    refuse_foreign(turn, schema, where)
    field = TURN_FIELDS[schema][0]
    name = turn.get(field)
    if not isinstance(name, str) or name not in roles:
        expected = ", ".join(repr(role) for role in roles)
        raise schema_error(f"{where} has the {field} {name!r}; expected one of {expected}")
    return roles[name]


def _text(text: object, where: str) -> TextPart:
    if not isinstance(text, str):
        raise schema_error(f"{where} has a text that is {kind_of(text)}; expected a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise schema_error(f"{where} has half of a surrogate pair, which is no text") from None
    return TextPart(text)


def kind_of(value: object) -> str:
    """What a message calls a value that is not as expected."""
    names = {type(None): "missing", list: "a list", dict: "an object", str: "a string"}
    if value == []:
        return "an empty list"
    return names.get(type(value), f"a {type(value).__name__}")
