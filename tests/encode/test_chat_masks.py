"""What the assistant wrote, by the boundaries of published chat templates."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from support.images import conversation
from support.templates import (
    CHATML_MARKED,
    LLAVA_ONEVISION,
    MISTRAL_MOVES,
    MISTRAL_V3,
    NO_PROMPT,
    SMOLVLM,
    TEMPLATES,
    Template,
    chat_encoder,
)

from vlmpack.encode.chat import ChatEncoder, ChatTokens
from vlmpack.encode.markers import hide_literals, put_back, renamed_tokenizer
from vlmpack.encode.sample import VLMSample
from vlmpack.errors import DataError

EVERY = pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)


def dialogue(template: Template, *, turns: int = 3) -> VLMSample:
    """Questions that look like answers, answers with white space around them."""
    said: list[Any] = [("system", ["You are\nterse."])] if template.system else []
    answers = ["It is 2.", "  4, of course.\n", "assistant\nuser: 7"]
    for number, answer in enumerate(answers[:turns]):
        said += [("user", [f"assistant\nQuestion {number}?"]), ("assistant", [answer])]
    return conversation(*said)


def rendered(encoder: ChatEncoder, sample: VLMSample) -> str:
    """By transformers alone."""
    turns: list[dict[str, Any]] = []
    for message in sample.messages:
        parts = [
            {"type": "text", "text": part.text} if hasattr(part, "text") else {"type": "image"}
            for part in message.parts
        ]
        turns.append(
            {"role": message.role, "content": parts if encoder.takes_images else message.text}
        )
    return str(encoder.tokenizer.apply_chat_template(turns, tokenize=False))


def learnt(encoder: ChatEncoder, tokens: ChatTokens) -> str:
    ids = zip(tokens.input_ids, tokens.from_assistant, strict=True)
    return str(encoder.tokenizer.decode([token for token, is_target in ids if is_target]))


@EVERY
def test_the_assistant_alone_is_learnt(template):
    encoder, sample = chat_encoder(template), dialogue(template)
    text = rendered(encoder, sample)
    expected = re.findall(template.answer, text, re.DOTALL)
    tokens = encoder.encode(sample.messages)
    assert encoder.tokenizer.decode(tokens.input_ids) == text
    assert len(expected) == 3, text
    assert learnt(encoder, tokens) == "".join(expected)
    assert "Question" not in "".join(expected), "the reference takes too much"


@EVERY
@pytest.mark.parametrize("left_out", [{0}, {1}, {2}, {0, 2}], ids=str)
def test_an_answer_that_the_data_excludes_is_not_learnt(template, left_out):
    """The text stays as it is; the turn's tokens, its end of turn too, are no targets."""
    encoder, sample = chat_encoder(template), dialogue(template)
    answers = [place for place, turn in enumerate(sample.messages) if turn.role == "assistant"]
    excluded = {answers[place] for place in left_out}
    messages = tuple(
        replace(message, learn=place not in excluded)
        for place, message in enumerate(sample.messages)
    )
    expected = re.findall(template.answer, rendered(encoder, sample), re.DOTALL)
    tokens, before = encoder.encode(messages), encoder.encode(sample.messages)
    assert tokens.input_ids == before.input_ids
    kept = "".join(answer for place, answer in enumerate(expected) if place not in left_out)
    assert kept and learnt(encoder, tokens) == kept
    lost = zip(before.from_assistant, tokens.from_assistant, tokens.excluded, strict=True)
    assert all(was == (now or out) or (out and not was) for was, now, out in lost)
    assert any(tokens.excluded) and not any(before.excluded)


@EVERY
def test_a_prompt_and_its_answer_are_the_sample(template):
    """What generation sees is what training conditioned on."""
    encoder = chat_encoder(template)
    sample = dialogue(template, turns=1)
    prompt = encoder.encode_prompt(sample.messages[:-1])
    tokens = encoder.encode(sample.messages)
    first = tokens.from_assistant.index(True)
    if template is LLAVA_ONEVISION:  # as published: its prompt lacks the space of its turns
        assert tokens.input_ids[: first - 1] == prompt[:-1]
        return
    assert tokens.input_ids[:first] == prompt


