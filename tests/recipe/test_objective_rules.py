"""What a recipe of preference training may say."""

from __future__ import annotations

import pytest
from support.shards import TINY_MODEL

from vlmpack.build.data import packing_mode
from vlmpack.recipe import identity, load_recipe

DPO = ["objective.name=dpo"]
OFF = [*DPO, "objective.reference=adapters_off", f"model.path={TINY_MODEL}"]
FROZEN = ["trainable.vision=frozen", "trainable.projector=frozen"]
ONLINE = ["packing.mode=online", "training.micro_batch_size=1", "training.seq_length=4096"]


def test_pairs_may_be_alone_in_a_row(problems_of, minimal):
    one = ["training.micro_batch_size=1", "packing.mode=in_batch"]
    assert problems_of([*DPO, *one]) == []
    assert "one sample has nothing to share its row with" in problems_of(one)[0]
    found = identity(load_recipe(minimal, [*DPO, "objective.beta=0.2"]))
    assert found["objective.name"] == "dpo"
    assert found["objective.beta"] == 0.2
    assert "objective.reference_dir" not in found, "where it lies may change"
    assert "objective.reference" not in found, "and where the same numbers come from"
    assert problems_of([*OFF, *FROZEN, "trainable.language=lora"]) == []


def test_pairs_run_on_either_engine_in_any_layout(problems_of):
    split = [f"parallelism.{name}=2" for name in ("tensor", "context", "pipeline")]
    more = ["parallelism.sequence=true", "packing.mode=in_batch"]
    assert problems_of([*DPO, "model.backend=mcore", *split, *more]) == []
    aux = problems_of([*DPO, "model.backend=mcore", "model.router_aux_loss_coef=0.1"])
    assert any("looks across all tokens of a row" in problem for problem in aux)


def test_a_planned_row_holds_the_longest_pair(minimal):
    """Each of its sequences is rounded up by itself."""
    recipe = load_recipe(minimal, [*DPO, *ONLINE, "packing.scope=batch"])
    found = packing_mode(recipe).budget
    worst = max(-(-w // 8) * 8 + -(-(4096 - w) // 8) * 8 for w in range(1, 4096))
    assert found.max_tokens == worst == 4104
    alone = [*ONLINE, "packing.scope=batch"]
    assert packing_mode(load_recipe(minimal, alone)).budget.max_tokens == 4096


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["objective.beta=0.5"], "objective.beta: 0.5, but objective.name 'sft' has no such knob"),
        (["objective.loss=ipo"], "objective.loss: ipo, but objective.name 'sft'"),
        (
            [*DPO, "objective.loss=hinge", "objective.label_smoothing=0.1"],
            "objective.label_smoothing: 0.1, but objective.loss 'hinge' has no probabilities",
        ),
        ([*DPO, "objective.loss=bco_pair"], "'bco_pair' looks across the batch"),
        ([*DPO, "objective.loss=aot"], "'aot' looks across the batch"),
        ([*DPO, "objective.loss=sigmiod"], "did you mean 'sigmoid'"),
        (
            [*DPO, "packing.mode=offline", "packing.path=p", "training.micro_batch_size=1"],
            "packing.scope: stream counts rows, but objective.name 'dpo' trains",
        ),
        ([*DPO, *ONLINE], "packing.scope: stream counts rows, but objective.name 'dpo' trains"),
        ([*DPO, *ONLINE, "packing.pad_to_max_length=true"], "rows of pairs have no fixed shape"),
        (
            [*DPO, *ONLINE, "packing.scope=batch", "packing.max_tokens=4096"],
            "4096, but the longest pair takes up to 4104 tokens",
        ),
        (
            [*DPO, "packing.mode=offline", "packing.path=p", "training.micro_batch_size=2"],
            "training.global_batch_size 16 then counts pairs, as in the unpacked run",
        ),
        ([*DPO, "data.learn=each_answer"], "data.learn: each_answer, but objective.name 'dpo'"),
        ([*DPO, "model.router_aux_loss_coef=0.1"], "looks across all tokens of a row"),
        (
            [*OFF, "trainable.language=lora"],
            "are trained too (trainable.vision: full, trainable.projector: full), so without",
        ),
        ([*OFF, *FROZEN], "are trained too (trainable.language: full)"),
        (
            [*OFF, *FROZEN, "trainable.language=lora", "objective.reference_dir=there"],
            "there, but objective.reference 'adapters_off' keeps no numbers; leave it out",
        ),
        (
            [*OFF, *FROZEN, "trainable.language=lora", "model.backend=mcore"],
            "'adapters_off' needs model.backend: hf; with 'mcore' use cached",
        ),
        (["objective.reference=adapters_off"], "'sft' has no such knob; use objective.name: dpo"),
        ([*DPO, "objective.beta=0"], "objective.beta"),
        ([*DPO, "objective.label_smoothing=0.5"], "objective.label_smoothing"),
    ],
)
def test_what_pairs_cannot_do_is_refused_by_name(overrides, words, problems_of):
    assert any(words in problem for problem in problems_of(overrides)), problems_of(overrides)
