"""The layouts that records may have: which keys tell one, and how its turns are made.

A layout turns a record into one with `messages`, which `chat.py` then reads like any other. So
flags, tools and keys that nobody reads are the same in all of them. The layouts with turns
(`messages`, `llava`, `preference`) leave a record as it is.

A new layout is a function from a record to a record with turns, a `Layout`, and its entry in
`LAYOUTS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from vlmpack.data.shards.naming import PAIR_KEYS, number_text, parsed_text, refuse_unknown
from vlmpack.data.shards.turns import LEARN_FLAGS, named_images
from vlmpack.errors import schema_error
from vlmpack.words import kind_of

Turned = dict[str, Any]
"""A record whose turns stand under `messages` or `conversations`."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Keys by which a layout is known: all of `keys` are there, and none of `unless`."""

    keys: frozenset[str]
    unless: frozenset[str] = frozenset()

    def fits(self, keys: Collection[str]) -> bool:
        """Whether a record with these keys has it."""
        return self.keys <= {*keys} and self.unless.isdisjoint(keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to lay out records.

    Args:
        whose: who writes it, for messages.
        signatures: any of them makes a record one of this layout.
        turned: a record of this layout -> the same with turns; keys that it does not read stay. A
            record that has turns is left as it is.
        is_made: whether its turns are made of columns, so that a part of the question or of the
            answer may stand in a column that it does not read.
        others: keys that it reads beside those of its signatures.
    """

    name: str
    whose: str
    signatures: tuple[Signature, ...]
    turned: Callable[[dict[str, Any]], Turned] = lambda record: record
    is_made: bool = False
    others: frozenset[str] = frozenset()
    alias_of: str | None = None

    @property
    def columns(self) -> frozenset[str]:
        """The keys that it reads, without those that records of all layouts may have."""
        return self.others.union(*(signature.keys for signature in self.signatures))

    def fits(self, keys: Collection[str]) -> bool:
        """Whether a record with these keys is one of this layout."""
        return any(signature.fits(keys) for signature in self.signatures)


def _known_by(*keys: str, unless: Collection[str] = ()) -> Signature:
    return Signature(frozenset(keys), frozenset(unless))


# What several layouts do with the cells of a record.


def has_value(value: object) -> bool:
    """Whether a cell holds anything: a table has a null, or an empty text, where nothing is."""
    return value is not None and value != ""


def _text_of(record: Mapping[str, Any], name: str, layout: str) -> str:
    value = record.get(name)
    if not has_value(value):
        names = ", ".join(repr(key[:60]) for key in list(record)[:8]) or "nothing"
        missing = "an empty" if value == "" else "no"
        raise schema_error(f"the record has {missing} {name!r}, as {layout} has it; found {names}")
    if not isinstance(value, str):
        raise schema_error(f"{name!r} is {kind_of(value)}; expected a text, as {layout} has it")
    return value


def _answer_of(record: Mapping[str, Any], name: str, layout: str) -> str:
    """The text of an answer, which may be a number or a boolean of JSON."""
    return _text_of({**record, name: number_text(record.get(name))}, name, layout)


def _question_turn(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _answer_turn(content: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _history_turns(history: object) -> list[dict[str, Any]]:
    """The turns of earlier rounds ([[question, answer], ...], or JSON of that). All are learnt, as
    in ms-swift and LLaMA-Factory.

    Raises:
        DataError: (schema) no such list.
    """
    if not has_value(history):
        return []
    if isinstance(history, str):
        history = parsed_text(history, "'history'")
    expected = "expected [[question, answer], ...]"
    if not isinstance(history, list):
        raise schema_error(f"'history' is {kind_of(history)}; {expected}")
    turns = []
    for place, pair in enumerate(history):
        if isinstance(pair, list) and len(pair) == 2:
            pair = [pair[0], number_text(pair[1])]
        if not isinstance(pair, list) or [type(item) for item in pair] != [str, str]:
            raise schema_error(f"history[{place}] is no pair of texts; {expected}")
        turns += [_question_turn(pair[0]), _answer_turn(pair[1])]
    return turns


def _without(record: Turned, names: Collection[str]) -> Turned:
    return {key: value for key, value in record.items() if key not in names}


# Records that have turns already.


_PAIR = frozenset(PAIR_KEYS)
PROMPT = "prompt"
"""TRL's column of what an answer, or both answers of a pair, follow."""

# {"messages": [{"role": "user", "content": "<image>Which digit?"},
#               {"role": "assistant", "content": "A seven."}], "images": ["0.png"]}
MESSAGES = Layout(
    name="messages",
    whose="OpenAI's files, TRL, ms-swift, LLaMA-Factory",
    signatures=(_known_by("messages"),),
    others=_PAIR,
)

# {"conversations": [{"from": "human", "value": "<image>\\nWhich digit?"},
#                    {"from": "gpt", "value": "A seven."}], "image": "0.png"}
LLAVA = Layout(
    name="llava",
    whose="LLaVA, ShareGPT, LLaMA-Factory",
    signatures=(_known_by("conversations"),),
    others=_PAIR,
)

SHAREGPT = replace(LLAVA, name="sharegpt", whose="ShareGPT, LLaMA-Factory", alias_of="llava")

# {"prompt": "Which digit?", "chosen": "A seven.", "rejected": "A one.", "images": ["0.png"]}
PREFERENCE = Layout(
    name="preference",
    whose="TRL",
    signatures=(
        _known_by(PROMPT, *PAIR_KEYS),
        # With turns or an instruction in the record, the two are the answers to these.
        _known_by(*PAIR_KEYS, unless=("messages", "conversations", "instruction")),
    ),
    is_made=True,
)

CHAT = "chat"
"""The layout of records that have `messages` or `conversations`, each record one of them."""

_CHAT_LAYOUT = Layout(
    name=CHAT,
    whose="records with turns",
    signatures=(*MESSAGES.signatures, *LLAVA.signatures),
    others=_PAIR,
)


# ms-swift's one round, with those before. `rejected_response` makes a pair of it.


def _query_response(record: Turned) -> Turned:
    """ms-swift's query and response.

    {"system": "Be brief.", "history": [["Hello", "Hi"]],
     "query": "<image>Which digit?", "response": "A seven.", "images": ["0.png"]}
    """
    name = QUERY_RESPONSE.name
    query, response = _text_of(record, "query", name), _answer_of(record, "response", name)
    turns = [*_history_turns(record.get("history")), _question_turn(query), _answer_turn(response)]
    return {**_without(record, QUERY_RESPONSE.columns), "messages": turns}


QUERY_RESPONSE = Layout(
    name="query-response",
    whose="ms-swift",
    signatures=(_known_by("query", "response"),),
    turned=_query_response,
    is_made=True,
    others=frozenset({"history"}),
)


# TRL's prompt and completion. The loss is on the completion, as TRL's is: an answer inside the
# prompt is not learnt. Texts become a turn of the user and one of the assistant, in the model's
# chat template, while TRL puts texts end to end.

COMPLETION = "completion"


def _prompt_completion(record: Turned) -> Turned:
    """TRL's prompt and completion, both as texts or both as turns.

    {"prompt": "Which digit?", "completion": "A seven.", "images": ["0.png"]}
    {"prompt": [{"role": "user", "content": "Which digit?"}], "completion": [...]}
    """
    rest = _without(record, PROMPT_COMPLETION.columns)
    record = {**record, COMPLETION: number_text(record.get(COMPLETION))}
    prompt, completion = _turns_or_text(record, PROMPT), _turns_or_text(record, COMPLETION)
    before = map(_unlearnt, [_question_turn(prompt)] if isinstance(prompt, str) else prompt)
    after = [_answer_turn(completion)] if isinstance(completion, str) else completion
    return {**rest, "messages": [*before, *after]}


def _turns_or_text(record: Turned, name: str) -> str | list[Any]:
    """A text, or a list of turns, which a CSV or parquet column may hold as JSON."""
    value = record.get(name)
    if isinstance(value, list) and value:
        return value
    text = _text_of(record, name, PROMPT_COMPLETION.name)
    if not text.startswith('[{"role"'):
        return text
    parsed = parsed_text(text, repr(name), "JSON of turns")
    return parsed if isinstance(parsed, list) else text


def _unlearnt(turn: Any) -> Any:
    """A turn of the prompt without loss, unless its own flags say what to do."""
    is_answer = isinstance(turn, dict) and turn.get("role") == "assistant"
    if not is_answer or any(has_value(turn.get(flag)) for flag in LEARN_FLAGS):
        return turn
    return {**turn, "loss": False}


PROMPT_COMPLETION = Layout(
    name="prompt-completion",
    whose="TRL",
    signatures=(_known_by(PROMPT, COMPLETION),),
    turned=_prompt_completion,
    is_made=True,
)


# Alpaca's instruction, input and output, with LLaMA-Factory's columns. The question is the
# instruction and, where there is one, the input on the next line.


def _alpaca(record: Turned) -> Turned:
    """Alpaca's instruction and output. Of a pair, the turns are those of the prompt.

    {"instruction": "<image>Which digit?", "input": "Answer in one word.", "output": "Seven.",
     "system": "Be brief.", "history": [["Hello", "Hi"]], "images": ["0.png"]}
    {"instruction": "Which digit?", "chosen": "Seven.", "rejected": "One.", "images": ["0.png"]}
    """
    question = _text_of(record, "instruction", ALPACA.name)
    if has_value(record.get("input")):
        question += "\n" + _text_of(record, "input", ALPACA.name)
    turns = [*_history_turns(record.get("history")), _question_turn(question)]
    if not all(has_value(record.get(name)) for name in PAIR_KEYS):
        turns.append(_answer_turn(_answer_of(record, "output", ALPACA.name)))
    elif has_value(record.get("output")):
        raise schema_error(
            "the record has its answer twice, as 'output' and as 'chosen' and 'rejected'; "
            "expected one of these"
        )
    return {**_without(record, ALPACA.columns - _PAIR), "messages": turns}


ALPACA = Layout(
    name="alpaca",
    whose="Alpaca, LLaMA-Factory, ms-swift",
    signatures=(_known_by("instruction", "output"), _known_by("instruction", *PAIR_KEYS)),
    turned=_alpaca,
    is_made=True,
    others=frozenset({"input", "history"}),
)


# A question about an image. What is learnt is `answer`; without one `multiple_choice_answer`,
# VQAv2's word for the answer that most people gave; without that the most frequent of `answers`, of
# equals the first. Answers that are not learnt are a key that is not read, and counted as such.

_QUESTION = "question"
_ANSWERS = ("answer", "multiple_choice_answer", "answers")


def _vqa(record: Turned) -> Turned:
    """A question about an image, and its answer.

    {"question": "Which digit?", "answer": "seven", "image": "0.png"}
    {"question": "Which digit?", "answers": ["seven", "7", "seven"], "image": "0.png"}
    {"question": "Which digit?", "multiple_choice_answer": "seven", "image": "0.png",
     "answers": [{"answer": "seven", "answer_confidence": "yes", "answer_id": 1}]}
    """
    source = next((name for name in _ANSWERS if has_value(record.get(name))), _ANSWERS[0])
    question = _text_of(record, _QUESTION, VQA.name)
    if source == _ANSWERS[2]:
        answer = _most_frequent(record[source])
    else:
        answer = _answer_of(record, source, VQA.name)
    turns = [_question_turn(question), _answer_turn(answer)]
    return {**_without(record, (_QUESTION, source)), "messages": turns}


def _most_frequent(answers: object) -> str:
    given = answers if isinstance(answers, list) else [answers]
    found = [item.get("answer") if isinstance(item, dict) else item for item in given]
    found = [number_text(item) for item in found]
    texts = [text for text in found if isinstance(text, str) and text]
    if not texts or len(texts) < len(found):
        raise schema_error(
            f"'answers' is {kind_of(answers)} without texts alone; expected texts, or objects with "
            "'answer'"
        )
    return Counter(texts).most_common(1)[0][0]  # of equals, the one that was met first


VQA = Layout(
    name="vqa",
    whose="VQA",
    signatures=tuple(_known_by(_QUESTION, answer) for answer in _ANSWERS),
    turned=_vqa,
    is_made=True,
)


# An image and its caption. The user shows the image and says nothing; the caption is the answer. A
# pair of `.jpg` and `.txt` in a shard is read so, too.

_CAPTIONS = ("caption", "text")
_IMAGES = ("image", "images")


def _caption(record: Turned) -> Turned:
    """An image and its caption.

    {"image": "0.png", "text": "A handwritten seven."}
    {"image": "0.png", "caption": "A handwritten seven."}
    """
    given = [name for name in _CAPTIONS if has_value(record.get(name))]
    if len(given) > 1 and record[given[0]] != record[given[1]]:
        raise schema_error(
            "the record has 'caption' and 'text', and they differ; expected one caption. "
            "data.columns: {text: caption}, say, reads that column alone"
        )
    caption = _answer_of(record, given[0] if given else _CAPTIONS[0], CAPTION.name)
    count = len(named_images(record))
    if not count:
        raise schema_error("the record has a caption and no image; expected 'image' or 'images'")
    turns = [_question_turn([{"type": "image"}] * count), _answer_turn(caption)]
    return {**_without(record, _CAPTIONS), "messages": turns}


CAPTION = Layout(
    name="caption",
    whose="image and text pairs",
    signatures=tuple(_known_by(image, caption) for image in _IMAGES for caption in _CAPTIONS),
    turned=_caption,
    is_made=True,
)


# Rounds of a question and an answer, an object each.


@dataclass(frozen=True, slots=True)
class _Rounds:
    """How rounds are written: the column, the keys of a round, and other keys that it may have."""

    column: str
    question: str
    answer: str
    unused: frozenset[str] = frozenset()

    def turned(self, record: Turned) -> Turned:
        """The rounds as turns.

        Raises:
            DataError: (schema) no list of rounds, or one that is not a question and its answer.
        """
        rounds = record.get(self.column)
        if isinstance(rounds, str) and has_value(rounds):
            rounds = parsed_text(rounds, repr(self.column))
        if not isinstance(rounds, list) or not rounds:
            raise schema_error(
                f"{self.column!r} is {kind_of(rounds)}; expected a list of rounds, "
                f"{{{self.question!r}: ..., {self.answer!r}: ...}}"
            )
        turns: list[dict[str, Any]] = []
        for place, one in enumerate(rounds):
            turns += self._turns(one, f"{self.column}[{place}]")
        return {**_without(record, (self.column,)), "messages": turns}

    def _turns(self, one: object, where: str) -> list[dict[str, Any]]:
        if not isinstance(one, dict):
            raise schema_error(f"{where} is {kind_of(one)}; expected an object")
        for keys in (("role", "content"), ("from", "value")):
            if all(has_value(one.get(key)) for key in keys):
                column = "messages" if keys[0] == "role" else "conversations"
                raise schema_error(
                    f"{where} has the keys {keys[0]!r} and {keys[1]!r}, which are turns of "
                    f"{column!r}. data.columns: {{{column}: {self.column}}} reads them"
                )
        refuse_unknown(one, self.unused | {self.question, self.answer}, where)
        texts = [one.get(self.question), number_text(one.get(self.answer))]
        for name, text in zip((self.question, self.answer), texts, strict=True):
            if not isinstance(text, str) or not text:
                found = "an empty text" if text == "" else kind_of(text)
                raise schema_error(f"{where}.{name} is {found}; expected a text")
        return [_question_turn(texts[0]), _answer_turn(texts[1])]


# {"texts": [{"user": "Which digit?", "assistant": "A seven.", "source": "x"}], "images": [...]}
# `source` says where a round comes from; it is known, and not read.
CAULDRON = Layout(
    name="cauldron",
    whose="Cauldron",
    signatures=(_known_by("texts"),),
    turned=_Rounds("texts", "user", "assistant", frozenset({"source"})).turned,
)

# {"conversation": [{"human": "Which digit?", "assistant": "A seven."}], "system": "Be brief."}
ROUNDS = Layout(
    name="rounds",
    whose="ms-swift",
    signatures=(_known_by("conversation"),),
    turned=_Rounds("conversation", "human", "assistant").turned,
)


LAYOUTS: Mapping[str, Layout] = {
    each.name: each
    for each in (
        *(MESSAGES, LLAVA, SHAREGPT, PREFERENCE, QUERY_RESPONSE, PROMPT_COMPLETION, ALPACA, VQA),
        *(CAPTION, CAULDRON, ROUNDS),
    )
}


def layout_named(name: str) -> Layout:
    """The layout of a name that is known, CHAT among them."""
    return _CHAT_LAYOUT if name == CHAT else LAYOUTS[name]


def fitting(keys: Collection[str]) -> tuple[Layout, ...]:
    """The layouts that a record may have, without aliases, by its keys with a value."""
    return tuple(each for each in LAYOUTS.values() if each.alias_of is None and each.fits(keys))


@cache
def all_columns() -> frozenset[str]:
    """Every key that some layout reads, without those that records of all layouts may have."""
    return frozenset().union(*(each.columns for each in LAYOUTS.values()))
