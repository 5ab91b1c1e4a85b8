"""The answers of a conversation as samples of their own: `data.learn: each_answer`.

    record    user "one?"  assistant "[a] 1"  user "two?"  assistant "[b] 2"      in [] its thoughts
    key#0     user "one?"  assistant "[a] 1"                                      1 is learnt
    key#1     user "one?"  assistant "[a] 1"  user "two?"  assistant "[b] 2"      2 is learnt

An answer is a turn of the assistant that the data does not exclude. Its sample is the conversation
up to it, as the model is asked for it; only the answer is learnt. So the chat template writes what
it drops once other turns follow, as thoughts. A turn that calls tools is an answer, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vlmpack.encode.sample import VLMSample, num_files, shown_by


def samples_of_answers(samples: Sequence[VLMSample]) -> list[VLMSample]:
    """A sample for each answer of each of a record's samples, under the key that this one has.

    Args:
        samples: of one record: one, or one for each of its branches.
    """
    return [each for sample in samples for each in _answers_of(sample)]


def _answers_of(sample: VLMSample) -> list[VLMSample]:
    turns = sample.messages
    places = [at for at, turn in enumerate(turns) if turn.role == "assistant" and turn.learn]
    context = [replace(turn, learn=False) if turn.role == "assistant" else turn for turn in turns]
    found = []
    for before, at in zip((None, *places), places, strict=False):
        messages = (*context[:at], turns[at])
        found.append(
            replace(
                sample,
                messages=messages,
                image_names=sample.image_names[: num_files(shown_by(messages))],
                num_common=sample.num_common if before is None else before,
                is_continued=at != places[-1],
            )
        )
    return found
