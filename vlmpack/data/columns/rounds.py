"""Rounds of a question and an answer, an object each.

    {"texts": [{"user": "Which digit?", "assistant": "A seven.", "source": "x"}], "images": [...]}
    {"conversation": [{"human": "Which digit?", "assistant": "A seven."}], "system": "Be brief."}

The first is Cauldron's, the second ms-swift's. The `source` of Cauldron's rounds says where they
come from; it is known, and not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vlmpack.data.columns.cells import answered, asked, has_value
from vlmpack.data.columns.layout import Layout, Turned, known_by
from vlmpack.data.shards.json_text import number_text, parse_json
from vlmpack.data.shards.keys import refuse_unknown
from vlmpack.errors import schema_error
from vlmpack.words import kind_of


@dataclass(frozen=True, slots=True)
class _Words:
    """How rounds are written.

    Args:
        column: where they stand.
        question, answer: the keys of a round.
        unread: other keys that a round may have.
    """

    column: str
    question: str
    answer: str
    unread: frozenset[str] = frozenset()

    def turned(self, record: Turned) -> Turned:
        """The rounds as turns.

        Raises:
            DataError: (schema) no list of rounds, or one that is not a question and its answer.
        """
        rounds = record.get(self.column)
        if isinstance(rounds, str) and has_value(rounds):
            try:
                rounds = parse_json(rounds)
            except (ValueError, RecursionError) as error:
                raise schema_error(f"{self.column!r} is text that is no JSON: {error}") from None
        if not isinstance(rounds, list) or not rounds:
            raise schema_error(
                f"{self.column!r} is {kind_of(rounds)}; expected a list of rounds, "
                f"{{{self.question!r}: ..., {self.answer!r}: ...}}"
            )
        turns: list[dict[str, Any]] = []
        for place, one in enumerate(rounds):
            turns += self._turns(one, f"{self.column}[{place}]")
        rest = {key: value for key, value in record.items() if key != self.column}
        return {**rest, "messages": turns}

    def _turns(self, one: object, where: str) -> list[dict[str, Any]]:
        if not isinstance(one, dict):
            raise schema_error(f"{where} is {kind_of(one)}; expected an object")
        for keys in (("role", "content"), ("from", "value")):
            if all(has_value(one.get(key)) for key in keys):
                column = "messages" if keys[0] == "role" else "conversations"
                raise schema_error(
                    f"{where} has the keys {keys[0]!r} and {keys[1]!r}: these are turns of "
                    f"{column!r}; data.columns: {{{column}: {self.column}}} reads them"
                )
        refuse_unknown(one, self.unread | {self.question, self.answer}, where)
        said = [one.get(self.question), number_text(one.get(self.answer))]
        for name, text in zip((self.question, self.answer), said, strict=True):
            if not isinstance(text, str) or not text:
                found = "an empty text" if text == "" else kind_of(text)
                raise schema_error(f"{where}.{name} is {found}; expected a text")
        return [asked(said[0]), answered(said[1])]


def _layout(name: str, whose: str, words: _Words) -> Layout:
    read: Callable[[Turned], Turned] = words.turned
    return Layout(name=name, whose=whose, signatures=(known_by(words.column),), turned=read)


CAULDRON = _layout(
    "cauldron", "Cauldron", _Words("texts", "user", "assistant", frozenset({"source"}))
)
ROUNDS = _layout("rounds", "ms-swift", _Words("conversation", "human", "assistant"))
