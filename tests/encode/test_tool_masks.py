"""Conversations with tools and thoughts: ids and what is learnt are those of transformers'
`apply_chat_template`, by templates with marks, and by the same ones without."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from encode.joining_tokenizers import TOKENIZERS, encoder_of, with_whole_characters
from support.templates import NO_PROMPT, QWEN2_5, Template, chat_encoder
from support.tool_templates import THINKING, TOOL_TEMPLATES, without_marks

from vlmpack.data.shards.samples import samples_of_answers
from vlmpack.encode import turns as turns_module
from vlmpack.encode.chat import ChatEncoder, ChatTokens
from vlmpack.encode.sample import Message, TemplateInputs, TextPart, VLMSample
from vlmpack.errors import DataError

WORDS = ("Oslo", " 7\n", "it is <b>", "assistant", "\u00e9t\u00e9", "a: b", "y", "z", "{}", "</a>")
NAMES = ("get_weather", "search", "y")
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
    for name in NAMES
)


def words(draw: random.Random) -> str:
    return "".join(draw.choices(WORDS, k=draw.randint(1, 4))).strip() or "x"


class Spoken:
    """A random record as a user writes it, in what a template can express."""

    def __init__(self, draw: random.Random, name: str) -> None:
        self.draw, self.name = draw, name
        self.turns: list[dict[str, Any]] = []
        if TOOL_TEMPLATES[name].system and draw.random() < 0.4:
            self.turns.append({"role": "system", "content": words(draw)})
        for _ in range(draw.randint(1, 3)):
            self.turns.append({"role": "user", "content": words(draw)})
            while draw.random() < 0.6:
                self._call()
            self.turns.append(self._thinking({"role": "assistant", "content": words(draw)}))
        self.tools = list(TOOLS)
        self.variables: dict[str, Any] = {}
        if name.startswith("qwen3"):
            self.variables = draw.choice([{}, *({"enable_thinking": on} for on in (True, False))])
        if name == "llama-3":
            self.variables = draw.choice([{}, {"date_string": "1 May 2026"}])

    def _call(self) -> None:
        draw, calls = self.draw, []
        for _ in range(1 if self.name == "llama-3" else draw.choice((1, 1, 2))):
            keys = draw.sample(("q", "city", "days"), draw.choice((0, 1, 2)))
            values = {key: draw.choice([words(draw), 3, True, ["a"]]) for key in keys}
            function = {"name": draw.choice(NAMES), "arguments": values}
            call = {"type": "function", "id": f"{len(calls)}{draw.randrange(10**7):08}"}
            calls.append(call | {"function": function})
        turn: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": calls}
        if self.name in ("qwen3", "qwen3.5", "hermes", "nemotron") and draw.random() < 0.4:
            turn["content"] = words(draw)
        self.turns.append(self._thinking(turn))
        for call in calls:
            name = call["function"]["name"]
            result = {"role": "tool", "content": words(draw), "name": name}
            self.turns.append(result | {"tool_call_id": call["id"]})

    def _thinking(self, turn: dict[str, Any]) -> dict[str, Any]:
        knows = self.name in THINKING and (self.name != "gemma-4" or "tool_calls" in turn)
        if knows and self.draw.random() < 0.5:
            turn["reasoning_content"] = words(self.draw)
        return turn

    @property
    def messages(self) -> tuple[Message, ...]:
        """By hand, not by our reader."""
        return tuple(
            Message(
                turn["role"],
                () if turn["content"] is None else (TextPart(turn["content"]),),
                fields={k: v for k, v in turn.items() if k not in ("role", "content")},
            )
            for turn in self.turns
        )

    @property
    def inputs(self) -> TemplateInputs:
        return TemplateInputs(self.tools, self.variables)


def by_transformers(encoder: ChatEncoder, spoken: Spoken, **changes: Any) -> Any:
    """Ids and mask by transformers alone, from the record as it is."""
    given: dict[str, Any] = {"tools": spoken.tools, **spoken.variables, **changes}
    return encoder.tokenizer.apply_chat_template(
        spoken.turns, return_dict=True, return_assistant_tokens_mask=True, **given
    )


def stretches(mask: list[int]) -> list[set[int]]:
    """The runs of ones."""
    found: list[set[int]] = []
    for at, flag in enumerate(mask):
        if flag:
            if not at or not mask[at - 1]:
                found.append(set())
            found[-1].add(at)
    return found


def encoders(name: str) -> list[ChatEncoder]:
    template = TOOL_TEMPLATES[name]
    return [chat_encoder(template), chat_encoder(without_marks(template))]


@pytest.mark.cases(quick=("hermes-25", "llama-3-25"), slow=("qwen3.5-25", "gemma-4-25"))
@pytest.mark.parametrize("count", [25, pytest.param(400, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_ids_and_masks_are_those_of_transformers(name: str, count: int) -> None:
    draw = random.Random(name)
    marked, bare = encoders(name)
    calls = thoughts = changes = 0
    for _ in range(count):
        spoken = Spoken(draw, name)
        theirs = by_transformers(marked, spoken)
        expected = [bool(flag) for flag in theirs["assistant_masks"]]
        for encoder in (marked, bare):
            ours = encoder.encode(spoken.messages, (), spoken.inputs)
            assert ours.input_ids == theirs["input_ids"]
            text = encoder.tokenizer.decode(ours.input_ids)
            assert ours.from_assistant == expected, (encoder is marked, text, learnt(encoder, ours))
        assert 0 < sum(expected) < len(expected)
        calls += any("tool_calls" in turn for turn in spoken.turns)
        thoughts += any("reasoning_content" in turn for turn in spoken.turns)
        changes += bool(spoken.variables)
    assert calls > count // 3 and (thoughts > count // 4 or name not in THINKING)
    assert changes > count // 5 or name not in ("qwen3", "qwen3.5", "llama-3")


@pytest.mark.cases(slow=("gemma-4-qwen2", "mistral-sentencepiece", "qwen3.5-whole text"))
@pytest.mark.slow
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", ["qwen3.5", "mistral", "gemma-4"])
def test_a_token_that_straddles_the_start_of_an_answer_belongs_to_it(name: str, kind: str) -> None:
    """Such as a break of the prompt's `<think>` joined with one of the thought's end."""
    draw = random.Random(f"{name} {kind}")
    template = TOOL_TEMPLATES[name]
    marked, bare = (encoder_of(kind, one) for one in (template, without_marks(template)))
    straddle = 0
    for _ in range(12):
        spoken = Spoken(draw, name)
        theirs = by_transformers(marked, spoken, tokenizer_kwargs={"return_offsets_mapping": True})
        expected = with_whole_characters(theirs, end=None)
        for encoder in (marked, bare):
            ours = encoder.encode(spoken.messages, (), spoken.inputs)
            assert ours.input_ids == theirs["input_ids"]
            assert ours.from_assistant == expected
        spans = marked.template.spans(
            spoken.messages, spoken.inputs, marked.render(spoken.messages, spoken.inputs)
        )
        places = zip(theirs["offset_mapping"], expected, strict=True)
        joined = [place for place, flag in places if flag]
        straddle += any(start < a < end for a, _ in spans for start, end in joined)
    assert straddle or name != "qwen3.5" or kind == "sentencepiece", "the tokenizer joins nothing"


def learnt(encoder: ChatEncoder, tokens: ChatTokens) -> str:
    ids = zip(tokens.input_ids, tokens.from_assistant, strict=True)
    return str(encoder.tokenizer.decode([token for token, flag in ids if flag]))


@pytest.mark.cases(quick=("hermes", "llama-3"), slow=("qwen3.5", "gemma-4"))
@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_a_turn_with_calls_that_the_data_exclude_is_not_learnt(name: str) -> None:
    draw = random.Random(f"excluded {name}")
    looked_at = 0
    while looked_at < 8:
        spoken = Spoken(draw, name)
        answers = [at for at, turn in enumerate(spoken.turns) if turn["role"] == "assistant"]
        left_out = draw.choice(answers)
        marked, bare = encoders(name)
        theirs = by_transformers(marked, spoken)
        runs = stretches(theirs["assistant_masks"])
        if len(runs) != len(answers):
            continue
        looked_at += "tool_calls" in spoken.turns[left_out]
        dropped = runs[answers.index(left_out)]
        expected = [
            bool(flag) and at not in dropped for at, flag in enumerate(theirs["assistant_masks"])
        ]
        messages = tuple(
            replace(turn, learn=at != left_out) for at, turn in enumerate(spoken.messages)
        )
        for encoder in (marked, bare):
            ours = encoder.encode(messages, (), spoken.inputs)
            assert (ours.input_ids, ours.from_assistant) == (theirs["input_ids"], expected)
            assert {at for at, flag in enumerate(ours.excluded) if flag} == dropped


@pytest.mark.cases(quick=("qwen3", "llama-3"), slow=("qwen3.5", "gemma-4"))
@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_each_answer_s_sample_is_the_conversation_up_to_it(name: str) -> None:
    """`data.learn: each_answer`: ids are transformers' of the turns up to each answer, and what is
    learnt is the last of what its mask marks there."""
    draw = random.Random(f"each answer {name}")
    looked_at = kept = 0
    for _ in range(12):
        spoken = Spoken(draw, name)
        whole = VLMSample(key="k", url="", messages=spoken.messages, inputs=spoken.inputs)
        answers = [at for at, turn in enumerate(spoken.turns) if turn["role"] == "assistant"]
        marked, bare = encoders(name)
        all_of_it = marked.render(spoken.messages, spoken.inputs)
        samples = samples_of_answers([whole])
        assert len(samples) == len(answers)
        for number, (at, sample) in enumerate(zip(answers, samples, strict=True)):
            part = copy.copy(spoken)
            part.turns = spoken.turns[: at + 1]
            theirs = by_transformers(marked, part)
            runs = stretches(theirs["assistant_masks"])
            if len(runs) != number + 1:
                continue  # turns that stand in one stretch
            looked_at += 1
            for encoder in (marked, bare):
                ours = encoder.encode(sample.messages, (), sample.inputs, last_alone=True)
                assert ours.input_ids == theirs["input_ids"]
                found = {at for at, flag in enumerate(ours.from_assistant) if flag}
                assert found == runs[-1], learnt(encoder, ours)
            kept += learnt(marked, ours) not in all_of_it
    assert looked_at > 12 and (kept or name not in ("qwen3", "qwen3.5", "nemotron"))


ASKED = Spoken(random.Random(0), "qwen3")
ASKED.variables = {}
ASKED.turns = [
    {"role": "user", "content": "Oslo?"},
    {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "EARLIER",
        "tool_calls": [
            {
                "type": "function",
                "id": "123456789",
                "function": {"name": "search", "arguments": {"q": "A"}},
            }
        ],
    },
    {"role": "tool", "content": "RESULT", "tool_call_id": "123456789", "name": "search"},
    {"role": "assistant", "content": "Rain."},
    {"role": "user", "content": "And Rome?"},
    {"role": "assistant", "content": "Sun.", "reasoning_content": "LAST"},
]


def test_what_is_learnt_reads_as_it_should() -> None:
    """Word by word, once: thoughts of the last question, calls, answers; no result."""
    expected = (
        'Let me look.\n<tool_call>\n{"name": "search", "arguments": {"q": "A"}}\n</tool_call>'
        "<|im_end|>Rain.<|im_end|><think>\nLAST\n</think>\n\nSun.<|im_end|>"
    )
    for encoder in encoders("qwen3"):
        tokens = encoder.encode(ASKED.messages, (), ASKED.inputs)
        assert learnt(encoder, tokens) == expected
        text = encoder.tokenizer.decode(tokens.input_ids)
        assert "RESULT" in text and "Does search" in text and "EARLIER" not in text
        until = encoder.encode(ASKED.messages[:4], (), ASKED.inputs)
        assert learnt(encoder, until).startswith("<think>\nEARLIER\n</think>\n\nLet me look.")
        asked = encoder.encode_prompt(ASKED.messages[:3], (), ASKED.inputs)
        said = encoder.encode(ASKED.messages[:4], (), ASKED.inputs).input_ids
        assert said[: len(asked)] == asked


CONTROLS = ("results learnt", "earlier thoughts kept", "tools left out")


@pytest.mark.parametrize("control", CONTROLS)
def test_what_is_wrong_is_seen(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls of this file: each makes the comparison with transformers fail."""
    [marked, bare] = encoders("qwen3")
    theirs = by_transformers(marked, ASKED)
    right = bare.encode(ASKED.messages, (), ASKED.inputs)
    assert right.from_assistant == [bool(flag) for flag in theirs["assistant_masks"]]
    if control == "results learnt":

        def all_after(self: Any, messages: Any, text: str, *, only_excluded: bool = False) -> Any:
            return [] if only_excluded else [(text.index("Let me"), len(text))]

        monkeypatch.setattr(turns_module.AssistantTurns, "spans", all_after)
        wrong = bare.encode(ASKED.messages, (), ASKED.inputs)
        assert "RESULT" in learnt(bare, wrong)
        assert wrong.from_assistant != right.from_assistant
    elif control == "earlier thoughts kept":
        text = TOOL_TEMPLATES["qwen3"].text.replace("loop.index0 > last.query and", "true and")
        keeps = chat_encoder(without_marks(TOOL_TEMPLATES["qwen3"]._replace(text=text)))
        wrong = keeps.encode(ASKED.messages, (), ASKED.inputs)
        assert "EARLIER" in learnt(keeps, wrong) and wrong.input_ids != theirs["input_ids"]
    else:
        assert bare.encode(ASKED.messages).input_ids != theirs["input_ids"]
        without = by_transformers(marked, ASKED, tools=None)
        assert bare.encode(ASKED.messages).input_ids == without["input_ids"]


