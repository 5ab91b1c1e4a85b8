"""`data.learn: each_answer`: packed rows of a conversation's answers compute what the stock model
computes of each conversation up to its answer, one at a time.

In float32 within 1e-6 of its loss and 1e-5 of every gradient, with and without shared prefixes. The
template drops the thoughts of earlier turns, so no single sequence holds what is learnt.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from support.answers import asks, dropping_folder, replies
from support.engines import make_engine
from support.families import tiny_family_folder
from support.runs import find_differences
from support.shard_fakes import image_bytes
from support.shards import TINY_MODEL, RawSample
from support.shared import collators, run_row
from support.stock import StockInputs, StockProcessor, load_stock, run_one_by_one

from vlmpack.data.shards.samples import cook_texts
from vlmpack.encode import Encoder
from vlmpack.packing import IGNORE_INDEX, EncodedSample


def conversations() -> list[RawSample]:
    """An image in the first question, text alone, one answer, an image in the second question."""
    draw, found = random.Random(3), []

    def letters() -> str:
        return "".join(draw.choices(ascii_lowercase, k=draw.randint(3, 12)))

    for key, shows, count in (("first", 0, 3), ("text", -1, 4), ("one", 0, 1), ("later", 1, 3)):
        turns: list[dict[str, Any]] = []
        for number in range(count):
            turns.append(asks(f"What is {letters()}?", image=number == shows))
            turns.append(replies(letters(), letters()))
        images = () if shows < 0 else (image_bytes(84, 56, seed=shows),)
        found.append(RawSample(key, turns, images))
    return found


def of_answers(raw: RawSample) -> list[RawSample]:
    """The conversation up to each answer, by hand."""
    ends = range(2, len(raw.messages) + 1, 2)
    parts = [(f"{raw.key}#{n}" if len(ends) > 1 else raw.key, end) for n, end in enumerate(ends)]
    shown = [
        sum(part["type"] == "image" for turn in raw.messages[:end] for part in turn["content"])
        for end in ends
    ]
    return [
        RawSample(key, raw.messages[:end], raw.images[:count])
        for (key, end), count in zip(parts, shown, strict=True)
    ]


def last_alone(inputs: StockInputs) -> StockInputs:
    """The labels of the last answer: those behind the last label that is none."""
    labels = inputs.labels.clone()
    unlearnt = (labels[0] == IGNORE_INDEX).nonzero().flatten()
    ends = int(unlearnt[-1]) if int(unlearnt[-1]) < labels.shape[1] - 1 else None
    before = unlearnt[:-1] if ends is None else unlearnt
    labels[0, : int(before[-1]) + 1] = IGNORE_INDEX
    return replace(inputs, labels=labels)


class Case:
    """One model's rows, and what the stock model makes of each answer."""

    def __init__(self, folder: Path) -> None:
        self.encoder = Encoder(folder).replace(learn="each_answer", share_prefix=True)
        self.vlm = make_engine(folder, self.encoder).vlm.train()
        raws = conversations()
        self.samples = [each for raw in raws for each in self.encoded(raw)]
        stock, processor = load_stock(folder).train(), StockProcessor(folder)
        alone = {one.key: last_alone(processor(one)) for raw in raws for one in of_answers(raw)}
        self.inputs = alone
        self.reference = run_one_by_one(stock, alone)

    def encoded(self, raw: RawSample) -> list[EncodedSample]:
        """As the data layer reads and encodes them."""
        document = json.dumps({"messages": raw.messages}).encode()
        files = {f"{n}.png": data for n, data in enumerate(raw.images)}
        texts = cook_texts(raw.key, "s", document, ("json", *files), each_answer=True)
        return [
            self.encoder.encode(
                replace(text.sample, images=tuple(files[name] for name in text.image_fields))
            )
            for text in texts
        ]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(name: str) -> Case:
        root = tmp_path_factory.mktemp(name)
        model = TINY_MODEL if name == "tiny" else tiny_family_folder(name, root / "stock")
        return Case(dropping_folder(model, root / "model"))

    return made


NAMES = ["tiny", pytest.param("qwen3_vl", marks=pytest.mark.slow)]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_rows_compute_what_each_answer_alone_does(name: str, share: bool, case_of: Any) -> None:
    case = case_of(name)
    row = collators(case.encoder, 8)[0 if share else 1](case.samples)
    assert row.keys == tuple(case.inputs) and len(row.keys) == 11
    assert find_differences(run_row(case.vlm, row), case.reference) == []
    assert row.num_label_tokens == sum(map(len, case.reference.losses.values()))
    whole = sum(each.length for each in case.samples)
    assert (row.num_shared_tokens > 0.2 * whole) == share


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_labels_are_those_of_apply_chat_template(name: str, case_of: Any) -> None:
    case = case_of(name)
    for sample, inputs in zip(case.samples, case.inputs.values(), strict=True):
        assert sample.input_ids.tolist() == inputs.input_ids[0].tolist()
        assert sample.labels[:-1].tolist() == inputs.labels[0, 1:].tolist()


def test_what_is_wrong_is_found(case_of: Any) -> None:
    """One sample of all answers, as the template writes it: another loss, fewer labels."""
    case = case_of("tiny")
    every = Encoder(case.encoder.folder)
    together = [every.encode(raw.cooked()) for raw in conversations()]
    row = collators(case.encoder, 8)[1](together)
    assert row.num_label_tokens < sum(map(len, case.reference.losses.values()))
    later = [replace(each, labels=case.samples[0].labels) for each in case.samples[:1]]
    wrong = replace(case.samples[1], position_ids=case.samples[1].position_ids + 1)
    row = collators(case.encoder, 8)[1]([*later, wrong, *case.samples[2:]])
    assert find_differences(run_row(case.vlm, row), case.reference) != []
