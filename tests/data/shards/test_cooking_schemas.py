"""Both schemas give the same sample, and every mismatch is named with both numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlmpack.data.columns.chat import chat_turns
from vlmpack.data.shards.naming import MEANT_ELSEWHERE
from vlmpack.data.shards.samples import CookedText, cook_text
from vlmpack.encode.sample import ImagePart, TextPart
from vlmpack.errors import DataError


def cooked(document: Any, *fields: str, key: str = "dir/k7") -> CookedText:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    return cook_text(key, "s.tar", data, ("json", *fields))


def chat(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def llava(*turns: tuple[str, str], **rest: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in turns], **rest}


IMAGE = {"type": "image"}


def named(name: str) -> dict[str, str]:
    return {"type": "image", "image": name}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_both_schemas_give_the_same_messages() -> None:
    one = cooked(
        chat(("system", "S"), ("user", [IMAGE, text("\nQ"), IMAGE]), ("assistant", "A")),
        "0.jpg",
        "1.png",
    )
    two = cooked(
        llava(
            ("system", "S"), ("human", "<image>\nQ<image>"), ("gpt", "A"), images=["0.jpg", "1.png"]
        ),
        "0.jpg",
        "1.png",
    )
    assert one.sample.messages == two.sample.messages
    assert one.image_fields == two.image_fields == ("0.jpg", "1.png")
    assert one.sample.messages[1].parts == (ImagePart(0), TextPart("\nQ"), ImagePart(1))
    assert one.sample.num_images == 2


def test_a_literal_marker_in_chat_text_stays_text() -> None:
    sample = cooked(chat(("user", "what is <image>?"), ("assistant", "a tag"))).sample
    assert sample.messages[0].parts == (TextPart("what is <image>?"),)
    assert sample.num_images == 0


IMAGES_ANYWHERE: list[dict[str, Any]] = [
    chat(
        ("system", [IMAGE, text("S")]),
        ("user", [text("a"), IMAGE, text("b"), IMAGE]),
        ("assistant", [text("c"), IMAGE]),
        ("user", "d"),
        ("assistant", "e"),
    ),
    llava(
        ("system", "<image>S"),
        ("human", "a<image>b<image>"),
        ("gpt", "c<image>"),
        ("human", "d"),
        ("gpt", "e"),
    ),
]


@pytest.mark.parametrize("document", IMAGES_ANYWHERE, ids=["messages", "conversations"])
def test_images_stand_in_any_turn_before_between_and_after_text(document: Any) -> None:
    found = cooked(document, *(f"{n}.jpg" for n in range(4)))
    parts = [message.parts for message in found.sample.messages]
    assert parts == [
        (ImagePart(0), TextPart("S")),
        (TextPart("a"), ImagePart(1), TextPart("b"), ImagePart(2)),
        (TextPart("c"), ImagePart(3)),
        (TextPart("d"),),
        (TextPart("e"),),
    ]
    assert found.image_fields == ("0.jpg", "1.jpg", "2.jpg", "3.jpg")


def test_a_video_that_is_not_there_is_none() -> None:
    found = cooked(llava(("human", "Q"), ("gpt", "A"), video=None, videos=[]))
    assert found.sample.num_images == 0


def test_a_literal_video_marker_in_chat_text_stays_text() -> None:
    found = cooked(chat(("user", "<video>?"), ("assistant", "a tag")))
    assert found.sample.messages[0].parts == (TextPart("<video>?"),)


def test_named_images_follow_the_text_not_the_file() -> None:
    found = cooked(
        chat(("user", [named("1.jpg"), text("and"), named("0.jpg")]), ("assistant", "A")),
        "0.jpg",
        "1.jpg",
    )
    assert found.image_fields == ("1.jpg", "0.jpg")


def test_unnamed_images_take_what_is_left_in_member_order() -> None:
    found = cooked(
        chat(("user", [IMAGE, named("a.jpg"), IMAGE]), ("assistant", "A")),
        "b.jpg",
        "a.jpg",
        "c.jpg",
    )
    assert found.image_fields == ("b.jpg", "a.jpg", "c.jpg")


@pytest.mark.parametrize("name", ["jpg", "k7.jpg", "coco/train/k7.jpg", "K7.JPG"])
def test_llava_names_match_field_or_file_name(name: str) -> None:
    found = cooked(llava(("human", "<image>Q"), ("gpt", "A"), image=name), "jpg")
    assert found.image_fields == ("jpg",)


def test_llava_without_names_takes_member_order() -> None:
    found = cooked(llava(("human", "<image><image>"), ("gpt", "A")), "0.webp", "1.jpeg")
    assert found.image_fields == ("0.webp", "1.jpeg")


def test_task_and_other_members_pass() -> None:
    document = {**chat(("user", "Q"), ("assistant", "A")), "task": "count"}
    found = cooked(document, "txt", "cls")
    assert found.sample.task == "count"
    assert found.num_text_bytes == 2


@pytest.mark.parametrize("schema", [chat, llava], ids=["messages", "conversations"])
def test_a_system_beside_the_turns_is_the_first_turn(schema: Any) -> None:
    user, assistant = ("user", "assistant") if schema is chat else ("human", "gpt")
    turns = [(user, "Q"), (assistant, "A")]
    beside = cooked({**schema(*turns), "system": "S"})
    assert beside.sample.messages == cooked(schema(("system", "S"), *turns)).sample.messages
    assert beside.sample.messages[0].text == "S"
    for absent in (None, []):
        plain = cooked({**schema(*turns), "system": absent})
        assert plain.sample.messages == cooked(schema(*turns)).sample.messages


FLAGS = [("loss", False), ("train", False), ("weight", 0), ("weight", 0.0), ("loss", 0)]


@pytest.mark.parametrize(("name", "value"), FLAGS)
@pytest.mark.parametrize("schema", [chat, llava], ids=["messages", "conversations"])
def test_a_flag_excludes_an_answer(schema: Any, name: str, value: object) -> None:
    user, assistant = ("user", "assistant") if schema is chat else ("human", "gpt")
    document = schema((user, "Q"), (assistant, "draft"), (user, "R"), (assistant, "A"))
    turns = next(iter(document.values()))
    turns[0] |= {name: value, "loss": None, "train": []} if name == "weight" else {name: value}
    turns[1] |= {name: value}
    turns[3] |= {name: type(value)(1)}
    found = cooked(document).sample.messages
    assert [message.learn for message in found if message.role == "assistant"] == [False, True]
    for turn in turns:
        turn[name] = None
    assert all(message.learn for message in cooked(document).sample.messages)


UNREAD_IN_TURNS = [
    ("tool_call_id", "1", "tool_call_id', which would be lost: .* only the tool's have one"),
    ("name", "f", "'name', which would be lost: .* only the tool's have one"),
    ("function_call", {"name": "f"}, "calls are a list here, 'tool_calls'"),
    ("losss", False, r"'losss', which would be lost: did you mean 'loss'"),
    ("wieght", 0, "did you mean 'weight'"),
    ("images", ["0.jpg"], "'images', .*an image is a part of the content"),
    ("zebra", 1, r"'zebra', which would be lost: expected .*loss, .*train, .*weight"),
    ("zebra", {"a": {"b": [None, 0]}}, "'zebra'"),
]


@pytest.mark.parametrize(("name", "value", "reason"), UNREAD_IN_TURNS)
@pytest.mark.parametrize("place", [0, 1], ids=["user", "assistant"])
@pytest.mark.parametrize("schema", [chat, llava], ids=["messages", "conversations"])
def test_a_turns_key_that_is_not_read_is_refused(
    schema: Any, place: int, name: str, value: object, reason: str
) -> None:
    user, assistant = ("user", "assistant") if schema is chat else ("human", "gpt")
    document = schema((user, "Q"), (assistant, "A"))
    turn = next(iter(document.values()))[place]
    turn[name] = value
    with pytest.raises(DataError, match=rf"\[{place}\] has the key .*{reason}") as caught:
        cooked(document)
    assert caught.value.error_class == "schema"
    for absent in (None, [], "", {}, {"a": None, "b": {"c": []}}):
        turn[name] = absent
        assert cooked(document).sample.messages[place].text == "QA"[place]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (
            {**text("Q"), "image": "0.jpg"},
            r"content\[0\] has the key 'image', .* an image is a part",
        ),
        ({**IMAGE, "text": "Q"}, r"content\[0\] has the key 'text', which would be lost: expected"),
        ({**IMAGE, "max_pixels": 3136}, "images.max_pixels of the recipe"),
        ({**IMAGE, "imge": "0.jpg"}, "did you mean 'image'"),
    ],
)
def test_a_parts_key_that_is_not_read_is_refused(part: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        cooked(chat(("user", [part]), ("assistant", "A")), "0.jpg")
    plain = {key: value if key in ("type", part["type"]) else None for key, value in part.items()}
    fields = ("0.jpg",) if part["type"] == "image" else ()
    assert len(cooked(chat(("user", [plain]), ("assistant", "A")), *fields).image_fields) == len(
        fields
    )


@pytest.mark.parametrize("name", [*MEANT_ELSEWHERE, "label", "videos", "audio"])
@pytest.mark.parametrize("schema", [chat, llava], ids=["messages", "conversations"])
def test_a_records_key_that_means_something_elsewhere_is_refused(schema: Any, name: str) -> None:
    user, assistant = ("user", "assistant") if schema is chat else ("human", "gpt")
    document = {**schema((user, "Q"), (assistant, "A")), name: True}
    with pytest.raises(DataError, match=rf"has '{name}'[:;,] ") as caught:
        cooked(document)
    assert caught.value.error_class == "schema"
    for absent in (None, [], "", {"enable_thinking": None}):
        assert cooked({**document, name: absent}).unknown_keys == ()


def test_other_keys_of_a_record_are_counted() -> None:
    document = {**chat(("user", "Q"), ("assistant", "A")), "source": "web", "id": 7, "label": 3}
    assert cooked({**document, "score": 0.5, "none": None}).unknown_keys == (
        "label",
        "score",
        "source",
    )


@pytest.mark.parametrize("schema", [chat, llava], ids=["messages", "conversations"])
def test_images_named_beside_the_turns(schema: Any) -> None:
    """Beside `messages` too the record's names say which image a part shows."""

    def document(**beside: Any) -> dict[str, Any]:
        turns = (
            (("user", [IMAGE, IMAGE, text("Q")]), ("assistant", "A"))
            if schema is chat
            else (("human", "<image><image>Q"), ("gpt", "A"))
        )
        return {**schema(*turns), **beside}

    members = ("0.jpg", "1.jpg")
    assert cooked(document(images=["1.jpg", "0.jpg"]), *members).image_fields == (
        "1.jpg",
        "0.jpg",
    )
    for absent in ({"images": []}, {"image": None, "images": None}):
        assert cooked(document(**absent), *members).image_fields == members
    same = document(images=["0.jpg", "1.jpg"], image=["0.jpg", "1.jpg"])
    assert cooked(same, *members).image_fields == members
    with pytest.raises(DataError, match="'images' and 'image', and not the same ones"):
        cooked(document(images=["0.jpg", "1.jpg"], image="0.jpg"), *members)
    with pytest.raises(DataError, match=r"2 (image parts|<image> markers) .* 1 image named"):
        cooked(document(images=["0.jpg"]), *members)


