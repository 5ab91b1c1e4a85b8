"""Preference training: an objective over pairs of answers to one prompt.

    h_i  = beta ((lp_w - ref_w) - (lp_l - ref_l))          lp: sum of log p over an answer's tokens
    loss = 1/N sum_i f(h_i)  +  sft_weight 1/M sum -log p of the chosen answers' M tokens

`sigmoid`, DPO (2305.18290), with label smoothing (cDPO): f = -(1 - e) log s(h) - e log s(-h).
`ipo` (2310.12036): f = (h / beta - 1 / (2 beta))^2, lp and ref divided by the answer's tokens.
`hinge` (2305.10425): f = max(0, 1 - h).

N counts the pairs and M the tokens of the whole global batch, so no micro-batch, row or rank weighs
a pair. Tokens are float32 and their sums float64: in bfloat16 a sum of 2,000 is off by a nat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmpack.errors import ReferenceCacheError
from vlmpack.packing import Batch, ContextSlice, PackedBatch
from vlmpack.packing.pairs import identical_pairs
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training.objective import Objective
from vlmpack.training.vlm_step import forward_step


def sequence_sums(values: Tensor, batch: Batch) -> Tensor:
    """(N,) float64: values of the label tokens added up by sequence, those of all context-parallel
    ranks.

    Args:
        values: (L,) of the batch's label tokens; under context parallelism this rank's.
        batch: of pairs, on the same device.
    """
    context = batch.context if isinstance(batch, PackedBatch) else None
    total = _by_sequence(values, batch, batch if context is None else context)
    if context is None:
        return total
    assert context.all_sum is not None
    return context.all_sum(total)


def label_tokens(batch: Batch) -> Tensor:
    """(N,) float64: label tokens of each sequence, under context parallelism too: every rank knows
    the whole row's."""
    return _by_sequence(torch.ones_like(batch.label_positions), batch, batch)


def _by_sequence(values: Tensor, batch: Batch, part: Batch | ContextSlice) -> Tensor:
    sequences = part.label_sequences
    if sequences is None:
        sequences = part.label_positions  # a row without samples: none
    total = torch.zeros(len(batch.lengths), dtype=torch.float64, device=values.device)
    return total.index_add(0, sequences, values.double())


def sequence_log_probabilities(losses: Tensor, batch: Batch) -> Tensor:
    """(N,) float64: log p of each sequence's label tokens, given what is before them.

    Args:
        losses: (L,) float32, -log p of the batch's label tokens; under context parallelism this
            rank's.
        batch: of pairs, on the same device.
    """
    return -sequence_sums(losses, batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSums:
    """Sums over the pairs of a micro-batch, of what the loss and the report are made of.

    Args:
        section: the recipe's knobs.
    """

    section: ObjectiveSection

    def __call__(self, losses: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        """0-d float64 sums by name.

        Args:
            losses: (L,) float32, -log p of the label tokens; under context parallelism this
                rank's.
            batch: of pairs, with their reference.

        Raises:
            ReferenceCacheError: a batch that has none.
        """
        log_p = sequence_log_probabilities(losses, batch)
        reference = batch.reference
        if reference is None:
            if batch.keys:
                raise ReferenceCacheError(
                    f"sample {batch.keys[0]!r} and those beside it come without the reference "
                    "model's log-probabilities; make them by `vlmpack reference`"
                )
            reference = torch.zeros_like(log_p)
        chosen, rejected = (log_p - reference)[0::2], (log_p - reference)[1::2]
        margin = self.section.beta * (chosen - rejected)
        if self.section.loss == "ipo":
            mean = (log_p - reference) / label_tokens(batch)
            terms = self._ipo(mean[0::2] - mean[1::2])
        else:
            terms = self._of(margin)
        won = (margin > 0).double() + 0.5 * (margin == 0).double()
        return {
            "loss_sum": terms.sum(),
            "chosen_loss_sum": -log_p[0::2].sum(),
            "margin_sum": margin.sum(),
            "accuracy_sum": won.sum(),
            "chosen_reward_sum": self.section.beta * chosen.sum(),
            "rejected_reward_sum": self.section.beta * rejected.sum(),
            "chosen_log_p_sum": log_p[0::2].sum(),
            "rejected_log_p_sum": log_p[1::2].sum(),
        }

    def _of(self, margin: Tensor) -> Tensor:
        if self.section.loss == "hinge":
            return F.relu(1 - margin)
        smoothing = self.section.label_smoothing
        terms = -F.logsigmoid(margin) * (1 - smoothing)
        return terms - F.logsigmoid(-margin) * smoothing if smoothing else terms

    def _ipo(self, difference: Tensor) -> Tensor:
        return (difference - 1 / (2 * self.section.beta)).square()


def num_pairs(batch: Batch) -> int:
    """Pairs of a micro-batch."""
    return batch.num_pairs


def num_chosen_tokens(batch: Batch) -> int:
    """Label tokens of a micro-batch's chosen answers; on CPU."""
    sequences = batch.label_sequences
    return 0 if sequences is None else int((sequences % 2 == 0).sum())


def dpo(section: ObjectiveSection) -> Objective:
    """The objective with a recipe's knobs."""
    weight = section.sft_weight
    return Objective(
        forward_step=partial(forward_step, sums=PreferenceSums(section=section), of_rows=True),
        sums=(
            "loss_sum",
            "chosen_loss_sum",
            "margin_sum",
            "accuracy_sum",
            "chosen_reward_sum",
            "rejected_reward_sum",
            "chosen_log_p_sum",
            "rejected_log_p_sum",
        ),
        counts={
            "num_pairs": num_pairs,
            "num_chosen_tokens": num_chosen_tokens,
            "num_identical": identical_pairs,
        },
        divisor="num_pairs",
        terms={"chosen_loss_sum": ("num_chosen_tokens", weight)} if weight else {},
        report={
            "preference_loss": ("loss_sum", "num_pairs"),
            "chosen_loss": ("chosen_loss_sum", "num_chosen_tokens"),
            "margin": ("margin_sum", "num_pairs"),
            "accuracy": ("accuracy_sum", "num_pairs"),
            "chosen_reward": ("chosen_reward_sum", "num_pairs"),
            "rejected_reward": ("rejected_reward_sum", "num_pairs"),
            "chosen_log_p": ("chosen_log_p_sum", "num_pairs"),
            "rejected_log_p": ("rejected_log_p_sum", "num_pairs"),
            "identical": ("num_identical", "num_pairs"),
        },
    )
