"""The one place where text reaches a terminal, which it cannot steer whatever its origin.

Keys, file names, texts and errors come from outside. Control characters and those that change the
direction of writing are escaped (`\\x1b`), and secrets in addresses are left out. rich adds colours
after that.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vlmpack.addresses import redacted

if TYPE_CHECKING:
    from rich.console import Console

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


def say_printable(text: str, level: int = logging.WARNING) -> None:
    """Log a text from a process whose log may have no formatter of ours: a loader's, a script's."""
    logging.getLogger("vlmpack").log(level, "%s", printable(text))


class PrintableFormatter(logging.Formatter):
    """Lines of the log, for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        return printable(super().format(record))


def open_console(**options: Any) -> Console:
    """rich's console, whose texts are printable."""
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
            for text, style, control in super().render(*args, **kwargs):
                yield Segment(text if control else printable(text), style, control)

    return PrintableConsole(**options)


def say(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """A line on standard output, or on standard error."""
    import typer

    typer.echo(printable(text), err=err, nl=nl)
