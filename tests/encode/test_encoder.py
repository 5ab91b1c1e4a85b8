"""Samples to tokens: exact lengths, labels, positions and refusals, on the tiny model's folder."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.families import TEXT_TEMPLATE, tiny_family_folder
from support.images import conversation, file_of, one_image, picture
from support.shards import read_shard
from tokenizers import Tokenizer

from vlmpack.encode import Encoder, ImagePart, Message, VLMSample
from vlmpack.errors import CapabilityError, DataError, ModelError
from vlmpack.model_folder.content import PROCESSOR_FILES
from vlmpack.packing import IGNORE_INDEX

PLACEHOLDER = "<|image_pad|>"
END_OF_TURN = "<|im_end|>"


@pytest.fixture(scope="module")
def everything(tiny_folder):
    """An encoder with a label on every text token."""
    return Encoder(tiny_folder).replace(loss_on="all")


def test_an_excluded_answer_is_no_target_even_where_every_token_is(encoder, everything):
    sample = conversation(
        ("user", ["Q"]), ("assistant", ["draft"]), ("user", ["R"]), ("assistant", ["A"])
    )
    cut = replace(
        sample,
        messages=tuple(replace(turn, learn=turn.text != "draft") for turn in sample.messages),
    )
    assert "draft" in targets(everything, sample) and "draft" in targets(encoder, sample)
    assert targets(encoder, cut) == f"A{END_OF_TURN}"
    found = targets(everything, cut)
    assert "draft" not in found and "Q" in found and "A" in found
    assert encoder.length(cut, []).num_label_tokens == 2
    assert encoder.encode(cut).length == encoder.encode(sample).length
    none = replace(cut, messages=tuple(replace(turn, learn=False) for turn in cut.messages))
    with pytest.raises(DataError, match=r"no token to learn: .* its turns are excluded"):
        encoder.encode(none)


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy of the processor files that a test may damage."""
    for name in ("config.json", *PROCESSOR_FILES):
        if (tiny_folder / name).is_file():
            shutil.copyfile(tiny_folder / name, tmp_path / name)
    return tmp_path


def targets(encoder, sample):
    """The text of the label tokens, in order."""
    labels = encoder.encode(sample).labels
    return encoder.tokenizer.decode(labels[labels != IGNORE_INDEX])


# Lengths


def image_sizes(count=200):
    """Random sizes over two orders of magnitude, extreme ratios among them."""
    draw = random.Random(0)
    sizes = [(8, 1600), (1600, 8), (1, 200), (200, 1), (1, 1), (16, 16), (2000, 1500), (513, 511)]
    while len(sizes) < count:
        width, height = (round(8 * 2 ** draw.uniform(0, 6.2)) for _ in range(2))
        sizes.append((width, height))
    return sizes


@pytest.mark.slow
def test_the_predicted_length_is_the_actual_one_for_200_image_sizes(encoder):
    token_counts = set()
    for start in range(0, 200, 2):
        sizes = image_sizes()[start : start + 2]
        images = tuple(file_of(picture(*size), compress_level=1) for size in sizes)
        sample = conversation(
            ("user", ["Compare", None, "with", None, "."]), ("assistant", ["same"]), images=images
        )
        actual = encoder.encode(sample)
        predicted = encoder.length(sample, sizes)
        assert predicted.num_tokens == actual.length, sizes
        assert predicted.num_image_tokens == len(actual.media_positions) > 0, sizes
        assert predicted.num_label_tokens == int((actual.labels != IGNORE_INDEX).sum())
        assert predicted.num_patches == actual.media.pixel_values.shape[0], sizes
        assert (actual.input_ids[actual.media_positions] == encoder.placeholder_id).all()
        token_counts.update(actual.media.num_tokens)
    assert len(token_counts) > 30, "the sizes were all alike"


def test_the_length_needs_no_pixels(encoder):
    sample = one_image(b"")
    without = VLMSample(key="k", url="u", messages=sample.messages)
    assert encoder.length(without, [(48, 32)]) == encoder.length(sample, [(48, 32)])


