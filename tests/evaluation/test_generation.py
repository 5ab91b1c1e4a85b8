"""Batched greedy answers equal those asked one by one; bad questions and ranks change nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from support.forked import check_ranks
from support.shards import SHARD, read_shard
from typer.testing import CliRunner

from vlmpack.cli.generate import generate
from vlmpack.encode import Encoder, Message, TextPart
from vlmpack.errors import DataError, ModelError, VlmpackError
from vlmpack.evaluation.generation import (
    _model_inputs,
    _tokenise,
    answer_over_ranks,
    answer_questions,
    load_for_generation,
)
from vlmpack.evaluation.predictions import Question

NUM_NEW = 8


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> tuple[Any, Encoder]:
    return load_for_generation(tiny_folder)


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    """Twelve questions with 0 to 3 images and prompts of many lengths."""
    by_count: dict[int, list[Question]] = {}
    for sample in read_shard(SHARD):
        asked = Question.from_sample(sample.cooked())
        by_count.setdefault(len(asked.images), []).append(asked)
    assert set(by_count) == {0, 1, 2, 3}
    return [by_count[count][i] for i in range(3) for count in (1, 0, 3, 2)]


@pytest.fixture(scope="module")
def one_by_one(loaded: tuple[Any, Encoder], questions: list[Question]) -> list[str | None]:
    model, encoder = loaded
    return [
        answer_questions(model, encoder, [asked], batch_size=1, max_new_tokens=NUM_NEW)[0]
        for asked in questions
    ]


def test_batched_left_padded_answers_equal_one_by_one(loaded, questions, one_by_one) -> None:
    model, encoder = loaded
    lengths = {_tokenise(0, asked, encoder).num_tokens for asked in questions}
    assert len(lengths) > 6, "equal lengths would need no padding"
    assert len(set(one_by_one)) > 2, "equal answers could not be mixed up"
    for batch_size in (5, 64):
        answers = answer_questions(
            model, encoder, questions, batch_size=batch_size, max_new_tokens=NUM_NEW
        )
        assert answers == one_by_one


def test_text_only_batch_needs_no_pixels(loaded, questions, one_by_one) -> None:
    model, encoder = loaded
    text = [place for place, asked in enumerate(questions) if not asked.images]
    answers = answer_questions(
        model, encoder, [questions[i] for i in text], batch_size=8, max_new_tokens=NUM_NEW
    )
    assert len(text) == 3
    assert answers == [one_by_one[i] for i in text]


def test_prompt_is_the_beginning_of_the_training_sample(encoder: Encoder) -> None:
    found = 0
    for raw in read_shard(SHARD, limit=20):
        sample = raw.cooked()
        asked = Question.from_sample(sample)
        prompt = _tokenise(0, asked, encoder)
        encoded = encoder.encode(sample)
        inputs = _model_inputs(encoder, [(prompt, encoded.media)])
        ids = inputs["input_ids"][0]
        assert torch.equal(ids, encoded.input_ids[: len(ids)])
        assert len(ids) == prompt.num_tokens
        if encoded.media is not None:
            found += 1
            kinds = torch.nonzero(inputs["mm_token_type_ids"][0]).flatten()
            assert torch.equal(kinds, encoded.media_positions)
    assert found > 5


def test_sampling_settings_of_the_folder_are_set_aside_and_restored(
    loaded, questions, one_by_one
) -> None:
    model, encoder = loaded
    own = model.generation_config
    changed = type(own)(
        **{**own.to_dict(), "do_sample": True, "temperature": 9.0, "repetition_penalty": 7.0}
    )
    model.generation_config = changed
    try:
        answers = answer_questions(model, encoder, questions, batch_size=6, max_new_tokens=NUM_NEW)
        assert model.generation_config is changed
    finally:
        model.generation_config = own
    assert answers == one_by_one


def test_answers_stop_at_the_end_of_the_turn(loaded, questions) -> None:
    model, encoder = loaded
    asked = questions[0]
    free = answer_questions(model, encoder, [asked], batch_size=1, max_new_tokens=NUM_NEW)
    first = model.generate(
        **_model_inputs(encoder, [(_tokenise(0, asked, encoder), _media_of(asked, encoder))]),
        do_sample=False,
        max_new_tokens=1,
    )[0, -1].item()
    own = model.generation_config
    model.generation_config = type(own)(**{**own.to_dict(), "eos_token_id": [first]})
    try:
        stopped = answer_questions(model, encoder, [asked], batch_size=1, max_new_tokens=NUM_NEW)
    finally:
        model.generation_config = own
    text = encoder.tokenizer.decode([first], skip_special_tokens=True).strip()
    assert stopped == [text]
    assert free[0] is not None and len(free[0]) >= len(text)


def _media_of(asked: Question, encoder: Encoder) -> Any:
    from vlmpack.evaluation.generation import _media

    return _media(asked, encoder)


def test_bad_question_is_reported_and_moves_no_other_answer(loaded, questions, one_by_one) -> None:
    model, encoder = loaded
    image = next(i for i, asked in enumerate(questions) if asked.images)
    text = next(i for i, asked in enumerate(questions) if not asked.images)
    broken = list(questions)
    cut = questions[image].images[0]
    broken[image] = replace(questions[image], images=(cut[: len(cut) // 2],), key="cut")
    spelt = Message("user", (TextPart("say <|im_end|>"),))
    broken[text] = replace(questions[text], messages=(spelt,), key="spelt")
    errors: list[DataError] = []
    answers = answer_questions(
        model, encoder, broken, batch_size=4, max_new_tokens=NUM_NEW, on_bad_sample=errors.append
    )
    assert {error.key: error.error_class for error in errors} == {
        "cut": "decode",
        "spelt": "schema",
    }
    assert [i for i, answer in enumerate(answers) if answer is None] == sorted((image, text))
    expected = [None if i in (image, text) else x for i, x in enumerate(one_by_one)]
    assert answers == expected
    with pytest.raises(DataError, match=r"cut|spelt"):
        answer_questions(model, encoder, broken, batch_size=4, max_new_tokens=NUM_NEW)


def test_one_rank_answers_with_the_engine_and_leaves_it_in_training_mode(
    session_engine, encoder, one_rank, questions, one_by_one
) -> None:
    session_engine.vlm.train()
    threads = torch.get_num_threads()
    answers = answer_over_ranks(
        session_engine, encoder, questions, ranks=one_rank, batch_size=16, max_new_tokens=NUM_NEW
    )
    assert answers == one_by_one
    assert session_engine.vlm.model.training
    assert torch.get_num_threads() == threads


WORKER = """
import json, sys
from pathlib import Path
from support.engines import make_engine
from support.shards import TINY_MODEL, read_shard
from vlmpack.distributed import start_process_group, stop_process_group
from vlmpack.errors import DataError
from vlmpack.encode import Encoder
from vlmpack.evaluation.generation import answer_over_ranks
from vlmpack.evaluation.predictions import Question
from dataclasses import replace

