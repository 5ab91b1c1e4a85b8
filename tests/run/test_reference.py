"""Runs of pairs: their reference is made once, goes on after a stop, and is of that model alone."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.pairs import raw_pairs, write_pairs
from support.recipes import rewrite, rows, run_settings
from support.shards import TINY_MODEL
from support.whole_runs import audited, finetune_in_ranks, run_until

from vlmpack.api import resolve, run_recipe
from vlmpack.build.look import open_recipe
from vlmpack.distributed import Ranks
from vlmpack.errors import RecipeError, ReferenceCacheError
from vlmpack.forecast.open import plan_recipe
from vlmpack.run import opening
from vlmpack.run import reference as reference_of_runs
from vlmpack.run.reference import make_references
from vlmpack.training import reference as reference_pass
from vlmpack.training.reference import ReferenceFile

NUM_PAIRS = 18
TOTAL = 7
COLUMNS = ("loss", "grad_norm", "margin", "accuracy", "chosen_log_p", "num_samples", "num_tokens")

SMOOTH = tuple(name for name in COLUMNS if name != "accuracy")
"""Those that another row of the same pairs changes by rounding alone: margins of 1e-7 have a sign.
"""


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    pairs = list(itertools.chain.from_iterable(raw_pairs(seed) for seed in range(3)))
    return write_pairs(tmp_path_factory.mktemp("reference-pairs") / "pairs.tar", pairs)


def settings(root: Path, shard: Path, **changes):
    values = {
        "data__train": str(shard),
        "data__validation": None,
        "data__index_dir": str(root / "index"),
        "objective__name": "dpo",
        "objective__sft_weight": 0.1,
        "packing__mode": "in_batch",
        "training__micro_batch_size": 2,
        "training__global_batch_size": 4,
        "training__max_steps": TOTAL,
    }
    return run_settings(root, **(values | changes))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, shard):
    """(settings, run folder) of a run of seven steps, of which the fifth ends an epoch."""
    values = settings(tmp_path_factory.mktemp("unbroken"), shard)
    run_recipe(resolve(values, {}))
    return values, Path(values["run_dir"])


@pytest.mark.slow
def test_a_run_begins_at_ln_2_and_counts_pairs(unbroken):
    first = json.loads((unbroken[1] / "metrics.jsonl").read_text().splitlines()[0])
    assert first["preference_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert abs(first["margin"]) < 1e-4
    found = rows(unbroken[1], "num_samples", "num_rows")
    assert found == [(4, 2), (4, 2), (4, 2), (4, 2), (2, 1), (4, 2), (4, 2)]
    later = rows(unbroken[1], "margin")
    assert any(abs(margin) > 1e-3 for (margin,) in later), "the policy moves away"


@pytest.mark.slow
def test_the_run_trained_what_was_planned(unbroken):
    assert audited(unbroken[1]).problems == []


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_by_bit(unbroken, tmp_path, shard, monkeypatch):
    """In the second epoch, with the reference of its first launch."""
    values = settings(tmp_path, shard)
    run_until(values, 6, monkeypatch, total=TOTAL)

    def never(*_args):
        raise AssertionError("the reference was there")

    monkeypatch.setattr(reference_pass, "log_probabilities", never)
    run_until(values, None, monkeypatch, total=TOTAL)
    ours, theirs = Path(values["run_dir"]), unbroken[1]
    assert rows(ours, *COLUMNS) == rows(theirs, *COLUMNS)


PLANNED = {
    "packing__mode": "online",
    "packing__scope": "batch",
    "packing__max_tokens": 640,
    "training__micro_batch_size": 1,
}


@pytest.mark.soak
def test_planned_rows_train_the_same_steps(unbroken, tmp_path, shard):
    """`packing.scope: batch`: the same pairs in each step, in other rows."""
    values = settings(tmp_path, shard, **PLANNED)
    run_recipe(resolve(values, {}))
    run_dir = Path(values["run_dir"])
    found, wanted = rows(run_dir, *SMOOTH), rows(unbroken[1], *SMOOTH)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-4)
    assert rows(run_dir, "num_rows") != rows(unbroken[1], "num_rows")
    assert audited(run_dir).problems == []


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["in_batch", "online"])
def test_shared_prefixes_train_the_same_steps(mode, unbroken, tmp_path, shard):
    """The prompt of a pair stands in its row once; its reference too, within rounding."""
    planned = {
        "packing__mode": "online",
        "packing__scope": "batch",
        "training__micro_batch_size": 1,
    }
    changes = planned if mode == "online" else {}
    values = settings(tmp_path, shard, packing__share_prefix=True, **changes)
    run_recipe(resolve(values | {"training": values["training"] | {"max_steps": 3}}, {}))
    ours = Path(values["run_dir"])
    for found, wanted in zip(rows(ours, *SMOOTH), rows(unbroken[1], *SMOOTH)[:3], strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    (shared,) = zip(*rows(ours, "num_shared_tokens"), strict=True)
    whole = rows(ours, "num_tokens", "num_slots", "fill")
    assert min(shared) > 0
    for (tokens, slots, fill), saved in zip(whole, shared, strict=True):
        assert fill == pytest.approx((tokens - saved) / slots, abs=1e-6)
        assert slots < tokens
    assert audited(ours).problems == []


@pytest.mark.soak
def test_shards_indexed_on_the_way_have_their_own_reference(tmp_path):
    """Samples are numbered otherwise there; two shards, of which the second begins at 12."""
    for place, seeds in enumerate(((0, 1), (2,))):
        pairs = [pair for seed in seeds for pair in raw_pairs(seed)]
        write_pairs(tmp_path / f"pairs-{place}.tar", pairs)
    values = settings(tmp_path, tmp_path / "pairs-*.tar", data__shuffle="window", **PLANNED)
    values = {**values, "optim": {**values["optim"], "lr": 1e-12}}
    run_recipe(resolve(values, {}))
    found = rows(Path(values["run_dir"]), "margin", "accuracy", "num_samples")
    assert sum(row[2] for row in found[:5]) == NUM_PAIRS, "an epoch"
    assert max(abs(row[0]) for row in found) < 1e-4, "of a model that stays, every margin is 0"


@pytest.mark.cases(slow="window")
@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_plan_counts_what_a_run_of_pairs_computes(tmp_path, shard, shuffle):
    """Slots of every mode of an epoch, of which the padded ones are rows of one sequence each."""
    trained = {}
    for mode, more in (("none", {}), ("in_batch", {}), ("online", PLANNED)):
        (tmp_path / mode).mkdir()
        changes = {"packing__mode": mode, "data__shuffle": shuffle, **more}
        values = settings(tmp_path / mode, shard, **changes, training__num_epochs=1)
        values["training"].pop("max_steps")
        recipe = resolve(values, {})
        train, _ = open_recipe(recipe)
        state, batches = train.start(), []
        for step in train.batches(state, rank=0, dp=1, max_steps=5):
            batches += [micro.batch for micro in step.micro_batches]
        trained[mode] = sum(batch.num_slots for batch in batches)
        found = plan_recipe(recipe, world_size=1)
        own = next(figures for figures in found.modes if figures.is_recipes)
        assert own.slots == trained[mode]
        assert train.summary().padded_slots == sum(b.num_padded_slots for b in batches)
        assert found.reference.num_pairs == 18
        names = [figures.name for figures in found.modes]
        assert names == ["none", "in_batch", "online, batch", "offline, batch"]
        assert {figures.samples for figures in found.modes} == {18}
        assert {figures.steps for figures in found.modes} == {5}
    assert trained["none"] > 1.1 * trained["in_batch"]


@pytest.mark.slow
def test_a_pass_that_was_stopped_goes_on(tmp_path, shard, monkeypatch):
    values = settings(tmp_path, shard)
    recipe = resolve(values, {})
    own, left = reference_pass.log_probabilities, iter(range(4))

    def stops(engine, batch):
        next(left)  # StopIteration ends it in the middle
        return own(engine, batch)

    monkeypatch.setattr(reference_pass, "BATCHES_PER_PART", 2)
    with monkeypatch.context() as patch:
        patch.setattr(reference_pass, "log_probabilities", stops)
        with pytest.raises((StopIteration, RuntimeError)):
            make_references(recipe, Ranks())
    state = torch.get_rng_state()
    [found] = make_references(recipe, Ranks())
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"
    assert (found.num_samples, found.num_computed) == (NUM_PAIRS, NUM_PAIRS - 8)
    [again] = make_references(recipe, Ranks())
    assert again.num_computed == 0
    whole = {p.name: p.read_bytes() for p in found.folder.glob("*.part")}
    assert len(whole) == 5


@pytest.mark.slow
def test_another_reference_is_refused_before_the_engine_is_built(
    unbroken, tmp_path, shard, monkeypatch
):
    monkeypatch.setattr(opening, "build_engine", pytest.fail)
    monkeypatch.setattr(reference_of_runs, "build_engine", pytest.fail)
    folder = str(unbroken[1] / "reference")
    model = tmp_path / "model"
    shutil.copytree(TINY_MODEL, model)
    weights = load_file(str(model / "model.safetensors"))
    name = min(weights)
    save_file(weights | {name: weights[name] + 1}, model / "model.safetensors", {"format": "pt"})
    whole = {path: path.read_bytes() for path in Path(folder).rglob("*.*")}
    for changes, words in (
        ({"model__dtype": "bfloat16"}, "dtype: float32 there, bfloat16 here"),
        ({"model__path": str(model)}, "weights: .* there, .* here"),
    ):
        other = settings(tmp_path, shard, objective__reference_dir=folder, **changes)
        for launch in (run_recipe, lambda recipe: make_references(recipe, Ranks())):
            with pytest.raises(ReferenceCacheError, match=words) as caught:
                launch(resolve(other, {}))
            assert len(str(caught.value).splitlines()) == 3, "the one difference"
    assert whole == {path: path.read_bytes() for path in Path(folder).rglob("*.*")}


@pytest.mark.slow
def test_numbers_of_another_model_are_not_adopted_where_their_record_is_lost(
    unbroken, tmp_path, shard, monkeypatch
):
    """They are refused by the part's name, before the engine is built."""
    monkeypatch.setattr(opening, "build_engine", pytest.fail)
    monkeypatch.setattr(reference_of_runs, "build_engine", pytest.fail)
    folder = tmp_path / "reference"
    shutil.copytree(unbroken[1] / "reference", folder)
    (folder / "train" / "reference.json").unlink()
    changes = {"objective__reference_dir": str(folder), "model__dtype": "bfloat16"}
    other = settings(tmp_path, shard, **changes)
    for launch in (run_recipe, lambda recipe: make_references(recipe, Ranks())):
        with pytest.raises(
            ReferenceCacheError, match=r"train/0.*\.part holds .* another reference"
        ):
            launch(resolve(other, {}))
    assert not (folder / "train" / "reference.json").exists()


