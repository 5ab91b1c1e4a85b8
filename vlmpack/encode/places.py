"""The places in a record's texts where its objects are written.

Places are named by entry ({{box:i}}, {{point:i}}, {{polygon:i}}, {{ref:i}}; {{objects}} for all
with their labels), or they are ms-swift's <bbox> and <ref-object>, each kind in its own order.
`with_named_places` checks them once for a record, and names those of ms-swift. In records without
`objects` they are plain text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from vlmpack.encode.objects import Objects
from vlmpack.encode.sample import Message, TextPart, strings
from vlmpack.errors import schema_error
from vlmpack.words import counted

MAX_WRITTEN = 5_000
"""Shapes that the places of a record write at most, each as often as it is named."""

_PLACE = re.compile(r"\{\{(box|point|polygon|ref|objects)(?::([0-9]{1,4}(?:,[0-9]{1,4})*))?\}\}")
_SLIP = re.compile(
    r"\{\{\s*(?:b?box(?:es)?|(?:point|polygon|ref|label|object)s?)\s*(?::[^{}]*)?\}\}",
    re.IGNORECASE,
)
"""What somebody means as a place."""
_SWIFT = re.compile(r"<bbox>|<ref-object>")


def with_named_places(
    conversations: Sequence[tuple[Message, ...]], objects: Objects
) -> list[tuple[Message, ...]]:
    """The turns of a record, its places checked and named by entry.

    Args:
        conversations: parts of one record (its turns, the answers of a pair, branches), in order.

    Raises:
        DataError: (schema) a place without an entry, or an entry without a place.
    """
    texts = [text for turns in conversations for text in _texts(turns)]
    named = Counter(match[0] for text in texts for match in _PLACE.finditer(text))
    swift = [match for text in texts for match in _SWIFT.findall(text)]
    for text in texts:
        if slip := _SLIP.search(_PLACE.sub("", text)):
            raise schema_error(
                f"{slip[0][:60]} is no place; expected {{{{box:0}}}}, {{{{point:0}}}}, "
                "{{polygon:0}}, {{ref:0}}, {{objects}} or {{objects:0,2}}, without spaces"
            )
    for turns in conversations:
        for message in turns:
            for text in strings(message.fields):
                if _PLACE.search(text) or _SWIFT.search(text):
                    raise schema_error(
                        f"{text[:60]!r}, in a call or a thought, has a place of an object; such "
                        "places are written in the content of turns alone"
                    )
    if named and swift:
        raise schema_error(
            f"the turns have {swift[0]} and {min(named)}; expected either ms-swift's places or "
            "named ones"
        )
    if not swift:
        _refuse_unplaced(named, objects)
        return [*conversations]
    if len(conversations) > 1:
        raise schema_error(
            f"the record has several answers or branches, in which {swift[0]} has no one order; "
            "name each entry: {{box:0}}"
        )
    for place, what, entries in (("<bbox>", "bbox", objects.boxes), ("<ref-object>", "ref", None)):
        number = len(objects.labels if entries is None else entries)
        if swift.count(place) != number:
            raise schema_error(
                f"the turns have {place} {counted(swift.count(place), 'time')}, objects.{what} has "
                f"{counted(number, 'entry', 'entries')}; expected as many"
            )
    if objects.points or objects.polygons:
        raise schema_error(
            "objects.point and objects.polygon have no places in ms-swift's form; name each entry: "
            "{{point:0}}, {{polygon:0}}"
        )
    counters = {"<bbox>": count(), "<ref-object>": count()}
    names = {"<bbox>": "box", "<ref-object>": "ref"}

    def name(match: re.Match[str]) -> str:
        return f"{{{{{names[match[0]]}:{next(counters[match[0]])}}}}}"

    return [with_texts(turns, lambda text: _SWIFT.sub(name, text)) for turns in conversations]


def _refuse_unplaced(named: Mapping[str, int], objects: Objects) -> None:
    kinds = ("box", "point", "polygon")  # in the order of `Objects.shapes`
    entries = [(kind, n) for kind in kinds for n in range(len(objects.of(kind)))]
    written: set[tuple[str, int]] = set()
    total = 0
    for place, times in sorted(named.items()):
        kind, numbers = parsed_place(place)
        if kind == "objects":
            shapes = objects.shapes
            chosen = range(len(shapes)) if numbers is None else numbers
            if not shapes:
                raise schema_error(f"{place} has nothing to write: 'objects' has no shape")
            total += times * len(chosen)
            if total > MAX_WRITTEN:
                raise schema_error(
                    f"the places write more than {MAX_WRITTEN:,} shapes; write fewer of them, or "
                    "make several records"
                )
            _refuse_number(place, chosen, len(shapes), "shape")
            if objects.labels and len(objects.labels) != len(shapes):
                raise schema_error(
                    f"{place} writes shapes with their labels, and 'objects' has "
                    f"{counted(len(shapes), 'shape')} and {counted(len(objects.labels), 'label')}; "
                    "expected as many, or no label"
                )
            written |= {("ref", n) for n in chosen if objects.labels}
            written |= {entries[n] for n in chosen}
        else:
            if numbers is None or len(numbers) != 1:
                raise schema_error(f"{place} names no entry; expected {{{{{kind}:0}}}}")
            number = len(objects.labels if kind == "ref" else objects.of(kind))
            _refuse_number(place, numbers, number, "label" if kind == "ref" else kind)
            written.add((kind, numbers[0]))
    for kind, n in (*entries, *(("ref", n) for n in range(len(objects.labels)))):
        if (kind, n) not in written:
            raise schema_error(
                f"no turn has a place for {kind} {n} of 'objects'; expected "
                f"{{{{{kind}:{n}}}}} or {{{{objects}}}} in a text"
            )


def _refuse_number(place: str, numbers: Sequence[int], entries: int, what: str) -> None:
    if beyond := [n for n in numbers if n >= entries]:
        raise schema_error(
            f"{place} names {what} {beyond[0]}, 'objects' has {counted(entries, what)}, counted "
            "from 0"
        )


def parsed_place(place: str) -> tuple[str, tuple[int, ...] | None]:
    """The kind and the entries of a place; None for all."""
    match = _PLACE.fullmatch(place)
    assert match is not None
    numbers = None if match[2] is None else tuple(map(int, match[2].split(",")))
    return match[1], numbers


def write_places(text: str, write: Callable[[str, tuple[int, ...] | None], str]) -> str:
    """A text with each place replaced by what its kind and entries are written as."""
    return _PLACE.sub(lambda match: write(*parsed_place(match[0])), text)


def place_in(texts: Sequence[str]) -> str | None:
    """The first place that some texts have; None without one."""
    found = (match for text in texts for each in (_PLACE, _SWIFT) for match in each.finditer(text))
    return next((match[0] for match in found), None)


def _texts(turns: Sequence[Message]) -> Iterator[str]:
    return (part.text for turn in turns for part in turn.parts if isinstance(part, TextPart))


def with_texts(turns: Sequence[Message], change: Callable[[str], str]) -> tuple[Message, ...]:
    """Turns with changed texts."""
    return tuple(
        replace(
            turn,
            parts=tuple(
                TextPart(change(part.text)) if isinstance(part, TextPart) else part
                for part in turn.parts
            ),
        )
        for turn in turns
    )
