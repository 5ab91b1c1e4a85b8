"""Samples of a shard: members grouped under one key, then read as a VLMSample.

A sample is an unbroken run of members with one key. A field that occurs twice, a pickle, or a
member above the size cap is a fault of the sample, which becomes a hole with a reason. The index,
which sees the whole shard, finds keys that come back later.

A conversation has one of two formats:

    chat:   {"messages": [{"role": "user", "content": [{"type": "image", "image": "0.jpg"},
                                                       {"type": "text", "text": "What is it?"}]},
                          {"role": "assistant", "content": "A cat."}]}
    LLaVA:  {"conversations": [{"from": "human", "value": "<image>\\nWhat is it?"},
                               {"from": "gpt", "value": "A cat."}], "image": "0.jpg"}

The JSON's keys choose the schema. In `conversations` a literal `<image>` marks the place of an
image. In `messages` it is text. Images may stand anywhere in any turn. Images without a name take
the sample's image members in order, by number if they are numbered, else as in the file. A video is
a list of named frames. Containers and sounds are refused. turns.py reads turns, their flags and
pairs, and turn_parts.py reads tools, calls, thoughts and videos. An optional "task" groups
evaluation figures.

A record may hold several samples, its branches (turns.py). With `data.learn: each_answer` the
answers of a conversation are samples of their own:

    record    user "one?"  assistant "[a] 1"  user "two?"  assistant "[b] 2"      in [] its thoughts
    key#0     user "one?"  assistant "[a] 1"                                      1 is learnt
    key#1     user "one?"  assistant "[a] 1"  user "two?"  assistant "[b] 2"      2 is learnt

An answer is an assistant's turn that the data does not exclude, and may call tools. Its sample is
the conversation up to it, as the model gets it in use, and only the answer is learnt. So the chat
template writes thoughts that it drops once other turns follow.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from vlmpack.data.shards.naming import (
    JSON_FIELD,
    SampleCaps,
    is_image,
    may_stand_aside,
    parse_json,
    refusal,
    refuse_many_keys,
)
from vlmpack.data.shards.tar import TarMember, read_span
from vlmpack.data.shards.turn_parts import VIDEO, VIDEO_KEYS
from vlmpack.data.shards.turns import (
    CHAT_ROLES,
    Conversation,
    Dialect,
    branch_key,
    conversation,
    joined,
)
from vlmpack.encode.rollouts import Rollout, rollout_of
from vlmpack.encode.sample import VLMSample, num_files, shown_by
from vlmpack.errors import DataError, ErrorClass, integrity_error, schema_error
from vlmpack.storage.fetch import ShardStamp
from vlmpack.words import counted, kind_of

REINDEX = "restore the shard, or touch it where it is as it should be, so that it is indexed anew"
"""What to do about a shard that changed behind its index."""


@dataclass(frozen=True, slots=True)
class RawSample:
    """One sample as it lies in the shard.

    Args:
        offset: of its first byte in the shard.
        length: bytes from `offset` to the end of its last member, padding included.
        crc32: of that span.
        members: in file order.
        fault: why it cannot be used, where that is known before its text is read.
        row: of a record in the unit of its file at `offset`; None in shards.
        shown: field -> what a message calls a member, where that is not its name.
        image_stamps: where its images lie in a store, in token order, if they are files there.
        unknown_keys: of its record, apart from those of the JSON member.
        said: the parsed JSON member, where its reader has just written it; None to parse it.
        rollout: what a record that cannot be used says of its draw, where it has no members.
    """

    key: str
    shard: str
    offset: int
    length: int
    crc32: int
    members: tuple[TarMember, ...]
    fault: str | None
    error_class: ErrorClass = "integrity"
    row: int | None = None
    shown: Mapping[str, str] = field(default_factory=dict)
    image_stamps: tuple[ShardStamp, ...] = ()
    unknown_keys: tuple[str, ...] = ()
    said: Conversation[str] | None = None
    rollout: Rollout | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """The members' fields, in file order."""
        return tuple(member.field for member in self.members)

    def member(self, field: str) -> TarMember | None:
        """The member with this field."""
        return next((member for member in self.members if member.field == field), None)

    def payload(self, field: str) -> bytes:
        """The content of a field that is known to be there."""
        [data] = self.payloads([field])
        return data

    def payloads(self, fields: Iterable[str]) -> tuple[bytes, ...]:
        """The contents of fields that are known to be there."""
        payloads = {each.field: each.data for each in self.members if each.data is not None}
        return tuple(payloads[field] for field in fields)

    def called(self, name: str) -> str:
        """What a message calls a member: its field, or the file that it came from."""
        return self.shown.get(name, name)

    def drawn(self) -> Rollout | None:
        """What the record of a bad sample says of its draw, if that can be read. Its reward counts
        in its group."""
        document = self.member(JSON_FIELD)
        if document is None or document.data is None:
            return self.rollout
        try:
            return rollout_of(parse_document(document.data).get("rollout"))
        except DataError:
            return None

    def check(self) -> None:
        """Raises the fault, if there is one.

        Raises:
            DataError: class `integrity`, or that of a record that cannot be read.
        """
        if self.fault is not None:
            fault = DataError(self.fault, error_class=self.error_class)
            raise fault.located(key=self.key, shard=self.shard, offset=self.offset)


