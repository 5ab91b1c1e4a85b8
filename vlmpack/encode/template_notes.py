"""What a user should know of a chat template before training, found by rendering a conversation of
two answers. It is reported at launch and by `vlmpack data stats`.

    <|im_start|>assistant\\n<think>\\n\\n</think>\\n\\nLast Answer, ...<|im_end|>\\n
                           [---- words of its own ----]            [-- end --]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vlmpack.encode.chat import ChatEncoder
from vlmpack.encode.markers import HIDDEN, Span
from vlmpack.encode.sample import NO_INPUTS, Message, said
from vlmpack.encode.settings import Learn
from vlmpack.encode.turns import dropped_thoughts, written_for
from vlmpack.errors import DataError

_ANSWERS = tuple(f"{which} Answer,{' and so on' * 200} to its End." for which in ("First", "Last"))
"""Long ones with capitals: a template may cut answers, or write them in small letters."""


class _Answer(NamedTuple):
    """An answer in a template's text.

    Args:
        written: what the template writes in place of it; empty if it writes the answer itself.
        before: what is learnt of its turn before the answer.
        behind: what is learnt of its turn after the answer.
    """

    written: str = ""
    before: str = ""
    behind: str = ""


def template_notes(chat: ChatEncoder, learn: Learn) -> list[str]:
    """Sentences on what a template teaches besides the answers, or keeps from being taught."""
    return [*_of_forms(chat), *_of_answers(chat), *_of_thoughts(chat, learn)]


def _of_forms(chat: ChatEncoder) -> Iterator[str]:
    roles = ", ".join(chat.template.differing_roles)
    if roles:
        given = "a list of parts" if chat.template.documented == "parts" else "a string"
        yield (
            "the chat template writes a turn given as a string differently than a list of parts "
            f"({roles}). They are trained as {given}. Ask the model in that form too, or use a "
            "template that writes both alike"
        )


def _of_answers(chat: ChatEncoder) -> Iterator[str]:
    answers = _answers(chat)
    for written in dict.fromkeys(each.written for each in answers if each.written):
        yield (
            f"the chat template does not write answers as they are given ({_short(_ANSWERS[0])} "
            f"becomes {_short(written)}), and that is learnt. Use one that leaves answers as they "
            f"are"
        )
    tokens = _pattern(chat.tokenizer)
    unwritten = [each for each in answers if not each.written]
    if any(not tokens.search(each.behind) for each in unwritten):
        end = f" ({chat.tokenizer.eos_token})" if chat.tokenizer.eos_token else ""
        yield (
            "the chat template writes no end-of-turn token behind an answer, so the model is not "
            f"taught to stop. Let it write {{{{ eos_token }}}}{end} behind each answer"
        )
    own = [(each.before, tokens.sub("", each.behind, count=1)) for each in unwritten]
    for words in dict.fromkeys(words for pair in own for words in pair if words.strip()):
        yield (
            f"the chat template adds words to answers, and they are learnt: {words!r}; "
            f"{_remedy(chat)}"
        )


def _remedy(chat: ChatEncoder) -> str:
    given = chat.variables.get("enable_thinking")
    thinks = "enable_thinking" in chat.template.variables and given is not False
    return (
        "data.chat_template_kwargs: {enable_thinking: false} may have them in the prompt instead"
        if thinks
        else "a template that writes them into its generation prompt, or outside of its "
        "{% generation %} marks, would leave them out"
    )


def _answers(chat: ChatEncoder) -> list[_Answer]:
    """Each answer of a conversation of two, or of one where a template takes no more."""
    first, last = (
        (said("user", f"question {which}?"), said("assistant", words))
        for which, words in enumerate(_ANSWERS)
    )
    for messages in ((*first, *last), first):
        try:
            text = chat.render(messages)
            spans = chat.template.spans(messages, NO_INPUTS, text)
            return [
                _answer(chat, messages, at, text, spans)
                for at, turn in enumerate(messages)
                if turn.role == "assistant"
            ]
        except DataError:  # a template that wants other turns: nothing is known of it
            continue
    return []


def _answer(
    chat: ChatEncoder,
    messages: tuple[Message, ...],
    at: int,
    text: str,
    spans: Sequence[Span],
) -> _Answer:
    words = messages[at].text
    place = text.find(words)
    if place < 0:
        other = said("assistant", HIDDEN)
        return _Answer(written=written_for(text, messages, at, other, chat.render))
    question_at = max(text.rfind(messages[at - 1].text, 0, place), 0)
    following = text.find(messages[at + 1].text, place) if at + 1 < len(messages) else len(text)
    behind = place + len(words)
    return _Answer(
        before="".join(text[max(a, question_at) : min(b, place)] for a, b in spans),
        behind="".join(text[max(a, behind) : min(b, following)] for a, b in spans),
    )


def _pattern(tokenizer: Any) -> re.Pattern[str]:
    """Tokens of their own, which may end a turn."""
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    tokens |= set(tokenizer.all_special_tokens)
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:12]} ... {text[-12:]}")


def _of_thoughts(chat: ChatEncoder, learn: Learn) -> Iterator[str]:
    dropped = dropped_thoughts(chat.render)
    if dropped == "earlier" and learn == "all_turns":
        yield (
            "the chat template leaves out the thoughts (<think>) of earlier turns, so their "
            "answers are taught without thinking. With data.learn: each_answer each answer is a "
            "sample with its thoughts. data.learn: last_turn teaches only the last answer"
        )
    elif dropped == "all":
        yield (
            "the chat template leaves out the thoughts (<think>) of all answers, the last one's "
            "too. They are not taught. A template that writes them would teach them"
        )
