"""Packs that hold what neighbours begin with once: online's rows, saved."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.packed_splits import pack
from support.pairs import raw_pairs, write_pairs
from support.shard_fakes import chat_json, config_for, image_bytes, write_shard
from support.shards import TINY_MODEL

from vlmpack.data.loading.loader import MicroBatch
from vlmpack.data.packs import spans
from vlmpack.data.packs.manifest import read_manifest
from vlmpack.data.packs.open import SavedBins
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.state import DataState
from vlmpack.encode import Encoder
from vlmpack.errors import PacksError
from vlmpack.packing.budget import RowBudget

WORDS = ("what", "where is it", "why", "how many of them are there", "who")
SHARED: dict[str, Any] = {"share_prefix": True}
CASES = [
    ("samples", "plan", "original"),
    ("samples", "tokens", "original"),
    ("samples", "shards", "resized"),
    ("pairs", "shards", "original"),
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Five questions about each of six images, and pairs on none to three images."""
    folder = tmp_path_factory.mktemp("shared")
    records = [
        (
            f"q{picture}-{question}",
            {
                "json": chat_json(WORDS[question], f"a {picture}", 1),
                "0.png": image_bytes(40 + 16 * picture, 56, seed=picture),
            },
        )
        for question in range(5)
        for picture in range(6)
    ]
    write_shard(folder / "samples.tar", records)
    write_pairs(folder / "pairs.tar", [pair for seed in range(2) for pair in raw_pairs(seed)])
    return {form: folder / f"{form}.tar" for form in ("samples", "pairs")}


def opened(shard: Path, **changes: Any) -> TrainData:
    """A split in mode `online`, whose rows share unless the changes say otherwise."""
    pairs = shard.stem == "pairs"
    most = 400 if pairs else 128
    settings: dict[str, Any] = {
        "shuffle": "global",
        "mode": "online",
        "scope": "batch",
        "micro_batch_size": 1,
        "global_batch_size": 4 if pairs else 9,
        "seq_length": most,
        "budget": RowBudget(max_tokens=most, alignment=4),
        **SHARED,
    }
    if not pairs:
        settings["group_by"] = "image"
    config = config_for(str(shard), shard.parent / "index", **(settings | changes))
    encoder = Encoder(TINY_MODEL).replace(pairs=pairs)
    shares = config.mode.packing.share_prefix
    return TrainData.open(config, encoder.replace(share_prefix=True) if shares else encoder)


def offline(shard: Path, saved: Path, **changes: Any) -> TrainData:
    most = 400 if shard.stem == "pairs" else 128
    wanted = {"mode": "offline", "path": str(saved), "max_tokens": most}
    return opened(shard, **(wanted | changes))


def rows_of(data: TrainData, state: DataState | None = None, steps: int = 0) -> list[MicroBatch]:
    state = state or data.start()
    steps = steps or data.steps_until(1, state)
    found = data.batches(state, rank=0, dp=1, max_steps=steps)
    return [micro for step in found for micro in step.micro_batches]


def same(one: Any, two: Any) -> bool:
    """Bit by bit, whatever the fields are."""
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and torch.equal(one, two)
    if is_dataclass(one):
        return type(one) is type(two) and all(
            same(getattr(one, each.name), getattr(two, each.name)) for each in fields(one)
        )
    if isinstance(one, tuple) and isinstance(two, tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@pytest.mark.cases(
    quick=("pairs-shards-original-stream", "samples-plan-original-batch"),
    slow="samples-shards-resized-stream",
)
@pytest.mark.parametrize("scope", ["batch", "stream"])
@pytest.mark.parametrize(("form", "kind", "media"), CASES)
def test_packs_that_share_are_the_rows_of_online_bit_by_bit(
    shards: dict[str, Path], tmp_path: Path, form: str, kind: str, media: str, scope: str
) -> None:
    shard = shards[form]
    data = opened(shard, scope=scope)
    manifest = pack(data, tmp_path / "packs", kind=kind, media=media)
    assert manifest.share_prefix
    saved = offline(shard, tmp_path / "packs", scope=scope)
    assert saved.identity["packing.share_prefix"] is True
    ours, theirs = rows_of(saved), rows_of(data)
    assert len(ours) == len(theirs) == manifest.num_packs
    for one, two in zip(ours, theirs, strict=True):
        assert [each.key for each in one.samples] == [each.key for each in two.samples]
        assert same(one.batch, two.batch)
    plain = rows_of(opened(shard, scope=scope, share_prefix=False))
    held, alone = (sum(m.batch.num_tokens for m in each) for each in (ours, plain))
    shared = sum(m.batch.num_shared_tokens for m in ours)
    assert held == alone
    assert shared > 0.2 * alone
    assert manifest.num_tokens == alone - shared
    assert 0 < manifest.fill <= 1
    assert max(m.batch.num_slots for m in ours) <= manifest.budget.max_tokens
    assert len(ours) < len(plain), "packs are as full as sharing lets them be"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["samples", "pairs"])