def test_images_named_by_the_parts_and_otherwise_by_the_record() -> None:
    document = chat(("user", [named("1.jpg"), IMAGE]), ("assistant", "A"))
    members = ("0.jpg", "1.jpg")
    assert cooked({**document, "images": ["1.jpg", "0.jpg"]}, *members).image_fields == (
        "1.jpg",
        "0.jpg",
    )
    with pytest.raises(DataError, match="named by the parts and by the record, and not the same"):
        cooked({**document, "images": ["0.jpg", "1.jpg"]}, *members)


BAD_TURNS: list[tuple[dict[str, Any], str]] = [
    ({"weight": 0.5}, "weight is 0.5. Expected true or false, 1 or 0: .* no weight in between"),
    ({"weight": -1}, "weight is -1. Expected"),
    ({"weight": float("nan")}, "weight is nan. Expected"),
    ({"loss": "false"}, "loss is 'false'. Expected true or false"),
    ({"train": {}}, "train is {}. Expected true or false"),
    ({"train": True, "weight": 0}, "flags that disagree: train True, weight 0"),
    ({"loss": False}, "excludes 1 turn of the assistant, and there is no other, so nothing can"),
]


@pytest.mark.parametrize(("flags", "reason"), BAD_TURNS)
@pytest.mark.parametrize("schema", [chat, llava], ids=["messages", "conversations"])
def test_flags_that_say_neither_yes_nor_no(schema: Any, flags: Any, reason: str) -> None:
    user, assistant = ("user", "assistant") if schema is chat else ("human", "gpt")
    document = schema((user, "Q"), (assistant, "A"))
    next(iter(document.values()))[1] |= flags
    with pytest.raises(DataError, match=reason) as caught:
        cooked(document)
    assert (caught.value.error_class, caught.value.key) == ("schema", "dir/k7")


