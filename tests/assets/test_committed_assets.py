"""The committed model and shards are what the README says they are."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from support.shards import ROOT, read_shard
from transformers import AutoModelForImageTextToText, AutoTokenizer

from vlmpack.alignment import Alignment
from vlmpack.encode import Encoder, Message, TextPart, VLMSample
from vlmpack.recipe import load_recipe

DIGITS = ROOT / "assets" / "digits"
MODEL = ROOT / "assets" / "tiny-qwen2_5_vl"
HYBRID = ROOT / "assets" / "tiny-qwen3_5"
TEXT = ROOT / "assets" / "text"
PAIRS = ROOT / "assets" / "pairs"
BOXES = ROOT / "assets" / "boxes"
TEXT_MODEL = ROOT / "assets" / "tiny-qwen3"


@pytest.fixture(scope="module")
def manifest():
    return json.loads((DIGITS / "manifest.json").read_text())["splits"]


def shard_documents(split, folder=DIGITS):
    """(key, JSON document, number of images) of every sample of a split."""
    found = []
    for path in sorted(folder.glob(f"{split}-*.tar")):
        documents, images = {}, Counter()
        with tarfile.open(path) as tar:
            for entry in tar:
                key, _, suffix = entry.name.partition(".")
                if suffix == "json":
                    documents[key] = json.loads(tar.extractfile(entry).read())
                else:
                    images[key] += 1
        found += [(key, document, images[key]) for key, document in documents.items()]
    return found


def test_sizes_are_within_their_limits():
    def size(folder):
        files = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        return sum(path.stat().st_size for path in files)

    assert size(MODEL) <= 6 * 2**20
    assert size(HYBRID) <= 4e6
    assert size(TEXT_MODEL) <= 0.4 * 2**20
    assert size(TEXT) <= 0.3 * 2**20
    assert size(PAIRS) <= 5e6
    assert size(BOXES) <= 2e6
    assert size(ROOT / "assets") <= 25 * 2**20


def test_the_hybrid_is_qwen3_5_with_the_vocabulary_of_the_other_model():
    model = AutoModelForImageTextToText.from_pretrained(HYBRID, dtype="auto")
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration"
    layers = model.config.text_config.layer_types
    assert layers.count("linear_attention") == 3 * layers.count("full_attention") > 0
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (HYBRID / name).read_bytes() == (MODEL / name).read_bytes()
    ours, theirs = (
        json.loads((folder / "preprocessor_config.json").read_text()) for folder in (HYBRID, MODEL)
    )
    assert {key for key in ours if ours[key] != theirs[key]} == {"processor_class"}
    text = "<|im_start|>user\nCopy 31: caf\u00e9<|im_end|>\n"
    ids = [AutoTokenizer.from_pretrained(folder)(text).input_ids for folder in (HYBRID, MODEL)]
    assert ids[0] == ids[1]


def test_no_test_digit_is_seen_in_training(manifest):
    sources = {split: set(manifest[split]["source_images"]) for split in manifest}
    assert min(map(len, sources.values())) >= 60
    assert sum(map(len, sources.values())) == len(set().union(*sources.values()))


def test_shards_are_those_of_the_manifest(manifest):
    for split in manifest.values():
        for name, expected in split["shards"].items():
            data = (DIGITS / name).read_bytes()
            assert hashlib.sha256(data).hexdigest() == expected["sha256"]


def test_the_test_split_asks_what_it_should(manifest):
    documents = shard_documents("test")
    questions = [document for _, document, images in documents if images]
    assert len(questions) >= 600
    for document in questions:
        assert sum(message["role"] == "assistant" for message in document["messages"]) == 1
    tasks = Counter(document["task"] for document in questions)
    assert len(tasks) >= 4
    assert min(tasks.values()) >= 0.15 * len(questions)
    by_length = manifest["test"]["rows_by_length"]
    assert sorted(map(int, by_length)) == list(range(1, 9))
    assert max(by_length.values()) <= 1.02 * min(by_length.values())
    assert any(images == 0 for _, _, images in documents)


@pytest.mark.slow
def test_training_samples_vary_like_real_mixes():
    documents = shard_documents("train")
    images = Counter(count for _, _, count in documents)
    assert set(images) == {0, 1, 2, 3}
    assert any("conversations" in document for _, document, _ in documents)
    turns = [len(d.get("messages", d.get("conversations"))) for _, d, _ in documents]
    assert max(turns) >= 6


@pytest.mark.soak
def test_lengths_of_training_samples_differ_by_a_factor_of_six(encoder):
    lengths = [
        encoder.length(sample.cooked(), sample.sizes).num_tokens
        for path in sorted(DIGITS.glob("train-*.tar"))
        for sample in read_shard(path, limit=10_000)
    ]
    low, high = np.percentile(lengths, [5, 95])
    assert high >= 6 * low


@pytest.mark.cases(slow=("val", "test"))
@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_every_shard_passes_the_strict_reader(split, tmp_path):
    from vlmpack.data.config import DataConfig
    from vlmpack.data.modes import InBatch
    from vlmpack.data.pipeline import TrainData
    from vlmpack.packing.budget import RowBudget
    from vlmpack.recipe.data import DataSection
    from vlmpack.recipe.schema import PackingSection, TrainingSection
    from vlmpack.recipe.sources import Source

    encoder = Encoder(MODEL)
    config = DataConfig(
        data=DataSection(
            train=(Source(name=split, path=str(DIGITS / f"{split}-*.tar")),),
            index_dir=str(tmp_path),
        ),
        training=TrainingSection(micro_batch_size=16, global_batch_size=16, seq_length=1024),
        mode=InBatch(
            packing=PackingSection(), budget=RowBudget(max_tokens=1024), multiples=Alignment(1, 1)
        ),
    )
    summary = TrainData.open(config, encoder).summary()
    assert summary.num_usable == summary.num_samples > 100
    assert not summary.num_bad


# Pairs of readings


def test_a_rejected_reading_is_one_digit_off_and_held_out_pairs_are_none_of_training():
    splits = json.loads((PAIRS / "manifest.json").read_text())["splits"]
    seen, rows = {}, set()
    for split, said in splits.items():
        [(name, digest)] = said["shards"].items()
        assert hashlib.sha256((PAIRS / name).read_bytes()).hexdigest() == digest
        documents = shard_documents(split, PAIRS)
        assert len(documents) == said["pairs"] > 100
        assert sum(images for *_, images in documents) == said["images"] > said["pairs"]
        for key, document, _ in documents:
            right, wrong = document["chosen"], document["rejected"]
            assert len(right) == len(wrong), key
            assert sum(a != b for a, b in zip(right, wrong, strict=True)) == 1, key
            assert [turn["role"] for turn in document["messages"]] == ["user"]
            rows.add(len(right))
        seen[split] = pair_images(PAIRS / name)
    assert rows == {1, 2, 3, 4, 5, 6, 7, 8}
    assert not seen["train"] & seen["val"]


def pair_images(path):
    """The images of a shard, as bytes."""
    with tarfile.open(path) as tar:
        return {tar.extractfile(entry).read() for entry in tar if not entry.name.endswith("json")}


# Text without images


def text_documents():
    """All conversations of all splits."""
    manifest = json.loads((TEXT / "manifest.json").read_text())["splits"]
    found = {}
    for split, said in manifest.items():
        documents = shard_documents(split, TEXT)
        assert len(documents) == said["samples"] > 0
        assert not any(images for _, _, images in documents)
        for name, expected in said["shards"].items():
            data = (TEXT / name).read_bytes()
            assert hashlib.sha256(data).hexdigest() == expected["sha256"]
        found[split] = [document for _, document, _ in documents]
    return found


def result_of(question):
    """The right answer, read off the question alone."""
    digits = [int(word.strip(".?")) for word in question.split() if word.strip(".?").isdigit()]
    verb = question.split()[0]
    if verb in ("Which", "How", "Add"):
        return str({"Which": max, "How": len, "Add": sum}[verb](digits))
    order = {"Repeat": digits, "Reverse": digits[::-1], "Sort": sorted(digits)}[verb]
    return " ".join(map(str, order))


def test_text_answers_are_right_and_follow_the_system_prompt():
    documents = [document for split in text_documents().values() for document in split]
    styles = Counter()
    for document in documents:
        messages = document["messages"]
        has_system = messages[0]["role"] == "system"
        styles[messages[0]["content"] if has_system else None] += 1
        turns = messages[1:] if has_system else messages
        assert [m["role"] for m in turns] == ["user", "assistant"] * (len(turns) // 2)
        for asked, said in zip(turns[::2], turns[1::2], strict=True):
            result, answer = result_of(asked["content"]), said["content"]
            if "sentence" in str(messages[0]["content"]) and has_system:
                assert answer == f"The answer is {result}."
            elif "first" in messages[0]["content"] and has_system:
                assert answer.endswith(f": {result}")
            else:
                assert answer == result
    assert len(styles) == 4
    assert min(styles.values()) > 10
    assert set(Counter(document["task"] for document in documents).values()) != {0}


def test_text_lengths_have_a_long_tail():
    encoder = Encoder(TEXT_MODEL)
    lengths = []
    for document in text_documents()["train"]:
        messages = tuple(
            Message(m["role"], (TextPart(m["content"]),)) for m in document["messages"]
        )
        sample = VLMSample(key="", url="", messages=messages)
        lengths.append(encoder.length(sample, ()).num_tokens)
    low, middle, high = np.percentile(lengths, [5, 50, 95])
    assert high > 8 * low
    assert np.mean(lengths) > 1.25 * middle
    assert max(lengths) < 1024, "recipes/text-sft.yaml takes them all"


# Scattered digits


def box_rows(split):
    return pq.read_table(BOXES / f"{split}.parquet").to_pylist()


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_boxes_are_those_of_the_manifest(split):
    said = json.loads((BOXES / "manifest.json").read_text())["splits"][split]
    data = (BOXES / f"{split}.parquet").read_bytes()
    assert hashlib.sha256(data).hexdigest() == said["sha256"]
    rows = box_rows(split)
    assert len(rows) == said["samples"] >= 100
    digits = Counter(len(row["objects"]["bbox"]) for row in rows)
    assert set(digits) == ({0, 1, 2, 3} if split == "train" else {1})


def test_boxes_lie_around_the_ink():
    """All ink of a canvas is in its boxes, and each box is full of it; half of the canvases have
    more pixels than are shown."""
    recipe = load_recipe(ROOT / "recipes/digits-boxes.yaml")
    rows = [row for row in box_rows("train")[:200] if row["task"] != "read"]
    sizes, far = [], []
    assert len(rows) == 146
    for row in rows:
        image = Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("L")
        pixels = np.asarray(image).astype(float)
        paper = np.median(pixels)
        ink = abs(pixels - paper) > 0.4 * abs(pixels - paper).max()
        outside = ink.copy()
        for x1, y1, x2, y2 in row["objects"]["bbox"]:
            outside[max(0, y1 - 1) : y2 + 1, max(0, x1 - 1) : x2 + 1] = False
            ys, xs = np.nonzero(ink[y1:y2, x1:x2])
            edges = (xs.min(), ys.min(), x2 - x1 - 1 - xs.max(), y2 - y1 - 1 - ys.max())
            far.append(max(edges) / (y2 - y1))
        assert not outside.any()
        sizes.append(image.width * image.height)
    assert np.percentile(far, 95) < 0.12
    larger = np.mean(np.array(sizes) > recipe.images.max_pixels)
    assert larger == 0.5
