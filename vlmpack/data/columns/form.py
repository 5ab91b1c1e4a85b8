"""How the records of one source are read: decided once, then carried with every sample.

The recipe's `data.columns` names a layout, or the part of each column in one:

    columns: vqa
    columns: {question: q, answer: a, image: picture}
    columns: {layout: alpaca, output: response}

Without it the first records decide, if exactly one layout fits. If two do, the error names both.
`find_form` decides it, and `read_turns` reads a record by it.

A layout that makes turns of columns reads some of them. A record with a part of its question or
answer in another column is refused, since it would be trained as another question or half an
answer. Records that already have turns are complete, and their other columns are metadata.

    {"question": "Which one?", "choices": ["a", "b"], "answer": "a"}
    {"instruction": "Add.", "output": "4", "explanation": "2 and 2 make 4."}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from vlmpack.data.columns.chat import ChatTurns, Rewrite, chat_turns
from vlmpack.data.columns.image_columns import NAMES, is_image_column, plain, with_images
from vlmpack.data.columns.layouts import (
    CHAT,
    LAYOUTS,
    Layout,
    all_columns,
    fitting,
    has_value,
    layout_named,
)
from vlmpack.data.shards.naming import (
    MEANT_ELSEWHERE,
    PAIR_KEYS,
    RECORD_KEYS,
    is_missing,
    misspelt,
    suggestion,
)
from vlmpack.data.shards.turns import OTHER_MEDIA, TURN_FIELDS
from vlmpack.errors import DataError, RecipeError, schema_error
from vlmpack.words import some_of, twice

QUESTION_PARTS = (
    *("choices", "options", "option", "candidates", "answer_choices", "multiple_choices"),
    *("distractors", "context", "contexts", "hint", "hints", "passage", "paragraph", "lecture"),
    *("dialog", "dialogs", "dialogue", "dialogues", "qa", "qas", "qa_pairs", "questions"),
    *("background", "premise", "instruction", "question", "query", "prompt", "problem", "input"),
)
ANSWER_PARTS = (
    *("rationale", "rationales", "explanation", "explanations", "reasoning", "reasoning_content"),
    *("thinking", "thought", "thoughts", "solution", "cot", "chain_of_thought"),
)
LETTERS = ("A", "B", "C", "D", "E", "F")
"""The options of a question as MMBench has them: columns of this name, with `A` and `B` among
them."""
_PART_OF = {plain(name): "question" for name in QUESTION_PARTS} | {
    plain(name): "answer" for name in ANSWER_PARTS
}
_OPTION = re.compile(r"(option|choice|distractor)([a-f]|[0-9])")
_LONGEST = 2 * max(map(len, _PART_OF))
_RULE = "columns-1"
"""Part of a form's digest. Raise it when a layout is read differently."""
LAYOUT_ROLE = "layout"
"""The role in a mapping that names the layout."""
_TURNS = frozenset(TURN_FIELDS)
_COMMON = RECORD_KEYS - _TURNS - {"__key__"}
"""Roles that the records of every layout may have."""
_MAX_SHOWN = 12


