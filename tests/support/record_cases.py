"""Records in every layout with every key that a user may write, and what docs/data.md says of each:
trained as these turns, or refused with a reason that has this in it.

The outcome is written beside the key, turn by turn, and knows nothing of the readers.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vlmpack.data.shards.naming import MEANT_ELSEWHERE

Reader = Literal["direct", "convert"]
READERS: tuple[Reader, ...] = ("direct", "convert")


@dataclass
class Turn:
    """What is trained of a turn; a number stands for an image."""

    role: str
    pieces: list[str | int]
    learn: bool = True


@dataclass
class Outcome:
    """What one reader makes of a record.

    Args:
        turns: trained, where nothing refuses it.
        refused: regular expressions; a refusal matches one of them.
        unknown: keys that are named.
    """

    turns: list[Turn]
    refused: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


@dataclass
class Case:
    """A record, the images beside it in a shard, and what each reader makes of it."""

    layout: Layout
    record: dict[str, Any]
    members: list[int]
    outcomes: dict[Reader, Outcome]
    name: str = ""

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The record's own."""
        found: list[dict[str, Any]] = self.record[self.layout.schema]
        return found

    def refuse(self, reason: str, *readers: Reader) -> None:
        """Both readers, unless some are named, refuse it."""
        for reader in readers or READERS:
            self.outcomes[reader].refused.append(reason)


def base_turns(num_images: int) -> list[Turn]:
    """Two questions and their answers."""
    first: list[str | int] = [0, "Q-one ", 1] if num_images else ["Q-one"]
    return [
        Turn("user", first),
        Turn("assistant", ["A-one"]),
        Turn("user", ["Q-two"]),
        Turn("assistant", ["A-two"]),
    ]


@dataclass(frozen=True)
class Layout:
    """A way to write a conversation down.

    Args:
        schema: `messages` or `conversations`.
        part: how an image part is written; None where `<image>` stands in a text.
        beside: whether the record names its images.
        refused: reader -> why it refuses the layout.
        num_images: 0 or 2.
    """

    name: str
    schema: str
    part: Callable[[int], dict[str, Any]] | None = None
    beside: bool = False
    refused: tuple[tuple[Reader, str], ...] = ()
    num_images: int = 2

    @property
    def marks(self) -> bool:
        """Whether `<image>` is a place."""
        return self.schema == "conversations" or (self.part is None and self.num_images > 0)

    def case(self) -> Case:
        """The plain conversation."""
        turns = base_turns(self.num_images)
        role, content = ("role", "content") if self.schema == "messages" else ("from", "value")
        roles = {"user": "human", "assistant": "gpt"} if role == "from" else {}
        record: dict[str, Any] = {
            self.schema: [
                {role: roles.get(turn.role, turn.role), content: self._content(turn.pieces)}
                for turn in turns
            ]
        }
        if self.beside:
            record["images"] = [image_name(n) for n in range(self.num_images)]
        outcomes = {reader: Outcome(copy.deepcopy(turns)) for reader in READERS}
        for reader, reason in self.refused:
            outcomes[reader].refused.append(reason)
        return Case(self, record, list(range(self.num_images)), outcomes)

    def _content(self, pieces: list[str | int]) -> Any:
        if self.part is None or len(pieces) == 1:
            return "".join(piece if isinstance(piece, str) else "<image>" for piece in pieces)
        return [
            {"type": "text", "text": piece} if isinstance(piece, str) else self.part(piece)
            for piece in pieces
        ]


def image_name(number: int) -> str:
    """Of an image's file and member."""
    return f"{number}.png"


