"""Which tokens write which characters.

    ...assistant \nYes<|im_end|>      the template ends in a space, the answer begins with "\n"
                 [a  b)               the characters of the answer
       [---0---][1][2][----3---]      token 1 is " \n": the template's space, the answer's break

A token belongs to a stretch of text if it writes any character of it, as in transformers' own mask
(`char_to_token` of the first and the last character): token 1 is learnt. By where tokens start it
would not be, and the first token of the answer would teach nothing.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from vlmpack.encode.image_text import Span


def written_by(places: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """For each token, whether it writes any character of the spans.

    Args:
        places: the characters that each token writes, in order. The bytes of one character may be
            several tokens, of which all but the last are at an empty place where it begins.
        spans: of the same text; empty ones have no character.
    """
    found = [False] * len(places)
    if not spans:
        return found
    starts = [start for start, _ in places]
    for a, b in spans:
        at = bisect_left(starts, b) if a < b else 0
        while at and max(places[at - 1][1], starts[at - 1] + 1) > a:
            at -= 1
            found[at] = True
    return found


def without(spans: Sequence[Span], cuts: Sequence[Span]) -> list[Span]:
    """What is left of some spans behind and before the cuts, in order."""
    left = list(spans)
    for start, end in cuts:
        left = [
            piece
            for a, b in left
            for piece in ((a, min(b, start)), (max(a, end), b))
            if piece[0] < piece[1]
        ]
    return left


def with_whole_places(backend: Any) -> Any:
    """A copy of a `tokenizers.Tokenizer` whose tokens' places hold all that they write; None where
    its own do.

    Others lack the white space (`trim_offsets`): that of " Yes" is that of "Yes", and a line break
    is nowhere.
    """
    from tokenizers import Tokenizer

    processor = backend.post_processor
    if processor is None or not _untrim(json.loads(processor.__getstate__())):
        return None
    content = json.loads(backend.to_str())
    _untrim(content["post_processor"])
    content["truncation"] = content["padding"] = None
    return Tokenizer.from_str(json.dumps(content, ensure_ascii=False))


def _untrim(processor: Any) -> bool:
    """Switch the cutting off, in the parts of a sequence too; whether any was on."""
    if not isinstance(processor, dict):
        return False
    parts = [_untrim(part) for part in processor.get("processors", ())]
    cuts = bool(processor.get("trim_offsets"))
    if cuts:
        processor["trim_offsets"] = False
    return cuts or any(parts)
