"""Tools, calls, thoughts and variables of records: the same from shards, in both schemas, and from
`data convert`; or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.templates import chat_encoder
from support.tool_templates import TOOL_TEMPLATES, without_marks

from vlmpack.convert import ConvertSettings, convert, open_records
from vlmpack.data.columns.chat import chat_turns
from vlmpack.data.shards.samples import cook_text
from vlmpack.encode.sample import TemplateInputs, VLMSample
from vlmpack.errors import DataError

TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "Weather. \u00e9",
        "parameters": {"type": "object", "properties": {"city": {"type": ["string", "null"]}}},
    },
}
ARGUMENTS = {"city": "Oslo", "days": 3, "b": [True, 1.5]}
CALL = {"id": "123456789", "type": "function", "function": {"name": "get", "arguments": ARGUMENTS}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Oslo?"},
    {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "4 degrees", "tool_call_id": "123456789", "name": "get"},
    {"role": "assistant", "content": "It is cold.", "reasoning_content": "4 is cold."},
]
RECORD = {"messages": TURNS, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True}}


def llava(record: dict[str, Any]) -> dict[str, Any]:
    """The same record in the other schema."""
    roles = {"user": "human", "assistant": "gpt"}
    turns = []
    for turn in record["messages"]:
        rest = {key: value for key, value in turn.items() if key not in ("role", "content")}
        role = roles.get(turn["role"], turn["role"])
        turns.append({"from": role, "value": turn["content"], **rest})
    return {**{k: v for k, v in record.items() if k != "messages"}, "conversations": turns}


def cooked(record: dict[str, Any]) -> VLMSample:
    return cook_text("k", "s", json.dumps(record).encode(), ("json",)).sample


def converted(source: Path, record: dict[str, Any]) -> VLMSample:
    settings = ConvertSettings(
        folder=source / "out", image_root=source, index_dir=source / "i", prefix="x"
    )
    (source / "r.jsonl").write_text(json.dumps(record) + "\n")
    report = convert(open_records(source / "r.jsonl"), settings)
    assert report.samples == 1 and not report.unknown_keys
    return document_of(source / "out" / report.shards[0].name)


def document_of(shard: Path) -> VLMSample:
    import tarfile

    with tarfile.open(shard) as tar:
        [member] = [item for item in tar.getmembers() if item.name.endswith(".json")]
        stream = tar.extractfile(member)
        assert stream is not None
        return cook_text("k", "s", stream.read(), ("json",)).sample


def test_both_schemas_and_convert_give_what_the_record_says(tmp_path: Path) -> None:
    sample = cooked(RECORD)
    assert [turn.role for turn in sample.messages] == ["user", "assistant", "tool", "assistant"]
    assert sample.messages[1].parts == () and sample.messages[2].text == "4 degrees"
    assert sample.messages[1].fields == {"reasoning_content": "I look.", "tool_calls": [CALL]}
    assert sample.messages[2].fields == {"tool_call_id": "123456789", "name": "get"}
    assert sample.messages[3].fields == {"reasoning_content": "4 is cold."}
    assert sample.inputs == TemplateInputs((TOOL,), {"enable_thinking": True})
    (tmp_path / "llava").mkdir()
    found = [
        cooked(llava(RECORD)),
        converted(tmp_path, RECORD),
        converted(tmp_path / "llava", llava(RECORD)),
    ]
    for other in found:
        assert (other.messages, other.inputs) == (sample.messages, sample.inputs)
    # The order of keys is that of the record: a template writes them in it.
    assert list(sample.messages[1].fields["tool_calls"][0]["function"]["arguments"]) == [*ARGUMENTS]


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "mistral", "gemma-4", "hermes"])
def test_what_is_trained_is_what_transformers_makes_of_the_record(name: str) -> None:
    """From the JSON as a user has it, by transformers alone."""
    template = TOOL_TEMPLATES[name]
    turns, variables = [dict(turn) for turn in TURNS], {"enable_thinking": True}
    if name not in ("qwen3", "qwen3.5"):
        variables = {}
        for turn in turns:
            turn.pop("reasoning_content", None)
    record = {"messages": turns, "tools": [TOOL], "chat_template_kwargs": variables}
    for encoder in (chat_encoder(template), chat_encoder(without_marks(template))):
        theirs = chat_encoder(template).tokenizer.apply_chat_template(
            turns, tools=[TOOL], return_dict=True, return_assistant_tokens_mask=True, **variables
        )
        for one in (record, llava(record)):
            sample = cooked(one)
            ours = encoder.encode(sample.messages, (), sample.inputs)
            assert ours.input_ids == theirs["input_ids"]
            assert ours.from_assistant == [bool(flag) for flag in theirs["assistant_masks"]]
            assert 0 < sum(ours.from_assistant) < len(ours.input_ids)


def test_json_in_a_text_is_parsed() -> None:
    """Arguments and tools as OpenAI's files and tables have them: a template would write the text
    with its quotes, and the model would learn to."""
    turns = json.loads(json.dumps(TURNS))
    turns[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(ARGUMENTS)
    texts = {
        "messages": turns,
        "tools": json.dumps([TOOL]),
        "chat_template_kwargs": '{"enable_thinking": true}',
    }
    for read in (cooked, lambda record: chat_turns(record)):
        assert read(texts).inputs == cooked(RECORD).inputs
    assert cooked(texts).messages == cooked(RECORD).messages
    turns[1]["tool_calls"] = json.dumps([CALL])
    assert cooked(texts).messages == cooked(RECORD).messages
    for nothing in ("", None, {}, "{}"):
        turns[1]["tool_calls"] = [{"function": {"name": "get", "arguments": nothing}}]
        [call] = cooked(texts).messages[1].fields["tool_calls"]
        assert call == {"function": {"name": "get", "arguments": {}}}
    turns[1]["tool_calls"] = [{"name": "get", "arguments": '{"a": 1}'}]
    assert cooked(texts).messages[1].fields["tool_calls"] == [
        {"name": "get", "arguments": {"a": 1}}
    ]


def test_what_is_null_or_empty_is_not_there() -> None:
    """As Arrow fills structs."""
    keys = ("tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking", "name")
    for value in (None, [], "", {"a": None}):
        turns = [
            {"role": "user", "content": "Q", **dict.fromkeys(keys, value)},
            {"role": "assistant", "content": "A", **dict.fromkeys(keys, value)},
        ]
        record = {"messages": turns, "tools": None, "chat_template_kwargs": {"a": None}}
        sample = cooked(record)
        assert (
            all(not turn.fields for turn in sample.messages) and sample.inputs == TemplateInputs()
        )


def test_a_table_has_them_as_structs_or_texts(tmp_path: Path) -> None:
    turns = json.loads(json.dumps(TURNS))
    turns[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(ARGUMENTS)
    columns = {"messages": [turns], "tools": [json.dumps([TOOL])]}
    pq.write_table(pa.table(columns | {"source": ["web"]}), tmp_path / "x.parquet")
    [record] = open_records(tmp_path / "x.parquet")
    assert record.value is not None and record.unused == ("source",)
    found = chat_turns(record.value)
    assert found.turns == cooked(RECORD).messages and list(found.inputs.tools) == [TOOL]


def changed(place: int, **values: Any) -> dict[str, Any]:
    turns = json.loads(json.dumps(TURNS))
    turns[place] |= values
    return {"messages": turns}


def calls(*given: Any) -> dict[str, Any]:
    return changed(1, tool_calls=list(given))


DEEP: Any = 1
for _ in range(70):
    DEEP = [DEEP]

REFUSED = [
    (
        changed(0, tool_calls=[CALL]),
        "the key 'tool_calls'.* a turn of the user",
    ),
    (changed(1, name="x"), "'name', which would be lost: .* only the tool's have one"),
    (changed(2, reasoning_content="x"), "only the assistant's have one"),
    (changed(2, content=None), r"messages\[2\].content is missing; expected text"),
    (changed(3, content=None), r"messages\[3\].content is missing; expected text"),
    (changed(2, loss=True), "asks that the tool's turn be learnt"),
    (changed(1, thinking="x"), "has 'reasoning_content' and 'thinking'; expected one of them"),
    (changed(1, reasoning_content=["x"]), "reasoning_content is a list; expected a text"),
    (changed(1, tool_calls=CALL), "tool_calls is an object; expected a list of calls"),
    (changed(1, tool_calls="x"), "tool_calls is text that is no JSON"),
    (calls("get"), r"tool_calls\[0\] is a string; expected an object"),
    (calls({"function": "get"}), "function is a string; expected an object"),
    (calls({"function": {"arguments": {"a": 1}}}), "names no function"),
    (calls({"nam": "get"}), "the key 'nam', which would be lost: did you mean 'name'"),
    (calls({"function": {"name": "f", "args": {"a": 1}}}), "the key 'args'.*'arguments'"),
    (calls({"name": "f", "function": {"name": "f"}}), "a name or arguments outside its 'function'"),
    (calls({"name": "f", "arguments": "x"}), "its arguments is text that is no JSON"),
    (calls({"name": "f", "arguments": "[1]"}), "arguments that are a list; expected an object"),
    (calls({"name": "f", "arguments": '{"a": 1, "a": 2}'}), "'a' stands twice"),
    (calls({"name": "f", "arguments": {"a": DEEP}}), "nested more than 64 levels deep"),
    (calls({"name": "f", "arguments": {"\ud800": 1}}), "half of a surrogate pair"),
    ({**RECORD, "tools": {"a": TOOL}}, "'tools' is an object; expected a list of tools"),
    (
        {**RECORD, "tools": ["get"]},
        r"tools\[0\] is a string; expected an object with its JSON schema",
    ),
    ({**RECORD, "chat_template_kwargs": [1]}, "'chat_template_kwargs' is a list; expected an obj"),
    ({**RECORD, "chat_template_kwargs": {"tools": [1]}}, "'tools', which is no variable"),
    ({**RECORD, "chat_template_kwargs": {"add_generation_prompt": True}}, "is no variable of a"),
    ({**RECORD, "enable_thinking": True}, "it goes into 'chat_template_kwargs', as {'enable_th"),
    ({**RECORD, "functions": [TOOL]}, "tools are 'tools' here"),
]


@pytest.mark.parametrize(("record", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_no_template_takes_is_a_schema_error(record: dict[str, Any], reason: str) -> None:
    for read in (cooked, lambda record: chat_turns(record)):
        with pytest.raises(DataError, match=reason) as caught:
            read(record)
        assert caught.value.error_class == "schema"


def test_openais_switch_for_calls_is_counted_as_unread() -> None:
    record = {**RECORD, "parallel_tool_calls": False}
    document = json.dumps(record).encode()
    assert cook_text("k", "s", document, ("json",)).unknown_keys == ("parallel_tool_calls",)
