"""A bar on a terminal, nothing elsewhere: output that is piped stays clean."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

from vlmpack.activity import ACTIVITY
from vlmpack.terminal import open_console


class BytesBar:
    """Shards done of so many, with the bytes behind them.

    Args:
        what: the word before the bar.
        total: shards, or other units, in all; None where nobody knows.
    """

    def __init__(self, what: str, total: int | None) -> None:
        self._console = open_console(stderr=True)
        self.what = what
        self.total = total
        self.num_bytes = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> BytesBar:
        ACTIVITY.enter_alone(self.what, shown=self._console.is_terminal)
        if self._console.is_terminal:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
            )

            self._bar = Progress(
                TextColumn(self.what),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[size]}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task(self.what, total=self.total, size="")
            self._bar.start()
        return self

    def advance(self, num_bytes: int = 0, units: int = 1) -> None:
        """Some more are done."""
        ACTIVITY.moved()
        self.num_bytes += num_bytes
        if self._bar is not None:
            self._bar.update(self._task, advance=units, size=size_text(self.num_bytes))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class Bars:
    """A bar for what is being done now, as index, lengths or packing. It is called with the word
    for it, how much is done, and of how much. A new word begins a new bar."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._bar: BytesBar | None = None
        self._what: str | None = None
        self._done = 0

    def __enter__(self) -> Bars:
        return self

    def __call__(self, what: str, done: int, total: int | None, num_bytes: int = 0) -> None:
        if what != self._what:
            self._stack.close()
            self._bar = self._stack.enter_context(BytesBar(what, total))
            self._what, self._done = what, 0
        assert self._bar is not None
        if done > self._done:
            self._bar.advance(num_bytes, units=done - self._done)
            self._done = done

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def size_text(num_bytes: int) -> str:
    """`3.2 GB`; nothing for nothing."""
    if not num_bytes:
        return ""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
