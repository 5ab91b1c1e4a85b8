"""Saved packs of pairs train what the stock model does with each answer alone, in double.

However they are packed: by either planner, with other capacities and alignments, in any order of
pairs, rows and ranks. Bounds: 1e-11 for an answer's log p, 1e-13 for the loss, 1e-12 for gradients.
"""

from __future__ import annotations

import itertools
import json
import tarfile
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.doubles import stock_double, stock_log_p, stock_loss, use_double
from support.engines import make_engine, make_stepper
from support.pairs import raw_pairs, write_pairs
from support.recipes import run_settings
from support.runs import relative_l2
from support.shards import TINY_MODEL

from vlmpack.build.look import open_recipe
from vlmpack.data.loading.loader import BinRequest
from vlmpack.data.packs import spans as parts_module
from vlmpack.data.packs.spans import SavedSample
from vlmpack.data.packs.write import PackOrder
from vlmpack.data.pipeline import TrainData
from vlmpack.errors import DataError
from vlmpack.packing.pairs import sequences_of
from vlmpack.recipe import load_recipe
from vlmpack.run.packs import pack_recipe
from vlmpack.training.preference import dpo
from vlmpack.training.reference import log_probabilities

NUM_PAIRS = 12
GBS = 5
CASES: dict[str, tuple[dict[str, Any], PackOrder]] = {
    "stream": ({}, PackOrder()),
    "best fit, tight": (
        {"packing.alignment": 1, "packing.max_tokens": 256},
        PackOrder(planner="bfd", kind="tokens"),
    ),
    "long rows": (
        {"packing.max_tokens": 2048, "packing.alignment": 16},
        PackOrder(kind="shards", media="resized"),
    ),
}


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recipe's settings: 12 pairs, 5 a step, the last step short."""
    folder = tmp_path_factory.mktemp("packs-of-pairs")
    shard = write_pairs(folder / "pairs.tar", list(itertools.chain(raw_pairs(0), raw_pairs(1))))
    return run_settings(
        folder,
        data__train=str(shard),
        data__validation=None,
        data__index_dir=str(folder / "index"),
        objective={"name": "dpo", "beta": 0.2, "label_smoothing": 0.1, "sft_weight": 0.3},
        packing={"mode": "online", "scope": "batch", "max_tokens": 272},
        training__seq_length=256,
        training__micro_batch_size=1,
        training__global_batch_size=GBS,
        training__max_steps=6,
    )


def packed(
    online: dict[str, Any], folder: Path, order: PackOrder, changes: dict[str, Any] | None = None
) -> TrainData:
    """The recipe's split on packs that are made here."""
    recipe = load_recipe(online, changes or {})
    pack_recipe(recipe, folder, order)
    saved = {"packing.mode": "offline", "packing.path": str(folder)}
    return open_recipe(load_recipe(recipe, saved))[0]


@pytest.fixture(scope="module")
def alone(online: dict[str, Any]) -> dict[str, Any]:
    """The pairs by key, each encoded from its shard, in the order of the index."""
    data, encoder = open_recipe(load_recipe(online))
    return {sample.key: encoder.encode(sample) for sample in data.samples()}


@pytest.fixture(scope="module")
def double() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        use_double(patch.setattr)
        yield


@pytest.fixture(scope="module")
def stock(double: None, online: dict[str, Any], alone: dict[str, Any]) -> Any:
    """(log p, reference) of all answers, and a function: pairs of a step -> loss, gradients."""
    model, (_, encoder) = stock_double(), open_recipe(load_recipe(online))
    knobs = load_recipe(online).objective
    pairs = list(alone.values())
    log_p = stock_log_p(model, encoder, pairs)
    noise = torch.randn(len(log_p), generator=torch.Generator().manual_seed(0)).double()
    reference = log_p.detach() + 5 * noise
    tokens = torch.tensor(
        [int((part.labels != -100).sum()) for pair in pairs for part in sequences_of(pair)]
    )

    def step(numbers: list[int]) -> tuple[float, dict[str, Any]]:
        places = [2 * number + k for number in numbers for k in (0, 1)]
        model.zero_grad(set_to_none=True)
        loss = stock_loss(log_p[places], reference[places], tokens[places], knobs)
        loss.backward(retain_graph=True)
        return float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters()}

    return log_p.detach(), reference, step


