"""Question types: rows of digits in, chat messages out.

A prompt is plain text with one `<image>` marker per image, so the same string serves LLaVA's
`conversations` form and, split at the markers, the chat `messages` form. Nothing here knows
whether a row will be drawn in type (pretraining) or in handwriting (the shards).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IMAGE_MARK = "<image>"
IMAGE_TASKS = ("read", "count", "largest", "compare")
LABELS = ("A", "B", "C")

READ_FORMS = (
    "Read the digits{where}.",
    "What digits are shown{where}?",
    "Which number is written{where}?",
    "Transcribe the row{where}.",
    "What does the row say{where}?",
)
COUNT_FORMS = (
    "How many times does {digit} appear{where}?",
    "How often is the digit {digit} written{where}?",
    "Count the digit {digit}{where}.",
)
EXTREME_FORMS = (
    "What is the {kind} digit{where}?",
    "Which digit{where} is the {kind}?",
    "Name the {kind} digit{where}.",
)
COMPARE_FORMS = (
    "Which image starts with the {degree} digit?",
    "Compare the images: which one starts with the {degree} digit?",
    "Look at the first digit of each image. Where is it {degree}?",
)
# These two are asked in the shards only: pretraining leaves something to learn.
LENGTH_FORMS = ("How many digits are shown?", "Count the digits.", "How many digits are there?")
LONGEST_FORMS = ("Which image shows the longest row?", "Compare the images: which row is longest?")
# Image before the question is the usual order; the others put it in the middle or at the end.
ONE_IMAGE_FRAMES = (
    "<image>{q}",
    "<image>{q}",
    "<image>\n{q}",
    "Given <image>, answer this: {q}",
    "Here is a picture <image> of some digits. {q}",
    "{q} <image>",
)
# Several images carry labels, so that a question can name one of them.
MANY_IMAGE_FRAMES = (
    "{spaced} {q}",
    "{lines}\n{q}",
    "Given {spaced}, answer this: {q}",
    "{q} {spaced}",
)
# Some prompts are long, as instructions often are: the lengths in a batch differ by far.
LONG_PREAMBLE = (
    "You are given one or more pictures. Each of them shows a row of digits on paper, from left to"
    " right. Look at all of them first, then answer the question. Write the answer alone, with no"
    " other words: a number, a digit, or the letter of the picture. "
)
LONG_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer; `prompt` holds `<image>` marks only where images enter."""

    prompt: str
    answer: str


def pick(rng: np.random.Generator, options: Sequence[str]) -> str:
    """One of `options`, uniformly."""
    return options[int(rng.integers(len(options)))]


def draw_row(rng: np.random.Generator, length: int, task: str) -> list[int]:
    """Digits of one row, drawn so that the task's answer cannot be guessed from its frequency."""
    if task == "count":
        # Few distinct digits make repeats common, so the counts spread over the whole range.
        pool = rng.permutation(10)[: int(rng.integers(2, 6))]
    elif task == "largest":
        # A random cap (or floor) keeps 9 and 0 from being the answer to every long row.
        cap = int(rng.integers(10))
        pool = np.arange(cap + 1) if rng.random() < 0.5 else np.arange(cap, 10)
    else:
        pool = np.arange(10)
    return [int(d) for d in rng.choice(pool, size=length)]


def where_clause(target: int, num_images: int) -> str:
    """Text that names the row a question is about; empty when there is only one."""
    return "" if num_images == 1 else f" in {LABELS[target]}"


def ask_read(rng: np.random.Generator, rows: list[list[int]], target: int) -> Turn:
    """Transcribe one row."""
    text = pick(rng, READ_FORMS).format(where=where_clause(target, len(rows)))
    return Turn(text, "".join(map(str, rows[target])))


def ask_count(rng: np.random.Generator, rows: list[list[int]], target: int) -> Turn:
    """Count the occurrences of one digit."""
    row = rows[target]
    digit = int(rng.choice(row)) if rng.random() < 0.8 else int(rng.integers(10))
    where = where_clause(target, len(rows))
    text = pick(rng, COUNT_FORMS).format(digit=digit, where=where)
    return Turn(text, str(row.count(digit)))


