"""Whether a chat template writes the thoughts of an answer: asked of it with one conversation.

Qwen3's drops those of earlier turns, since a model is not asked with them either; others drop all.
An answer that is taught without its thoughts is taught as if said without thinking; where that is
not wanted, a conversation's last answer alone is learnt, or each answer as a sample of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from vlmpack.encode.sample import Message, said
from vlmpack.errors import DataError, schema_error

Dropped = Literal["none", "earlier", "all"]

OPEN, CLOSE = "<think>", "</think>"


def dropped_thoughts(render: Callable[[tuple[Message, ...]], str]) -> Dropped:
    """Which answers' thoughts a template leaves out of a conversation of two.

    Args:
        render: the template.
    """
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
            f"data.learn: each_answer takes a conversation that ends with the one answer to learn; "
            f"this one has {len(messages)} turns, and its answers are turns {learnt}: give each "
            "answer a sample that ends with it, and exclude the earlier ones"
        )


def last_turn_alone(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The turns, all answers but the last excluded from the loss.

    An answer that took tools is one with its calls: the assistant's turns before it count as far
    back as results of tools stand between them.
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