@pytest.fixture(scope="module")
def engine(double: None, online: dict[str, Any]) -> Any:
    made = make_engine(TINY_MODEL, open_recipe(load_recipe(online))[1])
    made.vlm.double()
    return made


def trained(engine: Any, online: dict[str, Any], batches: list[Any]) -> tuple[float, Any]:
    """(loss, gradients) of one step, whose weights stay."""
    objective = dpo(load_recipe(online).objective)
    stepper = make_stepper(engine, objective=objective, max_grad_norm=None)
    stepper.schedule = lambda step: 0.0
    sums, _ = stepper.train(0, batches, num_skipped=0, stop=False)
    found = {name: parameter.grad.clone() for name, parameter in engine.parameters()}
    engine.zero_gradients()
    return sums.loss, found


@pytest.mark.slow
def test_pairs_of_packs_come_in_other_rows_where_these_are_asked_for(
    online, engine, tmp_path
) -> None:
    """So that what rows differ by can be measured: a reference may be of other rows than a pack."""
    data = packed(online, tmp_path / "packs", PackOrder())
    numbers = next(iter(data.planned(data.start(), 1))).bins[0]
    assert len(numbers) > 1
    together, apart = (
        list(data.numbered_batches(numbers, rank=0, dp=1, together=part))
        for part in (len(numbers), 1)
    )
    assert [len(micro.samples) for micro in together] == [len(numbers)]
    assert [micro.samples[0].number for micro in apart] == list(numbers)
    whole = log_probabilities(engine, together[0].batch)
    each = [value for micro in apart for value in log_probabilities(engine, micro.batch)]
    assert each == pytest.approx(whole, abs=1e-11)


@pytest.mark.cases(slow="stream")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case == "long rows" else ()) for case in CASES],
)
def test_every_step_is_the_unpacked_one(case, engine, online, stock, tmp_path) -> None:
    changes, order = CASES[case]
    data = packed(online, tmp_path / "packs", order, changes)
    log_p, reference, step = stock
    data.kept["reference"] = reference.numpy().reshape(-1, 2)
    unpacked, _ = open_recipe(
        load_recipe({**online, "packing": {"mode": "none"}}, {"training.micro_batch_size": 5})
    )
    sets = [sorted(itertools.chain(*b.bins)) for b in unpacked.planned(unpacked.start(), 3)]
    counts: list[int] = []
    for place, found in enumerate(data.batches(data.start(), rank=0, dp=1, max_steps=3)):
        rows = found.micro_batches
        numbers = [sample.number for micro in rows for sample in micro.samples]
        assert sorted(numbers) == sets[place]
        counts.append(len(rows))
        for micro in rows if place == 0 else ():
            wanted = log_p[[2 * s.number + k for s in micro.samples for k in (0, 1)]]
            ours = torch.tensor(log_probabilities(engine, micro.batch), dtype=torch.float64)
            assert (ours - wanted).abs().max() < 1e-11
        if place == 1:
            continue  # as the first
        value, gradients = trained(engine, online, [micro.batch for micro in rows])
        loss, stock_gradients = step(numbers)
        assert value == pytest.approx(loss, abs=1e-13)
        worst = max(relative_l2(gradients[n], stock_gradients[n]) for n in stock_gradients)
        assert worst < 1e-12
        assert min(float(g.norm()) for g in stock_gradients.values()) > 1e-9
    assert (max(counts) == 1) == (case == "long rows")
    assert [len(members) for members in sets] == [5, 5, 2]


