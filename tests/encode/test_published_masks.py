"""What is learnt of conversations in the published templates: found in the text alone, it is what
the templates' own marks say, by transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from support.conversations import Conversation, Drawn
from support.published_templates import OLDER_GEMMA, manner, published_templates
from support.published_tokens import QWEN_ADDED
from support.templates import chat_encoder
from support.tool_templates import without_marks
from transformers import AddedToken

from vlmpack.encode import turns as turns_module
from vlmpack.encode.chat import ChatEncoder
from vlmpack.errors import DataError

NAMES = [name for name in published_templates() if name != OLDER_GEMMA]
LARGE = "Gemma 4, 26B-A4B and 31B"


def encoders(name: str) -> tuple[ChatEncoder, ChatEncoder]:
    template = published_templates()[name]
    return chat_encoder(template), chat_encoder(without_marks(template))


def by_transformers(name: str, conversation: Conversation) -> tuple[list[int], list[bool]]:
    """Ids and mask by transformers alone; a system prompt of Gemma as parts, as it is given."""
    given = conversation.turns
    if name.startswith("Gemma") and given[0]["role"] == "system":
        parts = [{"type": "text", "text": given[0]["content"]}]
        given = [{"role": "system", "content": parts}, *given[1:]]
    found: Any = encoders(name)[0].tokenizer.apply_chat_template(
        given,
        tools=conversation.tools,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **conversation.variables,
    )
    return found["input_ids"], [bool(flag) for flag in found["assistant_masks"]]


def learnt(encoder: ChatEncoder, conversation: Conversation) -> tuple[list[int], list[bool]]:
    images = sum(
        part["type"] == "image"
        for turn in conversation.turns
        for part in (turn["content"] if isinstance(turn["content"], list) else ())
    )
    markers = [encoder.marker] * images
    tokens = encoder.encode(conversation.messages, markers, conversation.inputs)
    return tokens.input_ids, tokens.from_assistant


@pytest.mark.cases(
    quick=("Qwen3.6-6", "Nemotron 3 Super-6"),
    slow=("Qwen3.5, 4B and larger-6", "Gemma 4, E2B and E4B-6"),
)
@pytest.mark.parametrize("count", [6, pytest.param(150, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", NAMES)
def test_ids_and_masks_are_those_of_transformers(name: str, count: int) -> None:
    drawn = Drawn(manner(name), f"masks {name}", plain=True)
    calls = thoughts = 0
    for _ in range(count):
        conversation = drawn.one()
        expected = by_transformers(name, conversation)
        for encoder in encoders(name):
            assert learnt(encoder, conversation) == expected, conversation
        assert 0 < sum(expected[1]) < len(expected[1])
        calls += any("tool_calls" in turn for turn in conversation.turns)
        thoughts += any("reasoning_content" in turn for turn in conversation.turns)
    assert calls > count // 4 and thoughts > count // 4


def called(number: int, **arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [{"id": f"c{number}", "type": "function", "function": function}]


def results(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "name": "f", "content": content}


def asked(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Q"}, *turns]


def says(content: str = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


TOOL = {"type": "function", "function": {"name": "f", "description": "Does f."}}
ONE_CALL = "<|tool_call>call:f{x:1}<tool_call|><|tool_response>"
TWO_CALLS = f"{ONE_CALL}<|tool_call>call:f{{x:2}}<tool_call|><|tool_response>"
READ: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "a call behind a prompt that closes an empty thought": (
        asked(says(tool_calls=called(1, x=1)), results(1, "R"), says("A")),
        {},
        f"{ONE_CALL}A<turn|>",
    ),
    "a thought there: from what the record says": (
        asked(says(reasoning_content="T", tool_calls=called(1, x=1)), results(1, "R"), says("A")),
        {},
        f"T\n<channel|>{ONE_CALL}A<turn|>",
    ),
    "a thought that begins as the prompt's end does": (
        asked(says("A", reasoning_content="<|T")),
        {},
        "<|T\n<channel|>A<turn|>",
    ),
    "a call where the prompt opens a thought behind a result": (
        asked(
            says(tool_calls=called(1, x=1)),
            results(1, "R"),
            says(tool_calls=called(2, x=2)),
            results(2, "R"),
            says("A"),
        ),
        {"enable_thinking": True},
        f"{TWO_CALLS}A<turn|>",
    ),
    "thoughts of an earlier question, dropped before a call": (
        [
            *asked(
                says(reasoning_content="T", tool_calls=called(1, x=1)),
                results(1, "R"),
                says(reasoning_content="U", tool_calls=called(2, x=2)),
                results(2, "R"),
                says("A"),
            ),
            *asked(says("B", reasoning_content="V")),
        ],
        {"enable_thinking": True},
        f"{TWO_CALLS}A<turn|><|channel>thought\nV\n<channel|>B<turn|>",
    ),
}


def read(encoder: ChatEncoder, conversation: Conversation) -> str:
    ids, flags = learnt(encoder, conversation)
    return str(encoder.tokenizer.decode([i for i, flag in zip(ids, flags, strict=True) if flag]))


@pytest.mark.parametrize("case", READ)
def test_what_is_learnt_of_gemmas_calls_reads_as_it_should(case: str) -> None:
    turns, variables, expected = READ[case]
    conversation = Conversation(turns, [TOOL], variables)
    for encoder in encoders(LARGE):
        assert read(encoder, conversation) == expected


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known of turns that begin otherwise than the prompt ends."""
    shape = turns_module.shape_of
    monkeypatch.setattr(
        "vlmpack.encode.template.shape_of",
        lambda render: turns_module.replace(shape(render), opening=None, prompt=""),
    )
    chat_encoder.cache_clear()
    yield
    chat_encoder.cache_clear()


