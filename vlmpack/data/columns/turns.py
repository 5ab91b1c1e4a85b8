"""Layouts whose records have turns already: of OpenAI's files and TRL, of LLaVA and ShareGPT, and
TRL's pairs of answers (preferences.py).

    {"messages": [{"role": "user", "content": "<image>Which digit?"},
                  {"role": "assistant", "content": "A seven."}], "images": ["0.png"]}
    {"conversations": [{"from": "human", "value": "<image>\\nWhich digit?"},
                       {"from": "gpt", "value": "A seven."}], "image": "0.png"}
    {"prompt": "Which digit?", "chosen": "A seven.", "rejected": "A one.", "images": ["0.png"]}

LLaVA's and ShareGPT's are one layout under two names: a record of either is read alike.
"""

from __future__ import annotations

from vlmpack.data.columns.layout import CHAT, Layout, Turned, known_by
from vlmpack.data.columns.preferences import PROMPT
from vlmpack.data.shards.keys import PAIR_KEYS


def _as_it_is(record: Turned) -> Turned:
    return record


_PAIR = frozenset(PAIR_KEYS)

MESSAGES = Layout(
    name="messages",
    whose="OpenAI's files, TRL, ms-swift, LLaMA-Factory",
    signatures=(known_by("messages"),),
    turned=_as_it_is,
    others=_PAIR,
)

LLAVA = Layout(
    name="llava",
    whose="LLaVA, ShareGPT, LLaMA-Factory",
    signatures=(known_by("conversations"),),
    turned=_as_it_is,
    others=_PAIR,
)

SHAREGPT = Layout(
    name="sharegpt",
    whose="ShareGPT, LLaMA-Factory",
    signatures=LLAVA.signatures,
    turned=_as_it_is,
    others=_PAIR,
    alias_of="llava",
)

PREFERENCE = Layout(
    name="preference",
    whose="TRL",
    signatures=(
        known_by(PROMPT, *PAIR_KEYS),
        # With turns or an instruction beside them, the two are the answers to these.
        known_by(*PAIR_KEYS, unless=("messages", "conversations", "instruction")),
    ),
    turned=_as_it_is,
    is_made=True,
)

CHAT_LAYOUT = Layout(
    name=CHAT,
    whose="records with turns",
    signatures=(*MESSAGES.signatures, *LLAVA.signatures),
    turned=_as_it_is,
    others=_PAIR,
)
