"""What a run minimises, by name, and the knobs of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from vlmpack.recipe.sources import IN_WORDS, Section, one_of

OBJECTIVES: Mapping[str, str] = {
    "sft": "vlmpack.training.objective:SFT",
    "dpo": "vlmpack.training.preference:dpo",
    "policy": "vlmpack.training.policy:policy",
}
"""Name in a recipe -> where the value is, or a function that makes it of the section: module:name,
imported where it is trained."""

LEARN_PAIRS = frozenset({"dpo"})
"""Objectives whose samples are pairs of answers."""

LEARN_ROLLOUTS = frozenset({"policy"})
"""Objectives whose samples are answers that a policy has drawn, with their rewards."""

KNOBS: Mapping[str, tuple[str, ...]] = {
    "dpo": ("beta", "loss", "sft_weight", "label_smoothing", "reference", "reference_dir"),
    "policy": (
        *("ratio", "surrogate", "clip_low", "clip_high", "average", "average_tokens"),
        *("advantage_scale", "kl_weight", "kl", "correction", "correction_limit", "old"),
        *("reference", "reference_dir"),
    ),
}
"""Objective -> its knobs, fields of `ObjectiveSection`. Beside other objectives they are refused.
"""

_LOSSES_ACROSS = ("bco_pair", "bco", "aot", "aot_pair", "aot_unpaired", "nca_pair", "kto")
"""Preference losses of other trainers that compare a pair with others of its batch, or have none.
"""


def _of_one_pair(name: object) -> object:
    if name in _LOSSES_ACROSS:
        raise PydanticCustomError(
            IN_WORDS,
            "'{name}' looks across the batch, or at no pair, so its value would change with the "
            "pairs that share a row. Expected sigmoid, ipo or hinge",
            {"name": str(name)},
        )
    return name


ObjectiveName = Annotated[
    str,
    AfterValidator(one_of(OBJECTIVES)),
    WithJsonSchema({"type": "string", "enum": [*OBJECTIVES]}),
]


class ObjectiveSection(Section):
    """What training minimises."""

    name: ObjectiveName = "sft"
    """`sft` is the cross entropy of the label tokens, averaged over those of a global batch. `dpo`
    prefers the chosen one of two answers to the rejected one, averaged over the pairs of a global
    batch. Its samples are pairs. `policy` makes drawn answers likelier that earned more than the
    others of their group. Its samples are rollouts. `python:NAME` is an objective that a program
    passes to `vlmpack.finetune`."""

    fingerprint: str | None = Field(default=None, min_length=1)
    """Digest of a `python:` objective's source text and version. `vlmpack.finetune` writes it, so
    that a resume with another one is refused."""

    beta: float = Field(default=0.1, gt=0)
    """For `dpo`, how much a difference to the reference model counts. Small values stay less close
    to it."""

    loss: Annotated[Literal["sigmoid", "ipo", "hinge"], BeforeValidator(_of_one_pair)] = "sigmoid"
    """For `dpo`, the loss of a pair's margin. `sigmoid` is DPO's. `ipo` is the squared distance to
    1 / (2 beta), by the mean over an answer's tokens. `hinge` is the hinge loss."""

    sft_weight: float = Field(default=0.0, ge=0)
    """For `dpo`, weight of the chosen answers' cross entropy, which is averaged over their tokens
    and added."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """For `dpo` with `loss: sigmoid`, the share of pairs that are taken to be the wrong way
    round."""

    ratio: Literal["token", "sequence"] = "token"
    """For `policy`, what the ratio of current to old policy is of. `sequence` takes the geometric
    mean over the tokens of an answer (GSPO)."""

    surrogate: Literal["clip", "cispo"] = "clip"
    """For `policy`, what is made of ratio and advantage. `clip` is the lower one of the product and
    that of the clipped ratio (PPO). `cispo` weighs log-probabilities by the clipped ratio, so that
    no token loses its gradient."""

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """For `policy`, how far below 1 a ratio counts."""

    clip_high: float = Field(default=0.2, gt=0)
    """For `policy`, how far above 1 a ratio counts. DAPO has 0.28."""

    average: Literal["token", "sequence", "constant"] = "token"
    """For `policy`, how token losses are averaged over a global batch. `token` is their mean
    (DAPO). `sequence` is the mean over answers of each one's mean (GRPO). `constant` is the mean
    over answers of each one's sum over `average_tokens` (Dr. GRPO)."""

    average_tokens: int | None = Field(default=None, ge=1)
    """For `policy` with `average: constant`, what sums are divided by. As a rule this is the most
    tokens that an answer may have."""

    advantage_scale: Literal["std", "none"] = "std"
    """For `policy`, what rewards less their group's mean are divided by: the group's standard
    deviation, or nothing (Dr. GRPO)."""

    kl_weight: float = Field(default=0.0, ge=0)
    """For `policy`, weight of the KL divergence to the reference model. At 0 there is no reference
    model."""

    kl: Literal["k1", "k2", "k3"] = "k3"
    """For `policy` with `kl_weight`, the estimator of the divergence. While the model is the old
    policy the expected gradient of `k2` is that of KL(model, reference), and that of `k3` the one
    of KL(reference, model). That of `k1` is zero."""

    correction: Literal["none", "truncated", "masked"] = "none"
    """For `policy`, how a token counts whose probability under the old policy is not the sampler's.
    `truncated` weighs it by their quotient, at most `correction_limit` (TIS). `masked` leaves it
    out above that (MIS)."""

    correction_limit: float = Field(default=2.0, gt=0)
    """For `policy` with `correction`, the largest quotient."""

    old: Literal["recomputed", "sampler"] = "recomputed"
    """For `policy`, the old policy's log-probabilities. `recomputed` makes them in a pass over the
    data before the first step, or in the step itself where the run has one. `sampler` takes those
    that the answers were drawn with."""

    reference: Literal["cached", "adapters_off"] = "cached"
    """For `dpo` and `policy`, where the reference model's log-probabilities come from. `cached`
    computes them in one pass over the data before the first step, and keeps them. `adapters_off`
    runs the model itself in each step with its adapters switched off. It needs a run that trains
    nothing but adapters."""

    reference_dir: str | None = Field(default=None, min_length=1)
    """For `dpo` and `policy` with `reference: cached`, folder of the log-probabilities: two numbers
    a pair, or one a token of an answer. `vlmpack reference` or the launch makes it. If null,
    `reference` in the run folder."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with a reference model."""
        return self.learns_pairs or (self.learns_rollouts and self.kl_weight > 0)

    @property
    def keeps_reference(self) -> bool:
        """Whether a reference model's log-probabilities are made before the run, and kept."""
        return self.has_reference and self.reference == "cached"

    def kept_columns(self, total_steps: int | None = None) -> tuple[str, ...]:
        """Columns of log-probabilities that are made before the run, and kept.

        Args:
            total_steps: of the run; None for not known. In a single step the old policy is the
                current one, and nothing is kept of it.
        """
        old = self.learns_rollouts and self.old == "recomputed" and total_steps != 1
        return ("old",) * old + ("reference",) * self.keeps_reference

    @property
    def learns_pairs(self) -> bool:
        """Whether samples are pairs of answers to one prompt."""
        return self.name in LEARN_PAIRS

    @property
    def learns_rollouts(self) -> bool:
        """Whether samples are answers that a policy has drawn."""
        return self.name in LEARN_ROLLOUTS
