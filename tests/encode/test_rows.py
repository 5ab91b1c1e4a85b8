"""Ids behind the embedding's rows, and ids of config.json that the tokenizer does not have."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
from support.families import FAMILIES, tiny_family_folder
from support.recipes import changed, run_settings, write_recipe
from support.shards import TINY_MODEL
from typer.testing import CliRunner

from vlmpack.backends.hf.load import load_model
from vlmpack.cli.app import app
from vlmpack.encode import Encoder, ImagePart, Message, TextPart, VLMSample
from vlmpack.encode.special_tokens import embedding_rows, refuse_beyond
from vlmpack.errors import DataError, ModelError

ROWS = 576
BOXES = ("<|box_start|>", "<|box_end|>")
NAMED = "'<|box_start|>' (id 576), '<|box_end|>' (id 577)"


@pytest.fixture
def folder(tmp_path):
    """A copy of the tiny model that a test may change."""
    return shutil.copytree(TINY_MODEL, tmp_path / "model")


def edit(folder, file, change):
    path = folder / file
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, ensure_ascii=False))


def with_boxes(folder, *, special=False):
    """Two tokens more than the embedding has rows."""

    def add(content):
        kinds = ("single_word", "lstrip", "rstrip", "normalized")
        for id_, text in enumerate(BOXES, ROWS):
            token = {"id": id_, "content": text, "special": special, **dict.fromkeys(kinds, False)}
            content["added_tokens"].append(token)

    edit(folder, "tokenizer.json", add)
    return folder


def sample_with(answer, question="Where?"):
    parts = [Message("user", (TextPart(question),)), Message("assistant", (TextPart(answer),))]
    return VLMSample(key="0", url="", messages=tuple(parts), images=())


@pytest.mark.cases(slow=("qwen2_5_vl", "gemma3", "internvl", "nemotron_h"))
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_config_json_knows_the_rows_of_every_family(name, tmp_path):
    """And no family's ids contradict one another."""
    folder = tiny_family_folder(name, tmp_path)
    assert embedding_rows(folder) == len(load_model(folder).get_input_embeddings().weight)
    Encoder(folder).load()


@pytest.mark.parametrize("special", [False, True])
def test_tokens_that_nothing_uses_are_a_note(folder, caplog, special):
    encoder = Encoder(with_boxes(folder, special=special))
    with caplog.at_level(logging.WARNING, "vlmpack"):
        encoder.load()
    (note,) = caplog.messages
    assert f"ids behind the {ROWS} rows of its embedding: tokens {NAMED}" in note
    sample = sample_with("There.")
    assert max(encoder.encode(sample).input_ids) < ROWS


def test_a_sample_that_uses_one_is_refused_by_name(folder):
    encoder = Encoder(with_boxes(folder))
    for sample in (sample_with(f"{BOXES[0]}(5,5){BOXES[1]}"), sample_with("no", "".join(BOXES))):
        for read in (lambda one: encoder.length(one, ()), encoder.encode):
            with pytest.raises(DataError, match=f"behind its {ROWS} rows: ") as caught:
                read(sample)
            assert caught.value.error_class == "schema"
            assert NAMED in str(caught.value)
    with pytest.raises(DataError, match=r"'<\|box_end\|>'"):
        encoder.chat.encode_prompt((Message("user", (TextPart(BOXES[1]),)),))


def test_without_the_check_such_ids_are_written(folder, monkeypatch):
    """The negative control."""
    monkeypatch.setattr("vlmpack.encode.chat.refuse_beyond", lambda *_: None)
    ids = Encoder(with_boxes(folder)).encode(sample_with("".join(BOXES))).input_ids
    assert {ROWS, ROWS + 1} <= set(ids.tolist())


def test_a_template_that_uses_one_is_the_folders_fault(folder):
    path = with_boxes(folder) / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_end|>", "<|im_end|><|box_start|>"))
    with pytest.raises(ModelError, match=r"use tokens behind them: '<\|box_start\|>' \(id 576\);"):
        Encoder(folder).load()


def test_so_is_an_image_token_behind_the_rows(folder):
    """As after a tokenizer of a larger model was put beside the weights."""

    def shrink(config):
        config["text_config"]["vocab_size"] = 574

    edit(folder, "config.json", shrink)
    with pytest.raises(ModelError, match=r"rows, and .*images use .*'<\|image_pad\|>' \(id 574\)"):
        Encoder(folder).load()