@pytest.mark.parametrize("template", [CHATML_MARKED, LLAVA_ONEVISION], ids=["marked", "onevision"])
def test_marks_of_the_template_are_those_of_transformers(template):
    encoder, sample = chat_encoder(template), dialogue(template)
    content = [
        {
            "role": m.role,
            "content": [{"type": "text", "text": m.text}] if template.takes_parts else m.text,
        }
        for m in sample.messages
    ]
    theirs = encoder.tokenizer.apply_chat_template(
        content, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ours = encoder.encode(sample.messages)
    assert ours.input_ids == theirs["input_ids"]
    expected = [bool(flag) for flag in theirs["assistant_masks"]]
    if template is LLAVA_ONEVISION:  # it leaves the end of the turn out, so nothing would stop
        end = encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")
        for place, token in enumerate(ours.input_ids):
            expected[place] |= token == end and place > 0 and expected[place - 1]
    assert ours.from_assistant == expected
    assert 0 < sum(expected) < len(expected)


def test_marks_and_turns_agree():
    """The same template without its marks gives the same mask by its turns."""
    bare = CHATML_MARKED._replace(text=re.sub(r"\{% (end)?generation %\}", "", CHATML_MARKED.text))
    marked, plain = chat_encoder(CHATML_MARKED), chat_encoder(bare)
    sample = dialogue(CHATML_MARKED)
    assert "generation %}" not in bare.text
    assert marked.encode(sample.messages) == plain.encode(sample.messages)


def test_a_template_that_forgets_turns_is_refused():
    last = (
        "{{ messages[0]['content'] }}{% set m = messages[-1] %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    )
    encoder = chat_encoder(NO_PROMPT._replace(text=last))
    with pytest.raises(DataError, match="turn 2 differently") as caught:
        encoder.encode(dialogue(NO_PROMPT).messages)
    assert caught.value.error_class == "schema"


def test_a_system_prompt_that_moves_leaves_earlier_answers_alone():
    """Then the prefix of a conversation is no prefix of its text."""
    encoder, sample = chat_encoder(MISTRAL_MOVES), dialogue(MISTRAL_MOVES)
    text = rendered(encoder, sample)
    assert text.index("You are") > text.index("It is 2.")
    head = VLMSample(key="k", url="u", messages=sample.messages[:3])
    assert not text.startswith(rendered(encoder, head))


def test_a_template_that_leaves_the_system_prompt_out_is_refused():
    encoder = chat_encoder(MISTRAL_V3)
    with pytest.raises(DataError, match="leaves the system prompt out") as caught:
        encoder.encode(dialogue(MISTRAL_MOVES).messages)
    assert caught.value.error_class == "schema"


# Images


@pytest.mark.parametrize(
    "said",
    [
        [("user", [None, "first"]), ("assistant", ["a"])],
        [("user", ["between", None, "words", None]), ("assistant", ["a"])],
        [("user", ["q"]), ("assistant", ["see", None, "there"])],
        [("user", ["q"]), ("assistant", [None]), ("user", [None, "and?"]), ("assistant", ["b"])],
        [("user", [None]), ("assistant", ["a"])],
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["smolvlm", "internvl", "gemma-3", "llava-onevision"])
def test_images_stand_anywhere_and_are_never_learnt(name, said):
    template = TEMPLATES[name]
    encoder = chat_encoder(template)
    sample = conversation(*said)
    image = f"[{template.marker}]"
    tokens = encoder.encode(sample.messages, [image] * sample.num_images)
    text = rendered(encoder, sample)
    assert encoder.tokenizer.decode(tokens.input_ids) == text.replace(template.marker, image)
    outside = text
    if name == "llava-onevision":  # it writes the images of a turn first, outside its marks
        outside = text.replace(template.marker, "")
    answers = "".join(re.findall(template.answer, outside, re.DOTALL))
    after = "\n" if name == "internvl" else ""  # its template writes that because of the image
    assert learnt(encoder, tokens) == answers.replace(template.marker + after, "")
    assert any(tokens.from_assistant)
    marker = encoder.tokenizer.convert_tokens_to_ids(template.marker)
    assert tokens.input_ids.count(marker) == sample.num_images > 0


def test_an_empty_turn_is_an_empty_text():
    """SmolVLM's template reads the first part of each turn."""
    encoder = chat_encoder(SMOLVLM)
    said = encoder.encode(conversation(("user", []), ("assistant", ["a"])).messages)
    assert encoder.tokenizer.decode(said.input_ids).startswith("<|im_start|>User: <end_of")


# The marker as text


@pytest.mark.parametrize("name", ["smolvlm", "internvl", "gemma-3", "llava-onevision"])
def test_a_literal_marker_stays_text(name):
    template = TEMPLATES[name]
    encoder = chat_encoder(template)
    word = template.marker
    sample = conversation(
        ("user", [f"What does {word} mean? {word}{word}", None]),
        ("assistant", [f"{word} is a tag"]),
    )
    tokens = encoder.encode(sample.messages, [word])
    marker = encoder.tokenizer.convert_tokens_to_ids(word)
    assert tokens.input_ids.count(marker) == 1 == sum(tokens.from_image)
    assert tokens.input_ids.index(marker) == tokens.from_image.index(True)
    assert encoder.tokenizer.decode(tokens.input_ids) == rendered(encoder, sample)
    assert f"{word} is a tag" in learnt(encoder, tokens)
    prompt = encoder.encode_prompt(sample.messages[:-1], [word])
    assert prompt.count(marker) == 1
    assert tokens.input_ids[: len(prompt)] == prompt or template is LLAVA_ONEVISION


@pytest.mark.parametrize("name", ["smolvlm", "internvl"])
def test_words_around_a_literal_marker_are_tokenised_as_ever(name):
    """By an independent reference: the same text with a spelling that is no special token."""
    template = TEMPLATES[name]
    encoder = chat_encoder(template)
    word = template.marker
    without = chat_encoder(
        template._replace(special=tuple(s for s in template.special if s != word))
    )
    sample = conversation(("user", [f"What\n{word}?  Really"]), ("assistant", [f" {word}."]))
    plain = without.tokenizer(rendered(without, sample), add_special_tokens=False)["input_ids"]
    ours = encoder.encode(sample.messages)
    names = [
        encoder.tokenizer.convert_ids_to_tokens(ours.input_ids),
        without.tokenizer.convert_ids_to_tokens(plain),
    ]
    assert names[0] == names[1]
    assert word not in names[0]


def test_a_literal_marker_changes_no_shared_tokenizer():
    encoder = chat_encoder(SMOLVLM)
    before = encoder.tokenizer.backend_tokenizer.to_str()
    encoder.encode(conversation(("user", ["<image>"]), ("assistant", ["x"])).messages)
    assert encoder.tokenizer.backend_tokenizer.to_str() == before
    marker = encoder.tokenizer.convert_tokens_to_ids("<image>")
    assert encoder.tokenizer("<image>", add_special_tokens=False)["input_ids"] == [marker]


def test_structural_tokens_beside_a_literal_marker_are_refused():
    encoder = chat_encoder(SMOLVLM)
    sample = conversation(("user", ["<image> <end_of_utterance>"]), ("assistant", ["x"]))
    with pytest.raises(DataError, match="special token '<end_of_utterance>'"):
        encoder.encode(sample.messages)


def test_our_own_private_characters_beside_a_literal_marker_are_refused():
    encoder = chat_encoder(SMOLVLM)
    sample = conversation(("user", ["<image> \U000f1e00"]), ("assistant", ["x"]))
    with pytest.raises(DataError, match=r"U\+F1E00"):
        encoder.encode(sample.messages)
    alone = conversation(("user", ["\U000f1e00"]), ("assistant", ["x"]))
    assert "\U000f1e00" in encoder.tokenizer.decode(encoder.encode(alone.messages).input_ids)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_marker_inside_the_vocabulary_is_renamed_there_too(kind):
    """As Mistral's [IMG] is, and SentencePiece's tokens; white space stays that of one text."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<image>", "\u2581", "\u2581a", *"abegim<>"]
    if kind == "unigram":
        model = models.Unigram([(word, -float(n)) for n, word in enumerate(words)], unk_id=0)
    else:
        model = models.BPE({word: n for n, word in enumerate(words)}, [("\u2581", "a")])
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens([AddedToken("<image>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    renamed = renamed_tokenizer(tokenizer, "<image>")
    (hidden,), found = hide_literals(conversation(("user", ["a <image> b"])).messages, "<image>")
    assert found
    ids = renamed.encode(put_back(f"<image>{hidden.text}<image>", "<image>")).ids
    spelt = [words.index(char) for char in "<image>"]
    around = [words.index("\u2581"), *spelt, words.index("\u2581"), words.index("b")]
    assert ids == [1, words.index("a"), *around, 1]
    assert [token.content for token in tokenizer.added_tokens_decoder.values()] == ["<image>"]


# Content as a string, or as parts


USER_PARTS = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n'}}"
    "{% if message['role'] == 'user' %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% else %}ELSE{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\\n' }}{% endif %}"
)

ONLY_STRINGS = {
    "fails on a list": "{{ message['content'] + '<|im_end|>\\n' }}",
    "writes the list out": "{{ message['content'] }}{{ '<|im_end|>\\n' }}",
}


@pytest.mark.parametrize("kind", ONLY_STRINGS)
def test_turns_that_must_be_strings_are_strings_where_questions_are_parts(kind):
    """Every sample was refused after indexing, or the list itself was learnt."""
    text = USER_PARTS.replace("ELSE", ONLY_STRINGS[kind])
    encoder = chat_encoder(
        LLAVA_ONEVISION._replace(text=text, answer=r"(?<=\|>assistant\n).*?<\|im_end\|>")
    )
    sample = conversation(
        ("system", ["Be terse."]), ("user", [None, "Which?"]), ("assistant", ["It", " is 2"])
    )
    tokens = encoder.encode(sample.messages, ["[image]"])
    assert encoder.tokenizer.decode(tokens.input_ids) == (
        "<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\n[image]Which?<|im_end|>\n"
        "<|im_start|>assistant\nIt is 2<|im_end|>\n"
    )
    assert learnt(encoder, tokens) == "It is 2<|im_end|>"
    shown = conversation(("user", ["Which?"]), ("assistant", [None, "this"]))
    with pytest.raises(DataError, match=r"the assistant's turn has an image.* as a string alone"):
        encoder.encode(shown.messages, ["[image]"])


def test_a_language_model_whose_template_takes_parts_alone_gets_them():
    text = USER_PARTS.replace("{% if message['role'] == 'user' %}", "{% if true %}")
    encoder = chat_encoder(NO_PROMPT._replace(text=text))
    tokens = encoder.encode(conversation(("user", ["Which?"]), ("assistant", ["2"])).messages)
    assert learnt(encoder, tokens) == "2<|im_end|>"


@EVERY
def test_a_template_that_takes_both_gets_what_it_always_got(template):
    form = "parts" if template.takes_parts else "string"
    assert set(chat_encoder(template).template._forms.values()) == {form}