@pytest.mark.slow
def test_a_reference_of_other_tokens_or_another_type_is_refused(unbroken, tmp_path, shard):
    folder = str(unbroken[1] / "reference")
    other = settings(tmp_path, shard, objective__reference_dir=folder, model__dtype="bfloat16")
    with pytest.raises(ReferenceCacheError, match="dtype: float32 there, bfloat16 here"):
        run_recipe(resolve(other, {}))
    same = settings(tmp_path, shard, objective__reference_dir=folder, objective__beta=0.5)
    [found] = make_references(resolve(same, {}), Ranks())
    assert found.num_computed == 0, "beta has no part in it"


@pytest.mark.slow
def test_a_pair_that_cannot_be_read_leaves_a_hole(tmp_path, shard):
    copy = tmp_path / "damaged.tar"
    copy.write_bytes(shard.read_bytes())
    rewrite(copy, lambda name, data: data[:40] if name == "00000.1.png" else data)
    values = settings(tmp_path, copy, training__num_epochs=1, data__on_error={"schema": "skip"})
    values["training"].pop("max_steps")
    run_recipe(resolve(values, {}))
    found = rows(Path(values["run_dir"]), "num_samples", "num_skipped")
    assert sum(trained for trained, _ in found) == NUM_PAIRS - 1
    assert sum(skipped for _, skipped in found) == 1


