"""Which form of samples is encoded: conversations, or pairs of answers to one prompt."""

from __future__ import annotations

from vlmpack.encode.sample import VLMSample
from vlmpack.errors import schema_error

PAIR_NAMES = ("chosen", "rejected")
"""The two sequences of a pair, in the order of its row."""


def refuse_other_form(sample: VLMSample, *, pairs: bool) -> None:
    """Raise DataError (schema) for a pair where none is wanted, or for anything else where pairs
    are.

    Args:
        sample: to be encoded.
        pairs: whether the objective compares two answers.
    """
    if sample.answers and not pairs:
        raise schema_error(
            "the record is a pair ('chosen' and 'rejected'), and the objective learns from one "
            "answer, the last of the turns; expected such a record, or objective.name: dpo"
        )
    if pairs and not sample.answers:
        raise schema_error(
            "the record has no 'chosen' and no 'rejected' answer, and objective.name: dpo learns "
            "from pairs; expected both beside the turns of the prompt, or objective.name: sft"
        )
