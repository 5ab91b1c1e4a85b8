"""The one place where text reaches a terminal, which it cannot steer whatever its origin.

Keys, file names, texts and errors come from outside. Control characters and those that change the
direction of writing are escaped (`\\x1b`), and secrets in addresses are left out. rich adds colours
after that. A line longer than a terminal goes on below its own text. In files and pipes lines stay
whole, unless COLUMNS says how wide they are.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from textwrap import wrap
from typing import IO, TYPE_CHECKING, Any

from vlmpack.addresses import redacted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but for tab and line end, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    "\u2028\u2029\ufeff\ufff9-\ufffb"  # line ends of other kinds, marks without a shape
    "\U000e0000-\U000e007f"  # invisible copies of ASCII
    "\ud800-\udfff]"  # halves of pairs, which cannot be encoded
)


def printable(text: str) -> str:
    """The text with every character that would steer a terminal escaped, and without secrets of
    addresses. Line ends and tabs stay."""
    if "://" in text:
        text = redacted(text)
    return _STEERING.sub(_written_out, text)


def _written_out(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "surrogatepass").decode("ascii")


_LABEL = re.compile(r" *(?:\S.{0,15}? {2,})?")
"""What a line begins with: `data           60 samples` goes on below `60`."""
_CELLS = 4
"""Spaces within cells are no place to break a line of so many."""


def columns(stream: IO[str]) -> int | None:
    """Characters of a line, by COLUMNS or the terminal; None in a file or a pipe."""
    with suppress(ValueError):
        if (wanted := int(os.environ.get("COLUMNS", "0"))) > 0:
            return wanted
    with suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or None
    return None


def wrapped(text: str, width: int | None) -> str:
    """The text with lines of at most so many characters. Words, such as paths, stay whole."""
    return text if width is None else "\n".join(_hanging(line, width) for line in text.split("\n"))


def _hanging(line: str, width: int) -> str:
    label = re.match(_LABEL, line)
    assert label is not None, "it may be empty"
    indent = len(label[0]) + (0 if label[0].strip() else 2)
    if len(line) <= width or len(line[len(label[0]) :].split()) < 2:
        return line
    has_cells = len(re.findall(r"\S {2,}(?=\S)", line)) >= _CELLS and "\0" not in line
    within = "\0" if has_cells else " "
    lines = wrap(
        re.sub(r"(?<=\S) (?=\S)", within, line),
        width,
        subsequent_indent=" " * indent,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(within, " ")


def say_printable(text: str, level: int = logging.WARNING) -> None:
    """Log a text from a process whose log may have no formatter of ours: a loader's, a script's."""
    logging.getLogger("vlmpack").log(level, "%s", printable(text))


class PrintableFormatter(logging.Formatter):
    """Lines of the log, for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        return wrapped(printable(super().format(record)), columns(sys.stderr))


def open_console(piped: int | None = None, **options: Any) -> Console:
    """rich's console, whose texts are printable. Lines with `soft_wrap` are wrapped as all others
    are.

    Args:
        piped: characters of a line in a file or a pipe, instead of rich's 80.
    """
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
            for text, style, control in super().render(*args, **kwargs):
                yield Segment(text if control else printable(text), style, control)

        def print(self, *objects: Any, **kwargs: Any) -> None:
            width = columns(self.file)
            if kwargs.get("soft_wrap") and width is not None:
                objects = tuple(
                    _hanging_text(
                        self.render_str(each, markup=kwargs.get("markup"), highlight=False)
                        if isinstance(each, str)
                        else each,
                        width,
                    )
                    for each in objects
                )
            super().print(*objects, **kwargs)

    console = PrintableConsole(**options)
    if piped is not None and columns(console.file) is None:
        console.width = piped
    return console


def _hanging_text(text: Text, width: int) -> Text:
    """`wrapped`, with the text's styles."""
    from rich.text import Text

    lines: list[Text] = []
    done = 0
    for line in wrapped(text.plain, width).split("\n"):
        words = line.lstrip() if lines else line
        start = text.plain.index(words, done)
        done = start + len(words)
        lines.append(Text(line[: len(line) - len(words)]).append_text(text[start:done]))
    return Text("\n").join(lines)


def say(text: str = "", *, err: bool = False, nl: bool = True, whole: bool = False) -> None:
    """A line on standard output, or on standard error.

    Args:
        whole: it is data, such as an answer, and never wrapped. So is a text of several lines on
            standard output.
    """
    import typer

    text = printable(text)
    if not whole and (err or "\n" not in text):
        text = wrapped(text, columns(sys.stderr if err else sys.stdout))
    typer.echo(text, err=err, nl=nl)
