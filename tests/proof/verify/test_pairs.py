"""`vlmpack verify` of pairs: right rows pass, and every known way to get pairs wrong is found."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import pytest
import torch
from support.engines import single_rank
from support.pairs import cooked_pair, raw_pairs, write_pairs
from support.recipes import run_settings
from support.shards import TINY_MODEL
from support.verified import Subject, failed, recipe_for

from vlmpack.api import resolve
from vlmpack.build.engine import engine_spec
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.packing import IGNORE_INDEX
from vlmpack.packing.media import media_of
from vlmpack.proof.verify import VerifyOptions, pairs, verify_recipe
from vlmpack.proof.verify.numbers import StockRuns
from vlmpack.proof.verify.packed import as_it_was, verified_spec
from vlmpack.proof.verify.run import verify_layout
from vlmpack.proof.verify.samples import make_row
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training.preference import PreferenceSums

GROUPS = ((0, 1, 2, 3), (4, 5))
"""Rows of unlike numbers of pairs: a mean of their means is another number."""

OF_PAIRS = {"log p of each answer", "reference of each answer", "preference loss"}
ONCE = "images of a pair are encoded once"
ISOLATION = {"leak test", "leak test of gradients"}


class PairSubject(Subject):
    """Six pairs on 0 to 3 images in two rows."""

    section = ObjectiveSection(name="dpo", beta=0.2, sft_weight=0.3, label_smoothing=0.1)

    @cached_property
    def encoder(self):
        return Encoder(self.folder).replace(pairs=True)

    @cached_property
    def samples(self):
        return [self.encoder.encode(cooked_pair(*pair)) for pair in self.raw]

    @cached_property
    def stock(self):
        with as_it_was():
            return StockRuns.make(
                self.encoder,
                self.samples,
                torch.device("cpu"),
                dtype=self.dtype,
                half_weights=False,
                objective=self.section,
            )

    def checks(self, collator=None, **overrides):
        collator = collator if collator is not None else self.collator()
        recipe = recipe_for(self.folder, objective__name="dpo", **overrides)
        spec = engine_spec(recipe, self.encoder, single_rank())
        rows = [
            make_row(collator, self.samples, numbers, self.encoder, row_multiple=1)
            for numbers in GROUPS
        ]
        with as_it_was():
            found, _ = verify_layout(verified_spec(spec, self.dtype), collator, rows, self.stock)
        assert len({check.name for check in found}) == len(found)
        return {check.name: check for check in found}


@pytest.fixture(scope="module")
def subject():
    return PairSubject(TINY_MODEL, raw_pairs())


class Broken:
    """A collator whose rows are changed by `fault(row)`."""

    def __init__(self, collator, fault):
        self.collator, self.fault = collator, fault
        self.pad_to_multiple_of, self.fixed = collator.pad_to_multiple_of, collator.fixed

    def __call__(self, samples):
        return self.fault(self.collator(samples), samples)


@pytest.mark.slow
def test_right_rows_of_pairs_pass(subject):
    checks = subject.checks()
    assert failed(checks) == set()
    wanted = OF_PAIRS | ISOLATION | {ONCE, "labels and loss mask", "positions", "boundaries"}
    assert wanted <= {name for name, check in checks.items() if check.status == "pass"}
    assert checks["samples"].detail.startswith("6 pairs with the tokens of each answer alone")
    assert "16 samples in turn" in checks["leak test"].detail, "12 answers, the images of 4 pairs"
    assert "8 losses in turn" in checks["leak test of gradients"].detail
    assert "for the images of 4 pairs" in checks[ONCE].detail
    parts = {"gradients: tower", "gradients: projector", "gradients: language model"}
    assert all(checks[name].status == "pass" for name in parts)


@pytest.mark.cases(slow="hinge")
@pytest.mark.slow
@pytest.mark.parametrize("loss", ["ipo", "hinge"])
def test_every_loss_passes_and_adapters_too(loss):
    subject = PairSubject(TINY_MODEL, raw_pairs(1))
    subject.section = ObjectiveSection(name="dpo", loss=loss)
    frozen = dict.fromkeys(("trainable__vision", "trainable__projector"), "frozen")
    more = {} if loss == "ipo" else {**frozen, "trainable__language": "lora"}
    checks = subject.checks(**more)
    assert failed(checks) == set()
    assert ("gradients: adapters" in checks) == bool(more)
    assert loss in checks["preference loss"].detail


def one_segment(row, _):
    return replace(
        row,
        cu_seqlens=torch.tensor([0, row.num_slots], dtype=torch.int32),
        cu_seqlens_padded=None,
        segment_lengths=(row.num_slots,),
    )


def rolled_labels(row, _):
    labels = torch.roll(row.labels, 1)
    mask = labels != IGNORE_INDEX
    at = mask.flatten().nonzero()[:, 0]
    return replace(row, labels=labels, loss_mask=mask, label_positions=at)


def swapped_sides(row, _):
    return replace(row, label_sequences=row.label_sequences ^ 1)


def swapped_images(row, _):
    return replace(row, media_sources=row.media_sources.flip(0))


def towers_twice(row, samples):
    """Each answer with its own copy of the images, as where a trainer's collator doubles them."""
    with_images = [sample for sample in samples if sample.media is not None]
    media = media_of([sample for sample in with_images for _ in (0, 1)])
    return replace(row, media=media, media_sources=torch.arange(sum(media.num_tokens)))


