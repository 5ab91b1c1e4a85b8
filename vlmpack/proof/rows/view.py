"""What the model sees of a batch, as text: its samples as runs of tokens, what is learnt in [[ ]].

    row 0 of global batch 1, epoch 0: 4 samples, 241 tokens, 30 labels in 1 x 256 slots
    segment 0  00012 (train-0.tar)  slots 0 to 71: 68 tokens, 4 of padding; learnt 11 (16.2%)
      roles: user, assistant
      <|im_start|>user\\n
      <|vision_start|>[image: 24 tokens, grid 1 x 8 x 12]<|vision_end|>What is it?<|im_end|>\\n
      <|im_start|>assistant\\n
      [[42<|im_end|>]]\\n

Everything is taken from the very tensors that training gets. A run prints its first sample in this
form at its start, from the first batch that it trains.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from PIL.Image import Image
from torch import Tensor

from vlmpack.data.loading.read import SkippedSample
from vlmpack.encode import Encoder
from vlmpack.encode.sample import PAIR_NAMES
from vlmpack.packing.batch import IGNORE_INDEX, Batch, GridTHW, Media, PackedBatch, PaddedBatch
from vlmpack.terminal import open_console
from vlmpack.whole_file import write_atomically

if TYPE_CHECKING:
    from rich.text import Text


Kind = Literal["given", "image", "learnt"]
"""Without loss; placeholders of an image; what the model must predict."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Neighbouring tokens of one kind.

    Args:
        text: decoded, special tokens included; the grid of an image.
    """

    kind: Kind
    num_tokens: int
    text: str

    def marked(self, *, brackets: bool = True, limit: int | None = None) -> str:
        """The text with visible control characters and line breaks; learnt text in brackets.

        Args:
            limit: characters beyond which the middle is left out.
        """
        if self.kind == "image":
            return f"[image: {self.text}]"
        text = readable(self.text if limit is None else _abridged(self.text, limit))
        return f"[[{text}]]" if brackets and self.kind == "learnt" else text


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """One sample as it lies in the batch.

    Args:
        start: its first slot; those of padded rows are counted on from row to row.
        num_padding: slots after it, up to the next sample or the row's end.
        shard: where it comes from; empty if unknown.
        roles: of its turns; empty where the tokens come from saved packs.
        images: after processing, without normalisation, if they are drawn.
        answer: which of a pair's it is; empty where the sample is no pair.
        sequence: the first of the batch's sequences that it is of.
        shared_by: sequences that share it as a prefix; else 0.
    """

    key: str
    start: int
    num_tokens: int
    num_padding: int
    num_labels: int
    runs: tuple[TokenRun, ...]
    media: Media | None
    shard: str = ""
    roles: tuple[str, ...] = ()
    images: tuple[Image, ...] = ()
    answer: str = ""
    sequence: int = 0
    shared_by: int = 0

    @property
    def name(self) -> str:
        if self.shared_by:
            return f"{self.key} and {self.shared_by - 1} more"
        return f"{self.key}, {self.answer}" if self.answer else self.key

    @property
    def learnt(self) -> str:
        share = self.num_labels / self.num_tokens
        return f"{self.num_labels:,} of {self.num_tokens:,} tokens ({share:.1%})"

    def lines(self) -> list[str]:
        return "".join(run.marked() for run in self.runs).rstrip().split("\n")


@dataclass(frozen=True, slots=True)
class RowView:
    """One row, or the padded rows of one micro-batch.

    Args:
        holes: samples that were left out, with the reason.
    """

    title: str
    samples: tuple[SampleView, ...]
    holes: tuple[SkippedSample, ...]
    num_rows: int
    num_columns: int

    def lines(self) -> Iterator[str]:
        tokens = sum(sample.num_tokens for sample in self.samples)
        labels = sum(sample.num_labels for sample in self.samples)
        sequences = sum(not sample.shared_by for sample in self.samples)
        count = f"{sequences} samples"
        if any(sample.answer for sample in self.samples):
            count = f"{sequences // 2} pairs"
        yield (
            f"{self.title}: {count}, {tokens} tokens, {labels} labels in "
            f"{self.num_rows} x {self.num_columns} slots"
        )
        for place, sample in enumerate(self.samples):
            row, first = divmod(sample.start, self.num_columns)
            where = f"row {row}, slots" if self.num_rows > 1 else "slots"
            last = first + sample.num_tokens + sample.num_padding - 1
            yield (
                f"segment {place}  {sample.name} ({sample.shard})  {where} {first} to {last}: "
                f"{sample.num_padding} of padding, learnt {sample.learnt}"
            )
            if sample.roles:
                yield f"  roles: {', '.join(sample.roles)}"
            yield from (f"  {line}" for line in sample.lines())
        yield from self.left_out()

    def left_out(self) -> Iterator[str]:
        """A line for each reason to leave samples out, with the first such sample."""
        groups: dict[tuple[str, str, str], list[SkippedSample]] = {}
        for hole in self.holes:
            groups.setdefault((hole.file or hole.shard, hole.error_class, hole.reason), []).append(
                hole
            )
        for (file, error_class, reason), (first, *rest) in groups.items():
            more = f" and {len(rest)} more" if rest else ""
            yield f"left out: {first.key}{more} ({file}): {error_class}: {reason}"


def view_samples(batch: Batch, encoder: Encoder) -> Iterator[SampleView]:
    ids, labels = batch.input_ids.flatten(), batch.labels.flatten()
    images, is_image = _Images(batch.media), encoder.placeholder_ids.__contains__
    keys, media = batch.sequence_keys, None
    members, tokens = _members(batch)
    for (start, slots), length, of in zip(_places(batch), tokens, members, strict=False):
        place = of[0]
        own, targets = ids[start : start + length], labels[start : start + length]
        second = batch.num_pairs and place % 2 and len(of) == 1
        if not second:  # that of a pair shows what the first does
            media = images.take(sum(map(is_image, ids[start : start + slots].tolist())))
        yield SampleView(
            key=keys[place],
            start=start,
            num_tokens=length,
            num_padding=slots - length,
            num_labels=int((targets != IGNORE_INDEX).sum()),
            runs=tuple(_runs(own, targets, encoder, media)),
            media=media,
            answer=PAIR_NAMES[place % 2] if batch.num_pairs and len(of) == 1 else "",
            sequence=place,
            shared_by=len(of) if len(of) > 1 else 0,
        )


def view_first(batch: Batch, encoder: Encoder) -> SampleView:
    """The first sequence of a batch that has one, with the prefix that it shares."""
    first = next(view_samples(batch, encoder))
    if not isinstance(batch, PackedBatch) or batch.prefix_tree is None:
        return first
    views = list(view_samples(batch, encoder))
    path = [views[number] for number in batch.segments_of_sequences[0]]
    return replace(
        path[-1],
        num_tokens=batch.lengths[0],
        runs=tuple(run for view in path for run in view.runs),
        media=next((view.media for view in path if view.media is not None), None),
    )


def _members(batch: Batch) -> tuple[list[list[int]], tuple[int, ...]]:
    """The sequences that each segment is of, and its tokens."""
    if not isinstance(batch, PackedBatch):
        return [[place] for place in range(len(batch.lengths))], batch.lengths
    members: list[list[int]] = [[] for _ in batch.segment_tokens]
    for sequence, segments in enumerate(batch.segments_of_sequences):
        for number in segments:
            members[number].append(sequence)
    return members, batch.segment_tokens


def _places(batch: Batch) -> Iterator[tuple[int, int]]:
    """(first slot, slots) of every segment, those without a sample included."""
    if isinstance(batch, PaddedBatch):
        rows, columns = batch.input_ids.shape
        return ((row * columns, columns) for row in range(rows))
    return zip(accumulate(batch.segment_lengths, initial=0), batch.segment_lengths, strict=False)


class _Images:
    """Hands the batch's images out by sample, as many as its placeholders stand for."""

    def __init__(self, media: Media | None) -> None:
        counts = media.patches_here if media is not None else []
        if media is not None and sum(counts) != media.pixel_values.shape[0]:
            media = None  # nobody can say whose they are
        self.media, self.image = media, 0
        self.patches = media.pixel_values.split(counts) if media is not None else ()

    def take(self, placeholders: int) -> Media | None:
        media, first = self.media, self.image
        if media is None:
            return None
        while placeholders > 0 and self.image < media.num_images:
            placeholders -= media.num_tokens[self.image]
            self.image += 1
        own = slice(first, self.image)
        if first == self.image:
            return None
        return Media(
            pixel_values=torch.cat(self.patches[own]),
            grid_thw=media.grid_thw[own],
            num_tokens=media.num_tokens[own],
            image_sizes=media.image_sizes[own] if media.image_sizes is not None else None,
            seconds=media.seconds[own] if media.seconds is not None else None,
        )