@pytest.mark.slow
def test_the_length_of_every_kind_of_real_sample(encoder):
    counts = set()
    for sample in read_shard():
        predicted = encoder.length(sample.cooked(), sample.sizes)
        assert predicted.num_tokens == encoder.encode(sample.cooked()).length
        counts.add(len(sample.images))
    assert counts == {0, 1, 2, 3}


def test_planned_sizes_resize_before_anything_else(encoder):
    sample = one_image(file_of(picture(200, 160)))
    small = encoder.encode(sample, sizes=[(64, 48)])
    assert small.length == encoder.length(sample, [(64, 48)]).num_tokens
    assert small.length < encoder.encode(sample).length


def test_a_ratio_beyond_200_is_a_decode_error(encoder):
    sample = one_image(file_of(picture(201, 1)))
    for call in (lambda: encoder.encode(sample), lambda: encoder.length(sample, [(201, 1)])):
        with pytest.raises(DataError, match="200 times") as caught:
            call()
        assert caught.value.error_class == "decode"


# Positions


@pytest.mark.parametrize(
    "parts",
    [
        ["only text"],
        [None, "after"],
        ["before", None],
        ["before", None, "between", None, "after"],
        [None, None, None, "three in a row"],
        ["a", None, "b", None, "c", None],
    ],
    ids=str,
)
def test_positions_are_those_of_the_stock_model(encoder, stock_model, parts):
    sizes = [(48, 32), (32, 96), (130, 70)][: parts.count(None)]
    sample = conversation(
        ("user", parts),
        ("assistant", ["one"]),
        ("user", ["and now?"]),
        ("assistant", ["two"]),
        images=tuple(file_of(picture(*size)) for size in sizes),
    )
    encoded = encoder.encode(sample)
    is_image = (encoded.input_ids == encoder.placeholder_id).int()
    grids = torch.tensor(encoded.media.grid_thw) if sizes else None
    theirs, _ = stock_model.model.get_rope_index(
        encoded.input_ids[None], mm_token_type_ids=is_image[None], image_grid_thw=grids
    )
    assert encoded.position_ids.shape == (3, encoded.length)
    assert encoded.position_ids.dtype == torch.int64
    assert torch.equal(encoded.position_ids, theirs[:, 0])
    axes_differ = bool((encoded.position_ids != encoded.position_ids[:1]).any())
    assert axes_differ == bool(sizes)


# Labels


def test_the_assistants_turns_alone_are_targets(encoder):
    sample = conversation(
        ("system", ["You read digits."]),
        ("user", ["What is 1 + 1?"]),
        ("assistant", ["It is 2."]),
        ("user", ["And 2 + 2?"]),
        ("assistant", ["That is 4, of course."]),
    )
    expected = f"It is 2.{END_OF_TURN}That is 4, of course.{END_OF_TURN}"
    assert targets(encoder, sample) == expected


@pytest.mark.parametrize("answer", ["7", "a  b ", "line\nline", "assistant", "user\nassistant"])
def test_targets_are_the_assistants_text_to_the_letter(encoder, answer):
    sample = conversation(("user", ["assistant\n" + answer]), ("assistant", [answer]))
    assert targets(encoder, sample) == answer + END_OF_TURN


def test_a_target_is_the_next_token_of_its_own_sample(encoder, encoded):
    for sample in encoded:
        at = (sample.labels != IGNORE_INDEX).nonzero()[:, 0]
        assert len(at) > 0
        assert torch.equal(sample.labels[at], sample.input_ids[at + 1])
        assert sample.labels[-1] == IGNORE_INDEX


def test_placeholders_are_never_targets(everything):
    sample = one_image(file_of(picture()))
    encoded = everything.encode(sample)
    targets_all = encoded.labels[encoded.labels != IGNORE_INDEX]
    assert everything.placeholder_id not in targets_all
    text = (encoded.input_ids[1:] != everything.placeholder_id).sum()
    assert len(targets_all) == text == everything.length(sample, [(48, 32)]).num_label_tokens


def test_an_assistant_that_says_nothing_still_ends_its_turn(encoder):
    sample = conversation(("user", ["Say nothing."]), ("assistant", [""]))
    assert targets(encoder, sample) == END_OF_TURN


