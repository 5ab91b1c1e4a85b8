"""The places of images in a conversation's text, and the characters that tokens write.

    "<|im_start|>user\\n" MARKER "What is this?"      what the chat template writes, once an image
    "...user\\n" "<img><IMG_CONTEXT></img>" "What"    `ImageLayout.text`: one feature token a run
    ids 7 5 [9] 6 12                                 tokenised
    ids 7 5 [9 9 ... 9] 6 12                         runs repeated to their true length, as ids

Text is replaced before it is tokenised, so that it merges with its neighbours as in the family's
processor. The long runs are repeated after that, which costs nothing.

The marker's spelling in a user's text stays text:

    "What does <image> mean?"          a user's words; also the spelling of the image token
    "What does ####### mean?"          hidden while the chat template is applied
    "~~~~~~~ What does <image> mean?"  the template's markers renamed, the user's put back
    [IMG] What does < image > mean ?   by a copy of the tokenizer that calls the token ~~~~~~~

Every spelling is as long as the marker, so places in the text stay valid. The tokenizer itself is
never changed, so threads may share it.

    ...assistant \\nYes<|im_end|>      the template ends in a space, the answer begins with "\\n"
                 [a   b)               the characters of the answer
       [---0---][ 1 ][2][----3---]     token 1 is " \\n": the template's space, the answer's break

A token belongs to a stretch of text if it writes any character of it, as in transformers' own mask
(`char_to_token` of the first and the last character). So token 1 is a target. By the tokens' starts
it would not be, and the first token of the answer would teach nothing.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from vlmpack.encode.sample import Message, TemplateInputs, TextPart, strings
from vlmpack.errors import schema_error

HIDDEN, _RENAMED = "\U000f1e00", "\U000f1e01"
"""Private-use characters: no text that is meant to be read has them."""
_ESCAPED = ("\\u000f1e00", "\\udb87\\ude00")
"""The first as Python and as JSON write it in ASCII, in small letters."""


def hide_literals(messages: tuple[Message, ...], marker: str) -> tuple[tuple[Message, ...], bool]:
    """The messages with the marker's spelling in their texts hidden, and whether there was any.

    Raises:
        DataError: (schema) a text that spells the marker and has one of our characters too.
    """
    texts = [part.text for m in messages for part in m.parts if isinstance(part, TextPart)]
    texts += [text for message in messages for text in strings(message.fields)]
    if not marker or not any(marker in text for text in texts):
        return messages, False
    _refuse_marks(texts, marker)
    hidden = HIDDEN * len(marker)
    return tuple(
        replace(
            message,
            parts=tuple(
                TextPart(part.text.replace(marker, hidden)) if isinstance(part, TextPart) else part
                for part in message.parts
            ),
            fields=_hidden(message.fields, marker),
        )
        for message in messages
    ), True


def hide_in_inputs(inputs: TemplateInputs, marker: str) -> tuple[TemplateInputs, bool]:
    """As `hide_literals`, for what the template gets besides the turns.

    Raises:
        DataError: (schema) as there.
    """
    texts = [*strings(inputs.tools), *strings(inputs.variables)]
    if not marker or not any(marker in text for text in texts):
        return inputs, False
    _refuse_marks(texts, marker)
    return TemplateInputs(_hidden(inputs.tools, marker), _hidden(inputs.variables, marker)), True


def refuse_escaped(text: str) -> None:
    """Raise DataError (schema) if a template wrote a hidden marker as an escape.

    Python writes a list out in this way, and so does JSON in ASCII. Nobody could tell the marker
    from other text again.
    """
    if any(escape in text.lower() for escape in _ESCAPED):
        raise schema_error(
            "the text of a tool, a call or a thought spells the image marker, and the chat "
            "template writes it escaped. Remove the marker from there"
        )


def _refuse_marks(texts: Sequence[str], marker: str) -> None:
    if any(mark in text for text in texts for mark in (HIDDEN, _RENAMED)):
        raise schema_error(
            f"the text spells {marker!r} and holds a character (U+F1E00 or U+F1E01) that is used "
            f"to tell it from the places of images. Remove one of them",
        )


def _hidden(value: Any, marker: str) -> Any:
    """A JSON value with the marker hidden in all of its strings."""
    if isinstance(value, str):
        return value.replace(marker, HIDDEN * len(marker))
    if isinstance(value, Mapping):
        return {_hidden(key, marker): _hidden(item, marker) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_hidden(item, marker) for item in value)
    return value


def put_back(text: str, marker: str) -> str:
    """A rendered text with the user's markers spelt out and the template's renamed."""
    count = len(marker)
    return text.replace(marker, _RENAMED * count).replace(HIDDEN * count, marker)


def renamed_tokenizer(tokenizer: Any, marker: str) -> Any:
    """A copy of a fast tokenizer's backend that knows the marker's token under another name."""
    from tokenizers import Tokenizer

    backend = tokenizer.backend_tokenizer
    content = json.loads(backend.to_str())
    content["truncation"] = content["padding"] = None
    name = _RENAMED * len(marker)
    for token in content["added_tokens"]:
        if token["content"] == marker:
            token["content"] = name
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: [token, score] by id
        content["model"]["vocab"] = [
            [name if token == marker else token, score] for token, score in vocabulary
        ]
    elif marker in vocabulary:
        vocabulary[name] = vocabulary.pop(marker)
    renamed = Tokenizer.from_str(json.dumps(content, ensure_ascii=False))
    assert renamed.token_to_id(name) == backend.token_to_id(marker)
    return renamed


Span = tuple[int, int]
"""Start and end in characters."""


class WrittenOut(NamedTuple):
    """A conversation with its images written out."""

    text: str
    spans: list[Span]
    images: list[Span]


def write_out(
    text: str,
    spans: Sequence[Span],
    marker: str,
    images: Sequence[str],
    markers: Sequence[str] = (),
) -> WrittenOut:
    """Replace each marker by the text of its image, or of its video.

    Args:
        marker: what the template writes for an image; empty where it writes none.
        markers: what the template writes for each of them, if some are videos. Empty if all are
            images.

    Returns:
        The new text, and where the spans and the images lie in it.

    Raises:
        DataError: (schema) as many markers as images were expected, or others.
    """
    expected = list(markers) or [marker] * len(images)
    known = {mark for mark in (marker, *expected) if mark}
    cut = re.split(f"({'|'.join(map(re.escape, known)) or '(?!)'})", text)
    pieces, marks = cut[::2], cut[1::2]
    if markers and marks != expected:
        raise schema_error(
            f"the template made the placeholders {' '.join(marks) or 'none'}, the sample's images "
            f"and videos need {' '.join(expected)}"
        )
    if len(marks) != len(images):
        raise schema_error(
            f"the template made {len(marks)} image placeholders, the sample has "
            f"{len(images)} images",
        )
    ends: list[int] = []  # of each marker, in the old text
    grown: list[int] = [0]  # by how much the text up to there has grown
    new, place = [pieces[0]], len(pieces[0])
    for image, mark, piece in zip(images, marks, pieces[1:], strict=True):
        place += len(mark)
        ends.append(place)
        grown.append(grown[-1] + len(image) - len(mark))
        new += [image, piece]
        place += len(piece)

    def moved(offset: int) -> int:
        return offset + grown[sum(end <= offset for end in ends)]

    places = [
        (end + total - len(image), end + total)
        for end, total, image in zip(ends, grown[1:], images, strict=True)
    ]
    return WrittenOut("".join(new), [(moved(a), moved(b)) for a, b in spans], places)


def written_by(places: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """For each token, whether it writes any character of the spans.

    Args:
        places: the characters that each token writes, in order. The bytes of one character may be
            several tokens. All of these except the last are at an empty place where it begins.
        spans: of the same text; empty ones have no character.
    """
    written = [False] * len(places)
    if not spans:
        return written
    starts = [start for start, _ in places]
    for a, b in spans:
        at = bisect_left(starts, b) if a < b else 0
        while at and max(places[at - 1][1], starts[at - 1] + 1) > a:
            at -= 1
            written[at] = True
    return written


def without(spans: Sequence[Span], cuts: Sequence[Span]) -> list[Span]:
    """What is left of some spans behind and before the cuts, in order."""
    remaining = list(spans)
    for start, end in cuts:
        remaining = [
            piece
            for a, b in remaining
            for piece in ((a, min(b, start)), (max(a, end), b))
            if piece[0] < piece[1]
        ]
    return remaining


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