def _runs(ids: Tensor, labels: Tensor, encoder: Encoder, media: Media | None) -> Iterator[TokenRun]:
    """Token j is learnt where position j - 1 has it as its label."""
    learnt = [False, *(labels[:-1] != IGNORE_INDEX).tolist()]
    tokens = ids.tolist()
    kinds: list[Kind] = [
        "image" if token in encoder.placeholder_ids else "learnt" if target else "given"
        for token, target in zip(tokens, learnt, strict=True)
    ]
    image = place = 0
    seen = 0  # tokens of that image so far: some families write an image in several runs
    for kind, members in groupby(kinds):
        length = sum(1 for _ in members)
        before, run = tokens[max(0, place - 1) : place], tokens[place : place + length]
        place += length
        if kind != "image":
            yield TokenRun(kind, length, _decode(encoder.tokenizer, before, run))
            continue
        while length > 0:  # images that touch each other
            if media is None or image >= media.num_images:
                yield TokenRun("image", length, f"{length} tokens, without an image")
                break
            total, grid = media.num_tokens[image], media.grid_thw[image]
            count = min(length, total - seen)
            part = f" of {total}" if count < total else ""
            yield TokenRun("image", count, f"{count}{part} tokens, grid {_size(grid)}")
            length, seen = length - count, seen + count
            if seen == total:
                image, seen = image + 1, 0