def ask_largest(rng: np.random.Generator, rows: list[list[int]], target: int) -> Turn:
    """Name the largest or smallest digit of one row."""
    largest = rng.random() < 0.5
    text = pick(rng, EXTREME_FORMS).format(
        kind="largest" if largest else "smallest", where=where_clause(target, len(rows))
    )
    return Turn(text, str(max(rows[target]) if largest else min(rows[target])))


def ask_compare(rng: np.random.Generator, rows: list[list[int]], target: int) -> Turn:
    """Say which image starts with the larger digit; `target` is unused."""
    text = pick(rng, COMPARE_FORMS).format(degree="largest" if len(rows) > 2 else "larger")
    firsts = [row[0] for row in rows]
    winners = [i for i, digit in enumerate(firsts) if digit == max(firsts)]
    return Turn(text, LABELS[winners[0]] if len(winners) == 1 else "same")


def ask_length(rng: np.random.Generator, rows: list[list[int]], target: int) -> Turn:
    """Count all digits of the only row."""
    return Turn(pick(rng, LENGTH_FORMS), str(len(rows[target])))


def ask_longest(rng: np.random.Generator, rows: list[list[int]], target: int) -> Turn:
    """Say which image shows the longest row; `target` is unused."""
    lengths = [len(row) for row in rows]
    winners = [i for i, length in enumerate(lengths) if length == max(lengths)]
    answer = LABELS[winners[0]] if len(winners) == 1 else "same"
    return Turn(pick(rng, LONGEST_FORMS), answer)


ASKERS = {
    "read": ask_read,
    "count": ask_count,
    "length": ask_length,
    "largest": ask_largest,
    "compare": ask_compare,
    "longest": ask_longest,
}


def ask(rng: np.random.Generator, task: str, rows: list[list[int]], target: int) -> Turn:
    """A question of type `task` about `rows`, without image marks yet."""
    return ASKERS[task](rng, rows, target)


def conversation(
    rng: np.random.Generator, rows: list[list[int]], plan: Sequence[str]
) -> list[Turn]:
    """Several questions about `rows`, the readings last; the image marks are in the first prompt.

    After a reading, the answer to any question about that row could be found in the text. Each row
    is therefore read at the end, at most once, so that every answer must come from the image.
    """
    tasks = [task for task in plan if task != "read"]
    turns = [ask(rng, task, rows, int(rng.integers(len(rows)))) for task in tasks]
    to_read = rng.permutation(len(rows))[: list(plan).count("read")]
    turns += [ask_read(rng, rows, int(target)) for target in to_read]
    return [place_images(rng, turns[0], len(rows)), *turns[1:]]


def ask_text(rng: np.random.Generator, max_digits: int = 5) -> Turn:
    """A short text-only task: copy, reverse or add."""
    kind = int(rng.integers(3))
    if kind == 2:
        a, b = (int(x) for x in rng.integers(10, size=2))
        return Turn(pick(rng, ("{} + {} = ?", "Add {} and {}.")).format(a, b), str(a + b))
    number = "".join(str(d) for d in rng.integers(10, size=int(rng.integers(1, max_digits + 1))))
    if kind == 0:
        return Turn(pick(rng, ("Copy {}.", "Repeat {}.")).format(number), number)
    return Turn(f"Reverse {number}.", number[::-1])


def place_images(rng: np.random.Generator, turn: Turn, num_images: int) -> Turn:
    """Put the image marks into a question: before it, after it or in the middle."""
    if num_images == 1:
        prompt = pick(rng, ONE_IMAGE_FRAMES).format(q=turn.prompt)
    else:
        named = [f"{label}: {IMAGE_MARK}" for label in LABELS[:num_images]]
        frame = pick(rng, MANY_IMAGE_FRAMES)
        prompt = frame.format(q=turn.prompt, spaced=" ".join(named), lines="\n".join(named))
    if rng.random() < LONG_SHARE:
        prompt = LONG_PREAMBLE + prompt
    return Turn(prompt, turn.answer)