def test_a_sample_without_an_assistant_turn_is_refused(encoder):
    sample = conversation(("user", ["Anyone?"]))
    for call in (lambda: encoder.encode(sample), lambda: encoder.length(sample, [])):
        with pytest.raises(DataError, match="no token to learn") as caught:
            call()
        assert caught.value.error_class == "schema"


# Tokens


def test_ids_are_those_of_the_tokenizers_own_template(encoder):
    compared = 0
    for sample in read_shard():
        if sample.images:
            continue
        theirs = encoder.tokenizer.apply_chat_template(
            sample.messages, tokenize=True, return_dict=True
        )["input_ids"]
        assert encoder.encode(sample.cooked()).input_ids.tolist() == theirs
        compared += 1
    assert compared >= 3


def test_the_prompt_is_the_head_of_the_sample(encoder):
    sample = conversation(("user", ["What is 1 + 1?"]), ("assistant", ["2"]))
    prompt = encoder.chat.encode_prompt(sample.messages[:1])
    whole = encoder.encode(sample).input_ids.tolist()
    assert whole[: len(prompt)] == prompt
    assert encoder.encode(sample).labels[len(prompt) - 1] == whole[len(prompt)]


def test_a_literal_image_tag_is_text(encoder):
    sample = conversation(("user", ["What does <image> mean?"]), ("assistant", ["<image>"]))
    encoded = encoder.encode(sample)
    assert encoded.media is None
    assert encoder.placeholder_id not in encoded.input_ids
    assert "What does <image> mean?" in encoder.tokenizer.decode(encoded.input_ids)
    assert targets(encoder, sample) == "<image>" + END_OF_TURN


