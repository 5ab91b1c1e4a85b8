"""Language models without a vision tower: what the suite of all families does not see."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from support.engines import make_engine
from support.families import TEXT_FAMILIES, tiny_family_folder
from support.images import conversation, file_of, one_image, picture
from support.runs import find_differences, pack, run_batch
from support.shards import text_samples
from support.stock import StockProcessor, load_stock, run_one_by_one, with_strings

from vlmpack.backends.hf.load import load_model
from vlmpack.backends.hf.model import PackedLM
from vlmpack.encode import Encoder, ImagePart, Message, TextPart
from vlmpack.errors import CapabilityError, DataError
from vlmpack.evaluation.generation import answer_questions
from vlmpack.evaluation.predictions import Question
from vlmpack.packing import IGNORE_INDEX, EncodedSample

LLAMA_3 = """\
{{- bos_token }}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n\\n' -}}{%- endif -%}
"""
"""The form of Llama 3's: given a list of parts it would write the list out, as Python does."""

QWEN_3 = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{{- '<think>\\n\\n</think>\\n\\n' if message.role == 'assistant' and loop.last -}}
{{- message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""What Qwen3's does to conversations: empty thoughts in front of the last answer alone."""

NO_ENDS = """\
{%- for message in messages -%}
{{- message.role + ': ' -}}
{{- '(last) ' if message.role == 'assistant' and loop.last -}}
{{- message.content + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}
{{- '<|endoftext|>' if not add_generation_prompt -}}
"""
"""The same without a token at the end of each turn: nothing says where one stops."""

TURNS = conversation(
    ("system", ["Be ", "brief."]),
    ("user", [" xylophone "]),
    ("assistant", ["one"]),
    ("user", ["yes"]),
    ("assistant", ["two"]),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """model_type -> tiny model folder."""
    return {name: tiny_family_folder(name, tmp_path_factory.mktemp(name)) for name in TEXT_FAMILIES}


@pytest.fixture(scope="module")
def encoder(folders):
    """Of the tiny Llama."""
    return Encoder(folders["llama"])


@pytest.fixture
def encoder_with(folders, tmp_path):
    """An encoder with another chat template."""

    def make(template):
        shutil.copytree(folders["llama"], tmp_path / "model")
        (tmp_path / "model" / "chat_template.jinja").write_text(template, encoding="utf-8")
        return Encoder(tmp_path / "model")

    return make


def learnt(encoder, sample):
    """Texts of the runs of label tokens, in order; checked against the predicted count."""
    encoded = encoder.encode(sample)
    mask = encoded.labels != IGNORE_INDEX
    length = encoder.length(sample, ())
    assert (length.num_tokens, length.num_label_tokens) == (encoded.length, int(mask.sum()))
    runs, before = [], False
    for label, is_label in zip(encoded.labels.tolist(), mask.tolist(), strict=True):
        if is_label and not before:
            runs.append([])
        if is_label:
            runs[-1].append(label)
        before = is_label
    return [encoder.tokenizer.decode(run) for run in runs]


# Packing


@pytest.mark.cases(quick="qwen3", slow="nemotron_h")
@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_no_isolation_is_found(folders, name):
    folder = folders[name]
    encoder, processor = Encoder(folder), StockProcessor(folder)
    samples = text_samples()
    reference = run_one_by_one(load_stock(folder), {s.key: processor(s) for s in samples})
    batch = pack([encoder.encode(sample.cooked()) for sample in samples], alignment=8)
    model = make_engine(folder, encoder).vlm
    assert find_differences(run_batch(model, batch), reference) == []
    one_segment = replace(
        batch,
        cu_seqlens=torch.tensor([0, batch.num_slots], dtype=torch.int32),
        cu_seqlens_padded=None,
        segment_lengths=(batch.num_slots,),
    ).packed_seq_params()
    broken = find_differences(run_batch(model, batch, one_segment), reference)
    assert {line.split(" of ")[0] for line in broken} == {"loss", "gradient"}
    assert not any(line.startswith("loss of text0:") for line in broken), "the first sees nobody"

    over_row = replace(batch, position_ids=torch.arange(batch.num_slots)[None, None])
    broken = find_differences(run_batch(model, over_row), reference)
    assert sum(line.startswith("positions of") for line in broken) == len(samples) - 1


def test_positions_begin_anew_with_each_sample(encoder):
    for sample in text_samples():
        encoded = encoder.encode(sample.cooked())
        assert encoded.position_ids.tolist() == [list(range(encoded.length))]


def test_rotary_rules_that_look_at_the_whole_row_are_refused(folders, tmp_path):
    shutil.copytree(folders["qwen2"], tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    path.write_text(json.dumps(config))
    encoder = Encoder(tmp_path / "model")
    with pytest.raises(CapabilityError, match=r"'dynamic'.*the longest sequence"):
        PackedLM(load_model(encoder.folder), encoder.family)


# Images


def test_a_sample_with_images_is_refused_by_name(encoder):
    sample = one_image(file_of(picture()))
    member_only = replace(
        sample, messages=(Message("user", (TextPart("Hi"),)), *sample.messages[1:])
    )
    place_only = Message("user", (ImagePart(0),))
    for refused in (
        lambda: encoder.encode(sample),
        lambda: encoder.encode(member_only),
        lambda: encoder.length(replace(sample, images=()), [(48, 32)]),
        lambda: encoder.length(replace(sample, images=()), ()),
        lambda: encoder.chat.encode_prompt((place_only,)),
    ):
        with pytest.raises(DataError, match="the model has no vision tower") as caught:
            refused()
        assert caught.value.error_class == "schema"


def test_a_batch_with_images_is_refused(folders, encoder):
    from support.samples import image_sample

    model = make_engine(folders["llama"], encoder).vlm
    batch = pack([image_sample("a", axes=1)])
    with pytest.raises(CapabilityError, match="no vision tower"):
        model.merge(batch)


def test_a_placeholder_of_the_vocabulary_is_a_token_like_any_other(encoder):
    placeholder = encoder.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert placeholder is not None
    assert not (torch.tensor([placeholder, -100, 0]) == encoder.placeholder_id).any()
    encoded = encoder.encode(TURNS)
    assert encoded.media is None
    assert isinstance(encoded, EncodedSample)
    with pytest.raises(CapabilityError, match="no vision tower"):
        _ = encoder.image_rule


# Answers


def test_answers_in_batches_are_those_of_the_stock_model_one_by_one(folders, encoder):
    model, processor = load_stock(encoder.folder).eval(), StockProcessor(encoder.folder)
    samples = [sample.cooked() for sample in text_samples()]
    questions = [Question.from_sample(sample) for sample in samples]
    answers = answer_questions(
        load_model(encoder.folder).eval(), encoder, questions, batch_size=4, max_new_tokens=6
    )
    for sample, answer in zip(text_samples(), answers, strict=True):
        ids = processor.tokenizer.apply_chat_template(
            with_strings(sample.messages[:-1]),
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        new = model.generate(**ids, max_new_tokens=6, do_sample=False, eos_token_id=570)
        said = processor.tokenizer.decode(
            new[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
        )
        assert said.strip() == answer
    assert len(set(answers)) == len(answers), "all alike: nothing was compared"


# Chat templates


def test_the_template_gets_strings(encoder_with):
    encoder = encoder_with(LLAMA_3)
    text = encoder.chat.render(TURNS.messages)
    assert "'type'" not in text
    assert text.startswith("<|im_start|>system\n\nBe brief.<|im_end|><|im_start|>user\n\nxylo")
    assert learnt(encoder, TURNS) == ["one<|im_end|>", "two<|im_end|>"]


def test_answers_that_later_turns_change_are_learnt_as_they_stand(encoder_with):
    encoder = encoder_with(QWEN_3)
    assert learnt(encoder, TURNS) == [
        "one<|im_end|>",
        "<think>\n\n</think>\n\ntwo<|im_end|>",
    ]


def test_without_an_end_of_turn_such_answers_are_refused(encoder_with):
    encoder = encoder_with(NO_ENDS)
    assert learnt(encoder, replace(TURNS, messages=TURNS.messages[:3])) == [
        "(last) one\n<|endoftext|>"
    ]
    with pytest.raises(DataError, match="renders turn 2 differently"):
        encoder.encode(TURNS)
