"""What every packing mode owes those who ask it; a new one is tested by its line in MODES."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from support.shard_fakes import COUNT, FakeEncoder, config_for, key_of, write_shards

from vlmpack.alignment import Alignment
from vlmpack.data.index.table import Int64s
from vlmpack.data.modes import MODES, Cutting, InBatch, Online, PackingMode, RowShape, Uncut
from vlmpack.data.pipeline import TrainData
from vlmpack.data.plan.packers import Bin, BudgetPacker, FixedPacker, window_samples
from vlmpack.data.plan.state import DataState
from vlmpack.errors import RecipeError
from vlmpack.forecast.modes import lay_out, layout_of
from vlmpack.packing import FixedShape
from vlmpack.packing.budget import RowBudget
from vlmpack.recipe.schema import FACTS, ModeName, PackingSection

NAMES = [name for name, facts in FACTS.items() if not facts.reads_packs]
SHUFFLES = ["global", "window"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("modes")
    return write_shards(folder, COUNT, per_shard=20), folder / "index"


def opened(shards: tuple[str, Path], mode: PackingMode, shuffle: str = "global") -> TrainData:
    micro, whole = (1, 2) if mode.facts.plans_rows else (3, 6)
    config = config_for(
        *shards, micro_batch_size=micro, global_batch_size=whole, seq_length=64, shuffle=shuffle
    )
    return TrainData.open(replace(config, mode=mode), FakeEncoder())


def mode_of(name: ModeName) -> PackingMode:
    section = PackingSection(mode=name)
    return MODES[name](
        packing=section, budget=RowBudget(max_tokens=64, alignment=4), multiples=Alignment(1, 1)
    )


def keys_of(data: TrainData, state: DataState, dp: int = 1) -> list[list[str]]:
    """The keys of each step's samples, over all ranks, to the end of the first epoch."""
    steps = data.steps_until(1, data.start())
    ranks = [list(data.batches(state, rank=r, dp=dp, max_steps=steps)) for r in range(dp)]
    return [
        [sample.key for step in share for micro in step.micro_batches for sample in micro.samples]
        for share in zip(*ranks, strict=True)
    ]


def check_epoch(shards: tuple[str, Path], mode: PackingMode, shuffle: str = "global") -> None:
    """Every sample once, whatever the ranks; and the same from the middle on."""
    data = opened(shards, mode, shuffle)
    steps = keys_of(data, data.start())
    assert len(steps) > 3
    assert Counter(key for step in steps for key in step) == Counter(map(key_of, range(COUNT)))
    assert [sorted(step) for step in keys_of(opened(shards, mode, shuffle), data.start(), 2)] == [
        sorted(step) for step in steps
    ]
    *_, third = data.batches(data.start(), rank=0, dp=1, max_steps=3)
    saved = DataState.from_json(third.state.to_json())
    again = opened(shards, mode, shuffle)
    assert keys_of(again, saved) == steps[3:]
    assert saved.identity["packing.mode"] == mode.name


def check_shape(shards: tuple[str, Path], mode: PackingMode) -> None:
    """What `vlmpack plan` counts is what the collator makes."""
    data = opened(shards, mode)
    steps = list(data.batches(data.start(), rank=0, dp=1, max_steps=data.steps_per_epoch()))
    made = [micro.batch.num_slots for step in steps for micro in step.micro_batches]
    planned = data.planned(data.start(), len(steps))
    layout = layout_of(
        [[batch.bins] for batch in planned], data.split.sizes, data.split.sequence_tokens
    )
    rows = lay_out(layout, data.config.mode.shape())
    assert made == rows.slots.tolist() and len(set(made)) > 1
    assert data.dataset.collator.empty().num_slots == rows.empty_slots


def test_every_name_has_its_facts_and_its_class() -> None:
    assert list(FACTS) == list(MODES) == list(get_args(ModeName))
    assert PackingSection().mode in MODES


