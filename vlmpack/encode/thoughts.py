"""Whether a chat template writes the thoughts of an answer: asked of it with one conversation.

Qwen3's drops those of earlier turns, since a model is not asked with them either; others drop all.
An answer that is taught without its thoughts is taught as if said without thinking; where that is
not wanted, a conversation's last answer alone is learnt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from vlmpack.encode.sample import Message, said
from vlmpack.errors import DataError

Dropped = Literal["none", "earlier", "all"]

OPEN, CLOSE = "<think>", "</think>"


def dropped_thoughts(render: Callable[[tuple[Message, ...]], str]) -> Dropped:
    """Which answers' thoughts a template leaves out of a conversation of two.

    Args:
        render: the template.
    """
    try:
        text = render(
            (
                said("user", "one?"),
                said("assistant", f"{OPEN}\nearlierthought\n{CLOSE}\n\nearlieranswer"),
                said("user", "two?"),
                said("assistant", f"{OPEN}\nlastthought\n{CLOSE}\n\nlastanswer"),
            )
        )
    except DataError:  # a template that wants other turns: nothing is known of it
        return "none"
    if "earlieranswer" not in text or "lastanswer" not in text:
        return "none"
    if "earlierthought" in text:
        return "none"
    return "earlier" if "lastthought" in text else "all"


def last_turn_alone(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The turns, all answers but the last excluded from the loss."""
    answers = [at for at, turn in enumerate(messages) if turn.role == "assistant"]
    return tuple(
        replace(turn, learn=False) if at in answers[:-1] else turn
        for at, turn in enumerate(messages)
    )
