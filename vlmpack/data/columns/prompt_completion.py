"""TRL's prompt and completion: texts, or turns.

    {"prompt": "Which digit?", "completion": "A seven.", "images": ["0.png"]}
    {"prompt": [{"role": "user", "content": "Which digit?"}],
     "completion": [{"role": "assistant", "content": "A seven."}], "images": ["0.png"]}

The loss is on the completion, as TRL's is: an answer inside the prompt is not learnt. Texts become
a turn of the user and one of the assistant, in the model's chat template (TRL puts texts end to
end, without a template).
"""

from __future__ import annotations

from typing import Any

from vlmpack.data.columns.cells import answered, asked, has_value, text_of
from vlmpack.data.columns.layout import Layout, Turned, known_by
from vlmpack.data.columns.preferences import PROMPT
from vlmpack.data.shards.json_text import number_text, parse_json
from vlmpack.data.shards.turns import LEARN_FLAGS
from vlmpack.errors import schema_error

NAME = "prompt-completion"
COMPLETION = "completion"


def turned(record: Turned) -> Turned:
    """The prompt's turns, not learnt, and the completion's.

    Raises:
        DataError: (schema) one of them is neither a text nor a list.
    """
    rest = {key: value for key, value in record.items() if key not in LAYOUT.columns}
    record = {**record, COMPLETION: number_text(record.get(COMPLETION))}
    prompt, completion = _turns(record, PROMPT), _turns(record, COMPLETION)
    before = [asked(prompt)] if isinstance(prompt, str) else [_unlearnt(turn) for turn in prompt]
    after = [answered(completion)] if isinstance(completion, str) else completion
    return {**rest, "messages": [*before, *after]}


def _turns(record: Turned, name: str) -> str | list[Any]:
    """A text, or a list of turns, which a CSV or parquet column may hold as JSON."""
    value = record.get(name)
    if isinstance(value, list) and value:
        return value
    text = text_of(record, name, NAME)
    if not text.startswith('[{"role"'):
        return text
    try:
        found = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise schema_error(f"{name!r} is text that is no JSON of turns: {error}") from None
    return found if isinstance(found, list) else text


def _unlearnt(turn: Any) -> Any:
    """A turn of the prompt without loss, unless its own flags say what to do."""
    if not isinstance(turn, dict) or turn.get("role") != "assistant":
        return turn
    return (
        turn if any(has_value(turn.get(flag)) for flag in LEARN_FLAGS) else {**turn, "loss": False}
    )


LAYOUT = Layout(
    name=NAME,
    whose="TRL",
    signatures=(known_by(PROMPT, COMPLETION),),
    turned=turned,
    is_made=True,
)