# What a template cannot express


def without(template: Template, *pieces: str) -> ChatEncoder:
    text = template.text
    for piece in pieces:
        assert piece in text
        text = text.replace(piece, "")
    return chat_encoder(without_marks(template._replace(text=text)))


QWEN = TOOL_TEMPLATES["qwen3"]
LOST = {
    "tools": ("{{- tool | tojson -}}", "leaves out the tool 'get_weather' of the record"),
    "result": (
        "'\\n<tool_response>\\n' + content + '\\n</tool_response>'",
        r"leaves out the result of turn 2 \(tool\)",
    ),
    "thoughts": (
        "{%- set thought = message.reasoning_content -%}",
        r"leaves out the thoughts \('reasoning_content'\) of turn 1 \(assistant\).*<think>",
    ),
}


@pytest.mark.parametrize("lost", ["tools", "result", "thoughts"])
def test_what_a_template_leaves_out_is_an_error_that_names_it(lost: str) -> None:
    piece, reason = LOST[lost]
    text = QWEN.text.replace(piece, "{{- 'x' -}}" if lost != "result" else "'x'")
    assert text != QWEN.text
    for template in (QWEN._replace(text=text), without_marks(QWEN._replace(text=text))):
        with pytest.raises(DataError, match=str(reason)) as caught:
            chat_encoder(template).encode(ASKED.messages, (), ASKED.inputs)
        assert caught.value.error_class == "schema"


