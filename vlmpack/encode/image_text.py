"""Writing images out in a rendered conversation: the template's marker -> the family's own text.

    "<|im_start|>user\\n" MARKER "What is this?"      what the chat template writes, once an image
    "...user\\n" "<img><IMG_CONTEXT></img>" "What"    `ImageLayout.text`: one feature token a run
    ids 7 5 [9] 6 12                                 tokenised
    ids 7 5 [9 9 ... 9] 6 12                         runs repeated to their true length, as ids

Text is replaced before it is tokenised, so that it merges with its neighbours as the family's
processor has it; the long runs are repeated after, which costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from vlmpack.errors import schema_error

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
        text: a rendered conversation.
        spans: stretches of it.
        marker: what the template writes for an image; empty where it writes none.
        images: what each image is written as, in order.
        markers: what the template writes for each of them, where that is not `marker` for all: some
            are videos. Empty where all are images.

    Returns:
        The new text, and where the spans and the images lie in it.

    Raises:
        DataError: (schema) as many markers as images were expected, or others.
    """
    wanted = list(markers) or [marker] * len(images)
    known = {mark for mark in (marker, *wanted) if mark}
    found = re.split(f"({'|'.join(map(re.escape, known)) or '(?!)'})", text)
    pieces, marks = found[::2], found[1::2]
    if markers and marks != wanted:
        raise schema_error(
            f"the template made the placeholders {' '.join(marks) or 'none'}, the sample's images "
            f"and videos need {' '.join(wanted)}"
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
