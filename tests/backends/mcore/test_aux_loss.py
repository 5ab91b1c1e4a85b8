"""The experts' auxiliary loss: alignment padding is outside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import layouts
from support.families import tiny_family_folder
from support.runs import relative_l2
from torch import Tensor

from vlmpack.backends.mcore import engine as engine_module
from vlmpack.backends.mcore import router
from vlmpack.distributed import start_process_group
from vlmpack.packing import PackCollator
from vlmpack.training.objective import forward_step

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.distributed.*is deprecated:FutureWarning",
    r"ignore:The \.grad attribute of a Tensor that is not a leaf",
)

AUX_LOSS = 0.01
TOLERANCE = 1e-5
"""Relative L2 of every gradient: the stated bound of the project."""
FOUND = 1e-3
"""What a wrong gradient is beyond."""

TIGHT = PackCollator(pad_token_id=layouts.PAD, num_position_axes=3)
WIDE = PackCollator(
    pad_token_id=layouts.PAD, num_position_axes=3, pad_to_multiple_of=16, total_multiple_of=64
)
LOSS = router.switch_load_balancing_loss_func


@dataclass
class Pass:
    """One forward and backward pass over all micro-batches.

    Args:
        gradients: of the sums, by parameter.
        counts: what each layer with experts counts in each micro-batch: tokens by expert, tokens.
    """

    gradients: dict[str, Tensor] = field(default_factory=dict)
    counts: list[tuple[list[int], float]] = field(default_factory=list)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_family_folder("qwen3_vl_moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def engines(folder):
    """With and without the auxiliary loss."""
    ranks = start_process_group()
    one = layouts.Layout()
    return {
        weight: layouts.make_megatron(one, ranks, folder, aux_loss=weight)
        for weight in (0.0, AUX_LOSS)
    }


@pytest.fixture(scope="module")
def packed(folder):
    """The same samples in rows without and with padding."""
    samples = layouts.samples(folder)
    rows = {
        collate: [collate([samples[index] for index in bin_]) for bin_ in layouts.BINS]
        for collate in (TIGHT, WIDE)
    }
    for row in rows[TIGHT]:
        assert row.num_slots == row.num_tokens
    for row in rows[WIDE]:
        assert row.num_slots > row.num_tokens
        assert row.num_slots % 64 == 0
    tails = [len(row.segment_lengths) > len(row.keys) for row in rows[WIDE]]
    assert any(tails), "no tail segment"
    return rows


def run(engine: Any, rows: Any) -> Pass:
    """Gradients of sums."""
    found = Pass()

    def counted(**arguments: Any) -> Any:
        by_expert, tokens = arguments["tokens_per_expert"], arguments["total_num_tokens"]
        found.counts.append((by_expert.tolist(), float(tokens)))
        return LOSS(**arguments)

    engine.zero_gradients()
    with patch.object(router, "switch_load_balancing_loss_func", counted):
        engine.forward_backward(forward_step, iter(rows), num_microbatches=len(rows))
    found.gradients = {
        name: parameter.main_grad.clone() for name, parameter in engine.model.named_parameters()
    }
    return found


def errors(found: Pass, expected: Pass) -> dict[str, float]:
    """Relative L2 by parameter."""
    assert found.gradients.keys() == expected.gradients.keys()
    return {
        name: relative_l2(found.gradients[name], theirs)
        for name, theirs in expected.gradients.items()
    }


@pytest.fixture(scope="module")
def tight(engines, packed):
    return run(engines[AUX_LOSS], packed[TIGHT])


def test_padding_changes_no_gradient_and_no_count(engines, packed, tight):
    wide = run(engines[AUX_LOSS], packed[WIDE])
    worst = max(errors(wide, tight).values())
    print(f"\nworst gradient {worst:.1e}")
    assert worst < TOLERANCE
    assert wide.counts == tight.counts
    routed, top_k = 3, 2
    assert len(wide.counts) == routed * len(layouts.BINS)
    tokens = [row.num_tokens for row in packed[WIDE]]
    assert [total for _, total in wide.counts] == [n for n in tokens for _ in range(routed)]
    assert all(sum(by_expert) == top_k * total for by_expert, total in wide.counts)


@pytest.mark.cases(slow="wide")
@pytest.mark.parametrize("collate", [TIGHT, WIDE], ids=["tight", "wide"])
def test_an_empty_row_adds_nothing(engines, packed, tight, collate):
    """A bin whose samples all became holes."""
    empty = collate([])
    assert empty.num_tokens == 0
    found = run(engines[AUX_LOSS], [empty])
    assert all(float(gradient.abs().max()) == 0.0 for gradient in found.gradients.values())
    found = run(engines[AUX_LOSS], [*packed[collate], empty])
    assert max(errors(found, tight).values()) < TOLERANCE


def test_without_the_mask_padding_is_found(engines, packed, tight):
    """The negative control."""
    with patch.object(engine_module, "padding_mask", lambda row: None):
        wide = run(engines[AUX_LOSS], packed[WIDE])
        same = run(engines[AUX_LOSS], packed[TIGHT])
    print(f"\nworst gradient {max(errors(wide, tight).values()):.1e}")
    assert max(errors(wide, tight).values()) > FOUND
    assert wide.counts != tight.counts
    assert max(errors(same, tight).values()) < TOLERANCE, "without padding there is nothing to mask"


def test_the_auxiliary_loss_reaches_the_weights(engines, packed, tight):
    without = run(engines[0.0], packed[TIGHT])
    assert without.counts == []
    found = errors(tight, without)
    gates = [error for name, error in found.items() if name.endswith("router.weight")]
    assert len(gates) == 3
    assert min(gates) > FOUND
    experts_after_last_gate = [
        name for name in found if ".layers.3.mlp.experts." in name or "output_layer" in name
    ]
    assert len(experts_after_last_gate) == 9
    assert all(found[name] < TOLERANCE for name in experts_after_last_gate)


@pytest.mark.slow
def test_its_weight_is_the_tokens_of_the_micro_batch(engines, packed, tight):
    """The loss is multiplied by the row's real tokens; the trainer divides by label tokens."""
    row = packed[TIGHT][0]
    name = "gpt.decoder.layers.3.mlp.router.weight"
    ours = run(engines[AUX_LOSS], [row]).gradients[name]
    without = run(engines[0.0], [row]).gradients[name]
    hidden: list[Tensor] = []
    layer = engines[0.0].model.gpt.decoder.layers[3].mlp.router
    hook = layer.register_forward_pre_hook(lambda _, args: hidden.append(args[0].detach()))
    run(engines[0.0], [row])
    hook.remove()
    weight = layer.weight.detach().clone().requires_grad_()
    scores = torch.softmax(hidden[0].flatten(0, 1) @ weight.T, dim=-1)
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0)
    experts = scores.shape[1]
    loss = experts * torch.sum(chosen.mean(0) / 2 * scores.mean(0))  # 2101.03961, equation 4
    (AUX_LOSS * row.num_tokens * loss).backward()
    assert relative_l2(ours - without, weight.grad) < FOUND
