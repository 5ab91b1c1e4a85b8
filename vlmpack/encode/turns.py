"""Which characters of a rendered conversation the assistant wrote.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    |------------ head: with the generation prompt ---------||--- turn ---|

The template itself says so: the text up to turn i with a generation prompt, and the text with turn
i, differ by exactly that turn, its end-of-turn token included. Where a template renders a turn
differently once others follow (Qwen3 drops earlier thoughts; Mistral moves the system prompt), the
turn is what changes in the whole conversation when its content does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from vlmpack.encode.image_text import Span
from vlmpack.encode.sample import Message, said
from vlmpack.errors import DataError, schema_error

Render = Callable[[tuple[Message, ...], bool], str]
"""(turns, whether to add a generation prompt) -> the template's text."""


@dataclass(frozen=True, slots=True)
class TurnShape:
    """What a template writes around an answer.

    Args:
        header: before it, where the template has no generation prompt to write it: not learnt.
        lead: between the generation prompt and the answer (a space): learnt.
        close: after it, up to trailing white space: the end-of-turn token, learnt.
    """

    header: str = ""
    lead: str = ""
    close: str = ""


@dataclass(frozen=True)
class AssistantTurns:
    """The assistant's turns in one template's texts.

    Args:
        render: the template.
    """

    render: Render

    @cached_property
    def shape(self) -> TurnShape:
        """What the template writes around the answer to a question."""
        asked = (said("user", "x"),)
        try:
            head, bare = self.render(asked, True), self.render(asked, False)
            answered = [self.render((*asked, said("assistant", word)), False) for word in "yz"]
        except DataError:  # a template that wants more turns: nothing is known of it beforehand
            return TurnShape()
        start, tail = difference(*answered)
        text = answered[0]
        before = text[len(head) : start] if text.startswith(head) else ""
        close = text[len(text) - tail :].rstrip()
        if head == bare and before.strip():
            return TurnShape(header=before, close=close)
        return TurnShape(lead=before, close=close)

    def spans(
        self, messages: tuple[Message, ...], text: str, *, only_excluded: bool = False
    ) -> list[Span]:
        """Character spans of the assistant's turns, end-of-turn token included.

        Args:
            messages: the conversation.
            text: what the template makes of it.
            only_excluded: of those turns alone that the data excludes from the loss.

        Raises:
            DataError: (schema) a turn that cannot be found in the text.
        """
        spans: list[Span] = []
        for index, turn in enumerate(messages):
            if turn.role != "assistant" or (only_excluded and turn.learn):
                continue
            span = self._by_prefix(messages, index, text) or self._by_change(messages, index, text)
            if span is None:
                raise schema_error(
                    f"the chat template renders turn {index} differently when later turns follow, "
                    f"so the assistant's tokens cannot be told apart",
                )
            spans.append(span)
        return spans

    def _by_prefix(self, messages: tuple[Message, ...], index: int, text: str) -> Span | None:
        """The turn as what a conversation that ends with it has more than the question alone."""
        head = self.render(messages[:index], True)
        is_last = index == len(messages) - 1
        turn = text if is_last else self.render(messages[: index + 1], False)
        if not (turn.startswith(head) and text.startswith(turn)):
            return None
        start, header = len(head), self.shape.header
        if header and text.startswith(header, start):
            start += len(header)
        return start, max(start, len(turn.rstrip()))

    def _by_change(self, messages: tuple[Message, ...], index: int, text: str) -> Span | None:
        """The turn as what changes in the whole conversation when its content does."""
        first, second = (
            self.render((*messages[:index], said("assistant", word), *messages[index + 1 :]), False)
            for word in "yz"
        )
        start, tail = difference(first, second)
        end = len(text) - tail
        if first == second or start > end:
            return None
        if text[:start] != first[:start] or text[end:] != first[len(first) - tail :]:
            return None
        shape = self.shape
        if shape.lead and text.endswith(shape.lead, 0, start):
            start -= len(shape.lead)
        if not text.startswith(shape.close, end):
            return None  # nothing would say where the answer stops
        return start, end + len(shape.close)


def difference(first: str, second: str) -> tuple[int, int]:
    """How many characters two texts share at the start, and how many after that at the end."""
    start = _shared(first, second)
    return start, _shared(first[start:][::-1], second[start:][::-1])


def _shared(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))