FAULTS = {
    one_segment: {"boundaries", "log p of each answer", "preference loss"} | ISOLATION,
    rolled_labels: {"labels and loss mask", "log p of each answer", "preference loss"},
    swapped_sides: {"log p of each answer", "preference loss", "gradients: language model"},
    swapped_images: {"pixels in order", "log p of each answer", "gradients: language model"},
    towers_twice: {ONCE, "pixels in order"},
}


@pytest.mark.cases(slow=("one_segment", "swapped_images"))
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_rows_are_found(subject, fault):
    assert failed(subject.checks(Broken(subject.collator(), fault))) >= FAULTS[fault]


@pytest.mark.slow
def test_a_mean_of_the_means_of_rows_is_found(subject, monkeypatch):
    own = PreferenceSums.__call__

    def means(self, losses, batch):
        return {name: 3 / batch.num_pairs * x for name, x in own(self, losses, batch).items()}

    monkeypatch.setattr(PreferenceSums, "__call__", means)
    found = failed(subject.checks())
    assert found >= {"preference loss", "gradients: tower", "gradients: language model"}
    assert not found & {"log p of each answer", "reference of each answer"}


@pytest.mark.slow
def test_a_reference_off_by_a_pair_is_found(subject, monkeypatch):
    own = pairs.with_kept

    def rolled(*given):
        found = own(*given)
        moved = found.batch.reference.roll(2)
        return replace(found, batch=replace(found.batch, reference=moved))

    monkeypatch.setattr(pairs, "with_kept", rolled)
    found = failed(subject.checks())
    assert found >= {"reference of each answer", "preference loss", "gradients: language model"}
    assert "log p of each answer" not in found


@pytest.mark.cases(slow="online")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "online"])
def test_a_recipe_of_pairs_is_verified(tmp_path, mode):
    shard = write_pairs(tmp_path / "pairs.tar", raw_pairs(2))
    online = {"packing__scope": "batch", "packing__max_tokens": 1200}
    values = run_settings(
        tmp_path,
        data__train=str(shard),
        data__validation=None,
        objective__name="dpo",
        packing__mode=mode,
        training__micro_batch_size=1 if mode == "online" else 2,
        **(online if mode == "online" else {}),
    )
    found = verify_recipe(resolve(values, {}), Ranks(), VerifyOptions(num_samples=4))
    assert found.passes, found.failed
    names = {check.name for check in found.checks if check.status == "pass"}
    prefixes = ("padded: ", "packed: ") if mode == "none" else ("",)
    assert {prefix + name for prefix in prefixes for name in OF_PAIRS} <= names
    assert "answers are learnt" in names
    assert found.facts["objective"] == "dpo"
    assert len(found.facts["samples"]) == 4