LAYOUTS = [
    Layout("named", "messages", lambda n: {"type": "image", "image": image_name(n)}),
    Layout(
        "ordered",
        "messages",
        lambda n: {"type": "image"},
        refused=(("convert", "2 places for images .*without a name"),),
    ),
    Layout("beside", "messages", lambda n: {"type": "image"}, beside=True),
    Layout(
        "urls",
        "messages",
        lambda n: {"type": "image_url", "image_url": {"url": image_name(n)}},
        refused=(("direct", "the type 'image_url'"),),
    ),
    Layout(
        "markers",
        "messages",
        beside=True,
        refused=(("direct", "0 image parts in the conversation, but 2 images named"),),
    ),
    Layout("llava", "conversations", beside=True),
    Layout(
        "llava-ordered",
        "conversations",
        refused=(("convert", "2 places for images .*without a name"),),
    ),
    Layout("text", "messages", num_images=0),
    Layout("llava-text", "conversations", num_images=0),
]


@dataclass(frozen=True)
class Key:
    """Something that a user writes into a record.

    Args:
        name: of the case.
        touches: what it changes; two keys of one case change different things.
        write: changes the case in place; False where the layout has no place for it.
    """

    name: str
    touches: str
    write: Callable[[Case], bool | None]


EMPTY: list[Any] = [None, []]
"""What counts as absent, whatever the key."""


def _beside(name: str, value: Any, refused: str = "", *, unknown: bool = False) -> Key:
    def write(case: Case) -> None:
        case.record[name] = copy.deepcopy(value)
        if refused:
            case.refuse(refused)
        for outcome in case.outcomes.values():
            outcome.unknown += [name] if unknown else []

    touches = {"system": "system", "images": "images", "image": "images"}
    return Key(f"{name}={value!r}", touches.get(name, f"beside {name}"), write)


def _in_turn(place: int, values: dict[str, Any], refused: str = "", learn: bool = True) -> Key:
    def write(case: Case) -> None:
        case.turns[place] |= copy.deepcopy(values)
        if refused:
            case.refuse(refused)
        for outcome in case.outcomes.values():
            turn = outcome.turns[place]
            turn.learn = turn.learn and (learn or turn.role != "assistant")

    return Key(f"turn {place} {values!r}", f"turn {place}", write)


def _in_part(kind: str, name: str, value: Any, refused: bool) -> Key:
    def write(case: Case) -> bool | None:
        content = case.turns[0].get("content")
        parts = [p for p in content if p["type"] == kind] if isinstance(content, list) else []
        if not parts:
            return False
        parts[0][name] = value
        if refused:
            case.refuse(f"the key '{name}', which would be lost")
        return None

    return Key(f"{kind} part {name}={value!r}", f"part {kind}", write)


def _system_turn(case: Case) -> None:
    role, content = ("role", "content") if case.layout.schema == "messages" else ("from", "value")
    case.turns.append({role: "system", content: "SYS"})
    case.refuse("'system' beside the turns")
    case.record["system"] = "SYS"


def _system(case: Case) -> None:
    case.record["system"] = "SYS\n<b>"
    for outcome in case.outcomes.values():
        outcome.turns.insert(0, Turn("system", ["SYS\n<b>"]))


def _missing_image(case: Case) -> bool | None:
    if not case.layout.num_images:
        return False
    if case.layout.name in ("named", "urls"):
        content = case.turns[0]["content"]
        content[2] = case.layout.part(9) if case.layout.part else None
        case.refuse("the image '9.png'")
    elif case.layout.beside:
        case.record["images"] = case.record["images"][:1]
        case.refuse("[02] .* but 1 image named")
    case.members.remove(1)
    case.refuse("2 image placeholders .* 1 image member|is no member", "direct")
    return None


def _too_many_members(case: Case) -> None:
    case.members.append(2)
    case.refuse("[02] image placeholders .* [13] image members?", "direct")


def _too_many_names(case: Case) -> bool | None:
    if not case.layout.beside and case.layout.num_images:
        return False
    named = [image_name(n) for n in range(case.layout.num_images + 1)]
    case.record["images"] = named
    refused = f"but {len(named)} images? named"
    if case.layout.name != "text":
        case.refuse(refused)
        return None
    case.refuse(refused, "direct")  # converted, it stands before the first text of the user
    outcome = case.outcomes["convert"]
    outcome.turns[_first_user(outcome)].pieces.insert(0, 0)
    return None


