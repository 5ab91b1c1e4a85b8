"""Alpaca's instruction, input and output, with LLaMA-Factory's columns beside them.

    {"instruction": "<image>Which digit?", "input": "Answer in one word.", "output": "Seven.",
     "system": "Be brief.", "history": [["Hello", "Hi"]], "images": ["0.png"]}
    {"instruction": "Which digit?", "chosen": "Seven.", "rejected": "One.", "images": ["0.png"]}

The question is the instruction and, where there is one, the input on the next line.
"""

from __future__ import annotations

from vlmpack.data.columns.cells import (
    answer_of,
    answered,
    asked,
    has_value,
    past_turns,
    text_of,
)
from vlmpack.data.columns.layout import Layout, Turned, known_by
from vlmpack.data.shards.keys import PAIR_KEYS
from vlmpack.errors import schema_error

NAME = "alpaca"


def turned(record: Turned) -> Turned:
    """The rounds as turns; of a pair, those of the prompt.

    Raises:
        DataError: (schema) an instruction, an input or an output that is no text, or a history
            that is none.
    """
    own = LAYOUT.columns - {*PAIR_KEYS}
    rest = {key: value for key, value in record.items() if key not in own}
    question = text_of(record, "instruction", NAME)
    if has_value(record.get("input")):
        question += "\n" + text_of(record, "input", NAME)
    turns = [*past_turns(record.get("history")), asked(question)]
    if not all(has_value(record.get(name)) for name in PAIR_KEYS):
        turns.append(answered(answer_of(record, "output", NAME)))
    elif has_value(record.get("output")):
        raise schema_error(
            "the record has 'output' beside 'chosen' and 'rejected': its answer is said twice; "
            "expected one of these"
        )
    return {**rest, "messages": turns}


LAYOUT = Layout(
    name=NAME,
    whose="Alpaca, LLaMA-Factory, ms-swift",
    signatures=(
        known_by("instruction", "output"),
        known_by("instruction", *PAIR_KEYS),
    ),
    turned=turned,
    is_made=True,
    others=frozenset({"input", "history"}),
)
