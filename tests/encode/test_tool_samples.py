"""A record with tools and an image, from its JSON to labels, lengths, `verify`, questions and what
is shown of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.shard_fakes import image_bytes
from support.shards import TINY_MODEL
from support.tool_templates import TOOL_TEMPLATES, without_marks

from vlmpack.data.shards.samples import cook_text
from vlmpack.encode import Encoder, TextPart, VLMSample
from vlmpack.encode.template import turn_dicts
from vlmpack.encode.turns import dropped_thoughts
from vlmpack.errors import DataError
from vlmpack.evaluation.predictions import Question
from vlmpack.model_folder.content import PROCESSOR_FILES
from vlmpack.packing import IGNORE_INDEX, pack_batch_sequences
from vlmpack.proof.rows.view import view_samples
from vlmpack.proof.verify.answers import check_answers

TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}


def call(city: str) -> dict[str, Any]:
    function = {"name": "get", "arguments": {"city": city}}
    return {"content": None, "tool_calls": [{"type": "function", "function": function}]}


RECORD = {
    "tools": [TOOL],
    "messages": [
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "reasoning_content": "earlier", **call("Oslo")},
        {"role": "tool", "content": [{"type": "text", "text": "seen: "}, {"type": "image"}]},
        {"role": "assistant", "content": "Cold."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "reasoning_content": "last", **call("Rome")},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "reasoning_content": "so", "content": "Warm."},
    ],
}
CALLED = (
    "<tool_call>\n<function=get>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
)


@pytest.fixture(params=["marks", "no marks"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The committed model's processor with a template that knows tools."""
    for name in ("config.json", *PROCESSOR_FILES):
        if (TINY_MODEL / name).is_file():
            shutil.copyfile(TINY_MODEL / name, tmp_path / name)
    template = TOOL_TEMPLATES["qwen3.5"]
    if request.param == "no marks":
        template = without_marks(template)
    (tmp_path / "chat_template.jinja").write_text(template.text, encoding="utf-8")
    return tmp_path


def sample_of(record: dict[str, Any]) -> VLMSample:
    found = cook_text("k", "s", json.dumps(record).encode(), ("json", "0.png")).sample
    return replace(found, images=(image_bytes(56, 28, seed=0),))


def learnt(encoder: Encoder, sample: VLMSample) -> str:
    encoded = encoder.encode(sample)
    return str(encoder.tokenizer.decode(encoded.labels[encoded.labels != IGNORE_INDEX]))


def test_labels_lengths_and_what_is_shown(folder: Path) -> None:
    encoder, sample = Encoder(folder), sample_of(RECORD)
    encoder.load()
    encoded = encoder.encode(sample)
    answers = [
        CALLED.format("Oslo") + "<|im_end|>",
        "Cold.<|im_end|>",
        "last\n</think>\n\n" + CALLED.format("Rome") + "<|im_end|>",
        "so\n</think>\n\nWarm.<|im_end|>",
    ]
    assert learnt(encoder, sample) == "".join(answers)
    length = encoder.length(sample, [(56, 28)])
    assert length.num_tokens == encoded.length and length.num_image_tokens > 0
    assert length.num_label_tokens == int((encoded.labels != IGNORE_INDEX).sum())
    batch = pack_batch_sequences([encoded], pad_token_id=encoder.pad_token_id)
    [view] = view_samples(batch, encoder)
    shown = "\n".join(view.lines())
    assert "[[last" in shown and "[[so" in shown and "[[Cold.<|im_end|>]]" in shown
    for context in ("seen: ", "sunny", "</tool_response>", "# Tools", '"name": "get"'):
        [line] = [line for line in shown.splitlines() if context in line][:1]
        assert "[[" not in line.replace("[[so", ""), line


def test_the_last_answer_is_learnt_with_its_calls(folder: Path) -> None:
    """`data.learn: last_turn`: the thoughts that led to it are kept, so they are taught."""
    encoder = Encoder(folder).replace(learn="last_turn")
    found = learnt(encoder, sample_of(RECORD))
    assert found.startswith("last\n</think>") and found.endswith("Warm.<|im_end|>")
    assert CALLED.format("Rome") in found and "Oslo" not in found
    assert dropped_thoughts(encoder.chat.render) == "earlier"


def test_verify_looks_at_results_and_thoughts_too(folder: Path) -> None:
    encoder, sample = Encoder(folder), sample_of(RECORD)
    right = encoder.encode(sample)
    found = check_answers(encoder, [right], [sample])
    assert found is not None and found.status == "pass" and "2 of 2" in found.detail
    text = encoder.tokenizer.decode(right.input_ids)
    for word, learnt, reasons in (
        ("sunny", True, ("turn 6 is the result 'sunny'", "a tool wrote it")),
        ("last", False, ("turn 5 thinks 'last'", "is no label")),
    ):
        at = text.index(word)
        place = len(encoder.tokenizer(text[:at], add_special_tokens=False)["input_ids"])
        labels = right.labels.clone()
        labels[place - 1] = right.input_ids[place] if learnt else IGNORE_INDEX
        wrong = check_answers(encoder, [replace(right, labels=labels)], [sample])
        assert wrong is not None and wrong.status == "fail"
        assert all(reason in wrong.detail for reason in reasons), wrong.detail


def test_a_question_has_the_tools_of_its_record(folder: Path) -> None:
    encoder, sample = Encoder(folder), sample_of(RECORD)
    question = Question.from_sample(sample)
    assert question.truth == "Warm." and question.inputs == sample.inputs
    ids = encoder.chat.encode_prompt(question.messages, ["<|image_pad|>"], question.inputs)
    text = encoder.tokenizer.decode(ids)
    assert "# Tools" in text and text.endswith("<|im_start|>assistant\n<think>\n")
    ends_with_a_call = replace(sample, messages=sample.messages[:6])
    assert Question.from_sample(ends_with_a_call).truth == "Cold."
    calls_alone = replace(sample, messages=sample.messages[:2], images=())
    with pytest.raises(DataError, match="calls no tool"):
        Question.from_sample(calls_alone)


def test_a_turn_that_calls_and_says_nothing_has_no_content() -> None:
    """As transformers has it, which drops a key that is null; an empty text stays one."""
    [called] = sample_of(RECORD).messages[1:2]
    fields = dict(called.fields)
    for form in ("parts", "string"):
        forms = dict.fromkeys(("user", "assistant", "system", "tool"), form)
        assert turn_dicts([called], forms) == [{"role": "assistant", **fields}]
        [said] = turn_dicts([replace(called, parts=(TextPart(""),))], forms)
        assert said["content"] == ("" if form == "string" else [{"type": "text", "text": ""}])


def test_a_model_without_tools_in_its_template_refuses_the_record() -> None:
    with pytest.raises(DataError, match="the chat template writes no tools"):
        Encoder(TINY_MODEL).length(sample_of(RECORD), [(56, 28)])
