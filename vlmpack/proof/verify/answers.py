"""Whether the ids and labels of samples are those of their conversations, by transformers alone.

Ids are compared with `apply_chat_template` of the conversation in transformers' documented form.
That form has lists of parts for a model with a vision tower, else strings.

Labels are checked through transformers' look-up of a character's token, without the encoder.

    messages    user "Is it?"   assistant "\\nYes."
    rendered    ...assistant \\nYes.<|im_end|>     the answer lies between two marks put round it

`char_to_token` gives the tokens of its first and its last character. Both must be labels. Neither
may be one where the data excludes the turn, or a tool wrote it. The text that the template writes
for the answer must be the answer, apart from white space at its ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, product
from typing import Any

from vlmpack.encode import Encoder, Message, TextPart, VideoPart, VLMSample
from vlmpack.encode.markers import HIDDEN
from vlmpack.encode.sample import said, strings
from vlmpack.encode.turns import THOUGHTS, with_field, written_for
from vlmpack.errors import DataError
from vlmpack.packing import IGNORE_INDEX, EncodedSample
from vlmpack.proof.measure import Check
from vlmpack.proof.verify.samples import in_sequences

ANSWERS = "answers are learnt"

_TAGS = re.compile("</?think>")
"""A template may write other white space round them, or drop what lies between."""

_OPEN, _CLOSE = "\U000f1e02", "\U000f1e03"
"""Private-use characters, put round an answer to see where the template writes it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a template writes an answer.

    Args:
        first: its first character; None where the template leaves the beginning out (a thought).
        last: its last character.
    """

    first: int | None
    last: int


def check_answers(
    encoder: Encoder, samples: Sequence[EncodedSample], cooked: Sequence[VLMSample | None]
) -> Check | None:
    """The template writes every learnt answer and thought unchanged.

    The first and last character of each lie in label tokens; those of tool results do not.

    Args:
        cooked: their messages; None where a pack holds the tokens alone.

    Returns:
        None where there is no answer to look for.
    """
    if any(sample.drawn is not None for sample in samples):
        return _check_drawn(samples, cooked)
    looked_at = with_answers = 0
    for sample, messages in conversations(samples, cooked):
        for each in _said(encoder.taught(messages.messages)):
            is_result = each.message.role == "tool"
            if is_result and encoder.settings.loss_on == "all":
                continue
            tokens = _tokens_of(encoder, sample, messages, each)
            if not (is_result or each.thoughts):
                looked_at += 1
                with_answers += bool(tokens)
            is_answer = each.message.learn and not is_result
            if is_answer and (written := _altered(encoder, messages, each)) is not None:
                return _rewritten(sample, each, written)
            wrong = [at for at in tokens if _is_label(sample, at) != is_answer]
            if wrong:
                return _broken(encoder, sample, each, wrong[0])
    if not looked_at:
        return None
    detail = f"{with_answers} of {looked_at}, by the tokens of their first and last characters"
    return Check(name=ANSWERS, status="pass" if with_answers else "too few", detail=detail)


def _check_drawn(
    samples: Sequence[EncodedSample], cooked: Sequence[VLMSample | None]
) -> Check | None:
    """Rollouts learn exactly the tokens that were drawn."""
    num_tokens = 0
    for sample, messages in conversations(samples, cooked):
        assert messages.rollout is not None
        ids = [*messages.rollout.token_ids]
        num_tokens += len(ids)
        if sample.labels[sample.labels != IGNORE_INDEX].tolist() != ids:
            detail = f"{sample.key}: its labels are other tokens than the {len(ids)} drawn ones"
            return Check(name=ANSWERS, status="fail", detail=detail)
    detail = f"{num_tokens} tokens, as samplers drew them"
    return Check(name=ANSWERS, status="pass", detail=detail) if num_tokens else None


def conversations(
    samples: Sequence[EncodedSample], cooked: Sequence[VLMSample | None]
) -> Iterator[tuple[EncodedSample, VLMSample]]:
    for sample, messages in zip(samples, cooked, strict=True):
        if messages is not None:
            parts = zip(in_sequences([sample]), messages.conversations, strict=True)
            yield from (
                (part, replace(messages, messages=turns, answers=())) for part, turns in parts
            )


@dataclass(frozen=True, slots=True)
class Said:
    """Text of a turn: its words, or the thoughts of the given name."""

    turn: int
    message: Message
    thoughts: str = ""

    @property
    def texts(self) -> list[str]:
        if self.thoughts:
            return [str(self.message.fields[self.thoughts])]
        return [part.text for part in self.message.parts if isinstance(part, TextPart)]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def hidden(self) -> Message:
        """The turn with an unusual character in place of each character."""
        if self.thoughts:
            return with_field(self.message, self.thoughts, HIDDEN)
        parts = (
            TextPart(HIDDEN) if isinstance(part, TextPart) else part for part in self.message.parts
        )
        return replace(self.message, parts=tuple(parts))

    def marked(self, *, stripped: bool) -> Message:
        """The turn with marks around its text, outside of white space if `stripped`."""
        if not self.thoughts:
            return _marked(self.message, stripped=stripped)
        [part] = _marked(said("assistant", self.text), stripped=stripped).parts
        assert isinstance(part, TextPart)
        return with_field(self.message, self.thoughts, part.text)


def _said(messages: Sequence[Message]) -> Iterator[Said]:
    for turn, message in enumerate(messages):
        if message.role not in ("assistant", "tool"):
            continue
        names = [name for name in THOUGHTS if name in message.fields]
        for each in (Said(turn, message), *(Said(turn, message, name) for name in names)):
            if each.text.strip():
                yield each


def _altered(encoder: Encoder, cooked: VLMSample, each: Said) -> str | None:
    """What the template writes for an answer, if it is more than white space off; else None."""

    def render(turns: tuple[Message, ...]) -> str:
        return encoder.chat.render(turns, cooked.inputs)

    turns = cooked.messages
    try:
        written = written_for(render(turns), turns, each.turn, each.hidden, render)
    except DataError:  # a template that wants something of the words
        return None
    if each.thoughts and not written:
        return None  # dropped, as the template was made to
    pieces = [[piece.strip() for piece in _TAGS.split(text)] for text in each.texts]
    whole, without_thoughts = chain(*pieces), (piece[-1] for piece in pieces)
    return None if _holds(written, whole) or _holds(written, without_thoughts) else written


def _holds(written: str, pieces: Iterable[str]) -> bool:
    """Whether a text has all pieces, in order."""
    at = 0
    for piece in pieces:
        at_piece = written.find(piece, at)
        if at_piece < 0:
            return False
        at = at_piece + len(piece)
    return True


def _rewritten(sample: EncodedSample, each: Said, written: str) -> Check:
    says = "thinks" if each.thoughts else "answers"
    return Check(
        name=ANSWERS,
        status="fail",
        detail=f"{sample.key}: turn {each.turn} {says} {_short(each.text)}; the chat template "
        f"writes {_short(written)}",
        look_at="the chat template of model.path, which should write answers as they are",
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:18] + "..." + text[-18:])


def _broken(encoder: Encoder, sample: EncodedSample, each: Said, at: int) -> Check:
    written = encoder.tokenizer.decode(sample.input_ids[at : at + 1])
    text, turn = _short(each.text), each.turn
    what = "is no label" if each.message.learn else "is a label, though the data excludes the turn"
    says = "thinks" if each.thoughts else "answers"
    if each.message.role == "tool":
        what, says = "is a label, though a tool wrote it", "is the result"
    return Check(
        name=ANSWERS,
        status="fail",
        detail=f"{sample.key}: turn {turn} {says} {text}; its token {at}, {written!r}, {what}",
        look_at="the turns that the chat template writes (vlmpack/encode/turns.py)",
    )


def _is_label(sample: EncodedSample, token: int) -> bool:
    """Whether a token is learnt: labels are shifted."""
    return token > 0 and int(sample.labels[token - 1]) != IGNORE_INDEX


def _tokens_of(encoder: Encoder, sample: EncodedSample, cooked: VLMSample, each: Said) -> list[int]:
    """Tokens of the first and the last character of an answer, as far as they can be found."""
    chat = encoder.chat
    if chat.marker and any(chat.marker in text for text in texts_of(cooked)):
        return []  # as text it is tokenised otherwise
    text = chat.render(cooked.messages, cooked.inputs)
    place = find_answer(encoder, cooked, each, text)
    if place is None:
        return []
    found: Any = encoder.tokenizer(text, add_special_tokens=False)
    characters = [at for at in (place.first, place.last) if at is not None]
    tokens = [found.char_to_token(at) for at in characters]
    moved = align(found["input_ids"], sample, encoder.tokenizer.convert_tokens_to_ids(chat.marker))
    marked = None
    if each.message.role == "assistant":
        marked = chat.template.mask_of_transformers(cooked.messages, cooked.inputs)
    return [
        moved[token]
        for token in tokens
        if token is not None and token in moved and (marked is None or marked[token])
    ]


def texts_of(cooked: VLMSample) -> Iterator[str]:
    """Every text that the template gets."""
    for message in cooked.messages:
        yield message.text
        yield from strings(message.fields)
    yield from strings([list(cooked.inputs.tools), dict(cooked.inputs.variables)])


def find_answer(encoder: Encoder, cooked: VLMSample, each: Said, text: str) -> Place | None:
    """Where the template writes an answer, thought or tool result, by marks around it.

    The marks include white space at first. If that changes the text, as in a template that strips
    white space, they are put inside it. None if neither leaves the rest of the text as it is.
    """
    for stripped in (False, True):
        marked = list(cooked.messages)
        marked[each.turn] = each.marked(stripped=stripped)
        try:
            rendered = encoder.chat.render(tuple(marked), cooked.inputs)
        except DataError:
            return None
        if rendered.replace(_OPEN, "").replace(_CLOSE, "") != text or rendered.count(_CLOSE) != 1:
            continue
        first, last = rendered.find(_OPEN), rendered.index(_CLOSE) - 1
        return Place(None, last) if first < 0 else Place(first, last - 1)
    return None


def _marked(message: Message, *, stripped: bool) -> Message:
    """The turn with a mark at each end, outside of white space if it is `stripped`."""
    texts = {
        number: part.text
        for number, part in enumerate(message.parts)
        if isinstance(part, TextPart) and (part.text.strip() if stripped else part.text)
    }
    last = max(texts)
    at = len(texts[last].rstrip() if stripped else texts[last])
    texts[last] = texts[last][:at] + _CLOSE + texts[last][at:]
    first = min(texts)
    at = len(texts[first]) - len(texts[first].lstrip()) if stripped else 0
    texts[first] = texts[first][:at] + _OPEN + texts[first][at:]
    parts = [
        TextPart(texts[number]) if number in texts else part
        for number, part in enumerate(message.parts)
    ]
    return replace(message, parts=tuple(parts))


def align(ids: Sequence[int], sample: EncodedSample, marker: int) -> dict[int, int]:
    """Token of the rendered text -> token of the sample, whose images are written out.

    Args:
        ids: of the rendered text, one marker an image.

    Returns:
        Without the tokens that merge with what is written for an image.
    """
    theirs = sample.input_ids.tolist()
    media = sample.media
    if media is None:
        return {at: at for at in range(len(ids))} if list(ids) == theirs else {}
    features, ends = sample.media_positions.tolist(), [0, *accumulate(media.num_tokens)]
    starts = [0, *(features[end - 1] + 1 for end in ends[1:])]
    stops = [*(features[end] for end in ends[:-1]), len(theirs)]
    cuts = [-1, *(at for at, token in enumerate(ids) if token == marker), len(ids)]
    if len(cuts) - 1 != len(starts):
        return {}
    moved: dict[int, int] = {}
    for cut, stop, start, limit in zip(cuts, cuts[1:], starts, stops, strict=False):
        piece, inside = range(cut + 1, stop), theirs[start:limit]
        # What is written for an image may end or begin in white space that joins that of the piece.
        for left, right in sorted(product(range(3), repeat=2), key=sum):
            core = piece[left : len(piece) - right]
            at = _find([ids[token] for token in core], inside)
            if at is not None and (left or cut >= 0 or at == 0):
                moved |= {token: start + at + k for k, token in enumerate(core)}
                break
    return moved


def _find(piece: list[int], inside: list[int]) -> int | None:
    """Where a stretch of tokens occurs last; None if it does not occur, or is empty."""
    if not piece:
        return None
    places = range(len(inside) - len(piece), -1, -1)
    return next((at for at in places if inside[at : at + len(piece)] == piece), None)


IDS = "ids of the chat template"


def check_ids(
    encoder: Encoder, samples: Sequence[EncodedSample], cooked: Sequence[VLMSample | None]
) -> Check | None:
    """Compare each conversation's ids, images as one marker each.

    Args:
        cooked: their messages; None where a pack holds the tokens alone.

    Returns:
        None where the template takes no conversation in that form.
    """
    looked_at = compared = 0
    for sample, each in conversations(samples, cooked):
        chat = encoder.chat_for(objects=each.objects is not None)
        looked_at += 1
        if chat.marker and any(chat.marker in text for text in texts_of(each)):
            continue  # as text it is tokenised otherwise
        is_drawn, turns = sample.drawn is not None, each.messages
        if is_drawn:  # the prompt alone is the template's
            turns = turns[:-1]
        theirs = chat.template.ids_of_transformers(turns, each.inputs, generation_prompt=is_drawn)
        if theirs is None or (is_drawn and chat.template.shape(each.inputs).header):
            continue
        ours = sample.input_ids.tolist()
        if is_drawn:
            ours = ours[: int((sample.labels != IGNORE_INDEX).nonzero()[0, 0]) + 1]
        if each.shown:
            text = chat.render(each.messages, each.inputs)
            marks = [
                chat.video_marker(text) if isinstance(part, VideoPart) else chat.marker
                for part in each.shown
            ]
            ours = (
                chat.encode_prompt(turns, marks, each.inputs)
                if is_drawn
                else chat.encode(turns, marks, each.inputs).input_ids
            )
        if ours != theirs:
            return _differing(encoder, sample.key, ours, theirs)
        compared += 1
    if not compared:
        return None
    form = "lists of parts" if encoder.chat.template.documented == "parts" else "strings"
    detail = f"{compared} of {looked_at} conversations, as apply_chat_template has them from {form}"
    return Check(name=IDS, status="pass", detail=detail)


def _differing(encoder: Encoder, key: str, ours: list[int], theirs: list[int]) -> Check:
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    here, there = (encoder.tokenizer.decode(ids[at : at + 8]) for ids in (ours, theirs))
    return Check(
        name=IDS,
        status="fail",
        detail=f"{key}: token {at} on is {here!r}, by apply_chat_template {there!r}",
        look_at="the form in which the template gets a turn (vlmpack/encode/template.py)",
    )