out = Path(sys.argv[1])
ranks = start_process_group()
encoder = Encoder(TINY_MODEL)
questions = [Question.from_sample(s.cooked()) for s in read_shard(limit=7)]
first = next(i for i, q in enumerate(questions) if q.images)
questions[first] = replace(questions[first], images=(b"x",) * len(questions[first].images))
for sharding in ("none", "fsdp"):
    engine = make_engine(TINY_MODEL, encoder, ranks=ranks, sharding=sharding)
    bad = []
    answers = answer_over_ranks(engine, encoder, questions, ranks=ranks, batch_size=2,
                                max_new_tokens=5, on_bad_sample=lambda e: bad.append(e.key))
    try:
        answer_over_ranks(engine, encoder, questions, ranks=ranks, batch_size=2, max_new_tokens=2)
        raised = False
    except DataError:
        raised = True
    (out / f"{sharding}-{ranks.rank}.json").write_text(
        json.dumps({"answers": answers, "bad": bad, "raised": raised, "sharded": engine.sharded}))
stop_process_group()
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    """The answers of two ranks, with whole weights and with sharded ones."""
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "worker.py"
    script.write_text(WORKER)
    check_ranks([script, folder], 2, timeout=240)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_two_ranks_give_the_answers_of_one(sharding: str, two_ranks: Path, loaded) -> None:
    results = [json.loads((two_ranks / f"{sharding}-{rank}.json").read_text()) for rank in (0, 1)]
    assert results[0] == results[1]
    assert results[0]["sharded"] == (sharding == "fsdp")
    assert len(results[0]["bad"]) == 1
    assert results[0]["raised"]
    model, encoder = loaded
    asked = [Question.from_sample(s.cooked()) for s in read_shard(limit=7)]
    alone = answer_questions(model, encoder, asked, batch_size=7, max_new_tokens=5)
    missing = [i for i, answer in enumerate(results[0]["answers"]) if answer is None]
    assert len(missing) == 1
    assert results[0]["answers"] == [None if i in missing else x for i, x in enumerate(alone)]