def group_members(
    members: Iterable[TarMember],
    *,
    shard: str,
    caps: SampleCaps,
    documents: tuple[str, ...] = (JSON_FIELD,),
) -> Iterator[RawSample]:
    """Runs of members with the same key, as samples.

    Args:
        documents: fields one of which a sample must have.
    """
    run: list[TarMember] = []
    count = 0
    for member in members:
        if run and member.key != run[0].key:
            yield _sample(run, shard, _fault(run, count, caps, documents))
            run, count = [], 0
        count += 1
        run.append(member)
        if count > caps.max_members or member.end - run[0].offset > caps.max_sample_bytes:
            # Its place is all that is kept, however much of it follows.
            run = [run[0]._replace(data=None), member._replace(data=None)]
    if run:
        yield _sample(run, shard, _fault(run, count, caps, documents))


def parse_span(
    span: bytes,
    *,
    shard: str,
    offset: int,
    caps: SampleCaps,
    verified: int | None = None,
    documents: tuple[str, ...] = (JSON_FIELD,),
) -> RawSample:
    """The one sample of a byte range that the index recorded.

    Args:
        verified: the span's CRC-32, where it was compared with the index already.

    Raises:
        DataError: class `integrity`, where the span is not one sample.
    """
    members = read_span(
        span, shard=shard, base=offset, max_member_bytes=caps.max_member_bytes, verified=verified
    )
    samples = list(group_members(members, shard=shard, caps=caps, documents=documents))
    if len(samples) != 1:
        raise integrity_error(
            f"the byte range holds {len(samples)} samples instead of 1; the shard changed after "
            "it was indexed",
            shard=shard,
            offset=offset,
        )
    return samples[0]


def _sample(run: list[TarMember], shard: str, fault: str | None) -> RawSample:
    return RawSample(
        key=run[0].key,
        shard=shard,
        offset=run[0].offset,
        length=run[-1].end - run[0].offset,
        crc32=run[-1].crc32,
        members=tuple(run),
        fault=fault,
    )


def _fault(
    run: list[TarMember], count: int, caps: SampleCaps, documents: tuple[str, ...]
) -> str | None:
    length = run[-1].end - run[0].offset
    if count > caps.max_members or length > caps.max_sample_bytes:
        return (
            f"the sample has {counted(count, 'member')} and {length} bytes; at most "
            f"{caps.max_members} and {caps.max_sample_bytes} are read"
        )
    seen: set[str] = set()
    for member in run:
        if member.field in seen:
            return f"the member {member.field!r} occurs twice; keys must be unique in a shard"
        seen.add(member.field)
        if member.data is None:
            return (
                f"the member {member.field!r} has {member.size} bytes; at most "
                f"{caps.max_member_bytes} are read"
            )
        if member.field in documents and member.size > caps.max_json_bytes:
            return (
                f"the '.{member.field}' member has {member.size} bytes; at most "
                f"{caps.max_json_bytes} are parsed"
            )
        refused = refusal(member.field, member.data)
        if refused is not None:
            return f"{member.field!r}: {refused}; it is refused"
    if not any(member.field in documents for member in run):
        shown = ", ".join(repr(member.field) for member in run[:6])
        return (
            f"no '.json' member, only {shown} (a key ends at the first dot of the file name, so "
            "a dot inside a name splits it there)"
        )
    return None