@pytest.mark.parametrize("schema", [chat, llava], ids=["messages", "conversations"])
def test_a_question_cannot_be_learnt(schema: Any) -> None:
    user, assistant = ("user", "assistant") if schema is chat else ("human", "gpt")
    document = schema((user, "Q"), (assistant, "A"))
    next(iter(document.values()))[0]["train"] = True
    with pytest.raises(DataError, match=r"\[0\].train asks that the user's turn be learnt; only"):
        cooked(document)


BAD: list[tuple[Any, tuple[str, ...], str]] = [
    (
        chat(("user", [IMAGE, IMAGE]), ("assistant", "A")),
        ("0.jpg",),
        "2 image placeholders .* 1 image member ",
    ),
    (
        chat(("user", "Q"), ("assistant", "A")),
        ("0.jpg", "1.jpg"),
        "0 image placeholders .* 2 image members",
    ),
    (chat(("user", [named("9.jpg")]), ("assistant", "A")), ("0.jpg",), "'9.jpg' is no member"),
    (
        llava(("human", "<image>"), ("gpt", "A"), images=["a.jpg", "b.jpg"]),
        ("a.jpg", "b.jpg"),
        "1 <image> marker in .* 2 images named",
    ),
    (llava(("human", "Q"), ("gpt", "A"), image="0.jpg"), ("0.jpg",), "0 <image> markers"),
    (llava(("human", "<image><image>"), ("gpt", "A")), ("0.jpg",), "2 image .* 1 image"),
    (
        llava(("human", "<image>"), ("gpt", "A"), image=7),
        ("0.jpg",),
        "image 0 beside the turns is an int; expected a member",
    ),
    (chat(("user", "Q"), ("critic", "A")), (), r"messages\[1\] has the role 'critic'"),
    (llava(("user", "Q"), ("gpt", "A")), (), "has the from 'user'"),
    (chat(("user", "Q")), (), "none of the 1 turns is the assistant's"),
    (chat(("assistant", "A"), ("user", "Q"), ("assistant", "B")), (), "starts with the assistant"),
    (llava(("gpt", "A"), ("human", "Q"), ("gpt", "B")), (), "starts with the assistant"),
    (
        chat(("user", [{"type": "video", "video": "a.mp4"}]), ("assistant", "A")),
        (),
        r"messages\[0\].content\[0\] names a video \('a.mp4'\); this version trains .*frames",
    ),
    (
        chat(("user", [{"type": "audio"}]), ("assistant", "A")),
        (),
        "type 'audio'; this version trains on images, .* and text: what is said",
    ),
    (chat(("user", [{"type": "image_url"}]), ("assistant", "A")), (), "type 'image_url'; expected"),
    (
        {**chat(("user", "Q"), ("assistant", "A")), "videos": ["a.mp4"]},
        (),
        "the record has 'videos'; .*frames",
    ),
    (llava(("human", "Q"), ("gpt", "A"), video="a.mp4"), (), "the record has 'video'; .*frames"),
    (
        llava(("human", "<video>\nQ"), ("gpt", "A")),
        (),
        r"conversations\[0\] marks a video \(<video>\); .*A literal <video> is written in",
    ),
    (chat(("user", ["words"]), ("assistant", "A")), (), "type None"),
    (chat(("user", 5), ("assistant", "A")), (), "content is an int"),
    (chat(("user", []), ("assistant", "A")), (), "content is an empty list"),
    (chat(("user", [{"type": "text"}]), ("assistant", "A")), (), "text that is missing"),
    ({"messages": []}, (), "empty list"),
    ({"messages": ["x"]}, (), "a string; expected an object"),
    ({"text": "x"}, (), "found 'text'"),
    ({}, (), "found nothing"),
    ({"messages": [], "conversations": []}, (), "found 'messages', 'conversations'"),
    ([1], (), "a list; expected an object"),
    (b"{not json", (), "cannot be parsed"),
    (b"\xff\xfe", (), "cannot be parsed"),
    (
        b'{"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", '
        b'"loss": false, "loss": true}]}',
        (),
        "cannot be parsed: the key 'loss' stands twice in one object",
    ),
    (b'{"messages": [], "messages": []}', (), "the key 'messages' stands twice"),
    (b"[" * 100_000, (), "cannot be parsed"),
    (b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}', (), "surrogate"),
    ({**chat(("user", "Q"), ("assistant", "A")), "task": 3}, (), "'task' is an int"),
    ({**chat(("user", "Q"), ("assistant", "A")), "system": 3}, (), "'system' .* is an int; expec"),
    (
        {**chat(("system", "S"), ("user", "Q"), ("assistant", "A")), "system": "T"},
        (),
        r"'system' beside the turns, and messages\[0\] is the system's too; expected one",
    ),
    (
        llava(("human", "Q"), ("system", "S"), ("gpt", "A"), system="T"),
        (),
        r"'system' beside the turns, and conversations\[1\] is the system's too",
    ),
]