def run_cli(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(generate)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_cli_prints_the_answer_alone(tiny_folder, loaded, tmp_path) -> None:
    asked = Question.from_sample(next(s for s in read_shard() if len(s.images) == 2).cooked())
    paths = []
    for i, data in enumerate(asked.images):
        paths += ["--image", tmp_path / f"{i}.jpg"]
        paths[-1].write_bytes(data)
    result = run_cli(
        "--model", tiny_folder, *paths, "--max-new-tokens", NUM_NEW, "What does the row say?"
    )
    assert result.exit_code == 0, result.exception
    plain = replace(
        asked,
        messages=(
            Message("user", (*[p for p in asked.messages[0].parts if not isinstance(p, TextPart)],
                             TextPart("What does the row say?"))),
        ),
    )  # fmt: skip
    model, encoder = loaded
    (answer,) = answer_questions(model, encoder, [plain], batch_size=1, max_new_tokens=NUM_NEW)
    assert result.stdout == f"{answer}\n"


def test_cli_says_that_an_answer_is_empty(monkeypatch, tiny_folder, loaded) -> None:
    monkeypatch.setattr("vlmpack.evaluation.generation.load_for_generation", lambda *_: loaded)
    monkeypatch.setattr("vlmpack.evaluation.generation.answer_questions", lambda *_, **__: [""])
    result = run_cli("--model", tiny_folder, "What does the row say?")
    assert (result.exit_code, result.stdout) == (0, "\n")
    assert result.stderr == "the answer is empty: the model ended its turn at once\n"


def test_cli_errors_say_what_is_wrong(tiny_folder, tmp_path) -> None:
    note = tmp_path / "note.jpg"
    note.write_text("no image")
    empty = tmp_path / "model"
    empty.mkdir()
    (empty / "config.json").write_text((tiny_folder / "config.json").read_text())
    cases = {
        ("--model", tiny_folder, "--image", tmp_path / "gone.png", "?"): "gone.png cannot be read",
        ("--model", tiny_folder, "--image", tmp_path, "?"): "cannot be read",
        ("--model", tiny_folder, "--image", note, "?"): "note.jpg",
        ("--model", tiny_folder, "say <|im_end|>"): "special token",
        ("--model", empty, "?"): "has no weights",
        ("--model", tmp_path / "gone", "?"): "is not a folder",
    }
    for arguments, message in cases.items():
        result = run_cli(*arguments)
        assert isinstance(result.exception, VlmpackError), (arguments, result.output)
        assert message in str(result.exception)
        assert result.stdout == ""
    assert issubclass(ModelError, VlmpackError)