def test_planned_slots_of_saved_packs_are_those_of_their_rows(
    shards: dict[str, Path], tmp_path: Path, form: str
) -> None:
    """The table of packs of kind `shards` keeps the prefixes; later epochs, too, are so large."""
    pack(opened(shards[form]), tmp_path / "packs", kind="shards")
    saved = offline(shards[form], tmp_path / "packs")
    indexed, kept = opened(shards[form]).fitted.table.prefixes, saved.fitted.table.prefixes
    assert indexed is not None and kept is not None
    assert kept.lengths.any()
    assert (kept.lengths == indexed.lengths).all()
    assert (kept.digests == indexed.digests).all()
    steps = saved.steps_until(2, saved.start())
    first = saved.steps_until(1, saved.start())
    epochs = rows_of(saved, steps=first), rows_of(saved, steps=steps)
    later = epochs[1][len(epochs[0]) :]
    slots = [sorted(m.batch.num_slots for m in each) for each in (epochs[0], later)]
    assert slots[0] == slots[1]


@pytest.mark.slow
def test_a_run_on_shared_packs_goes_on_from_any_step(
    shards: dict[str, Path], tmp_path: Path
) -> None:
    pack(opened(shards["samples"]), tmp_path / "packs", kind="tokens")
    data = offline(shards["samples"], tmp_path / "packs")
    total = data.steps_until(2, data.start())
    steps = list(data.batches(data.start(), rank=0, dp=1, max_steps=total))
    for stop in (1, total - 2):
        state = DataState.from_json(steps[stop - 1].state.to_json())
        again = rows_of(offline(shards["samples"], tmp_path / "packs"), state, total)
        wanted = [micro for step in steps[stop:] for micro in step.micro_batches]
        assert len(again) == len(wanted) > 0
        assert all(same(a.batch, b.batch) for a, b in zip(again, wanted, strict=True))


def test_packs_and_recipe_say_the_same_of_sharing(shards: dict[str, Path], tmp_path: Path) -> None:
    shard = shards["samples"]
    pack(opened(shard), tmp_path / "shared")
    pack(opened(shard, share_prefix=False), tmp_path / "alone")
    with pytest.raises(PacksError, match=r"share_prefix: true in the packs, false in the recipe; "):
        offline(shard, tmp_path / "shared", share_prefix=False)
    with pytest.raises(PacksError, match=r"pack again with packing.share_prefix=true, or train"):
        offline(shard, tmp_path / "alone")
    shares = [read_manifest(tmp_path / name).share_prefix for name in ("shared", "alone")]
    assert shares == [True, False]
    assert (
        "packing.share_prefix"
        not in offline(shard, tmp_path / "alone", share_prefix=False).identity
    )


def test_best_fit_decreasing_is_refused_by_name(shards: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(PacksError, match=r"--planner bfd: .*share_prefix.*Use --planner stream"):
        pack(opened(shards["samples"]), tmp_path / "packs", planner="bfd")
    assert not (tmp_path / "packs").exists()


def test_saved_cuts_are_those_of_the_samples(shards: dict[str, Path]) -> None:
    data = opened(shards["samples"])
    refs = [data.fitted.table.ref(number) for number in range(3)]
    samples = [data.dataset.encoder.encode(data.dataset.reader.read(ref)) for ref in refs]
    several = [*samples, replace(samples[0], prefixes=())]
    assert samples[0].prefixes
    there = [spans.SavedSample.of(sample) for sample in several]
    again = spans.read_pack(
        spans.write_span(0, [there[0], None, *there[1:]], 3), shard="s", offset=0
    )
    found = [None if each is None else each.tokens.prefixes for each in again]
    assert found == [several[0].prefixes, None, *(sample.prefixes for sample in several[1:])]
    alone = spans.write_span(0, [there[-1]], 3)
    assert b"num_prefixes" not in alone, "packs that do not share are written as before"


def test_without_its_prefixes_a_pack_would_take_more_than_was_planned(
    shards: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(opened(shards["samples"]), tmp_path / "packs", kind="tokens")
    own = SavedBins.encode
    monkeypatch.setattr(
        SavedBins, "encode", lambda self, *given: replace(own(self, *given), prefixes=())
    )
    found = rows_of(offline(shards["samples"], tmp_path / "packs"))
    assert sum(m.batch.num_shared_tokens for m in found) == 0
    assert max(m.batch.num_slots for m in found) > 128