def test_another_token_fills_gaps_where_the_pad_token_is_behind_the_rows(folder):
    edit(with_boxes(folder), "tokenizer_config.json", lambda c: c.update(pad_token=BOXES[0]))
    encoder = Encoder(folder)
    assert encoder.tokenizer.pad_token_id == ROWS
    assert encoder.pad_token_id == encoder.tokenizer.eos_token_id < ROWS
    encoder.load()


@pytest.mark.parametrize(
    ("name", "token", "id_"),
    [
        ("image_token_id", "<|image_pad|>", 574),
        ("video_token_id", "<|video_pad|>", 575),
        ("vision_start_token_id", "<|vision_start|>", 571),
    ],
)
def test_ids_of_config_json_that_are_other_tokens_are_refused(folder, name, token, id_):
    """Stock transformers would look for another id than samples are written with."""
    edit(folder, "config.json", lambda config: config.update({name: 7}))
    with pytest.raises(ModelError, match=f"says {name}: 7, but its tokenizer has") as caught:
        Encoder(folder).load()
    assert f"{token!r} as {id_}" in str(caught.value)
    assert f"Set {name}: {id_} there" in str(caught.value)


def test_ids_behind_the_rows_that_files_name_alone_are_a_note(folder, caplog):
    edit(folder, "generation_config.json", lambda config: config.update(eos_token_id=[570, 9999]))
    with caplog.at_level(logging.WARNING, "vlmpack"):
        Encoder(folder).load()
    (note,) = caplog.messages
    assert "generation_config.json: eos_token_id: 9999" in note


def test_rows_that_are_not_known_refuse_nothing():
    refuse_beyond(None, [10**9], None)
    refuse_beyond(None, [], 1)


def said(*arguments):
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return found.exit_code, f"{found.output}{found.exception or ''}"


def test_named_special_tokens_count_as_used(folder):
    """`data.special_tokens` is there so that samples use them."""
    with_boxes(folder, special=True)
    with pytest.raises(ModelError, match=r"tokens behind them: '<\|box_start\|>' \(id 576\);"):
        Encoder(folder).replace(special_tokens=[BOXES[0]]).load()


@pytest.fixture
def grounded(tmp_path):
    """A record that uses the tokens."""
    turns = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": BOXES[0]}]
    path = tmp_path / "ground.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    return path


@pytest.fixture
def settings(tmp_path):
    """A recipe as a mapping: everything local, no workers."""
    return run_settings(tmp_path)


MCORE = {
    "model__backend": "mcore",
    "model__attention": "segments",
    "parallelism__tensor": 2,
    "parallelism__sharding": "none",
}


def test_check_stats_and_lint_name_it(folder, grounded, settings, tmp_path):
    with_boxes(folder)
    recipe = write_recipe(tmp_path / "r.yaml", changed(settings, model__path=str(folder)))
    code, output = said("recipe", "check", recipe)
    assert code == 0
    assert "not checked: the data. Run vlmpack plan" in output
    for command in ("stats", "lint"):
        index = ("--index-dir", tmp_path / "index")
        code, output = said("data", command, grounded, "--model", folder, *index)
        assert code == 1, command
        assert "'<|box_start|>' (id 576)" in " ".join(output.split()), command
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_end|>", "<|im_end|><|box_start|>"))
    code, output = said("recipe", "check", recipe)
    assert code == 1
    assert "tokens behind them: '<|box_start|>' (id 576)" in output


@pytest.mark.parametrize("backend", ["hf", "mcore"])
def test_no_run_reads_it(folder, grounded, settings, tmp_path, backend):
    """Under Megatron's TP 2 such an id was a zero, and under all else an IndexError."""
    values = changed(
        settings,
        model__path=str(with_boxes(folder)),
        data__train=str(grounded),
        **(MCORE if backend == "mcore" else {}),
    )
    world = ("--world-size", 2) if backend == "mcore" else ()
    recipe = write_recipe(tmp_path / "r.yaml", values)
    code, output = said("plan", recipe, *world)
    assert code == 1
    assert "'<|box_start|>' (id 576)" in output


def test_an_image_beside_words_is_encoded_as_before(folder, encoder):
    """What the checks ask of the template leaves no trace in what it writes."""
    sample = VLMSample(
        key="0",
        url="",
        messages=(
            Message("user", (ImagePart(0), TextPart("?"))),
            Message("assistant", (TextPart("!"),)),
        ),
        images=(),
    )
    other = Encoder(folder)
    other.load()
    assert other.length(sample, [(56, 56)]) == encoder.length(sample, [(56, 56)])