@pytest.mark.parametrize(("document", "fields", "reason"), BAD)
def test_mismatches_are_schema_errors(document: Any, fields: tuple[str, ...], reason: str) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        cooked(document, *fields)
    error = caught.value
    assert (error.error_class, error.key, error.shard) == ("schema", "dir/k7", "s.tar")


def test_numbered_images_go_by_number_not_by_name() -> None:
    """webdataset writes members sorted by name: 0, 1, 10, 11, 2, ..."""
    members = sorted(f"{number}.jpg" for number in range(12))
    assert members[2] == "10.jpg"
    found = cooked(chat(("user", [IMAGE] * 12), ("assistant", "A")), *members)
    assert found.image_fields == tuple(f"{number}.jpg" for number in range(12))


def test_the_index_of_an_image_is_its_place_or_refused() -> None:
    """As HuggingFaceH4/llava-instruct-mix-vsft writes its parts."""

    def record(*places: object) -> dict[str, Any]:
        parts = [{"index": place, "text": None, "type": "image"} for place in places]
        words = {"index": None, "text": "Q", "type": "text"}
        return chat(("user", [words, parts[0]]), ("assistant", "A"), ("user", [*parts[1:], words]))

    for places in ((0, 1), (0.0, None)):
        found = cooked(record(*places), "0.jpg", "1.jpg")
        assert found.image_fields == ("0.jpg", "1.jpg")
        named_too = chat_turns(record(*places) | {"images": ["a.jpg", "b.jpg"]})
        assert named_too.images == ("a.jpg", "b.jpg")
    for places in ((1, 0), (0, 0), (False, 1), ("0", 1)):
        with pytest.raises(DataError, match="index is"):
            cooked(record(*places), "0.jpg", "1.jpg")
        with pytest.raises(DataError, match="index is"):
            chat_turns(record(*places) | {"images": ["a.jpg", "b.jpg"]})
    with pytest.raises(DataError, match="'index'"):
        cooked(chat(("user", [{"type": "text", "text": "Q", "index": 0}]), ("assistant", "A")))


@pytest.mark.parametrize("depth", [100, 500, 900])
def test_deep_values_of_other_keys_are_read_or_refused(depth: int) -> None:
    """Each as deeply as the parser reads: what looks into them is not to fail sooner."""
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    document = json.dumps(chat(("user", "Q"), ("assistant", "A"))).encode()[:-1]
    assert cooked(document + b',"x":' + deep + b"}").unknown_keys == ("x",)
    with pytest.raises(DataError, match="tools is nested more than 64 levels deep"):
        cooked(document + b',"tools":[' + deep + b"]}")
