"""What a run's first sample teaches, shown at its start: learnt tokens bright, the rest dim.

    first sample   cats/0012: learnt 4 of 289 tokens (1.4%), in [[ ]]
    <|im_start|>user\\n
    <|vision_start|>[image: 256 tokens, grid 1 x 32 x 32]<|vision_end|>What is it?<|im_end|>\\n
    <|im_start|>assistant\\n
    [[A cat.<|im_end|>]]\\n

It comes from the first batch that the run trains, so nothing is read or encoded again.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpack.encode import Encoder
from vlmpack.packing import Batch
from vlmpack.proof.rows.view import Kind, SampleView, readable, view_first
from vlmpack.terminal import open_console
from vlmpack.whole_file import write_atomically

if TYPE_CHECKING:
    from rich.text import Text

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
    """The sample as one text in colours."""
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