@dataclass(frozen=True, slots=True)
class RecordForm:
    """How the records of one source are read.

    Args:
        columns: (role in the layout, name of the user's column), sorted; empty where the columns
            have the layout's own names.
        is_chosen: whether the recipe says so: the columns of other layouts are then keys that
            nobody reads. Where the records themselves decided, a record that is of another layout,
            too, is refused.
        ignored: columns that the recipe leaves out, before anything is looked at.
    """

    layout: str
    columns: tuple[tuple[str, str], ...] = ()
    is_chosen: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A digest that differs between forms which may read a record differently."""
        said = json.dumps([_RULE, self.layout, self.columns, self.is_chosen, *self.ignored])
        return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()

    @property
    def words(self) -> str:
        """What it is, for whoever started the run."""
        if self.layout == CHAT:
            said = "turns of 'messages' or 'conversations'"
        else:
            said = f"{self.layout} ({layout_named(self.layout).whose})"
        named = ", ".join(f"{role} from {name!r}" for role, name in self.columns)
        return f"{said}, {named}" if named else said

    def unused(self, names: Sequence[str]) -> tuple[str, ...]:
        """The columns of a table that are neither read nor ignored by the recipe."""
        ignored = {*self.ignored}
        return tuple(name for name in names if name not in ignored)


AS_TURNS = RecordForm(CHAT)
"""Records that have `messages` or `conversations`."""


def read_turns(
    record: Mapping[str, Any], form: RecordForm, rewrite: Rewrite | None = None
) -> ChatTurns:
    """The turns of a record, and the images that they show.

    Raises:
        DataError: class `schema`; says what was found and what was expected. What `rewrite` raises.
    """
    layout, record = layout_named(form.layout), prepared(record, form)
    own = dict(record)
    lost: tuple[str, ...] = ()
    try:
        if form.columns or not _suspect(form.layout).isdisjoint(record):
            named, unused = _renamed(record, form.columns)
            own, foreign = _without_foreign(named, layout, form.is_chosen)
            lost = (*unused, *foreign)
        if layout.is_made:
            refuse_parts(own, layout.columns)
        turns = chat_turns(layout.turned(own), rewrite)
    except DataError as error:
        if not form.columns:
            raise
        names = ", ".join(f"{role!r} is the column {name!r}" for role, name in form.columns)
        raise error.reworded(f"{error.reason} ({names}, by data.columns)") from None
    return replace(turns, unknown_keys=(*turns.unknown_keys, *lost)) if lost else turns


def find_form(
    records: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str] | str | None,
    where: str,
    knob: str = "data.columns",
    ignored: Sequence[str] = (),
) -> RecordForm:
    """Decide how the records of a source are read.

    Args:
        records: the first of them; without any, turns are expected.
        columns: a layout's name, or role -> column (`layout` may be among the roles). With None
            the layout that fits is taken.
        knob: what says `columns`, for messages.

    Raises:
        RecipeError: more than one layout fits, or none, or `columns` names what is not there.
    """
    name, mapping = _asked(columns, knob)
    left_out = tuple(sorted(ignored))
    if columns is not None:
        _check_columns(records, mapping, where, knob)
    blank = RecordForm(name or CHAT, mapping, is_chosen=name is not None, ignored=left_out)
    layouts = [layout_named(name)] if name is not None else _with_roles(mapping, knob)
    roles = {role for role, _ in mapping} - _COMMON
    seen: dict[str, None] = {}
    found = [_keys_of(record, blank) for record in records]
    for keys in found:
        fits = [each for each in layouts if each.fits(keys)]
        if len(fits) > 1:
            raise RecipeError(_two_readings(fits, keys, where, knob))
        seen |= dict.fromkeys(each.name for each in fits)
    if records and not seen:
        raise RecipeError(_nothing_fits(found, layouts, where, knob))
    if blank.is_chosen or seen.keys() <= {"messages", "llava"}:
        return blank
    if len(seen) > 1:
        raise RecipeError(
            f"{where}: the first records are of several layouts, {' and '.join(seen)}. Expected "
            f"one. Make a source of each, or say by {knob} which is meant"
        )
    return replace(blank, layout=next(iter(seen)), is_chosen=bool(roles))


def prepared(record: Mapping[str, Any], form: RecordForm) -> Mapping[str, Any]:
    """The record without ignored columns, with its images under `images` where no column has that
    name."""
    if not form.ignored and not any(map(is_image_column, record)):
        return record
    ignored = {*form.ignored}
    record = {key: value for key, value in record.items() if key not in ignored}
    roles, taken = {role for role, _ in form.columns}, {name for _, name in form.columns}
    return record if not roles.isdisjoint(NAMES) else with_images(record, taken)


def is_read(name: str, form: RecordForm) -> bool:
    """Whether a form reads a column of this name, or another column has its role."""
    taken = {column for _, column in form.columns}
    return name in taken or name in layout_named(form.layout).columns | _COMMON


def read_columns(form: RecordForm, names: Collection[str]) -> list[str]:
    """The columns of a table to read: those of the form, and those whose content would be lost."""
    layout = layout_named(form.layout)
    taken = dict(form.columns)
    read = (layout.columns | _COMMON) - taken.keys() | {*taken.values()}
    read |= {*OTHER_MEDIA, *MEANT_ELSEWHERE, "label"}
    if not form.is_chosen:
        # A later row may turn out to be of another layout: it is then refused.
        under = {*names, NAMES[1]} if any(map(is_image_column, names)) else names
        read = read.union(*(each.columns for each in fitting(under)))
    if layout.is_made:
        parts = {name for name in names if part_of(name) or name in LETTERS}
        read |= parts - layout.columns
    slips = {name for name in names if name not in RECORD_KEYS and misspelt(name)}
    if taken.keys().isdisjoint(NAMES):
        slips |= {name for name in names if is_image_column(name)}
    read = (read | slips) - {*form.ignored}
    return [name for name in names if name in read]


def _asked(
    columns: Mapping[str, str] | str | None, knob: str
) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """The layout that is named, and the mapping without it."""
    if columns is None:
        return None, ()
    mapping = {LAYOUT_ROLE: columns} if isinstance(columns, str) else dict(columns)
    name = mapping.pop(LAYOUT_ROLE, None)
    if name is not None and name not in LAYOUTS:
        raise RecipeError(f"{knob}: {name!r} is no layout; {suggestion(name, LAYOUTS.keys())}")
    known = _COMMON | (layout_named(name).columns if name is not None else all_columns())
    for role in mapping:
        if role not in known:
            raise RecipeError(f"{knob}: {role!r} is no role; {suggestion(role, known)}")
    if shared := twice(mapping.values()):
        raise RecipeError(f"{knob}: the column {shared[0]!r} has two roles; expected one")
    return name, tuple(sorted(mapping.items()))


def _with_roles(mapping: Sequence[tuple[str, str]], knob: str) -> list[Layout]:
    """The layouts, without aliases, that have all roles of a mapping."""
    roles = {role for role, _ in mapping} - _COMMON
    every = [layout_named(name) for name in LAYOUTS]
    candidates = [each for each in every if each.alias_of is None and roles <= each.columns]
    if not candidates:
        raise RecipeError(
            f"{knob}: no layout has all of the roles {', '.join(map(repr, sorted(roles)))}; "
            f"known: {_known(every)}"
        )
    return candidates


def _check_columns(
    records: Sequence[Mapping[str, Any]], mapping: Sequence[tuple[str, str]], where: str, knob: str
) -> None:
    """Raise RecipeError where a mapped column is in none of the records."""
    there = dict.fromkeys(key for record in records for key in record)
    for role, name in mapping:
        if records and name not in there:
            raise RecipeError(
                f"{where}: {knob} reads {role!r} from the column {name!r}, and none of the first "
                f"records has it; found {_shown(there)}"
            )


def _keys_of(record: Mapping[str, Any], form: RecordForm) -> set[str]:
    """The roles that have a value."""
    named, _ = _renamed(prepared(record, form), form.columns)
    return {key for key, value in named.items() if has_value(value)}


def _renamed(
    record: Mapping[str, Any], mapping: tuple[tuple[str, str], ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The record under the names of the roles, and which of its keys a role replaced."""
    if not mapping:
        return dict(record), ()
    roles, columns = {role for role, _ in mapping}, {name for _, name in mapping}
    others = {key: value for key, value in record.items() if key not in columns}
    lost = tuple(key for key in others if key in roles and has_value(others[key]))
    given = {role: record[name] for role, name in mapping if name in record}
    return {key: value for key, value in others.items() if key not in roles} | given, lost


