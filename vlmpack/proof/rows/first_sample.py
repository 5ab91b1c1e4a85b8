"""What a run's first sample teaches, shown at its start: learnt tokens bright, the rest dim.

    first sample   cats/0012: learnt 4 of 289 tokens (1.4%), in [[ ]]
    <|im_start|>user\\n
    <|vision_start|>[image x 256]<|vision_end|>What is it?<|im_end|>\\n
    <|im_start|>assistant\\n
    [[A cat.<|im_end|>]]\\n

It comes from the first batch that the run trains, so nothing is read or encoded again.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlmpack.encode import Encoder
from vlmpack.packing import IGNORE_INDEX, Batch
from vlmpack.terminal import open_console
from vlmpack.training.run_dir import write_atomically

if TYPE_CHECKING:
    from rich.text import Text

logger = logging.getLogger("vlmpack")

MAX_LINES = 24
"""Lines of the conversation that are shown; `first-sample.txt` has all of them."""

_MAX_WIDTH = 120
_LIMITS = (600, 300, 150, 80, 40)
"""Characters of a stretch of text beyond which its middle is left out: the first one that makes the
conversation fit."""

Kind = Literal["learnt", "given", "image"]

_STYLES: dict[Kind, str] = {"learnt": "bold green", "given": "dim", "image": "dim cyan"}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens of one kind, one after the other, as text."""

    text: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A sample as stretches.

    Args:
        key: the sample's.
        stretches: in order.
        num_learnt: tokens that are targets.
        num_tokens: all tokens, those of images included.
    """

    key: str
    stretches: tuple[Stretch, ...]
    num_learnt: int
    num_tokens: int

    def title(self, how: str) -> str:
        """Key and share of what is learnt, for the log."""
        share = self.num_learnt / self.num_tokens
        return (
            f"{_readable(self.key)}: learnt {self.num_learnt:,} of {self.num_tokens:,} tokens "
            f"({share:.1%}), {how}"
        )


def show_first_sample(
    batches: Sequence[Batch], encoder: Encoder, folder: Path, *, quiet: bool = False
) -> bool:
    """Print the first sample of some batches to stderr; in full to `first-sample.txt`, once a run.

    Nothing that fails here stops a run.

    Args:
        batches: on CPU, as they are trained.
        encoder: what made them.
        folder: the run's.
        quiet: write the file alone.

    Returns:
        Whether there was a sample.
    """
    try:
        batch = next((batch for batch in batches if batch.keys), None)
        if batch is None:
            return False
        sample = first_sample(batch, encoder)
        path = folder / "first-sample.txt"
        if not path.exists():
            lines = [sample.title("in [[ ]]"), *_lines(sample.stretches, brackets=True)]
            write_atomically(path, "\n".join(lines) + "\n")
        if not quiet:
            _print(sample)
    except Exception as error:
        logger.warning("the first sample's mask cannot be shown: %s", error)
    return True


def first_sample(batch: Batch, encoder: Encoder) -> ShownSample:
    """The first sample of a batch that has one."""
    length = batch.lengths[0]
    ids: list[int] = batch.input_ids[0, :length].tolist()
    labels: list[int] = batch.labels[0, :length].tolist()
    learnt = [False, *(label != IGNORE_INDEX for label in labels[:-1])]
    kinds: list[Kind] = [
        "image" if token == encoder.placeholder_id else "learnt" if is_target else "given"
        for token, is_target in zip(ids, learnt, strict=True)
    ]
    stretches, place = [], 0
    for kind, group in groupby(kinds):
        count = len(list(group))
        part = ids[place : place + count]
        before = ids[place - 1 : place] if place else []
        text = f"[image x {count}]" if kind == "image" else _decode(encoder.tokenizer, before, part)
        stretches.append(Stretch(text, kind))
        place += count
    return ShownSample(batch.keys[0], tuple(stretches), sum(learnt), length)


def _decode(tokenizer: Any, before: list[int], ids: list[int]) -> str:
    """Text of some tokens. SentencePiece drops the space that a text begins with, so they are
    decoded behind the token before them."""
    head = tokenizer.decode(before, skip_special_tokens=False)
    text = tokenizer.decode([*before, *ids], skip_special_tokens=False)
    if not text.startswith(head):
        text, head = tokenizer.decode(ids, skip_special_tokens=False), ""
    return str(text[len(head) :])


def _readable(text: str) -> str:
    """Control characters spelt out; a line ends behind each line break's spelling."""
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


def _marked(stretches: Sequence[Stretch], *, brackets: bool, limit: int | None) -> Text:
    """All stretches as one styled text."""
    from rich.text import Text

    whole = Text()
    for stretch in stretches:
        text = _readable(stretch.text if limit is None else _abridged(stretch.text, limit))
        if brackets and stretch.kind == "learnt":
            text = f"[[{text}]]"
        whole.append(text, _STYLES[stretch.kind])
    whole.rstrip()
    return whole


def _lines(stretches: Sequence[Stretch], *, brackets: bool) -> list[str]:
    return _marked(stretches, brackets=brackets, limit=None).plain.split("\n")


def _print(sample: ShownSample) -> None:
    from rich.text import Text

    console = open_console(stderr=True)
    brackets = not console.is_terminal or console.no_color
    width = min(
        console.width if console.is_terminal else shutil.get_terminal_size().columns, _MAX_WIDTH
    )
    how = "in [[ ]]" if brackets else "in green"
    lines: list[Text] = []
    for limit in _LIMITS:
        whole = _marked(sample.stretches, brackets=brackets, limit=limit)
        lines = list(whole.wrap(console, width - 2))
        if len(lines) <= MAX_LINES:
            break
    if len(lines) > MAX_LINES:
        half = MAX_LINES // 2
        left_out = Text(f"... {len(lines) - 2 * half + 1} lines ...", "dim italic")
        lines = [*lines[:half], left_out, *lines[len(lines) - half + 1 :]]
    with console.capture() as capture:
        title = Text(f"{'first sample':<14} {sample.title(how)}")
        console.print(title, soft_wrap=True, highlight=False)
        for line in lines:
            console.print(Text("  ").append_text(line), soft_wrap=True, highlight=False)
    # While a progress bar is live it stands behind sys.stderr, and lets whole lines pass above it.
    sys.stderr.write(capture.get())