def _named_by_both(same: bool) -> Key:
    def write(case: Case) -> bool | None:
        if not case.layout.beside:
            return False
        case.record["image"] = [image_name(n) for n in ((0, 1) if same else (1, 0))]
        if not same:
            case.refuse("'images' and 'image', and not the same ones")
        return None

    return Key(f"images named {'twice' if same else 'twice, otherwise'}", "images", write)


def _one_image_twice(case: Case) -> bool | None:
    if case.layout.name not in ("named", "urls") and not case.layout.beside:
        return False
    if case.layout.beside:
        case.record["images"] = [image_name(0)] * 2
    else:
        assert case.layout.part is not None
        case.turns[0]["content"][2] = case.layout.part(0)
    case.members.remove(1)
    for outcome in case.outcomes.values():
        outcome.turns[_first_user(outcome)].pieces[2] = 0
    return None


def _other_order(case: Case) -> bool | None:
    if not case.layout.beside:
        return False
    case.record["images"].reverse()
    for outcome in case.outcomes.values():
        pieces = outcome.turns[_first_user(outcome)].pieces
        pieces[0], pieces[2] = pieces[2], pieces[0]
    return None


def _first_user(outcome: Outcome) -> int:
    return next(n for n, turn in enumerate(outcome.turns) if turn.role == "user")


def _literal(marker: str) -> Key:
    def write(case: Case) -> None:
        content = "content" if case.layout.schema == "messages" else "value"
        case.turns[2][content] = f"what is {marker}?"
        for outcome in case.outcomes.values():
            turn = next(turn for turn in outcome.turns if turn.pieces == ["Q-two"])
            turn.pieces = [f"what is {marker}?"]
        if not case.layout.marks:
            return
        if marker == "<video>":
            readers: tuple[Reader, ...] = READERS
            if case.layout.schema == "messages":
                readers = ("convert",)
            case.refuse("marks a video", *readers)
            return
        case.refuse(
            "[13] (<image> markers?|image placeholders?) in the conversation|"
            "[13] places? for images"
        )

    return Key(f"literal {marker}", "images", write)


IN_PAIRS = {
    "rejected_response": r"|rejected\[0\] has the key 'ZEBRA'|says its answers twice|"
    "excludes all of 'chosen' from the loss",
    "rejected_messages": "|'rejected_messages' does not begin with the turns|"
    "says its answers twice",
}
"""What `convert` says of keys that it reads as another answer."""