def refuse_changed(span: bytes, crc32: int) -> None:
    """Raise DataError (integrity) where a sample's checksum is not the one in the index."""
    checksum = zlib.crc32(span)
    if checksum != crc32:
        raise changed_since_indexed(checksum, crc32)


def changed_since_indexed(found: int, indexed: int, remedy: str = REINDEX) -> DataError:
    """The fault of a sample whose bytes are not those that its index row was made from."""
    return integrity_error(
        f"the sample's checksum is {found:08x}, the index has {indexed:08x}: its bytes changed "
        f"after they were indexed; {remedy}"
    )


@dataclass(frozen=True, slots=True)
class CookedText:
    """A sample without its image bytes, and the member that each image part shows, in token
    order."""

    sample: VLMSample
    image_fields: tuple[str, ...]
    unknown_keys: tuple[str, ...] = ()

    @property
    def num_text_bytes(self) -> int:
        """UTF-8 bytes of all text parts."""
        turns = chain(self.sample.messages, *self.sample.answers)
        return sum(len(message.text.encode("utf-8")) for message in turns)


def _member_name(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise schema_error(f"{where} is {kind_of(value)}; expected a member's name")
    return value


def _named_member(part: Mapping[str, Any], where: str) -> str | None:
    name = part.get("image")
    return None if name is None else _member_name(name, f"{where}.image")


_MEMBERS = Dialect(
    roles={
        "messages": CHAT_ROLES,
        "conversations": {"system": "system", "human": "user", "gpt": "assistant", "tool": "tool"},
    },
    part_keys={
        "messages": {
            "text": frozenset(("type", "text")),
            "image": frozenset(("type", "image", "index")),
            VIDEO: VIDEO_KEYS,
        },
        "conversations": {},
    },
    image=_member_name,
    part_image=_named_member,
    leave_out="; or leave such samples out (data.on_error.schema: skip)",
)
"""How the JSON of a shard is read: its images are members of the sample."""


def cook(raw: RawSample, branch: int | None = None, *, each_answer: bool = False) -> VLMSample:
    """A whole sample, with its images.

    Raises:
        DataError: class `integrity` or `schema`.
    """
    raw.check()
    if raw.said is not None and branch is None:
        text = _cooked(raw.key, raw.shard, raw.said, raw.fields, None, each_answer)[0]
    else:
        document = raw.payload(JSON_FIELD)
        text = cook_text(raw.key, raw.shard, document, raw.fields, branch, each_answer=each_answer)
    images = raw.payloads(text.image_fields)
    called = tuple(map(raw.called, text.image_fields))
    return replace(text.sample, images=images, image_names=called)


def cook_text(
    key: str,
    shard: str,
    document: bytes,
    fields: Sequence[str],
    branch: int | None = None,
    *,
    each_answer: bool = False,
) -> CookedText:
    """The conversation from the JSON member and the names of the other members.

    Args:
        fields: all members' fields, in file order.
        branch: which of the record's samples, where it holds several.

    Raises:
        DataError: class `schema`; the reason gives what was found and what was expected.
    """
    texts = cook_texts(key, shard, document, fields, each_answer=each_answer)
    place = 0 if texts[0].sample.key == key else len(texts)
    if branch is None and place:
        raise schema_error(
            f"the record holds {counted(place, 'sample')} ('branches'); expected one: name it as "
            f"'{branch_key(key, 0)}', or leave the branches out"
        ).located(key=key, shard=shard)
    if branch is not None and branch >= place:
        raise schema_error(
            f"the record holds {counted(place, 'branch', 'branches')}; number {branch} was indexed"
        ).located(key=branch_key(key, branch), shard=shard)
    return texts[branch or 0]


def cook_texts(
    key: str, shard: str, document: bytes, fields: Sequence[str], *, each_answer: bool = False
) -> tuple[CookedText, ...]:
    """As `cook_text`, all samples of a record: one, or several with keys of their own."""
    try:
        value = parse_document(document)
        said = conversation(value, _MEMBERS)
    except DataError as fault:
        raise fault.located(key=key, shard=shard) from None
    return _cooked(key, shard, said, fields, value.get("task"), each_answer)


def _cooked(
    key: str,
    shard: str,
    said: Conversation[str],
    fields: Sequence[str],
    task: object,
    each_answer: bool,
) -> tuple[CookedText, ...]:
    """See `cook_texts`; of what the JSON member says."""
    try:
        if said.messages[0].role == "assistant":
            raise schema_error(
                "the conversation starts with the assistant; expected a user's turn first"
            )
        _refuse_unlearnt(said)
        image_fields = _resolve(said.images, [name for name in fields if is_image(name)], key)
        if task is not None and not isinstance(task, str):
            raise schema_error(f"'task' is {kind_of(task)}; expected a string")
    except DataError as fault:
        raise fault.located(key=key, shard=shard) from None
    sample = VLMSample(
        key=key,
        url=shard,
        messages=said.messages,
        task=task,
        image_names=image_fields,
        inputs=said.inputs,
        answers=said.answers,
        objects=said.objects,
        rollout=said.rollout,
    )
    samples = [sample]
    if said.branches:
        both = [joined(said.messages, branch) for branch in said.branches]
        samples = [replace(sample, messages=turns, num_common=common) for turns, common in both]
    if each_answer and not said.answers:
        samples = samples_of_answers(samples)
    if said.branches or len(samples) > 1:
        samples = [replace(one, key=branch_key(key, n)) for n, one in enumerate(samples)]
    unknown = said.unknown_keys  # of the record, so counted once
    return tuple(
        CookedText(one, one.image_names, () if number else unknown)
        for number, one in enumerate(samples)
    )


def _refuse_unlearnt(said: Conversation[str]) -> None:
    """Raise DataError (schema) where no answer is learnt, or those of a pair follow another."""
    turns = [message for message in said.messages if message.role == "assistant"]
    if said.answers:
        if said.messages[-1].role == "assistant":
            raise schema_error(
                "the turns end with the assistant's, and the record has 'chosen' and 'rejected' "
                "too. Expected the turns of the prompt alone, which both answers follow"
            )
    elif not said.branches and not any(message.learn for message in turns):
        raise schema_error(
            f"the data excludes {counted(len(turns), 'turn')} of the assistant, and there is "
            "no other, so nothing can be learned"
            if turns
            else f"none of the {len(said.messages)} turns is the assistant's, so nothing can be "
            "learned"
        )


def parse_document(document: bytes) -> dict[str, Any]:
    """The object of a `.json` member.

    Raises:
        DataError: (schema) it holds none.
    """
    try:
        value = parse_json(document.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise schema_error(f"the '.json' member cannot be parsed: {error}") from None
    if not isinstance(value, dict):
        raise schema_error(f"the '.json' member is {kind_of(value)}; expected an object")
    refuse_many_keys(value)
    return value


def _resolve(names: Sequence[str | None], members: list[str], key: str) -> tuple[str, ...]:
    """The member of each image part. Every image member must be used, except spare ones such as
    previews."""
    if list(names) == members:
        return tuple(members)
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
    enough = [member for member in free if not may_stand_aside(member)]
    if unnamed == len(enough):
        free = enough
    if unnamed != len(free):
        raise schema_error(
            f"{counted(len(names), 'image placeholder')} in the conversation, but "
            f"{counted(len(members), 'image member')} in the sample "
            f"({', '.join(members) or 'none'})"
        )
    rest = iter(in_order(free))
    return tuple(name if name is not None else next(rest) for name in resolved)


def in_order(members: list[str]) -> list[str]:
    """File order, but numbered members (`0.jpg` .. `10.jpg`) go by number. webdataset sorts by
    name, which puts `10.jpg` before `2.jpg`."""
    stems = [member.partition(".")[0] for member in members]
    if all(stem.isascii() and stem.isdigit() and len(stem) < 19 for stem in stems):
        return [member for _, member in sorted(zip(map(int, stems), members, strict=True))]
    return members


def samples_of_answers(samples: Sequence[VLMSample]) -> list[VLMSample]:
    """A sample for each answer of each of a record's samples (its branches), under that sample's
    key."""
    return [each for sample in samples for each in _answers_of(sample)]


def _answers_of(sample: VLMSample) -> list[VLMSample]:
    turns = sample.messages
    places = [at for at, turn in enumerate(turns) if turn.role == "assistant" and turn.learn]
    context = [replace(turn, learn=False) if turn.role == "assistant" else turn for turn in turns]
    samples = []
    for before, at in zip((None, *places), places, strict=False):
        messages = (*context[:at], turns[at])
        samples.append(
            replace(
                sample,
                messages=messages,
                image_names=sample.image_names[: num_files(shown_by(messages))],
                num_common=sample.num_common if before is None else before,
                is_continued=at != places[-1],
            )
        )
    return samples
