"""Which characters of a rendered conversation the assistant wrote.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    |------------ head: with the generation prompt ---------||--- turn ---|

The template itself says so: the text up to turn i with a generation prompt, and the text with turn
i, differ by exactly that turn, its end-of-turn token included. Where a template renders a turn
differently once others follow (Qwen3 drops earlier thoughts; Mistral moves the system prompt), the
turn is what changes in the whole conversation when its content does. One that calls tools or thinks
is what changes with its thoughts, its words and the arguments of its calls, and what the template
writes before, between and behind them (`changes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from vlmpack.encode.changes import CALLS, THOUGHTS, Changed, changed, difference, shared
from vlmpack.encode.image_text import Span
from vlmpack.encode.sample import Message, said
from vlmpack.encode.thoughts import with_thoughts_apart
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
        opening: between the question and an answer whose turn does not begin as the prompt ends
            (a prompt that opens a thought, or closes an empty one): not learnt; None where turns
            begin so, or where nothing is known of it.
        prompt: what the generation prompt is behind a question.
    """

    header: str = ""
    lead: str = ""
    close: str = ""
    opening: str | None = None
    prompt: str = ""


def shape_of(render: Render) -> TurnShape:
    """What a template writes around the answer to a question."""
    asked = (said("user", "x"),)
    try:
        head, bare = render(asked, True), render(asked, False)
        answered = [render((*asked, said("assistant", word)), False) for word in "yz"]
    except DataError:  # a template that wants more turns: nothing is known of it beforehand
        return TurnShape()
    start, tail = difference(*answered)
    text = answered[0]
    before = text[len(head) : start] if text.startswith(head) else ""
    close = text[len(text) - tail :].rstrip()
    if head == bare and before.strip():
        return TurnShape(header=before, close=close)
    apart = text.startswith(bare) and not text.startswith(head)
    opening = text[len(bare) : start] if apart else None
    prompt = head[len(bare) :] if head.startswith(bare) else ""
    return TurnShape(lead=before, close=close, opening=opening, prompt=prompt)


@dataclass(frozen=True, slots=True)
class AssistantTurns:
    """The assistant's turns in one template's texts.

    Args:
        render: the template, with what it is given beside the turns.
        shape: what it writes around an answer.
    """

    render: Render
    shape: TurnShape

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
            spans.append(self._found(messages, index, text))
        return spans

    def last(self, messages: tuple[Message, ...], text: str) -> Span:
        """That of the last turn, which is the assistant's; see `spans`."""
        return self._found(messages, len(messages) - 1, text)

    def _found(self, messages: tuple[Message, ...], index: int, text: str) -> Span:
        span, turn = self._span(messages, index, text), messages[index]
        if span is None:
            why = "differently when later turns follow"
            if index == len(messages) - 1:
                why = "otherwise than its generation prompt begins it"
            beside = "; it may write the words of a turn with calls behind the results"
            raise schema_error(
                f"the chat template renders turn {index} {why}, "
                f"so the assistant's tokens cannot be told apart"
                + (beside if CALLS in turn.fields and turn.text.strip() else ""),
            )
        return span

    def _span(self, messages: tuple[Message, ...], index: int, text: str) -> Span | None:
        """One turn: what a conversation that ends with it has more than the question alone, or what
        changes with it."""
        head = self.render(messages[:index], True)
        is_last = index == len(messages) - 1
        turn = text if is_last else self.render(messages[: index + 1], False)
        if turn.startswith(head) and text.startswith(turn):
            start, header = len(head), self.shape.header
            if header and text.startswith(header, start):
                start += len(header)
            return start, max(start, len(turn.rstrip()))
        if messages[index].fields:
            return self._by_fields(messages, index, text, head)
        apart = with_thoughts_apart(messages[index])
        if apart is not None:
            told = (*messages[:index], apart, *messages[index + 1 :])
            if self.render(told, False) == text:
                return self._by_fields(told, index, text, head)
        return self._by_change(messages, index, text)

    def _by_fields(
        self, messages: tuple[Message, ...], index: int, text: str, head: str
    ) -> Span | None:
        """A turn that calls tools or thinks, as what changes with it; what stands around that is
        taken from the conversation that ends with it, with its thoughts or without: a template may
        drop them.

        Args:
            messages: the conversation.
            index: the turn's.
            text: what the template makes of it.
            head: of the turns before, with a generation prompt.
        """
        before, message, after = messages[:index], messages[index], messages[index + 1 :]
        whole = changed(text, message, lambda one: self.render((*before, one, *after), False))
        if whole is None:
            return None
        silent = {key: value for key, value in message.fields.items() if key not in THOUGHTS}
        for turn in (message, replace(message, fields=silent)):
            alone = self.render((*before, turn), False)
            place = changed(alone, turn, lambda one: self.render((*before, one), False))
            asked, is_asked = self._asked(before, head, alone, place)
            if place is None or place.start < asked:
                continue
            if whole.by_call and not (is_asked and place.by_call):
                continue  # what stands before the arguments is not known
            alone = alone.rstrip()
            lead = alone[asked : place.start] if is_asked else ""
            span = self._around(text, whole, lead, alone[place.end :])
            # The end of what the model would say there: all of it, or what thoughts leave.
            if span is not None and alone[asked:].endswith(text[slice(*span)]):
                return span
        return None

    def _asked(
        self, before: tuple[Message, ...], head: str, alone: str, place: Changed | None
    ) -> tuple[int, bool]:
        """Where a turn begins that nothing follows, and whether that is known: it begins as the
        prompt ends, or as an answer without thoughts does, or without a word where results stand in
        the model's own turn. Of one that shares part of the prompt alone, it is where the two part.

        Args:
            before: the turns before.
            head: of these, with a generation prompt.
            alone: the text that ends with the turn.
            place: what changes there with it.
        """
        asked = shared(head, alone)
        if asked == len(head):
            return asked, True
        if place is not None and place.start <= asked:
            return place.start, False
        bare, opening, prompt = self.render(before, False), self.shape.opening, self.shape.prompt
        goes_on = head.startswith(bare) and prompt and not head.startswith(prompt, len(bare))
        begins = bare + opening if opening is not None and not goes_on else bare
        if (goes_on or opening is not None) and alone.startswith(begins):
            return len(begins), True
        return asked, False

    def _around(self, text: str, found: Changed, lead: str, close: str) -> Span | None:
        """A turn with what the template writes before and behind what changes with it.

        Args:
            text: the template's.
            found: what changes with the turn.
            lead: before it, where the conversation ends with the turn.
            close: behind it there.
        """
        start = found.start
        if not text.startswith(close, found.end):
            return None
        if text.endswith(lead, 0, start):
            start -= len(lead)
        elif found.by_call:
            return None  # nothing says where that begins which is written before the arguments
        elif self.shape.lead and text.endswith(self.shape.lead, 0, start):
            start -= len(self.shape.lead)
        return start, found.end + len(close)

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
