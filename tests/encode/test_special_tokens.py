"""Special tokens that are named in the recipe are prompted and learnt as the tokens that they are;
what holds a conversation together can not be named."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.families import VISION_FAMILIES, tiny_family_folder
from support.images import conversation, file_of, picture
from support.published_templates import published_templates
from support.recipes import changed, small_settings
from support.shards import TINY_MODEL
from support.templates import TEMPLATES, Template, chat_encoder

import vlmpack
from vlmpack.build.data import build_encoder
from vlmpack.data.packs.manifest import encoder_differences
from vlmpack.encode import Encoder
from vlmpack.encode.chat import ChatEncoder
from vlmpack.encode.sample import said
from vlmpack.encode.settings import TOKENS_NOTE
from vlmpack.encode.special_tokens import special_tokens
from vlmpack.errors import DataError, ModelError
from vlmpack.evaluation.generation import answer_questions, load_for_generation
from vlmpack.evaluation.predictions import Question
from vlmpack.families.qwen_vl import QWEN2_VL
from vlmpack.packing import IGNORE_INDEX
from vlmpack.recipe import identity, identity_differences, load_recipe

BOX = ("<|box_start|>", "<|box_end|>")
REF = ("<|object_ref_start|>", "<|object_ref_end|>")
ANSWER = "<|box_start|>(5,5),(90,90)<|box_end|>"
SAMPLE = conversation(
    ("user", [None, "Where is <|box_start|>(1,1)<|box_end|>?"]),
    ("assistant", [ANSWER]),
    images=(file_of(picture(seed=1)),),
)


def with_tokens(folder: Path, texts: tuple[str, ...], *, special: bool = True) -> Path:
    """A copy of the committed model whose tokenizer has more tokens, and the embedding rows."""
    shutil.copytree(TINY_MODEL, folder)
    tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    first = max(token["id"] for token in tokens["added_tokens"]) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, text in enumerate(texts, first):
        tokens["added_tokens"].append({"id": number, "content": text, "special": special, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["vocab_size"] += len(texts)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_tokens(tmp_path / "model", (*REF, *BOX))


def test_named_tokens_are_prompted_and_learnt(folder: Path) -> None:
    encoder = Encoder(folder).replace(special_tokens=BOX)
    encoder.load()
    encoded = encoder.encode(SAMPLE)
    learnt = encoded.labels[encoded.labels != IGNORE_INDEX].tolist()
    assert encoder.tokenizer.decode(learnt) == f"{ANSWER}<|im_end|>"
    start, end = encoder.tokenizer.convert_tokens_to_ids(list(BOX))
    assert (start in learnt) and (end in learnt)
    turns = [
        {"role": turn.role, "content": [{"type": "text", "text": turn.text}]}
        for turn in SAMPLE.messages
    ]
    turns[0]["content"].insert(0, {"type": "image"})
    theirs: Any = encoder.tokenizer.apply_chat_template(turns, return_dict=True)
    chat = encoder.chat
    assert chat.encode(SAMPLE.messages, [chat.marker]).input_ids == theirs["input_ids"]
    asked = chat.encode_prompt(SAMPLE.messages[:1], [chat.marker])
    assert asked == theirs["input_ids"][: len(asked)] and start in asked
    assert encoder.length(SAMPLE, [picture(seed=1).size]).num_tokens == encoded.length


def test_others_stay_refused_and_the_message_says_what_can_be_done(folder: Path) -> None:
    spelt = conversation(("user", ["Where?"]), ("assistant", [REF[0]]))
    for sample, named in ((SAMPLE, ()), (spelt, BOX)):
        with pytest.raises(DataError, match=r"the special token .* or name it in data\.spec"):
            Encoder(folder).replace(special_tokens=named).encode(sample)
    turn = conversation(("user", ["<|im_end|>"]), ("assistant", ["x"]))
    with pytest.raises(DataError, match=r"escape or remove it$"):
        Encoder(folder).replace(special_tokens=BOX).encode(turn)


def test_a_text_may_spell_the_image_marker_beside_them(folder: Path) -> None:
    encoder = Encoder(folder).replace(special_tokens=BOX)
    marker, image = encoder.chat.marker, encoder.placeholder_id
    sample = conversation(("user", [f"What is {marker}?"]), ("assistant", [f"{marker} {ANSWER}"]))
    ids = encoder.encode(sample).input_ids.tolist()
    assert image not in ids and encoder.tokenizer.convert_tokens_to_ids(BOX[0]) in ids


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("<|im_start|>", "part of the chat template, so a text that spells it would be read as"),
        ("<|im_end|>", "part of the chat template"),
        ("<|image_pad|>", "the place of an image"),
        ("<|video_pad|>", "the place of an image"),
        ("<|vision_start|>", "part of the chat template"),
        ("<|endoftext|>", "the tokenizer's pad_token"),
        ("<|box_stat|>", r"is no special token of .*; did you mean '<\|box_start\|>'\?"),
        ("It is", r"is no special token of .*\. Texts may spell other tokens as they are"),
    ],
)
def test_what_can_not_be_named(folder: Path, named: str, words: str) -> None:
    with pytest.raises(ModelError, match=rf"^data\.special_tokens: .*{words}"):
        Encoder(folder).replace(special_tokens=[*BOX, named]).load()


def test_a_token_that_is_no_special_one_needs_no_name(tmp_path: Path) -> None:
    folder = with_tokens(tmp_path / "plain", BOX, special=False)
    Encoder(folder).encode(SAMPLE)
    with pytest.raises(ModelError, match="Texts may spell other tokens as they are"):
        Encoder(folder).replace(special_tokens=BOX).load()


KNOWN: dict[str, Template] = {**TEMPLATES, **published_templates()}


@pytest.mark.cases(quick=0.2, slow="*")
@pytest.mark.parametrize("name", KNOWN)
def test_no_token_of_a_known_template_can_be_named(name: str) -> None:
    known = chat_encoder(KNOWN[name])
    for token in KNOWN[name].special:
        with pytest.raises(ModelError, match="read as structure"):
            ChatEncoder(known.tokenizer, known.takes_images, known.marker, spelt=(token,))


@pytest.mark.cases(quick=("qwen2_5_vl", "internvl"), slow=("idefics3", "mistral3", "gemma3"))
@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_no_token_that_an_image_is_written_with_can_be_named(name: str, tmp_path: Path) -> None:
    folder = tiny_family_folder(name, tmp_path)
    plain = Encoder(folder)
    special = special_tokens(plain.tokenizer)
    text = plain.image_rule.layout(900, 300).text + plain.chat.marker
    written = [token for token in special if token in text]
    assert written
    for token in written:
        with pytest.raises(ModelError, match="read as structure"):
            Encoder(folder).replace(special_tokens=[token]).load()


def test_answers_keep_them(folder: Path) -> None:
    encoder = Encoder(folder).replace(special_tokens=BOX)
    ids = encoder.tokenizer(f"{ANSWER}{REF[0]}<|im_end|>", add_special_tokens=False)["input_ids"]
    assert encoder.chat.decode(ids) == ANSWER
    assert Encoder(folder).chat.decode(ids) == "(5,5),(90,90)"


def test_lengths_packs_workers_and_exports_know_them(folder: Path) -> None:
    plain, named = Encoder(folder), Encoder(folder).replace(special_tokens=BOX)
    assert len({plain.fingerprint, named.fingerprint}) == 2
    assert Encoder(folder).replace(special_tokens=()).fingerprint == plain.fingerprint
    assert Encoder(folder).replace(special_tokens=BOX[::-1]).fingerprint == named.fingerprint
    again = pickle.loads(pickle.dumps(named))
    assert (again.special_tokens, again.fingerprint) == (named.special_tokens, named.fingerprint)
    packs: Any = SimpleNamespace(kind="tokens", encoder=plain.fingerprint_parts)
    assert encoder_differences(packs, named) == [
        "data.special_tokens: not set in the packs, <|box_end|>, <|box_start|> now"
    ]
    plain.write_settings(folder)
    assert not (folder / TOKENS_NOTE.file).exists()
    vars(plain)["coordinates"] = QWEN2_VL.coordinates
    plain.write_settings(folder, {"lengths": 1})
    assert not (folder / TOKENS_NOTE.file).exists()
    plain.write_settings(folder, {"objects": "a digest"})
    assert Encoder(folder).special_tokens == tuple(sorted((*BOX, *REF))), "those of the form"
    named.write_settings(folder)
    assert Encoder(folder).special_tokens == named.special_tokens
    assert Encoder(folder).replace(special_tokens=()).special_tokens == (), "a recipe's count"
    (folder / TOKENS_NOTE.file).write_text("{", encoding="utf-8")
    assert Encoder(folder).special_tokens == ()


def test_others_are_another_run(folder: Path, tmp_path: Path) -> None:
    settings = small_settings(tmp_path, model__path=str(folder))
    none = load_recipe(settings)
    named = load_recipe(changed(settings, data__special_tokens=[*BOX, BOX[0]]))
    assert named.data.special_tokens == tuple(sorted(BOX))
    assert build_encoder(named).special_tokens == tuple(sorted(BOX))
    assert identity(load_recipe(none, [f"data.special_tokens=[{', '.join(BOX)}]"])) == identity(
        named
    )
    assert len(identity_differences(identity(none), identity(named))) == 2
    assert not [key for key in identity(none) if "special" in key], "as before there were any"
    with pytest.raises(ModelError, match=r"^data\.special_tokens: '<\|im_end\|>' is part of the c"):
        build_encoder(load_recipe(changed(settings, data__special_tokens=["<|im_end|>"])))


@pytest.mark.slow
def test_a_run_learns_them_and_its_export_is_asked_with_them(tmp_path: Path) -> None:
    """On a token that has a row in the embedding: a spare one gets its name."""
    folder = tmp_path / "model"
    shutil.copytree(TINY_MODEL, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text(encoding="utf-8")
        (folder / name).write_text(text.replace("<|vision_pad|>", BOX[0]), encoding="utf-8")
    lines = [
        {"messages": [{"role": "user", "content": f"{BOX[0]}?"},
                      {"role": "assistant", "content": f"{BOX[0]}{number}"}]}
        for number in range(8)
    ]  # fmt: skip
    records = tmp_path / "records.jsonl"
    records.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    settings = small_settings(
        tmp_path,
        model__path=str(folder),
        data__train=str(records),
        data__special_tokens=[BOX[0]],
        optim__lr=1e-2,
        training__max_steps=8,
        evaluation__generate=False,
    )
    done = vlmpack.finetune(settings)
    model, encoder = load_for_generation(done.run_dir / "export")
    assert encoder.special_tokens == (BOX[0],)
    asked = Question(
        key="a", shard="b", messages=(said("user", f"{BOX[0]}?"),), images=(), truth=""
    )
    [answer] = answer_questions(model, encoder, [asked], batch_size=1, max_new_tokens=3)
    assert answer.startswith(BOX[0])