@pytest.mark.slow
def test_the_order_of_pairs_rows_and_ranks_changes_nothing(engine, online, stock, tmp_path) -> None:
    """And a mean of each row's mean would."""
    data = packed(online, tmp_path / "packs", PackOrder(kind="tokens"))
    data.kept["reference"] = stock[1].numpy().reshape(-1, 2)
    ranks = [next(data.batches(data.start(), rank=rank, dp=2, max_steps=1)) for rank in (1, 0)]
    [whole] = data.batches(data.start(), rank=0, dp=1, max_steps=1)
    straight = [micro.batch for micro in whole.micro_batches]
    dealt = [micro.batch for share in ranks for micro in share.micro_batches]
    bins = next(data.planned(data.start(), 1)).bins
    loaded = [data.dataset[data.request(tuple(reversed(samples)))] for samples in reversed(bins)]
    turned = [
        replace(
            micro.batch,
            reference=stock[1][[2 * s.number + k for s in micro.samples for k in (0, 1)]],
        )
        for micro in loaded
    ]
    numbers = [number for samples in bins for number in samples]
    loss, wanted = stock[2](numbers)
    assert max(map(len, bins)) > 1 < len(bins)
    for batches in (straight, dealt, turned):
        value, gradients = trained(engine, online, batches)
        assert value == pytest.approx(loss, abs=1e-13)
        assert max(relative_l2(gradients[n], wanted[n]) for n in wanted) < 1e-12
    assert [b.keys for b in turned] != [b.keys for b in straight]
    values = [trained(engine, online, [batch])[0] for batch in straight]
    assert abs(sum(values) / len(values) - loss) > 1e-3, "rows would weigh alike"


def read_back(data: TrainData) -> dict[str, Any]:
    """Every pair of an epoch by key, as its pack gives it to the collator."""
    found: dict[str, Any] = {}
    for batch in data.planned(data.start(), data.steps_per_epoch()):
        for samples in batch.bins:
            request: BinRequest = data.request(samples)
            for ref, reading in zip(request.samples, data.dataset.read(request), strict=True):
                assert ref.key not in found, "a pair in two packs"
                found[ref.key] = data.dataset.encode(ref, reading)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tokens", "shards"])
def test_what_is_packed_comes_back(kind, online, alone, tmp_path) -> None:
    data = packed(online, tmp_path / "packs", PackOrder(kind=kind))
    found = read_back(data)
    assert found.keys() == alone.keys()
    assert len(found) == NUM_PAIRS
    for key, pair in alone.items():
        for field in fields(pair):
            ours, theirs = getattr(found[key], field.name), getattr(pair, field.name)
            if isinstance(theirs, torch.Tensor):
                assert torch.equal(ours, theirs), (key, field.name)
            elif field.name == "media" and theirs is not None:
                assert torch.equal(ours.pixel_values, theirs.pixel_values)
                assert ours.grid_thw == theirs.grid_thw
            else:
                assert ours == theirs, (key, field.name)
        assert len(pair.sequences) == 2


def test_images_of_a_pair_are_saved_once_and_nothing_is_pickled(online, alone, tmp_path) -> None:
    folder = tmp_path / "packs"
    packed(online, folder, PackOrder(kind="shards"))
    members: list[str] = []
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            members += [Path(name).suffix for name in tar.getnames()]
    saved = Counter(members)
    assert saved.keys() == {".safetensors", ".jpg"}
    images = sum(pair.media.num_images for pair in alone.values() if pair.media is not None)
    assert saved[".jpg"] == images > 5
    manifest = json.loads((folder / "pack.json").read_text())
    names = {path.suffix for path in folder.iterdir()}
    assert names == {".tar", ".json", ".safetensors", ".parquet"}
    assert (manifest["packs_by_batch"], manifest["encoder"]["samples"]) == (True, "pairs")


@pytest.mark.slow
def test_a_pair_that_is_split_over_packs_is_found(online, tmp_path, monkeypatch) -> None:
    """A pack that holds one answer of a pair, whole or cut short."""

    def halved(cls, encoded, images=(), *, resized=False):
        first = sequences_of(encoded)[0]
        return own(first, images, resized=resized)

    def short(cls, encoded, images=(), *, resized=False):
        first, second = encoded.sequences
        cut = replace(
            encoded,
            input_ids=encoded.input_ids[:-1],
            labels=encoded.labels[:-1],
            position_ids=encoded.position_ids[:, :-1],
            sequences=(first, second - 1),
        )
        return own(cut, images, resized=resized)

    own = SavedSample.of
    for name, broken, words in (
        ("half", halved, "the pack has one sequence of it, and a pair has two"),
        ("short", short, r"encoded to \d+ tokens, planned were \d+"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(parts_module.SavedSample, "of", classmethod(broken))
            strict = {"data.on_error.integrity": "raise"}
            data = packed(online, tmp_path / name, PackOrder(kind="tokens"), strict)
        with pytest.raises(DataError, match=words):
            list(data.batches(data.start(), rank=0, dp=1, max_steps=3))