def test_templates_that_know_no_tools_are_errors() -> None:
    asked, called, result, *_ = ASKED.messages
    answer = Message("assistant", (TextPart("Rain."),))
    encoder = chat_encoder(QWEN2_5)
    with pytest.raises(DataError, match="the chat template writes no tools, so"):
        encoder.encode((asked, answer), (), ASKED.inputs)
    call = replace(called, fields={"tool_calls": called.fields["tool_calls"]})
    with pytest.raises(DataError, match=r"leaves out the calls of turn 1 \(assistant\)"):
        encoder.encode((asked, call))
    with pytest.raises(DataError, match=r"leaves out the result of turn 1 \(tool\)"):
        encoder.encode((asked, result, answer))
    thinking = replace(answer, fields={"reasoning_content": "R"})
    with pytest.raises(DataError, match="leaves out the thoughts"):
        encoder.encode((asked, thinking))
    # One that writes any role writes results.
    tokens = chat_encoder(NO_PROMPT).encode((asked, result, answer))
    assert learnt(chat_encoder(NO_PROMPT), tokens) == "Rain.<|im_end|>"


def test_a_template_of_its_own_for_tools_is_used_for_records_with_tools() -> None:
    """As transformers chooses it among the named templates of a folder."""
    encoder = encoders("hermes")[1]
    tokenizer = copy.deepcopy(encoder.tokenizer)
    both = {"default": NO_PROMPT.text, "tool_use": tokenizer.chat_template}
    tokenizer.chat_template = both
    chooses = ChatEncoder(tokenizer, takes_images=False)
    asked = (Message("user", (TextPart("Q"),)), Message("assistant", (TextPart("A"),)))
    for inputs, template in ((TemplateInputs(TOOLS), "tool_use"), (TemplateInputs(), "default")):
        theirs = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
            tools=list(inputs.tools) or None,
            return_dict=True,
        )
        ours = chooses.encode(asked, (), inputs)
        assert ours.input_ids == theirs["input_ids"]
        assert chooses.template.text(inputs) == both[template]
        assert learnt(chooses, ours) == "A<|im_end|>"