@pytest.mark.usefixtures("blind")
def test_without_that_such_calls_cannot_be_found() -> None:
    """The negative control."""
    failed = 0
    for turns, variables, _ in READ.values():
        with_calls = Conversation(turns, [TOOL], variables)
        try:
            learnt(encoders(LARGE)[1], with_calls)
        except DataError as error:
            assert "renders turn" in str(error)
            failed += 1
    assert failed == 3


def test_tokens_of_their_own_that_are_no_special_ones() -> None:
    """Qwen's `<think>` and `<tool_call>` are one token each, and a record may spell them."""
    name = "Qwen3.6"
    drawn = Drawn(manner(name), "tokens", plain=True)
    made = []
    for encoder in encoders(name):
        tokenizer = copy.deepcopy(encoder.tokenizer)
        added = [AddedToken(text, normalized=False, special=False) for text in QWEN_ADDED.values()]
        assert tokenizer.add_tokens(added) == len(QWEN_ADDED)
        made.append(ChatEncoder(tokenizer, takes_images=True, marker=encoder.marker))
    marked = made[0].tokenizer
    think = marked.convert_tokens_to_ids("<think>")
    seen = 0
    for number in range(8):
        conversation = drawn.one()
        if number % 2:
            conversation.turns[-1]["content"] += " <tool_call> is a tag"
        theirs: Any = marked.apply_chat_template(
            conversation.turns,
            tools=conversation.tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **conversation.variables,
        )
        mask = [bool(flag) for flag in theirs["assistant_masks"]]
        for encoder in made:
            assert learnt(encoder, conversation) == (theirs["input_ids"], mask)
        seen += theirs["input_ids"].count(think)
    assert seen > 4


BARE = {"enable_thinking": False}
THOUGHT = says("<think>\nT\n</think>\n\nA")


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("Qwen3")])
@pytest.mark.parametrize("variables", [{}, BARE], ids=["thinking", "without"])
def test_thoughts_inside_an_answer_are_learnt_where_the_prompt_closes_an_empty_one(
    name: str, variables: dict[str, Any]
) -> None:
    """Published templates have no marks, and a single exchange has no later turn."""
    for turns in (asked(THOUGHT), [*asked(says("B")), *asked(THOUGHT)]):
        conversation = Conversation(turns, None, variables)
        expected = by_transformers(name, conversation)
        for encoder in encoders(name):
            assert learnt(encoder, conversation) == expected
        if name != "Qwen3.8":  # it tells no thoughts apart inside an answer
            assert "T\n</think>\n\nA<|im_end|>" in read(encoders(name)[1], conversation)


def test_an_answer_that_begins_otherwise_than_the_prompt_says_so() -> None:
    """Words before the thought are dropped, so nothing says where the answer lies."""
    conversation = Conversation(asked(says("Well <think>T</think>A")), None, BARE)
    _, unmarked = encoders("Qwen3.5, 4B and larger")
    with pytest.raises(DataError, match="turn 1 otherwise than its generation prompt begins it"):
        learnt(unmarked, conversation)
    later = Conversation([*conversation.turns, *asked(says("B"))], None, BARE)
    assert "B" in read(unmarked, later)