@pytest.mark.cases(quick=("in_batch-*", "online-*"), slow="none-window")
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("name", NAMES)
def test_an_epoch_trains_every_sample_once(
    shards: tuple[str, Path], name: ModeName, shuffle: str
) -> None:
    check_epoch(shards, mode_of(name), shuffle)


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_counts_the_slots_that_the_collator_makes(
    shards: tuple[str, Path], name: ModeName
) -> None:
    check_shape(shards, mode_of(name))
    check_shape(shards, replace(mode_of(name), multiples=Alignment(sequence=4, row=8)))


@dataclass(frozen=True)
class ByLength(FixedPacker):
    """Bins of samples of like length; `lost` of each global batch are left out."""

    sizes: Any
    lost: int = 0

    def __call__(self, order: Int64s) -> list[tuple[Bin, ...]]:
        whole, (tokens, _) = self.global_batch_size, self.sizes(order)
        pieces = [
            order[at : at + whole][np.argsort(tokens[at : at + whole], kind="stable")]
            for at in range(0, len(order), whole)
        ]
        kept = super().__call__(np.concatenate(pieces))
        return [(batch[0][self.lost :], *batch[1:]) for batch in kept]


class Sorted(InBatch):
    """A fifth mode, as somebody would write it."""

    lost = 0

    def cut(self, split: Uncut) -> Cutting:
        packer = ByLength(split.global_batch_size, split.micro_batch_size, split.sizes, self.lost)
        return Cutting(packer, window_samples(split.global_batch_size))


class Losing(Sorted):
    lost = 1


class Wide(Sorted):
    def shape(self) -> RowShape:
        return RowShape(width=4096)


def toy(kind: type[PackingMode]) -> PackingMode:
    return kind(
        packing=PackingSection(), budget=RowBudget(max_tokens=64), multiples=Alignment(1, 1)
    )