def test_words_beside_calls_that_a_template_drops_are_an_error() -> None:
    encoder = encoders("mistral")[1]
    asked, called, *_ = ASKED.messages
    messages = (asked, replace(called, fields={"tool_calls": called.fields["tool_calls"]}))
    with pytest.raises(DataError, match="leaves out the words beside the calls of turn 1"):
        encoder.encode(messages, (), ASKED.inputs)


def test_variables_that_a_template_does_not_read_are_errors() -> None:
    encoder = encoders("qwen3")[1]
    for name in ("enable_thinkng", "reasoning_effort", "namespace"):
        with pytest.raises(DataError, match=rf"'{name}', which .* \(it reads 'enable_thinking'\)"):
            encoder.encode(ASKED.messages, (), TemplateInputs(TOOLS, {name: True}))
    llama = encoders("llama-3")[1]
    with pytest.raises(DataError, match="it reads 'date_string'"):
        llama.encode(ASKED.messages, (), TemplateInputs(TOOLS, {"enable_thinking": True}))


@pytest.mark.parametrize(
    "writes", ["call.arguments", "'' + call.arguments"], ids=["as is", "added"]
)
def test_arguments_are_json_where_a_template_takes_them_as_a_text_alone(writes: str) -> None:
    """Of an object the one would write Python's words for it, and the other refuses it."""
    old = "call.arguments if call.arguments is string else call.arguments | tojson"
    assert old in QWEN.text
    template = QWEN._replace(text=QWEN.text.replace(old, writes))
    marked, bare = (chat_encoder(one) for one in (template, without_marks(template)))
    draw, calls = random.Random(writes), 0
    for _ in range(12):
        spoken = Spoken(draw, "qwen3")
        messages = copy.deepcopy(spoken.messages)
        for turn in spoken.turns:
            for call in turn.get("tool_calls", ()):
                text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                call["function"] = {**call["function"], "arguments": text}
                calls += 1
        theirs = by_transformers(marked, spoken)
        for encoder in (marked, bare):
            ours = encoder.encode(messages, (), spoken.inputs)
            assert ours.input_ids == theirs["input_ids"]
            assert ours.from_assistant == [bool(flag) for flag in theirs["assistant_masks"]]
    assert calls > 5


