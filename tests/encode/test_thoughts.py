"""Templates that drop thoughts are known, and the last answer alone can be learnt."""

from __future__ import annotations

import logging
import pickle
import shutil
from dataclasses import replace

import pytest
from support.images import conversation
from support.recipes import changed, small_settings
from support.shards import TINY_MODEL
from support.templates import TEMPLATES, chat_encoder

from vlmpack.build.data import _of_conversations, build_encoder
from vlmpack.data.packs.manifest import encoder_differences
from vlmpack.data.shards.samples import samples_of_answers
from vlmpack.encode import Encoder
from vlmpack.encode.turns import dropped_thoughts
from vlmpack.errors import DataError
from vlmpack.model_folder.content import PROCESSOR_FILES
from vlmpack.packing import IGNORE_INDEX
from vlmpack.proof.verify.answers import check_answers
from vlmpack.recipe import identity, load_recipe

QWEN3 = (
    "{%- set last = namespace(index=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set last.index = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- set content = message.content if message.content is string "
    "else message.content[0].text %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' and WHEN %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""As published, cut to what it does with thoughts."""

EARLIER = QWEN3.replace("WHEN", "loop.index0 < last.index")
ALL = QWEN3.replace("WHEN", "true")

THINKING = conversation(
    ("user", ["one?"]),
    ("assistant", ["<think>\nI guess\n</think>\n\nseven"]),
    ("user", ["two?"]),
    ("assistant", ["<think>\nI know\n</think>\n\nnine"]),
)


@pytest.fixture
def folder(tmp_path):
    """The committed model's processor with such a template."""
    for name in ("config.json", *PROCESSOR_FILES):
        if (TINY_MODEL / name).is_file():
            shutil.copyfile(TINY_MODEL / name, tmp_path / name)
    path = tmp_path / "chat_template.jinja"
    images = path.read_text(encoding="utf-8")  # for turns with images
    path.write_text(
        "{%- if messages[0].content is iterable and messages[0].content[0].type == "
        f"'image' %}}{images}{{%- else %}}{EARLIER}{{%- endif %}}"
    )
    return tmp_path


def targets(encoder, sample):
    labels = encoder.encode(sample).labels
    return encoder.tokenizer.decode(labels[labels != IGNORE_INDEX])


@pytest.mark.parametrize(
    ("text", "expected"), [(EARLIER, "earlier"), (ALL, "all"), (EARLIER + "{{ x.y }}", "none")]
)
def test_what_a_template_drops_is_seen(text, expected):
    assert dropped_thoughts(chat_encoder(TEMPLATES["qwen3"]._replace(text=text)).render) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_know_no_thoughts_drop_none(name):
    assert dropped_thoughts(chat_encoder(TEMPLATES[name]).render) == "none"


def test_the_last_answer_alone_is_learnt(folder):
    every, last = Encoder(folder), Encoder(folder).replace(learn="last_turn")
    assert targets(every, THINKING) == (
        "seven<|im_end|><think>\nI know\n</think>\n\nnine<|im_end|>"
    )
    assert targets(last, THINKING) == "<think>\nI know\n</think>\n\nnine<|im_end|>"
    assert last.encode(THINKING).input_ids.tolist() == every.encode(THINKING).input_ids.tolist()
    length = last.length(THINKING, [])
    assert length.num_label_tokens == int((last.encode(THINKING).labels >= 0).sum())
    one = conversation(("user", ["one?"]), ("assistant", ["seven"]))
    assert targets(last, one) == targets(every, one) == "seven<|im_end|>"
    for encoder in (every, last):
        found = check_answers(encoder, [encoder.encode(THINKING)], [THINKING])
        assert (found.status, found.detail[:6]) == ("pass", "2 of 2")


def test_a_last_answer_that_the_data_exclude_leaves_nothing(folder):
    turns = THINKING.messages
    excluded = replace(THINKING, messages=(*turns[:-1], replace(turns[-1], learn=False)))
    assert targets(Encoder(folder), excluded) == "seven<|im_end|>"
    with pytest.raises(DataError, match=r"no token .* excluded \(data.learn: last_turn leaves out"):
        Encoder(folder).replace(learn="last_turn").encode(excluded)
    none = replace(excluded, messages=tuple(replace(turn, learn=False) for turn in turns))
    with pytest.raises(DataError, match=r"its turns are excluded$"):
        Encoder(folder).encode(none)


def test_lengths_packs_and_workers_know_what_is_learnt(folder):
    every, last = Encoder(folder), Encoder(folder).replace(learn="last_turn")
    assert (
        every.fingerprint
        == Encoder(folder).replace(learn="all_turns").fingerprint
        != last.fingerprint
    )
    assert "learn" not in every.fingerprint_parts
    assert pickle.loads(pickle.dumps(last)).fingerprint == last.fingerprint

    class Packs:
        kind, encoder = "tokens", every.fingerprint_parts

    assert encoder_differences(Packs, last) == ["data.learn: not set in the packs, last_turn now"]


def test_a_sample_of_each_answer_ends_with_the_one_that_is_learnt(folder):
    each = Encoder(folder).replace(learn="each_answer")
    first, second = samples_of_answers([THINKING])
    assert targets(each, first) == "<think>\nI guess\n</think>\n\nseven<|im_end|>"
    assert targets(each, second) == "<think>\nI know\n</think>\n\nnine<|im_end|>"
    assert each.fingerprint not in {
        Encoder(folder).replace(learn=n).fingerprint for n in ("all_turns", "last_turn")
    }
    for sample in (first, second):
        found = check_answers(each, [each.encode(sample)], [sample])
        assert found.status == "pass"
    for wrong in (THINKING, replace(first, messages=THINKING.messages[:3])):
        with pytest.raises(DataError, match="expects a conversation that ends with the one answer"):
            each.encode(wrong)
    with pytest.raises(DataError, match="expected one of them"):
        Encoder(folder).replace(learn="each_answer", loss_on="all").encode(first)


def test_a_launch_says_it_and_another_choice_is_another_run(folder, tmp_path, caplog):
    settings = small_settings(tmp_path, model__path=str(folder))
    last = changed(settings, data__learn="last_turn")
    with caplog.at_level(logging.WARNING, "vlmpack"):
        assert build_encoder(load_recipe(last)).settings.learn == "last_turn"
        build_encoder(load_recipe(changed(settings, model__path=str(TINY_MODEL))))
        assert "thoughts" not in caplog.text
        build_encoder(load_recipe(settings))
    assert "leaves out the thoughts (<think>) of earlier turns" in caplog.text
    assert "data.learn: last_turn" in caplog.text and "data.learn: each_answer" in caplog.text
    caplog.clear()
    each = build_encoder(load_recipe(changed(settings, data__learn="each_answer")))
    assert each.each_answer and "thoughts" not in caplog.text
    assert not _of_conversations(each).each_answer, "questions are those of whole conversations"
    assert identity(load_recipe(last))["data.learn"] == "last_turn"
    assert "data.learn" not in identity(load_recipe(settings))