@pytest.mark.parametrize("token", ["<|vision_end|>", "<|im_end|>", "<|im_start|>", "<|endoftext|>"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_special_token_in_the_text_is_refused(encoder, role, token):
    texts = {"user": "hello", "assistant": "hello"} | {role: f"he{token}llo"}
    sample = conversation(("user", [texts["user"]]), ("assistant", [texts["assistant"]]))
    with pytest.raises(DataError, match="spells the special token") as caught:
        encoder.encode(sample)
    assert caught.value.error_class == "schema"
    assert role in str(caught.value)
    assert token in str(caught.value)


def test_a_special_token_split_over_two_parts_is_refused(encoder):
    sample = conversation(("user", ["he<|im_", "end|>llo"]), ("assistant", ["x"]))
    with pytest.raises(DataError, match="spells the special token"):
        encoder.encode(sample)


@pytest.mark.parametrize("files", [0, 2])
def test_images_and_placeholders_must_match(encoder, files):
    images = (file_of(picture()),) * files
    sample = conversation(("user", [None, "?"]), ("assistant", ["x"]), images=images)
    with pytest.raises(DataError, match=f"1 image placeholders.*{files} images") as caught:
        encoder.encode(sample)
    assert caught.value.error_class == "schema"
    with pytest.raises(DataError, match=f"1 image placeholders.*{files} images"):
        encoder.length(sample, [(48, 32)] * files)


def test_ids_and_pixels_are_those_of_the_stock_processor(encoder, tiny_folder, mixed):
    pytest.importorskip("torchvision", reason="AutoProcessor of a Qwen-VL folder needs it")
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(str(tiny_folder))
    for sample in mixed:
        text = processor.apply_chat_template(sample.messages, tokenize=False)
        from io import BytesIO

        from PIL import Image

        images = [Image.open(BytesIO(data)).convert("RGB") for data in sample.images] or None
        theirs = processor(text=[text], images=images, return_tensors="pt")
        ours = encoder.encode(sample.cooked())
        assert ours.input_ids.tolist() == theirs["input_ids"][0].tolist()
        if images:
            assert ours.media.grid_thw == tuple(map(tuple, theirs["image_grid_thw"].tolist()))
            # 8-bit resampling of PIL and torchvision may differ by one level of 255.
            difference = (ours.media.pixel_values - theirs["pixel_values"]).abs().max()
            assert difference <= 1.01 / 255 / 0.26


# The folder


def test_the_fingerprint_covers_every_processor_file(folder):
    before = Encoder(folder).fingerprint
    assert Encoder(folder).fingerprint == before
    seen = {before, Encoder(folder).replace(loss_on="all").fingerprint}
    for name in PROCESSOR_FILES:
        path = folder / name
        content = path.read_bytes() if path.is_file() else b""
        path.write_bytes(content + b" ")
        seen.add(Encoder(folder).fingerprint)
    assert len(seen) == 2 + len(PROCESSOR_FILES)


@pytest.mark.parametrize("question", ["What is this?", f"What does {PLACEHOLDER} mean?"])
def test_what_a_tokenizer_file_cuts_and_fills_up_is_neither(folder, encoder, question):
    """A trainer that saved its tokenizer left its own length in the file. Text with a marker goes
    through another tokenizer."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    path.write_text(json.dumps(content))
    assert len(Tokenizer.from_file(str(path)).encode("What is this thing?").ids) == 64, "guard"
    sample = conversation(("user", [question]), ("assistant", ["An answer of many words"]))
    whole = encoder.encode(sample)
    assert torch.equal(Encoder(folder).encode(sample).input_ids, whole.input_ids)
    assert Encoder(folder).length(sample, []) == encoder.length(sample, [])


def test_the_fingerprint_ignores_the_weights(folder):
    before = Encoder(folder).fingerprint
    (folder / "model.safetensors").write_bytes(b"weights")
    assert Encoder(folder).fingerprint == before


def test_an_encoder_crosses_process_borders_without_its_tokenizer(tiny_folder):
    original = Encoder(tiny_folder).replace(loss_on="all", max_image_pixels=1234)
    sample = conversation(("user", ["1 + 1"]), ("assistant", ["2"]))
    expected = original.encode(sample)
    data = pickle.dumps(original)
    assert len(data) < 1000, "the tokenizer travelled along"
    copy = pickle.loads(data)
    assert (copy.settings.loss_on, copy.settings.max_image_pixels) == ("all", 1234)
    assert torch.equal(copy.encode(sample).labels, expected.labels)


def test_a_folder_without_processor_files_names_what_is_missing(folder):
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"\(preprocessor_config.json\): the file is missing$"):
        _ = Encoder(folder).image_rule
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="no usable tokenizer"):
        _ = Encoder(folder).tokenizer


def test_a_tokenizer_without_a_chat_template_is_refused(folder):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        _ = Encoder(folder).chat


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_a_template_that_is_no_jinja_is_the_models_fault(folder, name):
    text = "{{ bos_token }}\n{% for message in messages }}\n{% endfor %}"
    content = text if name.endswith("jinja") else json.dumps({"chat_template": text})
    (folder / name).write_text(content, encoding="utf-8")
    where = "chat_template.jinja" if name.endswith("jinja") else "the chat template of .*"
    with pytest.raises(ModelError, match=rf"model.path: .*{where}, line 2: unexpected '}}'"):
        Encoder(folder).load()


def test_the_template_is_the_one_that_the_familys_processor_takes(folder):
    """Older folders: the processor's in chat_template.json, beside the language model's own."""
    sample = one_image(file_of(picture()))
    expected = Encoder(folder).encode(sample).input_ids
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEXT_TEMPLATE, encoding="utf-8")
    with pytest.raises(ModelError, match=r"does not write '<\|image_pad\|>' for an image"):
        Encoder(folder).load()
    for name in ("chat_template.json", "processor_config.json"):  # the later one wins
        other = {"chat_template": template.replace("assistant", "model")}
        (folder / "chat_template.json").write_text(json.dumps(other), encoding="utf-8")
        (folder / name).write_text(json.dumps({"chat_template": template}), encoding="utf-8")
        encoder = Encoder(folder)
        encoder.load()
        assert torch.equal(encoder.encode(sample).input_ids, expected), name


def test_a_template_of_strings_is_no_crash_for_a_model_with_a_tower(folder):
    (folder / "chat_template.jinja").write_text(TEXT_TEMPLATE, encoding="utf-8")
    with pytest.raises(DataError, match="the chat template refuses") as caught:
        Encoder(folder).encode(one_image(file_of(picture())))
    assert caught.value.error_class == "schema"


@pytest.mark.cases(quick=0.4, slow="*")
@pytest.mark.parametrize(
    ("name", "found", "reason"),
    [
        ("qwen2_vl", {"do_resize": False}, "do_resize is False"),
        ("qwen2_vl", {"size": {"longest_edge": 4096}}, "expected a shortest_edge"),
        (
            "qwen2_vl",
            {"image_processor_type": "CLIPImageProcessor"},
            "it is a CLIPImageProcessor.*, expected Qwen2VL",
        ),
        ("idefics3", {"size": None}, "size None, expected true and a size"),
        ("mistral3", {"size": {"shortest_edge": 64}}, "expected a longest_edge"),
        ("internvl", {"image_processor_type": "CLIPImageProcessor"}, "expected GotOcr2"),
        ("llava_onevision", {"do_center_crop": True}, "do_center_crop is true"),
        ("gemma3", {"size": None}, "size None, expected true and a size"),
    ],
)
def test_a_processor_that_the_rule_does_not_follow_is_refused(tmp_path, name, found, reason):
    """Each of them would make other patches than predicted, or fail while samples are read."""
    path = tiny_family_folder(name, tmp_path) / "preprocessor_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    assert Encoder(tmp_path).image_rule is not None
    path.write_text(json.dumps(content | found), encoding="utf-8")
    with pytest.raises(ModelError, match=reason):
        Encoder(tmp_path).load()


def test_the_fingerprint_covers_the_sizes_of_images_in_the_config(tmp_path):
    folder = tiny_family_folder("idefics3", tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    seen = []
    for scale in (1, 2):
        path.write_text(json.dumps(config | {"scale_factor": scale}), encoding="utf-8")
        encoder = Encoder(folder)
        tokens = encoder.layouts([(40, 30)])[0].num_tokens
        seen.append((tokens, encoder.fingerprint, encoder.fingerprint_parts["processor"]))
    assert all(one != two for one, two in zip(*seen, strict=True)), seen


def test_another_merge_size_is_refused(folder):
    path = folder / "preprocessor_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | {"merge_size": 4}), encoding="utf-8")
    with pytest.raises(ModelError, match="merge_size is 4, expected 2"):
        _ = Encoder(folder).image_rule


def test_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(ModelError, match="is not a folder"):
        Encoder(tmp_path / "missing")
    with pytest.raises(
        ModelError, match=r"models/gone \(relative to .*, the current directory\) is not a folder"
    ):
        Encoder(Path("models/gone"))
    with pytest.raises(ModelError, match=r"has no config\.json"):
        Encoder(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="is not valid JSON"):
        Encoder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    with pytest.raises(CapabilityError, match=r"'vit'.*`vlmpack families` lists"):
        Encoder(tmp_path)


def test_a_config_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelError):
        Encoder(tmp_path)


def test_encoding_warns_of_nothing(encoder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.encode(one_image(file_of(picture(), "JPEG")))


def test_image_parts_count_the_images():
    message = Message("user", (ImagePart(0), ImagePart(1)))
    assert VLMSample(key="k", url="u", messages=(message,)).num_images == 2


@pytest.mark.parametrize(
    "turns",
    [
        [("assistant", ["Hello."]), ("user", ["Hi."]), ("assistant", ["Yes?"])],
        [("assistant", ["Hello."])],
    ],
    ids=["more turns follow", "alone"],
)
def test_a_conversation_that_starts_with_the_assistant_is_a_schema_error(encoder, turns):
    with pytest.raises(DataError, match="starts with the assistant") as caught:
        encoder.length(conversation(*turns), ())
    assert caught.value.error_class == "schema"


def test_what_the_template_refuses_is_a_schema_error(encoder, monkeypatch):
    template = "{{ raise_exception('no such role here') }}"
    monkeypatch.setattr(encoder.tokenizer, "chat_template", template)
    with pytest.raises(DataError, match="no such role here") as caught:
        encoder.length(conversation(("user", ["Hi."]), ("assistant", ["Yes?"])), ())
    assert caught.value.error_class == "schema"
