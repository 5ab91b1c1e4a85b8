"""Which characters of a rendered conversation the assistant wrote.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    |------------ head: with the generation prompt ---------||--- turn ---|

The template itself shows it. The text up to turn i with a generation prompt, and the text with turn
i, differ by exactly that turn, its end-of-turn token included. Some templates render a turn
differently once others follow. Qwen3 drops earlier thoughts, and Mistral moves the system prompt.
There the turn is what changes in the whole conversation when its content does.

    assistant  thoughts "R"  words "Let me look."  calls get({"city": "Oslo"})
    text       ...assistant\\n<think>\\nR\\n</think>\\n\\nLet me look.\\n<tool_call>{... "Oslo"}...
                                   [--                                            ---)

In a turn that calls tools or thinks, each of the three is replaced by other words, and the texts
are compared. The names of calls stay, since a template may write them into the results too.

Qwen3's template drops the thoughts of earlier turns, since prompts do not have them either. Others
drop all. An answer that is taught without its thoughts is taught as if said without thinking.
`data.learn` can learn the last answer alone, or each answer as a sample of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from vlmpack.encode.markers import Span
from vlmpack.encode.sample import Message, TextPart, said
from vlmpack.errors import DataError, schema_error

Dropped = Literal["none", "earlier", "all"]

OPEN, CLOSE = "<think>", "</think>"


def dropped_thoughts(render: Callable[[tuple[Message, ...]], str]) -> Dropped:
    """Which answers' thoughts a template leaves out of a conversation of two."""
    inline = _dropped(render, lambda thought, words: said("assistant", _inline(thought, words)))
    if inline != "none":
        return inline
    apart = _dropped(
        render,
        lambda thought, words: replace(
            said("assistant", words), fields={"reasoning_content": thought}
        ),
    )
    return "none" if apart == "all" else apart  # one that does not know the key refuses it


def _inline(thought: str, words: str) -> str:
    return f"{OPEN}\n{thought}\n{CLOSE}\n\n{words}"


def _dropped(
    render: Callable[[tuple[Message, ...]], str], answer: Callable[[str, str], Message]
) -> Dropped:
    try:
        text = render(
            (
                said("user", "one?"),
                answer("earlierthought", "earlieranswer"),
                said("user", "two?"),
                answer("lastthought", "lastanswer"),
            )
        )
    except DataError:  # a template that wants other turns: nothing is known of it
        return "none"
    if "earlieranswer" not in text or "lastanswer" not in text:
        return "none"
    if "earlierthought" in text:
        return "none"
    return "earlier" if "lastthought" in text else "all"


def with_thoughts_apart(turn: Message) -> Message | None:
    """A turn that says its thoughts in its words, with both apart; None for another."""
    before, _, rest = turn.text.partition(OPEN)
    thought, closed, words = rest.partition(CLOSE)
    if not closed or before.strip() or turn.shown:
        return None
    return replace(said("assistant", words.strip()), fields={"reasoning_content": thought.strip()})


def answer_turn(text: str) -> Message:
    """A model's answer as a turn, with its thoughts apart. Some templates open them already."""
    whole = text if OPEN in text or CLOSE not in text else OPEN + text
    return with_thoughts_apart(said("assistant", whole)) or said("assistant", text)


def refuse_several(messages: tuple[Message, ...], loss_on: str) -> None:
    """Raise DataError (schema) for a conversation that is not the sample of one answer."""
    if loss_on == "all":
        raise schema_error(
            "loss_on 'all' learns all text, and data.learn: each_answer one answer of each sample; "
            "expected one of them"
        )
    learnt = [at for at, turn in enumerate(messages) if turn.role == "assistant" and turn.learn]
    if learnt != [len(messages) - 1]:
        raise schema_error(
            "data.learn: each_answer expects a conversation that ends with the one answer to "
            f"learn. This one has {len(messages)} turns, and its answers are turns {learnt}. Give "
            "each answer a sample that ends with it, and exclude the earlier ones"
        )