def test_a_fifth_mode_is_a_subclass(shards: tuple[str, Path]) -> None:
    check_epoch(shards, toy(Sorted))
    check_shape(shards, toy(Sorted))
    data, plain = opened(shards, toy(Sorted)), opened(shards, toy(InBatch))
    assert keys_of(data, data.start())[0] != keys_of(plain, plain.start())[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextFitPacker(BudgetPacker):
    def rows(self, order: Int64s) -> list[Bin]:
        rows, free = list[list[int]](), 0
        for sample, length in zip(order.tolist(), self.sizes(order)[0].tolist(), strict=True):
            needed = -(-max(1, length) // self.budget.alignment) * self.budget.alignment
            if needed > free:
                rows.append([])
                free = self.budget.max_tokens
            rows[-1].append(sample)
            free -= needed
        return [tuple(row) for row in rows]


class NextFit(Online):
    """Rows in the samples' order, as somebody would write it."""

    packer = NextFitPacker


def test_a_mode_that_plans_rows_names_its_packer(shards: tuple[str, Path]) -> None:
    online = mode_of("online")
    own = NextFit(packing=online.packing, budget=online.budget, multiples=online.multiples)
    check_epoch(shards, own)
    check_shape(shards, own)
    data, plain = opened(shards, own), opened(shards, online)
    assert keys_of(data, data.start()) != keys_of(plain, plain.start())
    lengths = np.array([48, 48, 16, 8, 8])
    split = Uncut(
        global_batch_size=4,
        micro_batch_size=1,
        sizes=lambda numbers: (lengths[numbers], 0 * numbers),
        first_samples=lambda: np.arange(5),
    )
    packer, chosen = own.cut(split).packer, online.cut(split).packer
    assert isinstance(packer, NextFitPacker) and isinstance(chosen, BudgetPacker)
    assert (packer.fullest, chosen.fullest) == (2, 3), "by its own dry run"


def test_a_mode_that_loses_samples_or_miscounts_slots_is_seen(shards: tuple[str, Path]) -> None:
    with pytest.raises(AssertionError):
        check_epoch(shards, toy(Losing))
    with pytest.raises(AssertionError):
        check_shape(shards, toy(Wide))


def test_the_shape_of_all_rows_is_that_of_the_settled_budget() -> None:
    section = PackingSection(mode="online", pad_to_max_length=True, pad_cu_seqlens=True)
    mode = Online(packing=section, budget=RowBudget(max_tokens=24), multiples=Alignment(1, 1))
    with pytest.raises(
        RecipeError, match=r"needs a number of sequences in a row; set packing.max_sequences"
    ):
        mode.fixed_shape()
    cutting = Cutting(FixedPacker(1, 1), 4096)
    assert mode.resolved(cutting.packer) is mode
    split = Uncut(
        global_batch_size=4,
        micro_batch_size=1,
        sizes=lambda numbers: (np.full(len(numbers), 4), np.zeros(len(numbers), np.int64)),
        first_samples=lambda: np.arange(100),
    )
    settled = mode.resolved(mode.cut(split).packer)
    assert settled.fixed_shape() == FixedShape(row_tokens=24, max_sequences=8)
    assert mode.identity(mode.cut(split))["packing.max_sequences"] == 8
    unknown = mode.cut(replace(split, first_samples=None))
    assert mode.resolved(unknown.packer).budget.max_sequences == 32, "nothing to try"
    free = replace(mode, packing=section.model_copy(update={"pad_to_max_length": False}))
    assert free.fixed_shape() is None and free.shape().width == 0


def graphs(sequences: int | None = None, **section: Any) -> Online:
    return Online(
        packing=PackingSection(mode="online", **section),
        budget=RowBudget(max_tokens=64, alignment=4, max_sequences=section.get("max_sequences")),
        multiples=Alignment(1, 1),
        captures=True,
        graph_sequences=sequences,
    )


def test_the_plan_counts_the_slots_of_captured_rows(shards: tuple[str, Path]) -> None:
    data = opened(shards, graphs(2))
    steps = list(data.batches(data.start(), rank=0, dp=1, max_steps=data.steps_per_epoch()))
    made = [micro.batch for step in steps for micro in step.micro_batches]
    assert {batch.overflows for batch in made} == {False, True}
    assert {batch.num_slots for batch in made if not batch.overflows} == {64}
    check_shape(shards, graphs(2))


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_graphs_change_no_member_of_any_row(shards: tuple[str, Path], shuffle: str) -> None:
    plain, captured = (opened(shards, mode, shuffle) for mode in (mode_of("online"), graphs()))
    assert keys_of(plain, plain.start()) == keys_of(captured, captured.start())
    assert plain.identity == captured.identity
    *_, third = plain.batches(plain.start(), rank=0, dp=1, max_steps=3)
    assert keys_of(captured, third.state) == keys_of(plain, third.state), "either goes on"


def test_what_fits_a_graph_is_the_fullest_row_of_the_dry_run() -> None:
    split = Uncut(
        global_batch_size=4,
        micro_batch_size=1,
        sizes=lambda numbers: (np.full(len(numbers), 4), np.zeros(len(numbers), np.int64)),
        first_samples=lambda: np.arange(100),
    )
    for scope in ("stream", "batch"):
        mode = graphs(max_sequences=100, scope=scope)
        settled = mode.resolved(mode.cut(split).packer)  # 16 samples of 4 tokens in 64
        shape = FixedShape(row_tokens=64, max_sequences=16, overflows=True)
        assert settled.fixed_shape() == shape
        assert settled.shape().most_filled == 16
    few = graphs(max_sequences=5)
    assert few.resolved(few.cut(split).packer).fixed_shape().max_sequences == 5
    unknown = few.cut(replace(split, first_samples=None))
    assert few.resolved(unknown.packer).fixed_shape().max_sequences == 5, "nothing to try"
    own = graphs(3)
    assert own.resolved(own.cut(split).packer).fixed_shape().max_sequences == 3
