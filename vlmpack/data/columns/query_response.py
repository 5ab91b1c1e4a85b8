"""ms-swift's layout of one round, with those before.

    {"system": "Be brief.", "history": [["Hello", "Hi"]],
     "query": "<image>Which digit?", "response": "A seven.", "images": ["0.png"]}

`rejected_response` beside it makes a pair.
"""

from __future__ import annotations

from vlmpack.data.columns.cells import answer_of, answered, asked, past_turns, text_of
from vlmpack.data.columns.layout import Layout, Turned, known_by

NAME = "query-response"


def turned(record: Turned) -> Turned:
    """The rounds as turns.

    Raises:
        DataError: (schema) a question or an answer that is no text, or a history that is none.
    """
    rest = {key: value for key, value in record.items() if key not in LAYOUT.columns}
    query, response = text_of(record, "query", NAME), answer_of(record, "response", NAME)
    turns = [*past_turns(record.get("history")), asked(query), answered(response)]
    return {**rest, "messages": turns}


LAYOUT = Layout(
    name=NAME,
    whose="ms-swift",
    signatures=(known_by("query", "response"),),
    turned=turned,
    is_made=True,
    others=frozenset({"history"}),
)