def test_a_recipe_without_pairs_has_no_reference(tmp_path):
    with pytest.raises(RecipeError, match="'sft' has no reference model"):
        make_references(resolve(run_settings(tmp_path), {}), Ranks())


@pytest.mark.soak
def test_adapters_switched_off_are_the_reference(tmp_path, shard):
    """No folder of numbers, margins of exactly 0 at the start, and the steps of a run with one."""
    found = []
    for reference in ("adapters_off", "cached"):
        (tmp_path / reference).mkdir()
        values = settings(
            tmp_path / reference, shard, objective__reference=reference, training__max_steps=4
        )
        parts = dict.fromkeys(("vision", "language"), "lora") | {"projector": "frozen"}
        values |= {"trainable": {**parts, "lora": {"rank": 4, "alpha": 8, "dropout": 0.3}}}
        values["data"]["validation"] = str(shard)
        run_recipe(resolve(values, {}))
        run_dir = Path(values["run_dir"])
        found.append(rows(run_dir, *SMOOTH))
        assert (run_dir / "reference").is_dir() is (reference == "cached")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        first = next(row for row in map(json.loads, lines) if "margin" in row)
        if reference == "adapters_off":
            assert (first["margin"], first["accuracy"]) == (0.0, 0.5)
            assert first["preference_loss"] == math.log(2)
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-4)
    assert abs(found[0][-1][2]) > 1e-3, "the policy moves away"