def _size(grid: GridTHW) -> str:
    return " x ".join(map(str, grid))


def _decode(tokenizer: Any, before: list[int], ids: list[int]) -> str:
    """Text of tokens, decoded after the one before: SentencePiece drops a first space."""
    head = tokenizer.decode(before, skip_special_tokens=False)
    text = tokenizer.decode([*before, *ids], skip_special_tokens=False)
    if not text.startswith(head):
        text, head = tokenizer.decode(ids, skip_special_tokens=False), ""
    return str(text[len(head) :])


def readable(text: str) -> str:
    """The text with control characters spelt out, and a new line after each line break."""
    return "".join(
        "\\n\n"
        if char == "\n"
        else char
        if char.isprintable()
        else char.encode("unicode_escape").decode()
        for char in text
    )


def _abridged(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ...{len(text) - 2 * half:,} characters... {text[-half:]}"


logger = logging.getLogger("vlmpack")

MAX_LINES = 24
"""Lines of the conversation that are shown; `first-sample.txt` has all of them."""

_MAX_WIDTH = 120
_LIMITS = (600, 300, 150, 80, 40)
"""Characters of a stretch of text beyond which its middle is left out: the first one that makes the
conversation fit."""

_STYLES: dict[Kind, str] = {"learnt": "bold green", "given": "dim", "image": "dim cyan"}


def show_first_sample(
    batches: Sequence[Batch], encoder: Encoder, folder: Path, *, quiet: bool = False
) -> bool:
    """Print the first sample of some batches to stderr; in full to `first-sample.txt`, once a run.

    An error here does not stop a run.

    Args:
        batches: on CPU, as they are trained.
        quiet: write the file alone.

    Returns:
        Whether there was a sample.
    """
    try:
        batch = next((batch for batch in batches if batch.keys), None)
        if batch is None:
            return False
        sample = view_first(batch, encoder)
        path = folder / "first-sample.txt"
        if not path.exists():
            write_atomically(path, "\n".join([_title(sample, "in [[ ]]"), *sample.lines()]) + "\n")
        if not quiet:
            _print(sample)
    except Exception as error:
        logger.warning("the first sample's mask cannot be shown: %s", error)
    return True


def _title(sample: SampleView, how: str) -> str:
    return f"{readable(sample.name)}: learnt {sample.learnt}, {how}"


def _styled(sample: SampleView, *, brackets: bool, limit: int) -> Text:
    from rich.text import Text

    whole = Text()
    for run in sample.runs:
        whole.append(run.marked(brackets=brackets, limit=limit), _STYLES[run.kind])
    whole.rstrip()
    return whole


def _print(sample: SampleView) -> None:
    from rich.text import Text

    console = open_console(stderr=True)
    brackets = not console.is_terminal or console.no_color
    width = min(
        console.width if console.is_terminal else shutil.get_terminal_size().columns, _MAX_WIDTH
    )
    lines: list[Text] = []
    for limit in _LIMITS:
        whole = _styled(sample, brackets=brackets, limit=limit)
        lines = list(whole.wrap(console, width - 2))
        if len(lines) <= MAX_LINES:
            break
    if len(lines) > MAX_LINES:
        half = MAX_LINES // 2
        left_out = Text(f"... {len(lines) - 2 * half + 1} lines ...", "dim italic")
        lines = [*lines[:half], left_out, *lines[len(lines) - half + 1 :]]
    with console.capture() as capture:
        how = "in [[ ]]" if brackets else "in green"
        title = Text(f"{'first sample':<14} {_title(sample, how)}")
        console.print(title, soft_wrap=True, highlight=False)
        for line in lines:
            console.print(Text("  ").append_text(line), soft_wrap=True, highlight=False)
    # While a progress bar is live it stands behind sys.stderr, and lets whole lines pass above it.
    sys.stderr.write(capture.get())
