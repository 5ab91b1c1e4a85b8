"""The layout of a source is settled where one fits; two are both named, and nobody guesses."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest

from vlmpack.data.columns.form import AS_TURNS, RecordForm, find_form, read_columns, read_turns
from vlmpack.data.columns.layouts import LAYOUTS, Layout, fitting, layout_named
from vlmpack.errors import DataError, RecipeError

TURNS = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
RECORDS: dict[str, dict[str, Any]] = {
    "messages": {"messages": TURNS},
    "llava": {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
    "preference": {"prompt": "Q", "chosen": "A", "rejected": "B"},
    "query-response": {"query": "Q", "response": "A"},
    "prompt-completion": {"prompt": "Q", "completion": "A"},
    "alpaca": {"instruction": "Q", "output": "A"},
    "vqa": {"question": "Q", "answer": "A"},
    "caption": {"image": "0.png", "text": "A"},
    "cauldron": {"texts": [{"user": "Q", "assistant": "A"}]},
    "rounds": {"conversation": [{"human": "Q", "assistant": "A"}]},
}
"""A record of each layout with nothing else in it."""
CHAT = {"messages", "llava"}


def distinct() -> list[Layout]:
    """The layouts without aliases."""
    return [each for each in map(layout_named, LAYOUTS) if each.alias_of is None]


def test_every_layout_is_known_by_its_name_and_found_by_its_keys() -> None:
    assert RECORDS.keys() == {layout.name for layout in distinct()}
    assert all(layout_named(name).name == name for name in LAYOUTS)
    for name, record in RECORDS.items():
        form = find_form([record], None, "here")
        assert form == (AS_TURNS if name in CHAT else RecordForm(name))
        said = read_turns(record, form)
        assert said.turns[0].role == "user" and not said.unknown_keys
        chosen = find_form([record], name, "here")
        assert read_turns(record, chosen) == said
        assert pickle.loads(pickle.dumps(chosen)) == chosen


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(sorted(RECORDS), 2)))
def test_a_record_of_two_layouts_is_refused_with_both_readings(one: str, other: str) -> None:
    """Of each pair, every way to tell the one beside every way to tell the other."""
    pairs = itertools.product(layout_named(one).signatures, layout_named(other).signatures)
    tried = 0
    for mine, theirs in pairs:
        keys = mine.keys | theirs.keys
        if not (mine.fits(keys) and theirs.fits(keys)):
            continue  # {messages, chosen, rejected} is a pair of messages, and so on
        tried += 1
        with pytest.raises(RecipeError) as caught:
            find_form([dict.fromkeys(keys, "x")], None, "train.jsonl")
        [problem] = caught.value.problems
        assert problem.startswith("train.jsonl can be read as ")
        for name in (one, other):
            assert f"{name} ('" in problem and f"data.columns: {name}" in problem
    assert tried


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(sorted(RECORDS), 2)))
def test_what_the_recipe_says_is_read_and_the_rest_named(one: str, other: str) -> None:
    both = RECORDS[other] | RECORDS[one]
    if len(fitting(both)) < 2:
        pytest.fail("these stand together, and nobody says which is meant")
    form = find_form([both], one, "here")
    both.pop("image" if one != "caption" else "", None)
    if (one, other) == ("alpaca", "preference"):
        with pytest.raises(DataError, match="has its answer twice"):
            read_turns(both, form)
        return
    said = read_turns(both, form)
    assert said.turns == read_turns(RECORDS[one], form).turns
    own = layout_named(one).columns
    beside = {key for key in RECORDS[other] if key not in own | {"image"}}
    assert {*said.unknown_keys} == beside


@pytest.mark.parametrize("name", sorted({*RECORDS} - CHAT))
@pytest.mark.parametrize("later", ["messages", "llava", "vqa"])
def test_a_later_record_of_two_layouts_is_bad(name: str, later: str) -> None:
    """The first records had one; nobody says which of the two this one means."""
    if name == later:
        return
    form = find_form([RECORDS[name]], None, "here")
    with pytest.raises(DataError, match=r"can be read as .* and as ") as caught:
        read_turns(RECORDS[name] | RECORDS[later], form)
    assert caught.value.error_class == "schema"
    assert f"data.columns: {name}" in caught.value.reason


def test_turns_of_either_kind_may_stand_in_one_file_each_record_with_its_own() -> None:
    records = [RECORDS["messages"], RECORDS["llava"]]
    form = find_form(records, None, "here")
    assert form == AS_TURNS and find_form([], None, "here") == AS_TURNS
    assert read_turns(records[0], form).turns == read_turns(records[1], form).turns
    with pytest.raises(RecipeError, match="several layouts, vqa and messages"):
        find_form([RECORDS["vqa"], RECORDS["messages"]], None, "here")
    with pytest.raises(DataError, match="exactly one of 'messages' and 'conversations'"):
        read_turns(RECORDS["vqa"], form)


def test_a_pair_beside_turns_or_an_instruction_is_theirs() -> None:
    answers = {"chosen": "A", "rejected": "B"}
    for record in ({"messages": TURNS[:1]}, {"instruction": "Q"}):
        form = find_form([record | answers], None, "here")
        said = read_turns(record | answers, form)
        assert [turn[0].text for turn in said.answers] == ["A", "B"]
        assert [turn.text for turn in said.turns] == ["Q"]
    ultra = {"prompt": "Q", "messages": TURNS, "chosen": TURNS, "rejected": TURNS}
    with pytest.raises(RecipeError, match=r"as messages .* and as preference"):
        find_form([ultra], None, "here")


def test_nothing_that_fits_lists_what_there_is_and_what_would_do() -> None:
    with pytest.raises(RecipeError) as caught:
        find_form([{"frage": "Q", "antwort": "A", "leer": None}], None, "train.csv")
    [problem] = caught.value.problems
    assert "which have the keys 'antwort', 'frage'. Expected" in problem
    assert all(f"{name} (" in problem for name in RECORDS) and "data.columns: {" in problem


def test_columns_have_roles() -> None:
    record = {"frage": "Q", "antwort": "A", "bild": "0.png", "messages": TURNS, "answer": "no"}
    mapping = {"question": "frage", "answer": "antwort", "image": "bild"}
    form = find_form([record], mapping, "here")
    assert form == find_form([record], {"layout": "vqa", **mapping}, "here")
    assert form.columns == (("answer", "antwort"), ("image", "bild"), ("question", "frage"))
    assert "vqa (VQA), answer from 'antwort'" in form.words
    said = read_turns(record, form)
    assert [turn.text for turn in said.turns] == ["Q", "A"] and said.images == ("0.png",)
    assert {*said.unknown_keys} == {"answer", "messages"}
    swapped = {"question": "A", "answer": "Q"}
    other = find_form([swapped], {"question": "answer", "answer": "question"}, "here")
    assert [turn.text for turn in read_turns(swapped, other).turns] == ["Q", "A"]
    with pytest.raises(
        DataError, match=r"'answer' is a list.*'antwort'.*by data\.columns"
    ) as caught:
        read_turns({"frage": "Q", "antwort": [3]}, form)
    assert "'question' is the column 'frage'" in caught.value.reason
    images = find_form([{"messages": TURNS, "bilder": ["a"]}], {"images": "bilder"}, "here")
    assert images.layout == "chat" and not images.is_chosen


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ("vqqa", "'vqqa' is no layout; did you mean 'vqa'"),
        ({"layout": "chat"}, "'chat' is no layout"),
        ({"questoin": "frage"}, "'questoin' is no role; did you mean 'question'"),
        ({"layout": "vqa", "query": "frage"}, "'query' is no role; expected"),
        ({"question": "frage", "completion": "antwort"}, "no layout has all of the roles"),
        ({"question": "frage", "answer": "anwort"}, "the column 'anwort', and none of the first"),
        ({"question": "frage", "answer": "frage"}, "the column 'frage' has two roles"),
        ("alpaca", "no layout fits its records.*Expected alpaca"),
        ({"question": "frage"}, "no layout fits its records.*'question'"),
    ],
)
def test_columns_that_name_what_is_not_there(columns: Any, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        find_form([{"frage": "Q", "antwort": "A"}], columns, "here")


def test_forms_that_read_otherwise_have_another_digest() -> None:
    forms = [
        AS_TURNS,
        RecordForm("messages", (), True),
        RecordForm("vqa"),
        RecordForm("vqa", (), True),
        RecordForm("vqa", (("answer", "a"),), True),
        RecordForm("vqa", (("answer", "b"),), True),
    ]
    assert len({form.digest for form in forms}) == len(forms)
    assert RecordForm("vqa").digest == "52c0cc91eeb4bc5d", "stored parts would be made again"


def test_columns_of_a_table_are_read_where_they_say_something() -> None:
    names = ["question", "answer", "image", "source", "kto_tag", "videos", "imgae", "q", "text"]
    form = find_form([{"question": "Q", "answer": "A"}], None, "here")
    found = read_columns(form, names)
    # An image and a text would be a caption as well: a row that has both is refused.
    assert found == ["question", "answer", "image", "kto_tag", "videos", "imgae", "text"]
    chosen = RecordForm("vqa", (("question", "q"),), True)
    assert read_columns(chosen, names) == ["answer", "image", "kto_tag", "videos", "imgae", "q"]
    assert read_columns(AS_TURNS, ["messages", "prompt", "images"]) == ["messages", "images"]


def test_keys_beside_a_layout_are_counted_or_refused_as_beside_turns() -> None:
    form = RecordForm("vqa")
    assert read_turns(RECORDS["vqa"] | {"source": "web"}, form).unknown_keys == ("source",)
    for key, reason in {
        "history": "turns are written out",
        "imgae": "did you mean 'image'",
    }.items():
        with pytest.raises(DataError, match=reason):
            read_turns(RECORDS["vqa"] | {key: [["a", "b"]]}, form)
