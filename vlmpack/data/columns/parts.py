"""Columns that hold a part of a question or of an answer, which another column does not repeat.

    {"question": "Which one?", "choices": ["a", "b"], "answer": "a"}
    {"instruction": "Add.", "output": "4", "explanation": "2 and 2 make 4."}

A layout that makes turns of columns reads some of them. A record that has another of these would
be trained as another question, or with half an answer, so it is refused. Turns that a record has
already say all of it, and its columns are about it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from vlmpack.data.columns.image_columns import plain
from vlmpack.data.shards.keys import is_absent
from vlmpack.errors import schema_error

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


def part_of(name: str) -> str | None:
    """What a column of this name holds a part of: `question`, `answer`, or nothing."""
    return _part_of(name) if len(name) <= _LONGEST else None


@lru_cache(maxsize=4096)
def _part_of(name: str) -> str | None:
    found = plain(name)
    return "question" if _OPTION.fullmatch(found) else _PART_OF.get(found)


def refuse_parts(record: Mapping[str, Any], read: Collection[str]) -> None:
    """Raise DataError (schema) where a record has a part of its question or answer beside them.

    Args:
        record: with its keys.
        read: the keys that its layout reads.
    """
    options = LETTERS if all(not is_absent(record.get(name)) for name in LETTERS[:2]) else ()
    for name, value in record.items():
        part = "question" if name in options else part_of(name)
        if part is not None and name not in read and not is_absent(value):
            raise schema_error(
                f"the record has {name[:60]!r} beside its {part}, which would be lost: write it "
                f"into the text of the {part}, give it a role by data.columns, or leave it out by "
                f"data.ignore_columns: [{name}]"
            )
