"""Pairs of answers as other trainers write them -> the turns of the prompt, and the two answers.

    TRL       {"prompt": turns or text, "chosen": turns or text, "rejected": ...}
              {"chosen": [question, answer], "rejected": [question, other answer]}
    ms-swift  {"messages": [question, answer], "rejected_response": text}, or "rejected_messages"

LLaMA-Factory's `conversations` with `chosen` and `rejected` already have our format.

Images without a place go before the first text of the user, in order, in pairs and any other
`messages`. TRL and ms-swift do the same. LLaMA-Factory and LLaVA refuse such records, so theirs
(`conversations`) are refused here too. A record that marks only some places is refused, as in all
of them but ms-swift.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vlmpack.data.columns.layouts import PROMPT
from vlmpack.data.shards.naming import PAIR_KEYS, is_absent
from vlmpack.data.shards.turns import IMAGE_MARKER, TURN_FIELDS, named_images
from vlmpack.errors import schema_error
from vlmpack.words import counted

_REJECTED = ("rejected_response", "rejected_messages")


def as_pair(record: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The record with its pair in our format, and whether its images were put into its turns here.

    Raises:
        DataError: (schema) turns without a prompt and an answer, one answer without the other, or
            images without a place.
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


def with_images_first(record: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The record with its images shown in its `messages`, and whether that changed it.

    Raises:
        DataError: (schema) the prompt of a pair has no text of the user that they could go before.
    """
    turns = record.get("messages")
    if not isinstance(turns, list) or not (count := len(named_images(record))):
        return record, False
    if any(map(_shows, _contents(turns))):
        return record, False
    pair = [record.get(name) for name in PAIR_KEYS]
    if any(_shows(content) for one in pair for content in _contents(one)):
        return record, False
    asked = [n for n, t in enumerate(turns) if isinstance(t, dict) and t.get("role") == "user"]
    is_text = all(isinstance(content, str | None) for content in _contents(turns))
    if not is_text or not asked or not isinstance(turns[asked[0]].get("content"), str):
        if all(map(is_absent, pair)):
            return record, False  # the reader of turns says what is missing
        raise schema_error(
            f"the record names {counted(count, 'image')}, and no turn of its prompt shows one; "
            f"expected an image part ({{'type': 'image'}}) or {IMAGE_MARKER} at the place of each, "
            "or turns that are texts alone: images are put before the first of the user's then"
        )
    first = turns[asked[0]]
    content = [{"type": "image"}] * count + [{"type": "text", "text": first["content"]}]
    changed = [*turns[: asked[0]], {**first, "content": content}, *turns[asked[0] + 1 :]]
    return {**record, "messages": changed}, True


def _contents(turns: object) -> list[object]:
    """What turns say: those of a list, of one turn, or a text that stands for one."""
    every: Iterable[object] = turns if isinstance(turns, list) else [turns]
    return [turn.get("content") if isinstance(turn, dict) else turn for turn in every]


def _shows(content: object) -> bool:
    """Whether a content has an image, or marks the place of one."""
    if isinstance(content, str):
        return IMAGE_MARKER in content
    parts = content if isinstance(content, list) else ()
    return any(
        part.get("type") in ("image", "image_url") or _shows(part.get("text"))
        for part in parts
        if isinstance(part, dict)
    )
