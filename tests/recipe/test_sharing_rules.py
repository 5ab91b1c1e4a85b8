"""Where rows may share what their samples begin with, and what is refused with which knob."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from vlmpack.build.data import evaluation_mode, packing_mode
from vlmpack.capabilities.served import SERVED, generic_line
from vlmpack.recipe import identity, load_recipe
from vlmpack.recipe.packing_rules import families_share_prefixes
from vlmpack.recipe.schema import FACTS, PackingSection

SHARE = ["packing.share_prefix=true"]
ONLINE = ["packing.mode=online", "training.micro_batch_size=1"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["packing.mode=none"], "packing.mode 'none' has a row for each sample"),
        (
            [*ONLINE, "packing.scope=batch", "packing.pad_to_max_length=true"],
            r"rows of fixed shape \(packing.pad_to_max_length\) share no prefixes",
        ),
        (["model.backend=mcore"], "model.backend 'mcore' shares no prefixes, nor does"),
        (["model.router_aux_loss_coef=0.1"], "the balancing loss of a router"),
    ],
)
def test_what_cannot_share_is_refused_by_name(overrides, words, problems_of):
    found = [each for each in problems_of([*SHARE, *overrides]) if "share_prefix" in each]
    assert len(found) == 1
    assert re.search(words, found[0])
    assert not [each for each in problems_of(overrides) if "share_prefix" in each]


@pytest.mark.parametrize("mode", [[], [*ONLINE, "packing.scope=batch"]])
@pytest.mark.parametrize("objective", [[], ["objective.name=dpo"]])
def test_sharing_is_no_part_of_a_run_whose_steps_stay_the_same(mode, objective, minimal):
    """The same samples in each step, so a run in `in_batch` may go on with it or without. In
    `online` it decides how rows are cut, which the identity of the data keeps
    (tests/data/index/test_planned_prefixes.py)."""
    shared, separate = (load_recipe(minimal, [*share, *mode, *objective]) for share in (SHARE, []))
    assert identity(shared) == identity(separate)
    made = [packing_mode(recipe) for recipe in (shared, separate)]
    assert made[0].budget == made[1].budget
    assert made[0].shape() == made[1].shape()
    collators = [each.collator(pad_token_id=0, num_position_axes=1) for each in made]
    assert [each.share_prefix for each in collators] == [True, False]


def test_saved_packs_may_share(minimal):
    offline = ["packing.mode=offline", "packing.path=p", "training.micro_batch_size=1"]
    made = packing_mode(load_recipe(minimal, [*SHARE, *offline]))
    assert made.collator(pad_token_id=0, num_position_axes=1).share_prefix


def test_validation_shares_as_training_does(minimal):
    for share, wanted in ((SHARE, True), ([], False)):
        mode = evaluation_mode(load_recipe(minimal, share))
        assert mode.packing.share_prefix is wanted


@pytest.mark.parametrize(
    ("served", "words"),
    [
        (SERVED["qwen3_5"], "carry state"),
        (SERVED["qwen3_5_moe_text"], "carry state"),
        (SERVED["nemotron_h"], "carry state"),
        (SERVED["nemotron_h_omni"], "carry state"),
        (SERVED["gemma3"], "both directions"),
        (SERVED["gemma4"], "both directions"),
        (SERVED["gemma4_unified"], "both directions"),
        (generic_line("granitemoehybrid"), "no family of ours"),
    ],
)
def test_families_that_cannot_say_why(served, words):
    (found,) = families_share_prefixes(PackingSection(share_prefix=True), served)
    assert served.title in found.message
    assert words in found.message
    assert found.path == ("packing", "share_prefix") and found.message.endswith("; use false")
    assert families_share_prefixes(PackingSection(), served) == []


def test_every_layer_with_state_is_among_them():
    for name, served in SERVED.items():
        assert bool(served.layers) <= (served.unshared is not None), name
    assert SERVED["qwen3_vl"].unshared is None


def test_a_mode_that_shares_nothing_says_so_in_its_facts(problems_of, monkeypatch):
    monkeypatch.setitem(FACTS, "in_batch", replace(FACTS["in_batch"], shares_prefixes=False))
    (found,) = [each for each in problems_of(SHARE) if "share_prefix" in each]
    assert "true, but packing.mode 'in_batch' shares no prefixes; use" in found
