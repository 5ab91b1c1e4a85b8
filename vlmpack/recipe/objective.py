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
}
"""Name in a recipe -> where the value is, or a function that makes it of the section: module:name,
imported where it is trained."""

LEARN_PAIRS = frozenset({"dpo"})
"""Objectives whose samples are pairs of answers."""

KNOBS: Mapping[str, tuple[str, ...]] = {
    "dpo": ("beta", "loss", "sft_weight", "label_smoothing", "reference", "reference_dir"),
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
    batch. Its samples are pairs. `python:NAME` is an objective that a program passes to
    `vlmpack.finetune`."""

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

    reference: Literal["cached", "adapters_off"] = "cached"
    """For `dpo`, where the reference model's log-probabilities come from. `cached` computes them in
    one pass over the data before the first step, and keeps them. `adapters_off` runs the model
    itself in each step with its adapters switched off. It needs a run that trains nothing but
    adapters."""

    reference_dir: str | None = Field(default=None, min_length=1)
    """For `dpo` with `reference: cached`, folder of the log-probabilities, two numbers a pair.
    `vlmpack reference` or the launch makes it. If null, `reference` in the run folder."""

    @property
    def keeps_reference(self) -> bool:
        """Whether a reference model's log-probabilities are made before the run, and kept."""
        return self.learns_pairs and self.reference == "cached"

    @property
    def learns_pairs(self) -> bool:
        """Whether samples are pairs of answers to one prompt."""
        return self.name in LEARN_PAIRS
