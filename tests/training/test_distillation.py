"""An objective that needs more than the token losses is a file of its own, and nothing else.

A third objective in one file: distillation from a teacher's cached top-k log-probabilities.

    loss = 1 / label tokens  sum over them and the teacher's k tokens of p (log p - log q)

p is the teacher's, made to sum to 1 over its k, q the student's over the whole vocabulary. It needs
more than the losses of the label tokens, so it has a forward step of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from support.engines import make_engine
from support.runs import GRADIENT_TOLERANCE, LOSS_TOLERANCE, relative_l2
from support.shards import TINY_MODEL
from support.stock import StockProcessor, gradients_of
from support.toy_objective import take_step
from torch import Tensor, nn

from vlmpack.packing import Batch, move_batch
from vlmpack.training.objective import Objective

Cache = Mapping[str, tuple[Tensor, Tensor]]
"""Sample -> (l, k) tokens and (l, k) log p of the teacher, of its label tokens in order."""


def distilled(data_iterator: Iterator[Batch], model: Any, *, cache: Cache) -> tuple[Tensor, Any]:
    """Runs the decoder, and the head on label tokens alone."""
    batch = move_batch(next(data_iterator), next(nn.Module.parameters(model)).device)
    hidden = model.hidden_states(batch, batch.packed_seq_params())
    logits = model.logits(hidden.index_select(0, batch.label_positions))
    tokens = [cache[key][0] for key in batch.keys]
    teacher = [cache[key][1] for key in batch.keys]
    return logits, partial(summed, batch=batch, tokens=tokens, teacher=teacher)


def summed(
    logits: Tensor, *, batch: Batch, tokens: list[Tensor], teacher: list[Tensor]
) -> tuple[Tensor, int, dict[str, Tensor]]:
    """The divergence, and how often both would say the same token."""
    log_q = torch.log_softmax(logits.float(), dim=-1)
    if not tokens:
        nothing = log_q.sum()
        return nothing, 0, dict.fromkeys(("loss_sum", "agree_sum"), nothing.detach().double())
    ids, log_p = torch.cat(tokens), torch.cat(teacher).log_softmax(dim=-1)
    loss = (log_p.exp() * (log_p - log_q.gather(1, ids))).sum()
    agree = (log_q.argmax(dim=-1) == ids[:, 0]).double().sum()
    report = {"loss_sum": loss.detach().double(), "agree_sum": agree}
    return loss, batch.num_label_tokens, report


def distillation(cache: Cache) -> Objective:
    """The objective with a teacher's cache."""
    return Objective(
        forward_step=partial(distilled, cache=cache),
        sum_names=("loss_sum", "agree_sum"),
        report={"agreement": ("agree_sum", "num_label_tokens")},
    )


K = 4


def label_logits(model, processor, sample):
    """(l, V) of a sample's label tokens, by the stock model, alone."""
    inputs = processor(sample)
    output = model(
        attention_mask=torch.ones_like(inputs.input_ids), use_cache=False, **inputs.arguments()
    )
    return output.logits[0, :-1][inputs.labels[0, 1:] != -100].float()


@pytest.fixture(scope="module")
def taught(stock_model, mixed):
    """(cache of the teacher, loss, agreement, gradients of the student)."""
    processor = StockProcessor(TINY_MODEL)
    teacher, draw = copy.deepcopy(stock_model), torch.Generator().manual_seed(0)
    cache = {}
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=draw)
        for sample in mixed:
            top = torch.log_softmax(label_logits(teacher, processor, sample), -1).topk(K)
            cache[sample.key] = top.indices, top.values
    stock_model.zero_grad(set_to_none=True)
    logits = [label_logits(stock_model, processor, sample) for sample in mixed]
    loss = agree = torch.zeros(())
    for sample, own in zip(mixed, logits, strict=True):
        ids, values = cache[sample.key]
        p = values.exp() / values.exp().sum(-1, keepdim=True)
        q = own.softmax(-1).gather(1, ids)
        loss = loss + (p * (p.log() - q.log())).sum()
        agree = agree + (own.argmax(-1) == ids[:, 0]).sum()
    count = sum(map(len, logits))
    (loss / count).backward()
    gradients = gradients_of(stock_model)
    stock_model.zero_grad(set_to_none=True)
    return cache, float(loss.detach()) / count, float(agree) / count, gradients


def test_a_teachers_cached_tokens_are_learnt_from_packed_rows(encoder, encoded, taught):
    cache, loss, agreement, gradients = taught
    engine = make_engine(TINY_MODEL, encoder)
    figures, _ = take_step(engine, encoded, objective=distillation(cache))
    found = {name: parameter.grad for name, parameter in engine.parameters()}
    assert figures["loss"] == pytest.approx(loss, LOSS_TOLERANCE)
    assert figures["agreement"] == pytest.approx(agreement)
    assert 0 < agreement < 1
    assert max(relative_l2(found[n], gradients[n]) for n in gradients) < GRADIENT_TOLERANCE


def test_a_teacher_that_is_off_by_one_token_is_found(encoder, encoded, taught):
    cache, loss, _, gradients = taught
    moved = {key: (ids.roll(1, 0), values.roll(1, 0)) for key, (ids, values) in cache.items()}
    engine = make_engine(TINY_MODEL, encoder)
    figures, _ = take_step(engine, encoded, objective=distillation(moved))
    found = {name: parameter.grad for name, parameter in engine.parameters()}
    assert figures["loss"] != pytest.approx(loss, 0.01)
    assert min(relative_l2(found[n], gradients[n]) for n in gradients) > 0.01
