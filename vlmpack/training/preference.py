"""Preference training: an objective over pairs of answers to one prompt.

    h_i  = beta ((lp_w - ref_w) - (lp_l - ref_l))          lp: sum of log p over an answer's tokens
    loss = 1/N sum_i f(h_i)  +  sft_weight 1/M sum -log p of the chosen answers' M tokens

    sigmoid   f = -(1 - e) log s(h) - e log s(-h)     DPO (2305.18290) with label smoothing e (cDPO)
    ipo       f = (h / beta - 1 / (2 beta))^2         2310.12036, lp and ref per token
    hinge     f = max(0, 1 - h)                       2305.10425

N and M count the whole global batch, so a pair's weight does not depend on its micro-batch, row or
rank. Tokens are float32 and their sums float64: in bfloat16 a sum of 2,000 is off by a nat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmpack.errors import ReferenceCacheError
from vlmpack.packing import Batch
from vlmpack.packing.pairs import identical_pairs
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training.objective import Objective, Remark


def sequence_sums(values: Tensor, batch: Batch) -> Tensor:
    """(N, ...) float64, each sequence's sum of its label tokens' values over all context-parallel
    ranks.

    Args:
        values: (L, ...) of the batch's label tokens; under context parallelism this rank's.
        batch: of pairs or rollouts, on the same device.
    """
    total = _by_sequence(values, batch, batch.own_part(_sequences(batch)))
    if batch.context is None:
        return total
    assert batch.context.all_sum is not None
    return batch.context.all_sum(total)


def label_tokens(batch: Batch) -> Tensor:
    """(N,) float64 label tokens of each sequence; under CP each rank knows the whole row's."""
    return _by_sequence(torch.ones_like(batch.label_positions), batch, _sequences(batch))


def _sequences(batch: Batch) -> Tensor:
    """(L,) the sequence of each label token; a row without samples has none."""
    return batch.label_positions if batch.label_sequences is None else batch.label_sequences


def _by_sequence(values: Tensor, batch: Batch, sequences: Tensor) -> Tensor:
    total = values.new_zeros((len(batch.lengths), *values.shape[1:]), dtype=torch.float64)
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
    """Sums over the pairs of a micro-batch, of what the loss and the report are made of."""

    section: ObjectiveSection
    sources: tuple[str, ...] = ()

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
                    f"sample {batch.keys[0]!r} and the others of its batch come without the "
                    "reference model's log-probabilities; make them by `vlmpack reference`"
                )
            reference = torch.zeros_like(log_p)
        chosen, rejected = (log_p - reference)[0::2], (log_p - reference)[1::2]
        margin = self.section.beta * (chosen - rejected)
        if self.section.loss == "ipo":
            mean = (log_p - reference) / label_tokens(batch)
            terms = self._ipo(mean[0::2] - mean[1::2])
        else:
            terms = self._of(margin)
        of_pairs = {
            "loss_sum": terms,
            "margin_sum": margin,
            "accuracy_sum": _won(margin),
            "chosen_likelier_sum": _won(log_p[0::2] - log_p[1::2]),
            "chosen_reward_sum": self.section.beta * chosen,
            "rejected_reward_sum": self.section.beta * rejected,
            "chosen_log_p_sum": log_p[0::2],
            "rejected_log_p_sum": log_p[1::2],
        }
        sums = {name: values.sum() for name, values in of_pairs.items()}
        sums["chosen_loss_sum"] = -sums["chosen_log_p_sum"]
        return sums | self._by_source(of_pairs, batch)

    def _by_source(self, of_pairs: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        if not self.sources:
            return {}
        values = torch.stack([each.detach() for each in of_pairs.values()], dim=1)
        total = values.new_zeros(len(self.sources), len(of_pairs))
        if batch.sources is not None:  # a row without samples has none
            total = total.index_add(0, batch.sources, values)
        return {
            f"{name}/{source}": total[place, column]
            for place, source in enumerate(self.sources)
            for column, name in enumerate(of_pairs)
        }

    def _of(self, margin: Tensor) -> Tensor:
        if self.section.loss == "hinge":
            return F.relu(1 - margin)
        smoothing = self.section.label_smoothing
        terms = -F.logsigmoid(margin) * (1 - smoothing)
        return terms - F.logsigmoid(-margin) * smoothing if smoothing else terms

    def _ipo(self, difference: Tensor) -> Tensor:
        return (difference - 1 / (2 * self.section.beta)).square()


def _won(differences: Tensor) -> Tensor:
    """1 above 0, one half for a tie."""
    return (differences > 0).double() + 0.5 * (differences == 0).double()


def num_pairs(batch: Batch) -> int:
    return batch.num_pairs


def num_chosen_tokens(batch: Batch) -> int:
    sequences = batch.label_sequences
    return 0 if sequences is None else int((sequences % 2 == 0).sum())


def _pairs_of(batch: Batch, place: int) -> int:
    return 0 if batch.sources is None else int((batch.sources == place).sum())


SUMS = (
    "loss_sum",
    "margin_sum",
    "accuracy_sum",
    "chosen_likelier_sum",
    "chosen_reward_sum",
    "rejected_reward_sum",
    "chosen_log_p_sum",
    "rejected_log_p_sum",
)
"""Sums over pairs, all of them or those of a source."""

REPORT = {"preference_loss": "loss_sum"} | {n.removesuffix("_sum"): n for n in SUMS[1:]}
"""Column of the metrics -> the sum whose mean over pairs it is."""


def dpo(section: ObjectiveSection, sources: Sequence[str] = ()) -> Objective:
    """The objective with a recipe's knobs."""
    weight = section.sft_weight
    names = tuple(sources) if len(sources) > 1 else ()
    own = {name: f"num_pairs/{name}" for name in names}
    return Objective(
        sums=PreferenceSums(section=section, sources=names),
        of_rows=True,
        sum_names=(
            *SUMS,
            "chosen_loss_sum",
            *(f"{sum_}/{name}" for name in names for sum_ in SUMS),
        ),
        counts={
            "num_pairs": num_pairs,
            "num_chosen_tokens": num_chosen_tokens,
            "num_identical": lambda batch: len(identical_pairs(batch)),
            **{own[name]: partial(_pairs_of, place=place) for place, name in enumerate(names)},
        },
        divisor="num_pairs",
        terms={"chosen_loss_sum": ("num_chosen_tokens", weight)} if weight else {},
        report={name: (sum_, "num_pairs") for name, sum_ in REPORT.items()}
        | {
            "chosen_loss": ("chosen_loss_sum", "num_chosen_tokens"),
            "identical": ("num_identical", "num_pairs"),
        },
        by_source={
            name: {column: (f"{sum_}/{name}", own[name]) for column, sum_ in REPORT.items()}
            for name in names
        },
        remarks={
            "num_identical": Remark(
                one="pair has two answers of the same tokens: it teaches nothing, and counts as a "
                "pair (column `identical`)",
                many="pairs have two answers of the same tokens: they teach nothing, and count as "
                "pairs (column `identical`)",
                which=identical_pairs,
            )
        },
        shown=("margin", "accuracy", "chosen_likelier"),
    )
