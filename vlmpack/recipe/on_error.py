"""What happens to samples that cannot be used, by class of error."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from vlmpack.errors import ErrorClass

OnError = Literal["raise", "skip"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class OnErrorSection:
    """What happens to a sample that cannot be used, by class of error. A skipped one is counted
    and listed in `data-errors.jsonl`; too many stop the run."""

    # A dataclass, not a Section: pydantic's models reserve the name `schema`.

    transport: OnError = Field(default="raise", description="The shard's bytes cannot be read.")
    integrity: OnError = Field(
        default="skip",
        description="The bytes are not what the index recorded (truncated, damaged).",
    )
    decode: OnError = Field(default="skip", description="An image cannot be decoded.")
    schema: OnError = Field(
        default="raise",
        description="The sample's form is not one we know, or its images and placeholders differ "
        "in number.",
    )

    def skips(self, error_class: ErrorClass) -> bool:
        """Whether a sample with such an error is left out, instead of ending the run. Over-long
        samples have a rule of their own."""
        return error_class != "too_long" and getattr(self, error_class) == "skip"
