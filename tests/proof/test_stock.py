"""What a stock model cannot compute is an error that says so.

A model that computes no numbers is told by the first tensor or module that has some.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.foreign import load, padded
from support.judged import Case, losses_of
from torch import Tensor, nn
from transformers import MptConfig, MptForCausalLM

from vlmpack.errors import CapabilityError, NonFiniteError
from vlmpack.proof.judge import judge
from vlmpack.proof.stock import (
    computing,
    require_finite_gradients,
    require_finite_losses,
    require_finite_model,
)

INF, NAN = float("inf"), float("nan")


class Two(nn.Module):
    """Two layers, with something between them."""

    def __init__(self, between: Any = None, behind: Any = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.between, self.behind = between, behind
        # What is infinite stays above zero: a tensor of -inf alone may be a mask.
        nn.init.ones_(self.second.weight)
        self.register_buffer("mask", torch.tensor([0.0, -INF]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second(x if self.between is None else self.between(x))
        return x if self.behind is None else self.behind(x)


def told(model: Two) -> str:
    x = torch.ones(1, 2)
    with pytest.raises(NonFiniteError) as error:
        require_finite_losses("sample 0", model, [model(x)], lambda: model(x))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return str(error.value)


def test_the_first_module_is_named_not_those_behind_it() -> None:
    model = Two()
    with torch.no_grad():
        model.first.weight.mul_(0).add_(3e38)
    assert "the output of first (inf)" in told(model)
    assert "the input of second (NaN)" in told(Two(between=lambda x: x * NAN))
    assert "the output of Two (inf)" in told(Two(behind=lambda x: x.exp() + INF))
    x = torch.ones(1, 2)
    losses = [torch.tensor([1.0, NAN])]
    with pytest.raises(NonFiniteError, match="the cross entropy of finite logits"):
        require_finite_losses("sample 0", Two(), losses, lambda: Two()(x))


def test_what_is_finite_or_a_mask_passes_without_another_forward() -> None:
    values = [torch.ones(3), torch.full((3,), 3e38), torch.tensor([0.0, -INF])]
    require_finite_losses("sample 0", Two(), values, pytest.fail)
    require_finite_model("model", Two())
    require_finite_gradients("sample 0", {"w": torch.full((3,), 3e38)})


def test_tensors_are_named() -> None:
    model = Two()
    with torch.no_grad():
        model.second.bias[1] = NAN
    with pytest.raises(NonFiniteError, match=r"judge: model: 1 tensor .*: second\.bias \(NaN\)"):
        require_finite_model("judge: model", model)
    with pytest.raises(NonFiniteError, match=r"gradients are not, .*: w \(inf\)"):
        require_finite_gradients("samples", {"v": torch.ones(1), "w": torch.tensor([INF])})


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llama", tmp_path_factory.mktemp("llama"))


def judged(case: Case, fault: Any, stock: Any = None) -> Any:
    model = load(case.folder, case.encoder, packed=False)
    with torch.no_grad():
        fault(model)
    return judge(model, padded, case.samples, stock=stock)


def test_judge_blames_no_collator_for_a_model_of_no_numbers(case: Case) -> None:
    """Every row of its table failed before, as if packing were wrong."""

    def nan(model: Any) -> None:
        model.model.layers[1].mlp.down_proj.weight[0, 0] = NAN

    def large(model: Any) -> None:
        model.model.layers[1].mlp.down_proj.weight.fill_(3e38)

    with pytest.raises(
        NonFiniteError, match=r"model: .*: model\.layers\.1\.mlp\.down_proj\.weight"
    ):
        judged(case, nan)
    with pytest.raises(
        NonFiniteError, match=r"sample 0 .* output of model\.layers\.1\.mlp\.down_p"
    ):
        judged(case, large)
    right = load(case.folder, case.encoder, packed=False)
    with pytest.raises(
        NonFiniteError, match=r"model: .*: model\.layers\.1\.mlp\.down_proj\.weight"
    ):
        judged(case, nan, stock=right)
    assert judged(case, lambda model: None).passed


def test_losses_of_no_numbers_show_no_isolation(case: Case) -> None:
    """Nothing moves by more than a bound where nothing is a number."""
    found = case.judge(losses=lambda m, b: losses_of(m, b) * NAN)
    rows = {one.check.name: one.check.status for one in found.findings}
    assert rows["isolation"] == "not shown" and rows["loss of each sample"] == "fail"


TABLE = 8


def short() -> MptForCausalLM:
    return MptForCausalLM(
        MptConfig(d_model=16, n_heads=2, n_layers=1, max_seq_len=TABLE, vocab_size=32)
    )


def test_a_table_of_alibi_that_is_too_short_is_named() -> None:
    model = short()
    ids = torch.arange(TABLE + 4)[None]
    with computing(model, TABLE):
        model(input_ids=ids[:, :TABLE], use_cache=False)
    with (
        pytest.raises(
            CapabilityError, match=r"12 tokens, .*max_seq_len of config\.json is 8: lower"
        ),
        computing(model, TABLE + 4),
    ):
        model(input_ids=ids, use_cache=False)


def test_another_fault_of_a_sample_that_fits_has_no_advice_about_length() -> None:
    with (
        pytest.raises(CapabilityError, match=r"8 tokens, .*no kernel \(test_stock.py, line \d+\)$"),
        computing(short(), TABLE),
    ):
        raise RuntimeError("no kernel")


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(KeyError), computing(short(), 3):
        raise KeyError("x")
    with pytest.raises(torch.OutOfMemoryError), computing(short(), 3):
        raise torch.OutOfMemoryError