def test_a_reference_of_each_step_is_not_made_beforehand(tmp_path, shard):
    lora = {"vision": "frozen", "projector": "frozen", "language": "lora"}
    values = settings(tmp_path, shard, objective__reference="adapters_off")
    with pytest.raises(
        RecipeError, match="'adapters_off' keeps no numbers, since each step makes its"
    ):
        make_references(resolve(values | {"trainable": lora}, {}), Ranks())


@pytest.mark.soak
def test_two_processes_train_what_one_does(unbroken, tmp_path, shard):
    values = settings(tmp_path, shard, training__max_steps=4)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    done = finetune_in_ranks(recipe, processes=2)
    assert done.returncode == 0, done.stderr
    ours = rows(Path(values["run_dir"]), *SMOOTH)
    for found, wanted in zip(ours, rows(unbroken[1], *SMOOTH)[:4], strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_numbers_of_other_pairs_are_found_in_the_first_step(tmp_path, shard):
    """A folder whose facts are right, and whose numbers are each those of the pair before."""
    values = settings(tmp_path, shard, training__max_steps=1)
    [made] = make_references(resolve(values, {}), Ranks())
    [part] = made.folder.glob("*.part")
    facts = json.loads((made.folder / "reference.json").read_text())["facts"]
    file = ReferenceFile(made.folder, facts, NUM_PAIRS)
    [(_, found)] = file._own_parts()
    part.unlink()
    moved = [
        (n, *row.tolist()[1:]) for n, row in zip(np.roll(found["number"], 1), found, strict=True)
    ]
    file.write([(int(n), c, r) for n, c, r in moved])
    with pytest.raises(ReferenceCacheError, match=r"answer of sample '\d+' has log p") as caught:
        run_recipe(resolve(values, {}))
    assert f"the numbers in {made.folder.parent} are of another model, or of" in str(caught.value)
    assert not rows(values["run_dir"], "loss"), "nothing was trained"


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["in_batch", "online"])
def test_in_bfloat16_the_first_step_is_held_to_what_two_packings_differ_by(tmp_path, shard, mode):
    changes = PLANNED if mode == "online" else {}
    values = settings(tmp_path, shard, model__dtype="bfloat16", training__max_steps=1, **changes)
    run_recipe(resolve(values, {}))
    [(margin,)] = rows(values["run_dir"], "margin")
    assert abs(margin) < 0.01