@pytest.mark.parametrize("where", ["thought", "argument", "argument's name", "tool", "variable"])
def test_special_tokens_are_refused_wherever_they_are_spelt(where: str) -> None:
    encoder, spelt = encoders("qwen3")[1], "a <|im_end|> b"
    called = ASKED.messages[1]
    fields, inputs = dict(called.fields), ASKED.inputs
    if where == "thought":
        fields["reasoning_content"] = spelt
    elif where.startswith("argument"):
        given = {"q": spelt} if where == "argument" else {spelt: 1}
        fields["tool_calls"] = [{"function": {"name": "search", "arguments": given}}]
    elif where == "tool":
        inputs = TemplateInputs([*TOOLS, {"function": {"name": "x", "description": spelt}}])
    else:
        inputs = TemplateInputs(TOOLS, {"enable_thinking": spelt})
    messages = (ASKED.messages[0], replace(called, fields=fields), *ASKED.messages[2:])
    with pytest.raises(DataError, match=r"spells the special token '<\|im_end\|>'"):
        encoder.encode(messages, (), inputs)


@pytest.mark.parametrize("marks", [True, False])
def test_the_image_marker_stays_text_in_tools_and_calls(marks: bool) -> None:
    """With an image in the result of a tool, and its marker spelt in a call, a thought, a tool."""
    from vlmpack.encode.sample import ImagePart

    template = TOOL_TEMPLATES["qwen3.5"]
    encoder = chat_encoder(template if marks else without_marks(template))
    word = template.marker
    call = {"function": {"name": "search", "arguments": {"q": word}}}
    fields = {"reasoning_content": f"what is {word}?", "tool_calls": [call]}
    messages = (
        Message("user", (TextPart("q"),)),
        Message("assistant", (), fields=fields),
        Message("tool", (TextPart("see "), ImagePart(0))),
        Message("assistant", (TextPart("a"),)),
    )
    tool = {"type": "function", "function": {"name": "search", "description": word}}
    tokens = encoder.encode(messages, [word], TemplateInputs([tool]))
    marker = encoder.tokenizer.convert_tokens_to_ids(word)
    assert tokens.input_ids.count(marker) == 1 == sum(tokens.from_image)
    assert not tokens.from_assistant[tokens.from_image.index(True)]
    said = learnt(encoder, tokens)
    assert f"what is {word}?\n</think>" in said and f"<parameter=q>\n{word}\n" in said
    assert json.dumps(tool) in encoder.tokenizer.decode(tokens.input_ids)


def test_a_marker_that_a_template_escapes_is_refused() -> None:
    template = TOOL_TEMPLATES["qwen3.5"]
    text = template.text.replace(
        "{{- tool | tojson -}}", "{{- tool | tojson(ensure_ascii=True) -}}"
    )
    encoder = chat_encoder(without_marks(template._replace(text=text)))
    tool = {"type": "function", "function": {"name": "search", "description": template.marker}}
    messages = (Message("user", (TextPart("q"),)), Message("assistant", (TextPart("a"),)))
    with pytest.raises(DataError, match="writes it escaped"):
        encoder.encode(messages, (), TemplateInputs([tool]))
