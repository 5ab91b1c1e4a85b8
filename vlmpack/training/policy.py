"""Reinforcement: an objective over answers that a policy has drawn, weighed by what they earned.

Three policies give log-probabilities of an answer's tokens, all at the temperature of its draw:

    current   p    the model in this step
    old       o    the model when the round began
    sampler   s    what the answer was drawn with

    r_t  = p_t / o_t                              ratio of a token (PPO, 1707.06347)
    r_t  = exp(mean_t log(p_t / o_t))             ratio of its sequence (GSPO, 2507.18071). Its
                                                  gradient is that of log p_t (GSPO-token, 4.3),
                                                  which in sum is the same
    clip     l_t = -min(r_t A, clip(r_t, 1 - low, 1 + high) A)       A: the answer's advantage
    cispo    l_t = -clip(r_t, 1 - low, 1 + high) A log p_t           MiniMax-M1, 2506.13585, 3.1;
                                                                     the ratio has no gradient
    c_t  = min(o_t / s_t, C)                      truncated importance sampling (TIS)
    c_t  = o_t / s_t  where it is at most C, else 0                  masked (MIS)
    k_t  = KL to a reference q, d = log p_t - log q_t:   k1 d   k2 d^2 / 2   k3 exp(-d) - 1 + d
    loss = average of c_t l_t + w k_t

    average   token      sum over all tokens / their count            DAPO, 2503.14476, 3.3
              sequence   mean over answers of their token means       GRPO, 2402.03300, 4.1
              constant   mean over answers of sum / a constant        Dr. GRPO, 2503.20783, 3.2

Counts are those of the whole global batch, so an answer weighs the same in any row or rank.
Corrections have no gradient. Where answers were drawn from raw logits at another temperature, s is
of no distribution that they were drawn from, and corrections are 1.

The entropy of the policy is estimated from its tokens, as the mean of -(p_t / s_t) log p_t, whose
expectation it is as long as no quotient exceeds MOST_WEIGHT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmpack.errors import ObjectiveError
from vlmpack.packing import Batch
from vlmpack.packing.batch import Rollouts
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training.objective import Objective
from vlmpack.training.preference import label_tokens, sequence_sums

MOST_WEIGHT = 10.0
"""Largest quotient that a token of the estimated entropy is weighed by."""

TOKEN_REPORT = {
    name: f"{name}_sum"
    for name in ("surrogate", "kl", "ratio", "clipped", "correction", "limited", "entropy")
}
"""Column of the metrics -> the sum whose mean over label tokens it is."""

_TOKENS = ("loss_sum", *TOKEN_REPORT.values())


def num_without_advantage(batch: Batch) -> int:
    """Answers of a batch on CPU that teach nothing: alone in their group, or no better or worse."""
    if batch.rollouts is None or batch.rollouts.advantages is None:
        return 0
    return int((batch.rollouts.advantages == 0).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySums:
    """Sums over the answers of a micro-batch, of what the loss and the report are made of."""

    section: ObjectiveSection

    def __call__(self, losses: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        """0-d float64 sums by name.

        Args:
            losses: (L,) -log p of the label tokens at the temperatures of their draws; under
                context parallelism this rank's.
            batch: of rollouts, with their advantages.

        Raises:
            ObjectiveError: samples that are no rollouts, or columns that are missing.
        """
        given = self._given(batch)
        if given is None:  # a row without samples
            return dict.fromkeys((*_TOKENS, "reward_sum"), losses.double().sum())
        assert given.rewards is not None
        of_token = self._of_token(-losses.double(), given, batch)
        of_answer = sequence_sums(torch.stack([of_token[name] for name in _TOKENS], dim=1), batch)
        sums = dict(zip(_TOKENS, of_answer.sum(0).unbind(), strict=True))
        return sums | {"reward_sum": given.rewards.sum()}

    def _given(self, batch: Batch) -> Rollouts | None:
        """The columns of a batch; None for a row without samples.

        Raises:
            ObjectiveError: see `__call__`.
        """
        given, what = batch.rollouts, ""
        if given is None:
            if not batch.keys:
                return None
            what = "no rollout: its record has no 'rollout'"
        elif given.advantages is None or given.rewards is None:
            what = "a rollout without an advantage"
        elif self.section.kl_weight and given.reference is None:
            what = "a rollout without the reference model's log-probabilities"
        if what:
            raise ObjectiveError(
                f"sample {batch.keys[0]!r} and the others of its batch: expected rollouts with all "
                f"that objective.name: policy needs, found {what}"
            )
        return given

    def _of_token(self, log_p: Tensor, given: Rollouts, batch: Batch) -> dict[str, Tensor]:
        """(L,) float64 by name, of the label tokens that this rank has."""
        section = self.section
        assert batch.label_sequences is not None and given.advantages is not None
        sequences = batch.own_part(batch.label_sequences)
        num_tokens, advantages = label_tokens(batch), given.advantages[sequences]
        now, sampler = log_p.detach(), batch.own_part(given.sampler).double()
        old = now  # in a round of one step
        if section.old == "sampler":
            old = sampler
        elif given.old is not None:
            old = batch.own_part(given.old).double()
        log_ratio = log_p - old
        if section.ratio == "sequence":
            mean = sequence_sums(now - old, batch) / num_tokens
            log_ratio = mean[sequences] + log_p - now
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - section.clip_low, 1 + section.clip_high)
        if section.surrogate == "cispo":
            surrogate, is_clipped = -clipped.detach() * advantages * log_p, ratio != clipped
        else:
            surrogate = -torch.minimum(ratio * advantages, clipped * advantages)
            is_clipped = ratio * advantages > clipped * advantages
        drawn_from = old if given.is_raw else sampler
        quotient = (old - drawn_from).exp()
        loss = self._corrected(surrogate, quotient)
        divergence = torch.zeros_like(now)
        if given.reference is not None and section.kl_weight:
            divergence = self._divergence(log_p - batch.own_part(given.reference).double())
            loss = loss + section.kl_weight * divergence
        if section.average == "sequence":
            loss = loss / num_tokens[sequences]
        elif section.average_tokens is not None:
            loss = loss / section.average_tokens
        return {
            "loss_sum": loss,
            "surrogate_sum": surrogate.detach(),
            "kl_sum": divergence.detach(),
            "ratio_sum": ratio.detach(),
            "clipped_sum": is_clipped.double(),
            "correction_sum": quotient,
            "limited_sum": (quotient > section.correction_limit).double(),
            "entropy_sum": -now * (now - drawn_from).exp().clamp(max=MOST_WEIGHT),
        }

    def _corrected(self, surrogate: Tensor, quotient: Tensor) -> Tensor:
        limit = self.section.correction_limit
        if self.section.correction == "truncated":
            return quotient.clamp(max=limit) * surrogate
        if self.section.correction == "masked":
            return torch.where(quotient <= limit, quotient, 0.0) * surrogate
        return surrogate

    def _divergence(self, difference: Tensor) -> Tensor:
        """Estimators of KL(p, q) from tokens that p has drawn (Schulman, 2020): k1, k2, k3."""
        if self.section.kl == "k1":
            return difference
        if self.section.kl == "k2":
            return difference.square() / 2
        return torch.expm1(-difference) + difference


def policy(section: ObjectiveSection, sources: Sequence[str] = ()) -> Objective:
    """The objective with a recipe's knobs."""
    left_out = {"kl"} if not section.kl_weight else set()
    left_out |= {"correction", "limited"} if section.correction == "none" else set()
    names = {name: sum_ for name, sum_ in TOKEN_REPORT.items() if name not in left_out}
    return Objective(
        sums=PolicySums(section=section),
        of_rows=True,
        sum_names=(*_TOKENS, "reward_sum"),
        counts={"num_without_advantage": num_without_advantage},
        divisor="num_label_tokens" if section.average == "token" else "num_samples",
        report={name: (sum_, "num_label_tokens") for name, sum_ in names.items()}
        | {
            "reward": ("reward_sum", "num_samples"),
            "without_advantage": ("num_without_advantage", "num_samples"),
        },
        shown=("reward", "entropy"),
    )
