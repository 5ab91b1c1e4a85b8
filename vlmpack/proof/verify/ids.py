"""Whether samples have the ids that `apply_chat_template` gives their conversations, in the form
that transformers documents: lists of parts for a model with a vision tower, else strings."""

from __future__ import annotations

from collections.abc import Sequence

from vlmpack.encode import Encoder, VideoPart, VLMSample
from vlmpack.packing import EncodedSample
from vlmpack.proof.measure import Check
from vlmpack.proof.verify.answers import conversations, texts_of

IDS = "ids of the chat template"


def check_ids(
    encoder: Encoder, samples: Sequence[EncodedSample], cooked: Sequence[VLMSample | None]
) -> Check | None:
    """Compare each conversation's ids, images as one marker each.

    Args:
        encoder: template and tokenizer.
        samples: as they are trained.
        cooked: their messages; None where a pack holds the tokens alone.

    Returns:
        None where the template takes no conversation in that form.
    """
    chat, looked_at, found = encoder.chat, 0, 0
    for sample, each in conversations(samples, cooked):
        looked_at += 1
        if chat.marker and any(chat.marker in text for text in texts_of(each)):
            continue  # as text it is tokenised otherwise
        theirs = chat.template.ids_of_transformers(each.messages, each.beside)
        if theirs is None:
            continue
        ours = sample.input_ids.tolist()
        if each.shown:
            text = chat.render(each.messages, each.beside)
            marks = [
                chat.video_marker(text) if isinstance(part, VideoPart) else chat.marker
                for part in each.shown
            ]
            ours = chat.encode(each.messages, marks, each.beside).input_ids
        if ours != theirs:
            return _differing(encoder, sample.key, ours, theirs)
        found += 1
    if not found:
        return None
    form = "lists of parts" if chat.template.documented == "parts" else "strings"
    detail = f"{found} of {looked_at} conversations, as apply_chat_template has them from {form}"
    return Check(name=IDS, status="pass", detail=detail)


def _differing(encoder: Encoder, key: str, ours: list[int], theirs: list[int]) -> Check:
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    here, there = (encoder.tokenizer.decode(ids[at : at + 8]) for ids in (ours, theirs))
    return Check(
        name=IDS,
        status="fail",
        detail=f"{key}: token {at} on is {here!r}, by apply_chat_template {there!r}",
        look_at="the form in which the template gets a turn (vlmpack/encode/content.py)",
    )
