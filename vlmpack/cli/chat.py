"""`vlmpack chat`: talk with a model in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from vlmpack.activity import ACTIVITY, IDLE
from vlmpack.cli.generate import base_of, read_image
from vlmpack.cli.options import option, quiet_transformers
from vlmpack.errors import VlmpackError
from vlmpack.terminal import say

if TYPE_CHECKING:
    from vlmpack.encode import Encoder, Message

ORDERS = "/image FILE, /reset, /quit"


def chat(
    model: Annotated[Path | None, option("generate.model")] = None,
    adapter: Annotated[list[Path] | None, option("generate.adapter")] = None,
    max_new_tokens: Annotated[int, option("chat.max_new_tokens")] = 512,
) -> None:
    """Talk with a model in the terminal. Each line is a question, and answers are greedy and appear
    as they are generated. `/image FILE` adds an image to the next question, `/reset` begins a new
    conversation, `/quit` or Ctrl-D ends. Where the questions do not come from a terminal, the first
    one that cannot be asked ends the command with exit code 1."""
    base = base_of(model, adapter or ())
    from vlmpack.evaluation.generation import load_for_generation

    quiet_transformers()
    ACTIVITY.enter_alone("loading the model")
    talk = _Talk(*load_for_generation(base, adapter or ()), max_new_tokens)
    has_person = sys.stdin.isatty()
    if has_person:
        say(f"{base}: ask something ({ORDERS})", err=True)
    for line in _lines("> " if has_person else ""):
        if line == "/quit":
            return
        try:
            talk.take(line)
        except VlmpackError as error:
            if not has_person:
                raise
            say(f"error: {error}", err=True)


def _lines(prompt: str) -> Iterator[str]:
    """What is typed or piped in, without blank lines."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its history and editing
    while True:
        ACTIVITY.enter_alone(IDLE)  # a person may think for ever
        try:
            line = input(prompt).strip()
        except EOFError:
            if prompt:
                say()
            return
        except UnicodeDecodeError as error:
            raise VlmpackError(f"standard input is no text in UTF-8: {error}") from None
        if line:
            yield line


@dataclass
class _Talk:
    """A conversation.

    Args:
        messages, images: of the turns so far.
        added: images of the next question.
    """

    model: Any
    encoder: Encoder
    max_new_tokens: int
    messages: tuple[Message, ...] = ()
    images: tuple[bytes, ...] = ()
    added: list[bytes] = field(default_factory=list)

    def take(self, line: str) -> None:
        """Follow an order, or answer a question.

        Raises:
            VlmpackError: no such order, an image that cannot be read, or a question that cannot be
                asked. The conversation is as it was before the question.
        """
        order, _, rest = line.partition(" ")
        if order == "/image":
            self._add(Path(rest.strip().strip("'\"")).expanduser())
        elif line == "/reset":
            self.messages, self.images, self.added = (), (), []
        elif order.startswith("/"):
            raise VlmpackError(f"{order} is no order; expected {ORDERS}, or a question")
        else:
            self._ask(line)

    def _add(self, path: Path) -> None:
        from vlmpack.data.shards.images import image_facts
        from vlmpack.data.shards.naming import SampleCaps

        data = read_image("/image", path)
        image_facts(data, str(path), SampleCaps())
        self.added.append(data)

    def _ask(self, text: str) -> None:
        from vlmpack.encode import ImagePart, Message, TextPart
        from vlmpack.encode.turns import answer_turn
        from vlmpack.evaluation.generation import stream_answer
        from vlmpack.evaluation.predictions import Question

        shown = [ImagePart(len(self.images) + number) for number in range(len(self.added))]
        messages = (*self.messages, Message("user", (*shown, TextPart(text))))
        images, self.added = (*self.images, *self.added), []
        asked = Question(key="", shard="", messages=messages, images=images, truth="")
        answer = stream_answer(
            self.model,
            self.encoder,
            asked,
            max_new_tokens=self.max_new_tokens,
            show=lambda piece: say(piece, nl=False, whole=True),
        )
        say()
        self.messages, self.images = (*messages, answer_turn(answer)), images
