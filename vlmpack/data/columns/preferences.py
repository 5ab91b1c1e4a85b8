"""Pairs of answers as other trainers write them -> the turns of the prompt, with both beside them.

    TRL       {"prompt": turns or text, "chosen": turns or text, "rejected": ...}
              {"chosen": [question, answer], "rejected": [question, other answer]}
    ms-swift  {"messages": [question, answer], "rejected_response": text}, or "rejected_messages"

Images beside turns that are texts stand before the first of the user's (placing.py).
LLaMA-Factory's `conversations` with `chosen` and `rejected` are ours already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmpack.data.columns.layouts import PROMPT
from vlmpack.data.columns.placing import with_images_first
from vlmpack.data.shards.keys import PAIR_KEYS, is_absent
from vlmpack.data.shards.turns import TURN_FIELDS
from vlmpack.errors import schema_error

_REJECTED = ("rejected_response", "rejected_messages")


def as_pair(record: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The record with its pair in our words, as it is where it has none; and whether its images
    were put into its turns here.

    Raises:
        DataError: (schema) turns that do not come apart into a prompt and an answer, one answer
            without the other, or images without a place.
    """
    swift = [name for name in _REJECTED if not is_absent(record.get(name))]
    if not swift and any(not is_absent(record.get(name)) for name in TURN_FIELDS):
        return with_images_first(dict(record))
    given = {name: value for name, value in record.items() if not is_absent(value)}
    if swift:
        return with_images_first(_of_swift(given, swift))
    answers = [name for name in PAIR_KEYS if name in given]
    if len(answers) == 1 and PROMPT in given:
        [missing] = {*PAIR_KEYS} - {*answers}
        found = "no" if record.get(missing) is None else "an empty"
        raise schema_error(
            f"the record has {answers[0]!r}, but {found} {missing!r} answer; expected both"
        )
    if len(answers) < 2:
        return dict(record), False
    return with_images_first(_of_trl(given))


def _of_trl(given: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's: the prompt is a column, or what both conversations begin with."""
    rest = {name: value for name, value in given.items() if name != PROMPT}
    if PROMPT in given:
        asked = given[PROMPT]
        turns = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
        return {**rest, "messages": turns}
    chosen, rejected = (given[name] for name in PAIR_KEYS)
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise schema_error(
            "the record has 'chosen' and 'rejected', but no 'prompt' and no turns before them; "
            "expected one of these, or both answers as whole conversations that begin alike"
        )
    shared = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        shared += 1
    shared = min(shared, len(chosen) - 1, len(rejected) - 1)
    if shared < 1:
        raise schema_error(
            "'chosen' and 'rejected' are conversations that do not begin with the same turns; "
            "expected one prompt that both answer"
        )
    return {
        **rest,
        "messages": chosen[:shared],
        "chosen": chosen[shared:],
        "rejected": rejected[shared:],
    }


def _of_swift(given: Mapping[str, Any], swift: list[str]) -> dict[str, Any]:
    """ms-swift's: the chosen answer is the end of the turns."""
    if len(swift) > 1 or any(name in given for name in PAIR_KEYS):
        named = ", ".join(map(repr, [*swift, *(name for name in PAIR_KEYS if name in given)]))
        raise schema_error(f"the record says its answers twice: {named}; expected one of these")
    schema = next((name for name in TURN_FIELDS if isinstance(given.get(name), list)), None)
    if schema is None:
        raise schema_error(f"the record has {swift[0]!r}, but no list of turns that it belongs to")
    turns, role = given[schema], TURN_FIELDS[schema][0]
    last = turns[-1].get(role) if turns and isinstance(turns[-1], dict) else None
    if last not in ("assistant", "gpt") or len(turns) < 2:
        raise schema_error(
            f"the record has {swift[0]!r}, and its turns end with {last!r}; expected the chosen "
            "answer as the last of them"
        )
    rest = {name: value for name, value in given.items() if name not in swift}
    pair = {**rest, schema: turns[:-1], "chosen": turns[-1:], "rejected": given[swift[0]]}
    if swift[0] == "rejected_messages":
        other = given[swift[0]]
        if not isinstance(other, list) or other[: len(turns) - 1] != turns[:-1]:
            raise schema_error(
                "'rejected_messages' does not begin with the turns that the chosen answer follows; "
                "expected one prompt that both answer"
            )
        pair["rejected"] = other[len(turns) - 1 :]
    return pair
