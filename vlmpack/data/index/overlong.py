"""Samples longer than the sequence length are refused, dropped, or get smaller images.

Planning decides it from lengths alone, and no sample is ever cut. `shrink_images` scales all images
of a sample by the largest factor of 1/256 .. 255/256 with which it fits. The encoder gets the
target sizes. A sample that is too long even at the smallest factor is dropped, counted and listed,
as under `drop`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from vlmpack.data.index.lengths import CHOSEN, COUNTS, SampleText, prefixes_of_text
from vlmpack.data.index.table import Bools, SampleTable
from vlmpack.data.protocols import ImageSize
from vlmpack.encode import Encoder, SampleLength
from vlmpack.errors import DataError

OverLong = Literal["error", "drop", "shrink_images"]

SCALE_STEPS = 256


@dataclass(frozen=True, slots=True)
class Dropped:
    """A sample that the plan leaves out, by its number in the split; the reason has both
    lengths."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fitted:
    """The table after the policy.

    Args:
        eligible: (N,) bool, the samples that the plan may use (holes included).
    """

    table: SampleTable
    eligible: Bools
    dropped: tuple[Dropped, ...]

    @property
    def num_samples(self) -> int:
        """Samples of the split, used or dropped; those held back for another are not its."""
        return int(self.eligible.sum()) + len(self.dropped)

    def only(self, chosen: Bools) -> Fitted:
        """The split of some samples, (N,) bool; the others keep their numbers and are not used."""
        table, dropped = self.table, (one for one in self.dropped if chosen[one.number])
        faults = {number: fault for number, fault in table.faults.items() if chosen[number]}
        shrunk = {number: sizes for number, sizes in table.shrunk.items() if chosen[number]}
        table = replace(table, faults=faults, shrunk=shrunk)
        return Fitted(table, self.eligible & chosen, tuple(dropped))


def scaled_sizes(sizes: Sequence[ImageSize], step: int) -> tuple[ImageSize, ...]:
    """Every size times `step / SCALE_STEPS`, at least 1 pixel a side."""
    return tuple(
        (max(1, width * step // SCALE_STEPS), max(1, height * step // SCALE_STEPS))
        for width, height in sizes
    )


@dataclass(frozen=True, slots=True)
class SampleLimits:
    """What one sample may have at most.

    Args:
        seq_length: tokens (training.seq_length).
        max_patches: vision patches (packing.max_vision_patches); None for no limit.
    """

    seq_length: int
    max_patches: int | None = None

    @property
    def in_words(self) -> tuple[str, str]:
        """What a sample above them is."""
        return (
            f"longer than training.seq_length {self.seq_length}",
            f"more than packing.max_vision_patches {self.max_patches}",
        )

    def fit(self, num_tokens: npt.ArrayLike, num_patches: npt.ArrayLike) -> Bools:
        """(n,) bool: the samples that fit, by their (n,) tokens and patches; one bool of one."""
        fits: Bools = np.less_equal(num_tokens, self.seq_length)
        if self.max_patches is not None:
            fits = fits & np.less_equal(num_patches, self.max_patches)
        return fits

    def excess(self, tokens: int, patches: int) -> str:
        """What of a sample that does not fit is above which limit."""
        if tokens <= self.seq_length:
            return f"{patches} vision patches; packing.max_vision_patches is {self.max_patches}"
        return f"{tokens} tokens; training.seq_length is {self.seq_length}"


def shrink_to_fit(
    text: SampleText, encoder: Encoder, limits: SampleLimits
) -> tuple[tuple[ImageSize, ...], SampleLength] | None:
    """The largest scaled sizes with which the sample fits, and its length then; None if none do.

    Bisection over the 255 factors: image tokens grow with the size. The result is checked by its
    own length, so a rule that is not monotone costs size, never correctness.
    """
    best: tuple[tuple[ImageSize, ...], SampleLength] | None = None
    low, high = 1, SCALE_STEPS - 1
    while text.sizes and low <= high:
        step = (low + high) // 2
        sizes = scaled_sizes(text.sizes, step)
        try:
            length = encoder.length(text.sample, sizes)
        except DataError:  # images too small, or too narrow, for the family
            low = step + 1
            continue
        if limits.fit(length.num_tokens, length.num_patches):
            best, low = (sizes, length), step + 1
        else:
            high = step - 1
    return best


def apply_over_long(
    table: SampleTable,
    *,
    policy: OverLong,
    limits: SampleLimits,
    encoder: Encoder,
    read_text: Callable[[int], SampleText],
) -> Fitted:
    """Which samples the plan may use, and at what image sizes.

    Raises:
        DataError: class `too_long` under `error`, with the count and the longest few.
    """
    over = np.flatnonzero(~limits.fit(table.num_tokens, table.num_patches))
    eligible = np.ones(table.num_samples, dtype=np.bool_)
    if over.size == 0:
        return Fitted(table, eligible, ())
    if policy == "error":
        raise _too_long(table, over.tolist(), limits)
    names = COUNTS if table.num_chosen_tokens is None else (*COUNTS, CHOSEN)
    columns = {name: getattr(table, name).copy() for name in names}
    shrunk: dict[int, tuple[ImageSize, ...]] = {}
    dropped: list[Dropped] = []
    prefixes: dict[int, Sequence[tuple[int, int]]] = {}
    for number in over.tolist():
        found = None
        if policy == "shrink_images":
            text = read_text(number)
            found = shrink_to_fit(text, encoder, limits)
        if found is None:
            eligible[number] = False
            dropped.append(Dropped(number, _drop_reason(table, number, policy, limits)))
            continue
        shrunk[number] = found[0]
        prefixes[number] = prefixes_of_text(encoder, text, found[0])
        for name, column in columns.items():
            column[number] = getattr(found[1], name)
    kept = None if table.prefixes is None else table.prefixes.replaced(prefixes)
    fitted = replace(table, shrunk=shrunk, prefixes=kept, **columns)
    return Fitted(fitted, eligible, tuple(dropped))


def _drop_reason(table: SampleTable, number: int, policy: OverLong, limits: SampleLimits) -> str:
    tokens, patches = int(table.num_tokens[number]), int(table.num_patches[number])
    reason = limits.excess(tokens, patches)
    if tokens <= limits.seq_length:
        return reason + (", and no smaller size of its images fits" if policy != "drop" else "")
    if policy == "shrink_images":
        images = int(table.num_image_tokens[number])
        reason += f", and the {tokens - images} tokens of text leave too little room for images"
    return reason


def _too_long(table: SampleTable, over: Sequence[int], limits: SampleLimits) -> DataError:
    longer = [number for number in over if table.num_tokens[number] > limits.seq_length]
    column, knob = table.num_tokens, "training.seq_length"
    above, most = f"are longer than {knob} {limits.seq_length} tokens", "longest"
    kind = "samples"
    if table.num_chosen_tokens is not None:
        kind, above = "pairs", f"{above} (both sequences of a pair together)"
    if not longer:
        column, knob = table.num_patches, "packing.max_vision_patches"
        above, most = f"have more vision patches than {knob} {limits.max_patches}", "largest"
    worst = sorted(longer or over, key=lambda number: (-int(column[number]), number))
    shown = ", ".join(f"{table.key(number)!r} {column[number]}" for number in worst[:5])
    return DataError(
        f"{len(worst)} of {table.num_samples} {kind} {above}; the {most}: {shown}. Raise {knob}, "
        "or set data.over_long to drop or shrink_images",
        error_class="too_long",
        key=table.key(worst[0]) if len(worst) == 1 else None,
        shard=table.shards[table.shard_of(worst[0])].path if len(worst) == 1 else None,
    )