def keys() -> Iterator[Key]:
    """Every key, with every kind of value."""
    yield Key("plain", "nothing", lambda case: None)
    yield Key("system", "system", _system)
    yield Key("system, and a turn of it", "system", _system_turn)
    yield _beside("system", 7, "'system' beside the turns is an int")
    for name in ("system", "task", "images", "image", "source"):
        for value in EMPTY:
            if not (name == "images" or (name == "task" and value == [])):
                yield _beside(name, value)
    for name in (*MEANT_ELSEWHERE, "label", "video", "videos", "audio", "audios"):
        refused = f"has '{name}'" + IN_PAIRS.get(name, "")
        yield _beside(name, True if name == "label" else [{"ZEBRA": 1}], refused)
        for value in EMPTY:
            yield _beside(name, value)
    for name, value in (("source", "ZEBRA"), ("label", 3), ("Notes", 0), ("meta", {"a": [False]})):
        yield _beside(name, value, unknown=True)
    yield _beside("Tools", 0, "did you mean 'tools'")
    yield _beside("tools", 7, "'tools' is an int; expected a list")
    yield _beside("tools", ["ZEBRA"], r"tools\[0\] is a string; expected an object")
    yield _beside("chat_template_kwargs", [7], "'chat_template_kwargs' is a list; expected an obj")
    yield _beside("chat_template_kwargs", {"tools": [7]}, "'tools', which is no variable")
    yield _beside("id", "ZEBRA")
    yield _beside("task", 7, "'task' is an int")
    yield _beside("meta", {"a": None, "b": [{}][:0]})
    unread = ("reasoning_content", "tool_calls", "name", "images", "losss", "x", "tool_call_id")
    for place in (0, 1):
        for name in unread:
            reason = f"has the key '{name}', which would be lost"
            if place == 1 and name in ("reasoning_content", "tool_calls"):
                reason = f"{name}.* is a (list|string); expected (a text|an object)"
            yield _in_turn(place, {name: ["ZEBRA"]}, reason)
            for value in EMPTY:
                yield _in_turn(place, {name: value})
        for name in ("loss", "train", "weight"):
            for value in (False, 0, 0.0):
                yield _in_turn(place, {name: value}, learn=False)
            for value in (True, 1, 1.0):
                yield _in_turn(place, {name: value}, "be learnt; only" if place == 0 else "")
            for value in (0.5, "false", 2, {"a": 1}):
                yield _in_turn(place, {name: value}, f"{name} is .*. Expected true or false")
            for value in EMPTY:
                yield _in_turn(place, {name: value})
        yield _in_turn(place, {"loss": False, "weight": 0, "train": None}, learn=False)
        yield _in_turn(place, {"loss": False, "weight": 1}, "flags that disagree")
    yield _in_turn(3, {"loss": False}, learn=False)
    yield Key("nothing left to learn", "turn 1", _exclude_all)
    for kind, other in (("text", "image"), ("image", "text"), ("image_url", "text")):
        for name in (other, "cache_control", "max_pixels"):
            yield _in_part(kind, name, "ZEBRA", refused=True)
            for value in EMPTY:
                yield _in_part(kind, name, value, refused=False)
    yield Key("image missing", "images", _missing_image)
    yield Key("member too many", "images", _too_many_members)
    yield Key("name too many", "images", _too_many_names)
    yield Key("one image twice", "images", _one_image_twice)
    yield Key("other order", "images", _other_order)
    yield _named_by_both(True)
    yield _named_by_both(False)
    yield _literal("<image>")
    yield _literal("<video>")


def _exclude_all(case: Case) -> None:
    for place in (1, 3):
        case.turns[place]["weight"] = 0
    case.refuse("excludes 2 turns of the assistant")


def cases(num_mixed: int) -> Iterator[Case]:
    """Each layout with each key, and some with several keys at once.

    Args:
        num_mixed: of the latter.
    """
    every = list(keys())
    for layout in LAYOUTS:
        for key in every:
            if (case := _written(layout, [key])) is not None:
                yield case
    yield from mixed_cases(num_mixed, most=3, seed=0)


def mixed_cases(num_mixed: int, *, most: int, seed: int) -> Iterator[Case]:
    """Some with several keys at once.

    Args:
        num_mixed: how many.
        most: keys at most.
    """
    every, draw = list(keys()), random.Random(seed)
    while num_mixed:
        chosen = draw.sample(every, draw.randint(2, most))
        if len({key.touches for key in chosen}) < len(chosen):
            continue
        # Keys that name a turn by its place go before those that put one before it.
        chosen.sort(key=lambda key: key.touches == "system")
        if (case := _written(draw.choice(LAYOUTS), chosen)) is not None:
            num_mixed -= 1
            yield case


def _written(layout: Layout, chosen: list[Key]) -> Case | None:
    case = layout.case()
    if any(key.write(case) is False for key in chosen):
        return None
    for outcome in case.outcomes.values():
        if not any(turn.learn for turn in outcome.turns if turn.role == "assistant"):
            outcome.refused.append("excludes 2 turns of the assistant")
    return replace(case, name=f"{layout.name}: {', '.join(key.name for key in chosen)}")


def matches(outcome: Outcome, reason: str) -> bool:
    """Whether a refusal is one of those that are documented."""
    return any(re.search(pattern, reason) for pattern in outcome.refused)
