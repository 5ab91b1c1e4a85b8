"""The turns of a record in either schema, with the images that they show.

    {"system": "Be brief.", "messages": [{"role": "assistant", "content": "Draft.", "loss": false},
                                         ...]}

Shards and `vlmpack data convert` read records by this code; a `Dialect` holds their differences. A
record's `system` becomes its first turn, and a turn's flags say whether it is learnt.
`turn_parts.py` reads tools, calls and thoughts.

A pair has two answers next to the turns of its prompt:

    {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}],
     "chosen": "A cat.", "rejected": [{"role": "assistant", "content": "A dog."}]}

An answer is a text, a turn of the assistant, or a list of turns that begins and ends with the
assistant's (results of tools may stand between). Images belong to the prompt, which both answers
share.

A record may hold several samples. Its branches have the turns before them in common:

    {"messages": [{"role": "user", "content": [{"type": "image"}]}],
     "branches": [[{"role": "user", "content": "What is it?"},
                   {"role": "assistant", "content": "A cat."}],
                  [{"role": "user", "content": "Where?"},
                   {"role": "assistant", "content": "On a mat."}]]}

Each branch is a sample of its own, `key#0`, `key#1`, ...: the common turns, which are not learnt,
and then its own. If both the common turns end and the branch begins with a user's turn, the two are
joined, as image and question above. A branch that is a text is an answer alone. Images belong to
the common turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, get_args

from vlmpack.data.shards.naming import (
    BRANCHES,
    PAIR_KEYS,
    as_utf8,
    is_missing,
    names_no_image,
    number_text,
    refuse_unknown,
    unknown_record_keys,
)
from vlmpack.data.shards.turn_parts import (
    CONTAINERS,
    FIELD_NAMES,
    VIDEO,
    fields_of,
    frame_list,
    inputs_of,
    refuse_video_of_others,
)
from vlmpack.encode.objects import Objects, objects_of
from vlmpack.encode.places import with_named_places
from vlmpack.encode.rollouts import Rollout, rollout_of
from vlmpack.encode.sample import (
    ImagePart,
    Message,
    Role,
    Shown,
    TemplateInputs,
    TextPart,
    VideoPart,
)
from vlmpack.encode.turns import CALLS
from vlmpack.errors import schema_error
from vlmpack.limits import MAX_BRANCHES, MAX_TURNS
from vlmpack.words import counted, kind_of

Turns = tuple[Message, ...]
IMAGE_MARKER = "<image>"
VIDEO_MARKER = "<video>"
OTHER_MEDIA = ("video", "videos", "audio", "audios")
CHAT_ROLES: Mapping[str, Role] = {role: role for role in get_args(Role)}
SYSTEM = "system"
"""The key next to the turns, and the role that it becomes."""
TURN_FIELDS: Mapping[str, tuple[str, str]] = {
    "messages": ("role", "content"),
    "conversations": ("from", "value"),
}
"""Schema -> the keys of a turn that hold its role and its content."""
LEARN_FLAGS = ("loss", "train", "weight")
"""Keys of a turn that say whether it is learnt."""
TURN_KEYS: Mapping[str, frozenset[str]] = {
    schema: frozenset((*names, *LEARN_FLAGS, *FIELD_NAMES)) for schema, names in TURN_FIELDS.items()
}
"""Schema -> the keys of a turn that are read."""
Source = TypeVar("Source")
_FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "system": ("user",),
    "user": ("user", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""Role of the last common turn -> allowed roles of the first turn of a branch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect(Generic[Source]):
    """The differences between readers of records. The rest is the same for all.

    Args:
        roles: schema -> what its turns call a role -> the role.
        part_keys: schema -> kind of a part -> its keys that are read; every kind but `text` and
            `video` is an image. Without kinds a turn's content is text alone.
        image: (value, where) -> the image that a record names outside its turns, or a frame.
        part_image: (part, where) -> the image that a part names; None where it names none.
        marks_messages: whether `<image>` marks a place in `messages` too, where the record names
            images and no part shows one.
        leave_out: how videos and sounds can be avoided, for messages.
    """

    roles: Mapping[str, Mapping[str, Role]]
    part_keys: Mapping[str, Mapping[str, frozenset[str]]]
    image: Callable[[object, str], Source]
    part_image: Callable[[Mapping[str, Any], str], Source | None]
    marks_messages: bool = False
    leave_out: str = ""


@dataclass(frozen=True, slots=True)
class Conversation(Generic[Source]):
    """What a record says.

    Args:
        images: what each image part shows and each frame of a video, in order; None for an image
            that nothing names.
        unknown_keys: those of the record that are not read.
        answers: of a pair, the chosen one and the rejected one; else empty.
        branches: of a record of several samples, the turns of each after the messages.
        objects: boxes and points that the texts have places for, which are named by entry.
        rollout: what a sampler said of the last answer.
    """

    messages: tuple[Message, ...]
    images: tuple[Source | None, ...]
    unknown_keys: tuple[str, ...]
    inputs: TemplateInputs
    answers: tuple[tuple[Message, ...], ...] = ()
    branches: tuple[tuple[Message, ...], ...] = ()
    objects: Objects | None = None
    rollout: Rollout | None = None


def conversation(record: Mapping[str, Any], dialect: Dialect[Source]) -> Conversation[Source]:
    """What a record says, in either schema.

    Raises:
        DataError: class `schema`; the reason gives what was found and what was expected.
    """
    unknown = unknown_record_keys(record)
    schemas = [name for name in TURN_FIELDS if name in record]
    if not schemas and not any(is_missing(record.get(name)) for name in PAIR_KEYS):
        raise schema_error(
            "the record has 'chosen' and 'rejected', but no turns that they answer. TRL writes "
            "pairs so ('prompt', or two conversations that begin alike). Expected the prompt's "
            "turns as 'messages'. vlmpack data convert makes such records"
        )
    if len(schemas) != 1:
        listed = ", ".join(map(repr, schemas or sorted(record)[:8])) or "nothing"
        raise schema_error(
            f"expected exactly one of 'messages' and 'conversations', found {listed}"
        )
    [schema] = schemas
    for name in OTHER_MEDIA:
        if not is_missing(record.get(name)):
            raise schema_error(f"the record has {name!r}; {_other_media(name)}{dialect.leave_out}")
    located = located_turns(record, schema)
    named = [
        dialect.image(item, f"image {place} beside the turns")
        for place, item in enumerate(named_images(record))
    ]
    reader = _TurnReader(schema, dialect, marked=schema == "conversations")
    messages = [reader.message(turn, where) for where, turn in located]
    if dialect.marks_messages and named and len(reader.images) == len(reader.frames):
        reader = _TurnReader(schema, dialect, marked=True)
        messages = [reader.message(turn, where) for where, turn in located]
    images = reader.with_named(named) if named else tuple(reader.images)
    answers = reader.answers(record)
    branches = reader.branches(record, tuple(messages))
    inputs, turns = inputs_of(record), tuple(messages)
    objects = objects_of(record["objects"]) if "objects" in record else None
    if objects is not None:
        turns, *rest = with_named_places([turns, *answers, *branches], objects)
        answers, branches = tuple(rest[: len(answers)]), tuple(rest[len(answers) :])
        if not objects.shapes and not objects.labels:  # a table's row without any
            objects = None
    rollout = rollout_of(record.get("rollout"))
    if rollout is not None and branches:
        raise schema_error(
            f"the record has {BRANCHES!r} and 'rollout', which is of one answer. Give each answer "
            "that was drawn its own record"
        )
    return Conversation(turns, images, unknown, inputs, answers, branches, objects, rollout)


@dataclass(frozen=True, slots=True)
class _TurnReader(Generic[Source]):
    """Reads the turns of one record, in order.

    Args:
        marked: whether `<image>` in a text is the place of an image.
        images: what the image parts and the frames so far name.
        frames: which of these are frames of videos.
    """

    schema: str
    dialect: Dialect[Source]
    marked: bool
    images: list[Source | None] = field(default_factory=list)
    frames: set[int] = field(default_factory=set)

    def with_named(self, named: Sequence[Source]) -> tuple[Source | None, ...]:
        """What all parts show, with images from the record's own list. Frames are named by their
        videos alone."""
        stills = [place for place in range(len(self.images)) if place not in self.frames]
        if len(named) != len(stills):
            kind = f"{IMAGE_MARKER} marker" if self.marked else "image part"
            raise schema_error(
                f"{counted(len(stills), kind)} in the conversation, but "
                f"{counted(len(named), 'image')} named. {self.literal(IMAGE_MARKER)}"
            )
        shown = list(self.images)
        for place, name in zip(stills, named, strict=True):
            if shown[place] not in (None, name):
                raise schema_error(
                    "images are named by the parts and by the record, and not the same ones"
                )
            shown[place] = name
        return tuple(shown)

    def message(self, turn: object, where: str) -> Message:
        """One turn; `where` is its place, for messages."""
        if not isinstance(turn, dict):
            raise schema_error(f"{where} is {kind_of(turn)}; expected an object")
        refuse_foreign(turn, self.schema, where)
        roles, (key, content) = self.dialect.roles[self.schema], TURN_FIELDS[self.schema]
        name = turn.get(key)
        if not isinstance(name, str) or name not in roles:
            expected = ", ".join(map(repr, roles))
            raise schema_error(f"{where} has the {key} {name!r}; expected one of {expected}")
        learn = is_learnt(turn, roles[name], where)
        fields = fields_of(turn, roles[name], where)
        said = turn.get(content)
        if roles[name] == "assistant":
            said = number_text(said)
        if isinstance(said, str):
            parts: tuple[TextPart | Shown, ...] = tuple(self._text(said, where))
        elif CALLS in fields and said in (None, []):
            parts = ()  # it calls, and says nothing
        else:
            parts = tuple(self._parts(said, f"{where}.{content}"))
        message = Message(roles[name], parts, learn, fields)
        refuse_video_of_others(message, where)
        return message

    def answer_turn(self, text: str) -> dict[str, str]:
        """A text as a turn of the assistant."""
        roles, (key, content) = self.dialect.roles[self.schema], TURN_FIELDS[self.schema]
        return {key: next(n for n, role in roles.items() if role == "assistant"), content: text}

    def answers(self, record: Mapping[str, Any]) -> tuple[Turns, ...]:
        """The chosen answer and the rejected one; empty where the record is no pair.

        Raises:
            DataError: (schema) one answer without the other, or one that is no answer.
        """
        given = [name for name in PAIR_KEYS if not is_missing(record.get(name))]
        if not given:
            return ()
        if len(given) == 1:
            [missing] = {*PAIR_KEYS} - {*given}
            amount = "no" if record.get(missing) is None else "an empty"
            raise schema_error(
                f"the record has {given[0]!r}, but {amount} {missing!r} answer; expected both, or "
                "one answer as the last of the turns"
            )
        return tuple(self._answer(name, record[name]) for name in PAIR_KEYS)

    def _answer(self, name: str, value: object) -> Turns:
        turns: list[Any] = value if isinstance(value, list) else [number_text(value)]
        answer = []
        for place, turn in enumerate(turns):
            where = f"{name}[{place}]" if isinstance(value, list) else name
            if not isinstance(turn, str | dict):
                others = "" if isinstance(value, list) else ", or a list of turns"
                raise schema_error(
                    f"{where} is {kind_of(turn)}; expected a text or a turn of the "
                    f"assistant{others}"
                )
            message = self.message(self.answer_turn(turn) if isinstance(turn, str) else turn, where)
            if message.shown:
                raise schema_error(
                    f"{where} shows an image inside an answer; expected the images of a pair in "
                    "its prompt, which both answers share"
                )
            answer.append(message)
        roles = [message.role for message in answer]
        foreign = sorted({*roles} - {"assistant", "tool"})
        if foreign or roles[0] != "assistant" or roles[-1] != "assistant":
            raise schema_error(
                f"{name!r} is {counted(len(roles), 'turn')} of {', '.join(roles)}. Expected an "
                "answer alone, that begins and ends with the assistant's turn. The question "
                "belongs to the turns before"
            )
        if not any(message.learn for message in answer if message.role == "assistant"):
            raise schema_error(
                f"the data excludes all of {name!r} from the loss; nothing is compared"
            )
        return tuple(answer)

    def branches(self, record: Mapping[str, Any], common: Turns) -> tuple[Turns, ...]:
        """The turns of each branch; empty where the record is one sample.

        Raises:
            DataError: (schema) there is no list of branches, or a pair's two answers stand beside
                it. A branch is empty, shows an image, does not follow the common turns, or teaches
                nothing.
        """
        value = record.get(BRANCHES)
        if value is None or value == []:
            return ()
        if paired := [name for name in PAIR_KEYS if not is_missing(record.get(name))]:
            raise schema_error(
                f"the record has {BRANCHES!r} and {paired[0]!r}. Expected only one of them. Give "
                "each pair its own record, and group samples of one image by data.group_by: image"
            )
        if not isinstance(value, list):
            raise schema_error(
                f"{BRANCHES!r} is {kind_of(value)}; expected a list, an item a branch"
            )
        if len(value) > MAX_BRANCHES:
            raise schema_error(f"{len(value):,} branches; at most {MAX_BRANCHES:,} are read")
        return tuple(self._branch(turns, n, common) for n, turns in enumerate(value))

    def _branch(self, value: object, number: int, common: Turns) -> Turns:
        where = f"{BRANCHES}[{number}]"
        value = number_text(value)
        turns = [self.answer_turn(value)] if isinstance(value, str) and value else value
        if not isinstance(turns, list) or not turns:
            what = "empty" if not turns else kind_of(turns)
            raise schema_error(f"{where} is {what}; expected a list of turns, or an answer's text")
        if len(turns) > MAX_TURNS:
            raise schema_error(f"{where} has {len(turns):,} turns; at most {MAX_TURNS:,} are read")
        messages = []
        for place, turn in enumerate(turns):
            message = self.message(turn, f"{where}[{place}]")
            if message.shown:
                raise schema_error(
                    f"{where}[{place}] shows an image inside a branch. Expected images only in "
                    "the turns before, which all branches share"
                )
            messages.append(message)
        before, first = common[-1].role, messages[0].role
        if first not in _FOLLOWS[before] or any(m.role == "system" for m in messages):
            expected = " or ".join(f"the {role}'s" for role in _FOLLOWS[before])
            raise schema_error(
                f"{where} has turns of {', '.join(m.role for m in messages)}, and the turns before "
                f"end with the {before}'s. Expected it to begin with {expected}, and no turn of "
                "the system's"
            )
        if not any(message.role == "assistant" and message.learn for message in messages):
            raise schema_error(
                f"{where} has no turn of the assistant that is learnt. Expected an answer in "
                "each. The turns before are common to all, and are not learnt"
            )
        return tuple(messages)

    def _parts(self, content: object, where: str) -> Iterator[TextPart | Shown]:
        known = self.dialect.part_keys[self.schema]
        if not known or not isinstance(content, list) or not content:
            expected = "text or a list of parts" if known else "text"
            raise schema_error(f"{where} is {kind_of(content)}; expected {expected}")
        for number, part in enumerate(content):
            place = f"{where}[{number}]"
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str) or kind not in known:
                instead = f"expected one of {', '.join(map(repr, known))}"
                if kind in OTHER_MEDIA:
                    instead = f"{_other_media(kind)}{self.dialect.leave_out}"
                raise schema_error(f"{place} has the type {kind!r}; {instead}")
            if kind == VIDEO:
                yield self._video(part, place)
                continue
            refuse_unknown(part, known[kind], place)
            if kind == "text":
                yield from self._text(part.get("text"), place)
            else:
                _check_index(part.get("index"), len(self.images) - len(self.frames), place)
                yield self._image(self.dialect.part_image(part, place))

    def _text(self, text: object, where: str) -> Iterator[TextPart | ImagePart]:
        if not isinstance(text, str):
            raise schema_error(f"{where} has a text that is {kind_of(text)}; expected a string")
        as_utf8(text, where)
        if not self.marked:
            yield TextPart(text)
            return
        if VIDEO_MARKER in text:
            raise schema_error(
                f"{where} marks a video ({VIDEO_MARKER}); {_other_media(VIDEO)}. "
                f"{self.literal(VIDEO_MARKER)}{self.dialect.leave_out}"
            )
        for number, piece in enumerate(text.split(IMAGE_MARKER)):
            if number:
                yield self._image(None)
            if piece:
                yield TextPart(piece)

    def _video(self, part: Mapping[str, Any], where: str) -> VideoPart:
        said, first = frame_list(part, where), len(self.images)
        for number, frame in enumerate(said.frames):
            self.frames.add(len(self.images))
            self.images.append(self.dialect.image(frame, f"{where}.frames[{number}]"))
        return said.part(first)

    def _image(self, source: Source | None) -> ImagePart:
        self.images.append(source)
        return ImagePart(len(self.images) - 1)

    def literal(self, marker: str) -> str:
        """How a marker is written where it is meant as text."""
        if self.marked and self.schema == "messages":
            return f"A literal {marker} is text beside image parts ({{'type': 'image'}})"
        return f"A literal {marker} is written in the 'messages' schema, where it is text"


def located_turns(record: Mapping[str, Any], schema: str) -> list[tuple[str, object]]:
    """(where, turn) of each turn, the record's `system` first.

    Raises:
        DataError: (schema) no turns, a `system` that is no text, or beside a turn of the system.
    """
    turns = record[schema]
    if not isinstance(turns, list) or not turns:
        raise schema_error(f"{schema!r} is {kind_of(turns)}; expected a list of turns")
    if len(turns) > MAX_TURNS:
        raise schema_error(f"{schema!r} has {len(turns):,} turns; at most {MAX_TURNS:,} are read")
    located = [(f"{schema}[{place}]", turn) for place, turn in enumerate(turns)]
    system = record.get(SYSTEM)
    if system is None or system == []:
        return located
    if not isinstance(system, str):
        raise schema_error(f"'system' beside the turns is {kind_of(system)}; expected a text")
    role, content = TURN_FIELDS[schema]
    for where, turn in located:
        if isinstance(turn, dict) and turn.get(role) == SYSTEM:
            raise schema_error(
                f"the record has 'system' beside the turns, and {where} is the system's too; "
                "expected one of them"
            )
    return [("'system'", {role: SYSTEM, content: system}), *located]


def named_images(record: Mapping[str, Any]) -> list[Any]:
    """The record's `images` or `image`; null, empty texts and empty lists count as missing.

    Raises:
        DataError: (schema) both, and not the same.
    """
    return named_files(record, ("images", "image"), names_no_image)


def named_files(
    record: Mapping[str, Any], names: tuple[str, str], is_none: Callable[[object], bool]
) -> list[Any]:
    """The files that a record names outside its turns, under either of two keys.

    Raises:
        DataError: (schema) both, and not the same.
    """
    given = [record[name] for name in names if not is_none(record.get(name))]
    as_lists = [item if isinstance(item, list) else [item] for item in given]
    if len(given) == 2 and as_lists[0] != as_lists[1]:
        raise schema_error(
            f"the record has {names[0]!r} and {names[1]!r}, and not the same ones; expected one of "
            "them"
        )
    return as_lists[0] if given else []


def refuse_foreign(turn: Mapping[str, object], schema: str, where: str) -> None:
    """Raise DataError (schema) where a turn has a key that is not read, or no role. Keys come
    first, since a misspelt `role` is one."""
    role = TURN_FIELDS[schema][0]
    if is_missing(turn.get(role)):
        for other, names in TURN_FIELDS.items():
            if other != schema and not any(is_missing(turn.get(name)) for name in names):
                raise schema_error(
                    f"{where} has the keys {names[0]!r} and {names[1]!r}: these are turns of "
                    f"{other!r}; rename the record's key {schema!r}"
                )
    refuse_unknown(turn, TURN_KEYS[schema], where)
    if role not in turn:
        keys = ", ".join(repr(name[:60]) for name in list(turn)[:8]) or "nothing"
        raise schema_error(f"{where} has no key {role!r}; found {keys}")


def is_learnt(turn: Mapping[str, object], role: str, where: str) -> bool:
    """Whether a turn's flags let it be learnt; without one it is.

    Raises:
        DataError: (schema) a flag that is neither yes nor no, two that disagree, or one that asks
            for what the assistant did not say.
    """
    if len(turn) <= 2:  # its role and its content
        return True
    said = {name: turn[name] for name in LEARN_FLAGS if turn.get(name) not in (None, [])}
    for name, value in said.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise schema_error(
                f"{where}.{name} is {value!r}. Expected true or false, 1 or 0: a turn is learnt "
                "or not, it has no weight in between"
            )
    if len(set(map(bool, said.values()))) > 1:
        flags = ", ".join(f"{name} {value!r}" for name, value in said.items())
        raise schema_error(f"{where} has flags that disagree: {flags}; expected one of them")
    if role != "assistant" and any(said.values()):
        raise schema_error(
            f"{where}.{next(iter(said))} asks that the {role}'s turn be learnt; only the "
            "assistant's are: remove the flag"
        )
    return all(said.values())


def _check_index(index: object, number: int, where: str) -> None:
    """Raise unless the `index` of a Hugging Face image part is its place among the record's
    images."""
    if not is_missing(index) and (isinstance(index, bool) or index != number):
        raise schema_error(
            f"{where}.index is {index!r}, and it is image {number} of the record, counted from 0. "
            "Images are shown in their order, so put the parts into that of the images"
        )


def _other_media(kind: str) -> str:
    """Why videos and sounds are refused, and what would do."""
    if kind.startswith(VIDEO):
        return CONTAINERS
    return (
        "this version trains on images, frames of videos and text: what is said in it, as text, "
        "would do"
    )


def branch_key(key: str, branch: int | None) -> str:
    """The key of a sample: its record's, with the number of its branch where there are some."""
    return key if branch is None else f"{key}#{branch}"


def record_key(key: str, branch: int | None) -> str:
    """The key of a sample's record."""
    return key if branch is None else key.removesuffix(f"#{branch}")


def joined(common: Turns, branch: Turns) -> tuple[Turns, int]:
    """The turns of a branch's sample, and how many of them are unchanged common turns. Common turns
    are not learnt."""
    context = tuple(replace(message, learn=False) for message in common)
    if context[-1].role != "user" or branch[0].role != "user":
        return (*context, *branch), len(context)
    turn = replace(context[-1], parts=_as_one((*context[-1].parts, *branch[0].parts)))
    return (*context[:-1], turn, *branch[1:]), len(context) - 1


def _as_one(parts: tuple[TextPart | Shown, ...]) -> tuple[TextPart | Shown, ...]:
    """Parts with neighbouring texts as one, as they would stand in one turn."""
    found: list[TextPart | Shown] = []
    for part in parts:
        if found and isinstance(part, TextPart) and isinstance(last := found[-1], TextPart):
            found[-1] = TextPart(last.text + part.text)
        else:
            found.append(part)
    return tuple(found)