def _without_foreign(
    record: dict[str, Any], layout: Layout, is_chosen: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    keys = {key for key, value in record.items() if has_value(value)}
    if not is_chosen:
        fits = () if _suspect(layout.name).isdisjoint(keys) else fitting(keys)
        if len(fits) > 1:
            raise schema_error(_two_readings(fits, keys, "the record", "data.columns"))
        return record, ()
    signed = keys & _signed_elsewhere(layout.name)
    foreign = tuple(key for key in record if key in signed)
    return {key: value for key, value in record.items() if key not in signed}, foreign


@cache
def _suspect(name: str) -> frozenset[str]:
    """Keys with which a record of one layout may be of another as well."""
    return all_columns() - layout_named(name).columns - (_COMMON - {*PAIR_KEYS})


@cache
def _signed_elsewhere(name: str) -> frozenset[str]:
    """Keys that stand for another layout than this one."""
    every = [each for other in LAYOUTS for each in layout_named(other).signatures]
    keys = frozenset().union(*(signature.keys for signature in every))
    return keys - layout_named(name).columns - (_COMMON - {*PAIR_KEYS})


def _two_readings(fits: Sequence[Layout], keys: set[str], where: str, knob: str) -> str:
    readings = " and as ".join(
        f"{each.name} ({', '.join(map(repr, _signed(each, keys)))})" for each in fits
    )
    return (
        f"{where} can be read as {readings}; say which is meant by "
        f"{' or '.join(f'{knob}: {each.name}' for each in fits)}"
    )


def _signed(layout: Layout, keys: set[str]) -> list[str]:
    """The keys by which a layout is recognised."""
    signature = next(each for each in layout.signatures if each.fits(keys))
    return sorted(signature.keys)


def _nothing_fits(
    found: Sequence[set[str]], layouts: Sequence[Layout], where: str, knob: str
) -> str:
    there = dict.fromkeys(key for keys in found for key in sorted(keys))
    example = f"{knob}: {{question: ..., answer: ...}}, say, names the columns of a layout"
    if len(layouts) == 1:
        example = f"{knob}: {{layout: {layouts[0].name}, ROLE: COLUMN}} names columns"
    return (
        f"{where}: no layout fits its records, which have the keys {_shown(there)}. Expected "
        f"{_known(layouts)}; {example}"
    )


def _shown(keys: Collection[str]) -> str:
    return some_of([repr(key[:60]) for key in keys], _MAX_SHOWN) or "nothing"


def _known(layouts: Sequence[Layout]) -> str:
    """Layouts with the keys of their first signature."""
    return ", ".join(
        f"{each.name} ({' + '.join(sorted(each.signatures[0].keys))})" for each in layouts
    )


def part_of(name: str) -> str | None:
    """What a column of this name holds a part of: `question`, `answer`, or nothing."""
    return _part_of(name) if len(name) <= _LONGEST else None


@lru_cache(maxsize=4096)
def _part_of(name: str) -> str | None:
    word = plain(name)
    return "question" if _OPTION.fullmatch(word) else _PART_OF.get(word)


def refuse_parts(record: Mapping[str, Any], read: Collection[str]) -> None:
    """Raise DataError (schema) where a part of the question or answer is in a column that is not
    read."""
    options = LETTERS if all(not is_missing(record.get(name)) for name in LETTERS[:2]) else ()
    for name, value in record.items():
        part = "question" if name in options else part_of(name)
        if part is not None and name not in read and not is_missing(value):
            raise schema_error(
                f"the record has {name[:60]!r} beside its {part}. It would be lost. Write it "
                f"into the text of the {part}, give it a role by data.columns, or leave it out by "
                f"data.ignore_columns: [{name}]"
            )