def last_turn_alone(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The turns, all answers but the last excluded from the loss.

    An answer that took tools includes its calls. So the assistant's earlier turns count as long as
    only results of tools stand between them.
    """
    first = len(messages)
    for at in range(len(messages) - 1, -1, -1):
        role = messages[at].role
        if role == "assistant" and (first == len(messages) or messages[first - 1].role == "tool"):
            first = at
        elif role != "tool" and first < len(messages):
            break
    return tuple(
        replace(turn, learn=False) if turn.role == "assistant" and at < first else turn
        for at, turn in enumerate(messages)
    )


THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of a turn's thoughts, those that transformers knows."""

CALLS = "tool_calls"

Render = Callable[[tuple[Message, ...]], str]
"""A template: turns -> their text."""


@dataclass(frozen=True, slots=True)
class Changed:
    """The stretch of a text that changes with a turn.

    `by_call` says that it begins with the arguments of a call. What the template writes before them
    does not change, so it lies before the stretch.
    """

    start: int
    end: int
    by_call: bool


def changed(text: str, turn: Message, render: Callable[[Message], str]) -> Changed | None:
    """Where a text changes with a turn; None where it does not."""
    spans: list[tuple[int, int, bool]] = []
    silent = CALLS in turn.fields and not turn.text.strip()
    for by_call, versions in _versions(turn):
        try:
            first, second = (render(version) for version in versions)
        except DataError:  # a template that wants something of this
            continue
        if first == second:  # not written at all
            continue
        start = min(shared(first, second), shared(first, text))
        tail = min(shared(first[::-1], second[::-1]), shared(first[::-1], text[::-1]))
        # Words that a turn with calls lacks. They may begin it, but where they come after the
        # results of the calls (Gemma 4) it does not reach so far.
        is_word = versions[0].fields == turn.fields
        spans.append((start, 0 if silent and is_word else max(start, len(text) - tail), by_call))
    if not spans:
        return None
    start, _, by_call = min(spans)
    return Changed(start, max(start, *(end for _, end, _ in spans)), by_call)


def _versions(turn: Message) -> Iterator[tuple[bool, list[Message]]]:
    """(whether its calls, the turn with one of its three replaced, in two ways)."""
    yield False, [replace(turn, parts=(TextPart(word),)) for word in "yz"]
    for name in THOUGHTS:
        if name in turn.fields:
            yield False, [with_field(turn, name, word) for word in "yz"]
    if CALLS in turn.fields:
        yield True, [with_arguments(turn, {word: word}) for word in "yz"]


def written_for(
    text: str, messages: tuple[Message, ...], at: int, other: Message, render: Render
) -> str:
    """The stretch of a text that a template writes for a turn; empty where it writes nothing.

    It is found by putting another turn, without a common character, in its place.
    """
    start, tail = difference(text, render((*messages[:at], other, *messages[at + 1 :])))
    return text[start : len(text) - tail]


def with_field(turn: Message, name: str, value: Any) -> Message:
    """The turn with another value of a field."""
    return replace(turn, fields={**turn.fields, name: value})


def with_arguments(turn: Message, arguments: dict[str, Any]) -> Message:
    """The turn with other arguments in all of its calls."""
    calls = []
    for call in turn.fields[CALLS]:
        if "function" in call:
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        else:
            calls.append({**call, "arguments": arguments})
    return with_field(turn, CALLS, calls)


def difference(first: str, second: str) -> tuple[int, int]:
    """How many characters two texts share at the start, and how many after that at the end."""
    start = shared(first, second)
    return start, shared(first[start:][::-1], second[start:][::-1])


def shared(first: str, second: str) -> int:
    """How many characters two texts share at the start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


RenderTurns = Callable[[tuple[Message, ...], bool], str]
"""(turns, whether to add a generation prompt) -> the template's text."""


@dataclass(frozen=True, slots=True)
class TurnShape:
    """The text that a template writes around an answer.

    Args:
        header: before the answer, where the template has no generation prompt to write it. It is
            not learnt.
        lead: between the generation prompt and the answer (a space). It is learnt.
        close: after the answer, up to trailing white space. It has the end-of-turn token, and is
            learnt.
        opening: between the question and an answer whose turn does not begin as the prompt ends.
            Such a prompt opens a thought, or closes an empty one. It is not learnt. None where
            turns begin as the prompt ends, or where nothing is known.
        prompt: the generation prompt after a question.
    """

    header: str = ""
    lead: str = ""
    close: str = ""
    opening: str | None = None
    prompt: str = ""


def shape_of(render: RenderTurns) -> TurnShape:
    """The text that a template writes around the answer to a question."""
    question = (said("user", "x"),)
    try:
        head, bare = render(question, True), render(question, False)
        answered = [render((*question, said("assistant", word)), False) for word in "yz"]
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
    """The assistant's turns in one template's texts."""

    render: RenderTurns
    shape: TurnShape

    def spans(
        self, messages: tuple[Message, ...], text: str, *, only_excluded: bool = False
    ) -> list[Span]:
        """Character spans of the assistant's turns, end-of-turn token included.

        Args:
            only_excluded: only turns that the data excludes from the loss.

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
            note = "; it may write the words of a turn with calls behind the results"
            raise schema_error(
                f"the chat template renders turn {index} {why}, "
                f"so the assistant's tokens cannot be told apart"
                + (note if CALLS in turn.fields and turn.text.strip() else ""),
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
            parted = (*messages[:index], apart, *messages[index + 1 :])
            if self.render(parted, False) == text:
                return self._by_fields(parted, index, text, head)
        return self._by_change(messages, index, text)

    def _by_fields(
        self, messages: tuple[Message, ...], index: int, text: str, head: str
    ) -> Span | None:
        """A turn that calls tools or thinks, found by what changes with it.

        The template's text around that is taken from the conversation that ends with the turn, with
        its thoughts or without, because a template may drop them.
        """
        before, message, after = messages[:index], messages[index], messages[index + 1 :]
        whole = changed(text, message, lambda one: self.render((*before, one, *after), False))
        if whole is None:
            return None
        silent = {key: value for key, value in message.fields.items() if key not in THOUGHTS}
        for turn in (message, replace(message, fields=silent)):
            alone = self.render((*before, turn), False)
            place = changed(alone, turn, lambda one: self.render((*before, one), False))
            prompt_end, is_asked = self._asked(before, head, alone, place)
            if place is None or place.start < prompt_end:
                continue
            if whole.by_call and not (is_asked and place.by_call):
                continue  # what stands before the arguments is not known
            alone = alone.rstrip()
            lead = alone[prompt_end : place.start] if is_asked else ""
            span = self._around(text, whole, lead, alone[place.end :])
            # The end of what the model would say there: all of it, or what thoughts leave.
            if span is not None and alone[prompt_end:].endswith(text[slice(*span)]):
                return span
        return None

    def _asked(
        self, before: tuple[Message, ...], head: str, alone: str, place: Changed | None
    ) -> tuple[int, bool]:
        """Where a last turn begins, and whether that is known.

        It begins where the prompt ends, where an answer without thoughts begins, or, where results
        stand in the model's own turn, without a word before it. If the turn shares only part of the
        prompt, it begins where the two differ.
        """
        prompt_end = shared(head, alone)
        if prompt_end == len(head):
            return prompt_end, True
        if place is not None and place.start <= prompt_end:
            return place.start, False
        bare, opening, prompt = self.render(before, False), self.shape.opening, self.shape.prompt
        goes_on = head.startswith(bare) and prompt and not head.startswith(prompt, len(bare))
        start = bare + opening if opening is not None and not goes_on else bare
        if (goes_on or opening is not None) and alone.startswith(start):
            return len(start), True
        return prompt_end, False

    def _around(self, text: str, change: Changed, lead: str, close: str) -> Span | None:
        """A turn with what the template writes before and behind what changes with it."""
        start = change.start
        if not text.startswith(close, change.end):
            return None
        if text.endswith(lead, 0, start):
            start -= len(lead)
        elif change.by_call:
            return None  # where the text before the arguments begins is unknown
        elif self.shape.lead and text.endswith(self.shape.lead, 0, start):
            start -= len(self.shape.lead)
        return start, change.end + len(close)

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
