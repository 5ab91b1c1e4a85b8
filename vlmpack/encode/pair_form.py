"""Which form of samples is encoded: conversations, or pairs of answers to one prompt."""

from __future__ import annotations

from vlmpack.encode.sample import VLMSample
from vlmpack.errors import DataError, schema_error

PAIR_NAMES = ("chosen", "rejected")
"""The two sequences of a pair, in the order of its row."""


def refuse_other_form(sample: VLMSample, *, pairs: bool) -> None:
    """Raise DataError (schema) for a pair where none is wanted, or for anything else where pairs
    are.

    Args:
        sample: to be encoded.
        pairs: whether the objective compares two answers.
    """
    if (fault := other_form(bool(sample.answers), pairs=pairs)) is not None:
        raise fault


def other_form(is_pair: bool, *, pairs: bool) -> DataError | None:
    """The fault of a record of the form that an objective does not learn from; None without one.

    Args:
        is_pair: whether the record holds two answers to one prompt.
        pairs: whether the objective compares two answers.
    """
    if is_pair and not pairs:
        return schema_error(
            "the record is a pair ('chosen' and 'rejected'), and the objective learns from one "
            "answer, the last of the turns; expected such a record, or objective.name: dpo"
        )
    if pairs and not is_pair:
        return schema_error(
            "the record has no 'chosen' and no 'rejected' answer, and objective.name: dpo learns "
            "from pairs; expected both beside the turns of the prompt, or objective.name: sft"
        )
    return None
