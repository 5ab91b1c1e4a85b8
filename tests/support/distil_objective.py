"""A third objective in one file: distillation from a teacher's cached top-k log-probabilities.

    loss = 1 / label tokens  sum over them and the teacher's k tokens of p (log p - log q)

p is the teacher's, made to sum to 1 over its k, q the student's over the whole vocabulary. It needs
more than the losses of the label tokens, so it has a forward step of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
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
