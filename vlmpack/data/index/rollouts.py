"""What the index knows of rollouts, and each answer's advantage within its group.

    group           a a a a b b c      of all sources and shards, holes included
    reward r        1 0 0 1 1 1 3
    advantage       (r - mean of its group) / (standard deviation + 1e-6)
                    0.87 -0.87 -0.87 0.87   0 0   0

An answer that is alone in its group, or in one of equal rewards, has an advantage of exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import numpy.typing as npt

from vlmpack.data.index.columns_file import Int64s, Numbers
from vlmpack.encode.rollouts import READINGS, Rollout, reading_of
from vlmpack.errors import DataError

Bools = npt.NDArray[np.bool_]
Float64s = npt.NDArray[np.float64]

NONE = -1
"""Number of a sample whose record says nothing of a draw that could be read."""
EPSILON = 1e-6
ROLLOUT_COLUMNS = (
    *("rollout_group", "rollout_reward", "rollout_number", "rollout_version"),
    *("rollout_reading", "rollout_otherwise"),
)
"""Columns of int64 in lengths parts of rollouts: the digest of its group, the bits of its reward,
its number in the group, the policy version. Then the place of its reading in READINGS, and whether
the tokenizer would write its text with other tokens."""


def rollout_row(rollout: Rollout | None, *, otherwise: bool = False) -> dict[str, int]:
    """The columns of one sample."""
    if rollout is None:
        return dict.fromkeys(ROLLOUT_COLUMNS, 0) | {"rollout_number": NONE}
    try:
        reading = READINGS.index(reading_of(rollout.sampling))
    except DataError:  # a hole
        reading = 0
    reward = int(np.float64(rollout.reward).view(np.int64))
    values = (rollout.group_digest, reward, rollout.number, rollout.policy_version)
    return dict(zip(ROLLOUT_COLUMNS, (*values, reading, int(otherwise)), strict=True))


@dataclass(frozen=True, slots=True)
class RolloutColumns:
    """The columns of ROLLOUT_COLUMNS over all N samples."""

    groups: Numbers
    reward_bits: Numbers
    numbers: Numbers
    versions: Numbers
    readings: Numbers
    otherwise: Numbers

    @property
    def known(self) -> Bools:
        """(N,) bool, the samples whose draw is known."""
        known: Bools = self.numbers[:] != NONE
        return known

    def repeated(self) -> tuple[int, int] | None:
        """Two samples of the same policy version, group and number; None without such."""
        where = np.flatnonzero(self.known)
        names = np.stack([each[:][where] for each in (self.versions, self.groups, self.numbers)])
        order = np.lexsort(names)  # stable: of equal ones the first comes first
        same = np.flatnonzero((np.diff(names[:, order], axis=1) == 0).all(axis=0))
        if not same.size:
            return None
        at = same[np.argmin(where[order[same]])]
        return int(where[order[at]]), int(where[order[at + 1]])


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What each sample of a split earned.

    Args:
        rewards, advantages: (N,) float64; NaN and 0 where nothing is known.
        num_answers, num_groups: of the split, of which something is known.
        num_alone: answers that are alone in their group.
        num_equal: answers of the other groups without a difference.
        num_otherwise: answers whose text the tokenizer would write with other tokens.
    """

    rewards: Float64s
    advantages: Float64s
    num_answers: int
    num_groups: int
    num_alone: int
    num_equal: int
    num_otherwise: int

    @classmethod
    def of(
        cls, columns: RolloutColumns, scale: Literal["std", "none"], eligible: Bools
    ) -> Outcomes:
        """The outcomes of all samples, those that cannot be read included.

        Args:
            eligible: (N,) bool, the samples of the split, which are counted.
        """
        known = columns.known
        rewards = np.where(known, columns.reward_bits[:].view(np.float64), np.nan)
        advantages = np.zeros(known.shape[0])
        groups, own = columns.groups[:][known], rewards[known]
        advantages[known] = advantages_of(groups, own, scale)
        _, place, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        is_alone, is_equal = sizes[place] == 1, _spread(place, own, sizes.size)[place] == 0
        counted = eligible[known]
        return cls(
            rewards=rewards,
            advantages=advantages,
            num_answers=int(counted.sum()),
            num_groups=np.unique(place[counted]).size,
            num_alone=int((is_alone & counted).sum()),
            num_equal=int((is_equal & ~is_alone & counted).sum()),
            num_otherwise=int(columns.otherwise[:][known & eligible].sum()),
        )

    @property
    def counts(self) -> dict[str, int]:
        """Its counts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)[2:]}

    @property
    def words(self) -> str:
        """Its counts, for the log."""
        share = self.num_otherwise / max(1, self.num_answers)
        return (
            f"{self.num_answers:,} answers in {self.num_groups:,} groups. {self.num_alone:,} are "
            f"alone in theirs and {self.num_equal:,} in one of equal rewards, and teach nothing. "
            f"The tokenizer would write {share:.1%} of the answers with other tokens"
        )


def advantages_of(groups: Int64s, rewards: Float64s, scale: Literal["std", "none"]) -> Float64s:
    """(n,) float64, the advantage of each answer within its group (GRPO, 2402.03300, 4.1.2).

    It is (r - mean) / (std + 1e-6) with the unbiased standard deviation, or r - mean without a
    scale (Dr. GRPO, 2503.20783). Answers of groups without a difference have exactly 0.

    Args:
        groups: (n,) the group of each answer.
        rewards: (n,) float64.
    """
    _, place, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    apart = rewards - (np.bincount(place, rewards) / sizes)[place]
    if scale == "std":
        variance = np.bincount(place, apart * apart) / np.maximum(1, sizes - 1)
        apart = apart / (np.sqrt(variance) + EPSILON)[place]
    return np.where(_spread(place, rewards, sizes.size)[place] > 0, apart, 0.0)


def _spread(place: Int64s, rewards: Float64s, num_groups: int) -> Float64s:
    """(g,) the largest reward of each group less its smallest."""
    ends = np.full(num_groups, -np.inf), np.full(num_groups, np.inf)
    np.maximum.at(ends[0], place, rewards)
    np.minimum.at(ends[1], place, rewards)
    spread: Float64s = ends[0] - ends[1]
    return spread
