"""Runs of pairs on saved packs: the steps of the unpacked run; reference, holes, resume, checks."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import yaml
from support.pairs import raw_pairs, write_pairs
from support.recipes import rewrite, rows, run_settings
from support.whole_runs import audited, finetune_in_ranks, run_until

from vlmpack.api import resolve, run_recipe
from vlmpack.build.look import open_recipe
from vlmpack.cli import pack as cli
from vlmpack.data.packs import open
from vlmpack.data.packs.write import PackOrder
from vlmpack.distributed import Ranks
from vlmpack.errors import PacksError
from vlmpack.forecast.open import plan_recipe
from vlmpack.proof.rows.checks import check_row
from vlmpack.proof.rows.opening import load_row, rows_of_batch
from vlmpack.run.packs import pack_recipe
from vlmpack.run.reference import make_references

NUM_PAIRS = 18
COLUMNS = ("loss", "grad_norm", "margin", "chosen_log_p", "num_samples", "num_tokens")
PACKS = {"packing": {"mode": "online", "scope": "batch", "max_tokens": 400}}
ONE_ROW = {"training__micro_batch_size": 1}


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    pairs = list(itertools.chain.from_iterable(raw_pairs(seed) for seed in range(3)))
    return write_pairs(tmp_path_factory.mktemp("packed-pairs") / "pairs.tar", pairs)


def settings(root: Path, shard: Path, **changes):
    values = {
        "data__train": str(shard),
        "data__validation": None,
        "data__index_dir": str(root / "index"),
        "objective__name": "dpo",
        "objective__sft_weight": 0.1,
        "packing__mode": "in_batch",
        "training__seq_length": 360,
        "training__micro_batch_size": 2,
        "training__global_batch_size": 4,
        "training__max_steps": 7,
    }
    return run_settings(root, **(values | changes))


def packed(root: Path, shard: Path, order: PackOrder | None = None, **changes):
    """Settings of a run on packs that are made here."""
    values = settings(root, shard, **(ONE_ROW | changes)) | PACKS
    pack_recipe(resolve(values, {}), root / "packs", order or PackOrder(kind="shards"))
    saved = {"mode": "offline", "path": str(root / "packs"), "scope": "batch", "max_tokens": 400}
    return values | {"packing": saved}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, shard):
    """(settings, run folder) of seven steps on packs, of which the fifth ends an epoch."""
    values = packed(tmp_path_factory.mktemp("packed"), shard)
    gone = shard.rename(shard.with_suffix(".gone"))
    run_recipe(resolve(values, {}))
    gone.rename(shard)
    return values, Path(values["run_dir"])


@pytest.mark.slow
def test_a_run_on_packs_trains_the_unpacked_steps(unbroken, tmp_path, shard):
    """In its first epoch, with the seed of the packs; the shards are needed no more."""
    plain = settings(tmp_path, shard)
    run_recipe(resolve(plain, {}))
    ours, theirs = rows(unbroken[1], *COLUMNS), rows(Path(plain["run_dir"]), *COLUMNS)
    for found, wanted in zip(ours[:5], theirs[:5], strict=True):
        assert found == pytest.approx(wanted, rel=2e-4, abs=2e-4)
    assert len({n for (n,) in rows(unbroken[1], "num_rows")}) > 1, "rows of any number of pairs"
    assert audited(unbroken[1]).problems == []


@pytest.mark.slow
def test_margins_are_0_at_first_where_the_reference_ran_the_same_rows(unbroken):
    first = json.loads((unbroken[1] / "metrics.jsonl").read_text().splitlines()[0])
    assert first["preference_loss"] == math.log(2)
    assert first["margin"] == 0.0
    assert first["accuracy"] == 0.5
    assert any(abs(margin) > 1e-3 for (margin,) in rows(unbroken[1], "margin"))


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_by_bit(unbroken, tmp_path, shard, monkeypatch):
    """In the second epoch, whose sets come in another order."""
    values = packed(tmp_path, shard)
    run_until(values, 6, monkeypatch, total=7)
    run_until(values, None, monkeypatch, total=7)
    assert rows(Path(values["run_dir"]), *COLUMNS) == rows(unbroken[1], *COLUMNS)
    tokens = [n for (n,) in rows(unbroken[1], "num_tokens")]
    assert tokens[5:7] != tokens[:2]
    assert {*tokens[5:7]} <= {*tokens[:4]}, "a set of the first epoch, whole; the short one is last"


@pytest.mark.slow
def test_the_reference_reads_each_pack_once(tmp_path, shard, monkeypatch):
    values = packed(tmp_path, shard)
    own, read = open.load_pack, []

    def counted(fetcher, place):
        read.append(place.offset)
        return own(fetcher, place)

    monkeypatch.setattr(open, "load_pack", counted)
    recipe = resolve(values, {})
    [found] = make_references(recipe, Ranks())
    assert (found.num_samples, found.num_computed) == (NUM_PAIRS, NUM_PAIRS)
    assert len(read) == len(set(read)) == open_recipe(recipe)[0].split.manifest.num_packs
    [again] = make_references(recipe, Ranks())
    assert again.num_computed == 0


@pytest.mark.slow
def test_a_pair_that_cannot_be_read_leaves_a_hole_and_moves_nobody(tmp_path, shard):
    copy = tmp_path / "damaged.tar"
    copy.write_bytes(shard.read_bytes())

    def damaged(name, data):
        if name == "00000.json":
            record = json.loads(data)
            return json.dumps({k: v for k, v in record.items() if k != "rejected"}).encode()
        return data[:-40] if name == "00003.1.png" else data

    rewrite(copy, damaged)
    changes = {"data__on_error": {"schema": "skip", "decode": "skip"}, "training__max_steps": 5}
    values = packed(tmp_path, copy, **changes)
    run_recipe(resolve(values, {}))
    found = rows(Path(values["run_dir"]), "num_samples", "num_skipped")
    assert [sum(row) for row in found] == [4, 4, 4, 4, 2], "pairs in = trained + skipped"
    assert sum(skipped for _, skipped in found) == 2
    assert audited(Path(values["run_dir"])).problems == []


@pytest.mark.slow
def test_rows_of_saved_pairs_are_checked_as_any(unbroken):
    train, encoder = open_recipe(resolve(unbroken[0], {}))
    shards_are_there = train.split.probed(1, train.start()) == []
    assert shards_are_there, "kind shards needs none"
    for one in rows_of_batch(train, 0, None, None):
        row = load_row(train, encoder, one.samples, one.title, 1)
        assert [check for check in check_row(row) if check.fails] == []
        assert row.sequences == 2


@pytest.mark.soak
def test_packs_that_share_prompts_train_the_rows_that_plan_counts(unbroken, tmp_path, shard):
    """Before and behind the packing; each row is checked along its paths, as `inspect` does."""
    values = settings(tmp_path, shard, **ONE_ROW, training__max_steps=5)
    shares = {**PACKS["packing"], "share_prefix": True}
    saved = {**shares, "mode": "offline", "path": str(tmp_path / "packs")}
    offline = resolve(values | {"packing": saved}, {})
    before = plan_recipe(offline, world_size=1)
    pack_recipe(
        resolve(values | {"packing": shares}, {}), tmp_path / "packs", PackOrder(kind="shards")
    )
    after = plan_recipe(offline, world_size=1)
    run_recipe(offline)
    run_dir = Path(values["run_dir"])
    ours = rows(run_dir, *COLUMNS)
    online = values | {"packing": shares, "run_dir": str(tmp_path / "online")}
    run_recipe(resolve(online, {}))
    for found, wanted in zip(ours, rows(tmp_path / "online", *COLUMNS), strict=True):
        assert found == pytest.approx(wanted, rel=2e-4, abs=2e-4)
    trained = sum(n for (n,) in rows(run_dir, "num_slots"))
    alone = sum(n for (n,) in rows(unbroken[1], "num_slots")[:5])
    assert trained < 0.9 * alone
    for plan, name in ((before, "offline, shared"), (after, "offline, saved")):
        own = next(figures for figures in plan.modes if figures.is_recipes)
        assert (own.name, own.slots, own.steps) == (name, trained, 5)
        assert any(note.startswith("packing.share_prefix: an epoch") for note in plan.notes)
    assert any("no packs yet; with packing.share_prefix" in note for note in before.notes)
    train, encoder = open_recipe(offline)
    for one in rows_of_batch(train, 0, None, None):
        row = load_row(train, encoder, one.samples, one.title, 1)
        assert [check for check in check_row(row) if check.fails] == []
    assert audited(run_dir).problems == []


@pytest.mark.slow
def test_what_does_not_fit_is_refused_by_name(unbroken):
    def refusal(**changes):
        values = json.loads(json.dumps(unbroken[0]))
        for name, value in changes.items():
            section, key = name.split("__")
            values.setdefault(section, {})[key] = value
        with pytest.raises(PacksError) as error:
            open_recipe(resolve(values, {}))
        return str(error.value)

    assert "inside sets of 4 pairs, and 8 in the recipe. For sets of 8 pack again with" in refusal(
        training__global_batch_size=8
    )
    sft = refusal(objective__name="sft", objective__sft_weight=0.0)
    assert "form of samples (objective.name): pairs in the packs, conversations now" in sft


def test_the_command_compares_with_the_mean_of_pairs_in_a_pack(tmp_path, shard, capsys):
    values = settings(tmp_path, shard, **ONE_ROW) | PACKS
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    cli.pack(str(recipe), tmp_path / "packs", None, kind="plan", processes=1)
    printed = " ".join(capsys.readouterr().out.split())
    manifest = json.loads((tmp_path / "packs" / "pack.json").read_text())
    mean = NUM_PAIRS / manifest["num_packs"]
    assert f"pairs 18 ({mean:.1f} a pack)" in printed
    assert "a step 4 pairs, exactly" in printed
    assert f"4 / {mean:.2f} = {round(4 / mean)} packs" in printed


@pytest.mark.slow
def test_plan_says_what_the_planner_of_packs_would_make(tmp_path, shard):
    """Before there are any: by best-fit-decreasing inside each global batch."""
    values = settings(tmp_path, shard, **ONE_ROW) | PACKS
    saved = values | {"packing": PACKS["packing"] | {"mode": "offline", "path": str(tmp_path)}}
    planned = plan_recipe(resolve(saved, {}), world_size=1)
    made = pack_recipe(resolve(values, {}), tmp_path / "packs", PackOrder(planner="bfd"))
    assert planned.mode.name == "offline, batch"
    assert planned.mode.rows == made.num_packs
    assert planned.batch.samples_per_row == NUM_PAIRS / made.num_packs
    assert planned.batch.in_packs == pytest.approx(4 * made.num_packs / NUM_PAIRS)
    assert planned.run_steps == 7
    assert planned.steps_per_epoch == 5
    assert any("inside each global batch" in note for note in planned.notes)


@pytest.mark.soak
def test_two_processes_train_what_one_does(unbroken, tmp_path, shard):
    values = packed(tmp_path, shard, training__max_steps=4)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    done = finetune_in_ranks(recipe, processes=2)
    assert done.returncode == 0, done.stderr
    ours = rows(Path(values["run_dir"]), *COLUMNS)
    for found, wanted in zip(ours, rows(unbroken[1], *COLUMNS)[:4], strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)
