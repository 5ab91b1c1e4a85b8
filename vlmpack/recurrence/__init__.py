"""Layers that carry state from token to token, over the segments of packed rows. torch only."""

from vlmpack.recurrence.choose import (
    KINDS,
    Chosen,
    Kind,
    Listener,
    RecurrenceCall,
    RecurrenceChoice,
    RecurrenceName,
    choose_recurrence,
    on_this_path,
    packaged_kinds,
    recorded_by,
)
from vlmpack.recurrence.convolution import segment_convolution
from vlmpack.recurrence.delta_rule import fixed_delta_rule, segment_delta_rule
from vlmpack.recurrence.rows import RowSegments
from vlmpack.recurrence.scan import StepSize, fixed_scan, segment_scan

__all__ = [
    "KINDS",
    "Chosen",
    "RecurrenceCall",
    "Kind",
    "Listener",
    "RecurrenceChoice",
    "RecurrenceName",
    "RowSegments",
    "StepSize",
    "choose_recurrence",
    "on_this_path",
    "fixed_delta_rule",
    "fixed_scan",
    "recorded_by",
    "packaged_kinds",
    "segment_convolution",
    "segment_delta_rule",
    "segment_scan",
]
