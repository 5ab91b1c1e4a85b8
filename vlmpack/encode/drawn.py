"""A rollout -> the tokens that its sampler saw and drew, checked against the encoder's own prompt.

    encoder   <user> [image] What is it? <assistant>      its ids, placeholders expanded
    sampler   <user> [image] What is it? <assistant>      prompt_token_ids: the same, or refused
              A cat. <end>                                token_ids, as they are

An answer is never tokenised again, since a sampler draws ids that no tokenizer would write. Servers
give prompts back with placeholders expanded or not. One that is not has the chat template's marker
for each image, or a placeholder for each run of an image. It is compared with the encoder's prompt
in that form, which the family's rule expands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

import torch

from vlmpack.encode.assemble import Tokens
from vlmpack.encode.chat import ChatEncoder
from vlmpack.encode.rollouts import Rollout, reading_of
from vlmpack.encode.sample import NO_INPUTS, VideoPart, VLMSample, shown_by
from vlmpack.encode.special_tokens import ids_of
from vlmpack.errors import schema_error
from vlmpack.families.base import ImageLayout
from vlmpack.packing.batch import DrawnAnswer

AROUND = 4
"""Tokens that a message shows before and behind the place where two prompts differ."""


def rollout_in(sample: VLMSample) -> Rollout:
    """The rollout of a sample that an objective learns from.

    Raises:
        DataError: (schema) it has none, or none with tokens, or no answer as its last turn.
    """
    rollout = sample.rollout
    if rollout is None:
        raise schema_error(
            "the record has no 'rollout', and objective.name: policy learns from answers that a "
            "policy has drawn. Expected one beside the turns, or objective.name: sft"
        )
    if not rollout.token_ids:
        raise schema_error(
            "the record's rollout has no token_ids, and objective.name: policy learns exactly the "
            "tokens that were drawn. Expected token_ids, log_probs and prompt_token_ids. Such "
            "records serve objective.name: sft or dpo"
        )
    if sample.messages[-1].role != "assistant":
        raise schema_error(
            f"the record's turns end with the {sample.messages[-1].role}'s; expected the drawn "
            "answer as the last turn"
        )
    return rollout


def drawn_answer(rollout: Rollout) -> DrawnAnswer:
    """What a sampler said, for the row."""
    return DrawnAnswer(
        log_p=torch.tensor(rollout.log_probs, dtype=torch.float64),
        temperature=rollout.sampling.temperature,
        is_raw=reading_of(rollout.sampling) == "raw",
    )


@dataclass(frozen=True)
class DrawnTokens:
    """Checks what a sampler saw and drew against a model folder.

    Args:
        placeholder_ids: those that features replace.
    """

    folder: Path
    chat: ChatEncoder
    placeholder_id: int
    video_id: int

    @cached_property
    def ends(self) -> frozenset[int]:
        """Ids that end an answer, by the model folder's files and by its chat template."""
        tokenizer, close = self.chat.tokenizer, self.chat.template.shape(NO_INPUTS).close
        own = [each for name, each in ids_of(self.folder) if name.endswith("eos_token_id")]
        of_turn = tokenizer(close, add_special_tokens=False)["input_ids"][:1]
        return frozenset({*own, *of_turn, tokenizer.eos_token_id} - {None})

    @cached_property
    def num_ids(self) -> int:
        """Ids of the vocabulary: rows of the embedding where these are known."""
        return self.chat.rows or len(self.chat.tokenizer)

    def of(self, sample: VLMSample, layouts: Sequence[ImageLayout], chat: ChatEncoder) -> Tokens:
        """The tokens of a rollout, one placeholder for each run of an image. The answer is learnt.

        Args:
            chat: that writes the prompt.

        Raises:
            DataError: (schema) another prompt than the encoder's, or an answer that is none.
        """
        rollout = rollout_in(sample)
        reading_of(rollout.sampling)
        asked = sample.messages[:-1]

        def encoded(texts: Sequence[str]) -> list[int]:
            return chat.encode_prompt(asked, texts, sample.inputs)

        def compact() -> list[int]:
            text = chat.render(asked, sample.inputs)
            videos = [isinstance(part, VideoPart) for part in shown_by(asked)]
            return encoded([chat.video_marker(text) if each else chat.marker for each in videos])

        prompt = encoded([layout.text for layout in layouts])
        tokens = Tokens(prompt, [False] * len(prompt), self.placeholder_id, self.video_id)
        self._compare(tokens, [*rollout.prompt_token_ids], layouts, compact)
        self._refuse_answer(rollout)
        supervised = [*tokens.supervised, *[True] * len(rollout.token_ids)]
        return tokens._replace(ids=[*prompt, *rollout.token_ids], supervised=supervised)

    def is_written_otherwise(self, rollout: Rollout) -> bool:
        """Whether the tokenizer would write an answer's text with other tokens."""
        ids, tokenizer = [*rollout.token_ids], self.chat.tokenizer
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return bool(tokenizer(text, add_special_tokens=False)["input_ids"] != ids)

    def _refuse_answer(self, rollout: Rollout) -> None:
        ids = rollout.token_ids
        if (largest := max(ids)) >= self.num_ids:
            raise schema_error(
                f"rollout.token_ids[{ids.index(largest)}] is {largest}, but the model has "
                f"{self.num_ids:,} tokens. Another model has drawn the answer"
            )
        for token in {*ids} & {self.placeholder_id, self.video_id}:
            raise schema_error(
                f"rollout.token_ids[{ids.index(token)}] is {self._named(token)}, the placeholder "
                "of an image. Expected an answer of words"
            )
        if rollout.finish == "stop" and ids[-1] not in self.ends:
            ends = " or ".join(map(self._named, sorted(self.ends)))
            raise schema_error(
                f"rollout.token_ids ends with {self._named(ids[-1])}, and finish is 'stop'. "
                f"Expected an end token ({ends}), or finish: length"
            )

    def _compare(
        self,
        own: Tokens,
        theirs: list[int],
        layouts: Sequence[ImageLayout],
        compact: Callable[[], Sequence[int]],
    ) -> None:
        """Raise DataError (schema) where a sampler saw another prompt.

        Args:
            compact: makes the prompt with the template's marker for each image.
        """
        runs = [run for layout in layouts for run in layout.runs]
        marker = self.chat.tokenizer.convert_tokens_to_ids(self.chat.marker or None)
        count, markers = sum(map(own.is_placeholder, theirs)), theirs.count(marker)
        forms = [_expanded(own, runs)] if count == sum(runs) else []
        if forms != [theirs] and markers == len(layouts):
            forms.append([*compact()])
        if count == len(runs):
            forms.append([*own.ids])
        if theirs in forms:
            return
        ours = forms[0] if forms else _expanded(own, runs)
        pairs = enumerate(zip_longest(theirs, ours))
        place, (found, expected) = next((n, two) for n, two in pairs if two[0] != two[1])
        around = slice(max(0, place - AROUND), place + AROUND + 1)
        texts = [repr(self.chat.tokenizer.decode(ids[around])) for ids in (theirs, ours)]
        raise schema_error(
            f"rollout.prompt_token_ids is another prompt than this encoder's, from token {place} "
            f"of {len(ours)} on: it has {self._named(found)} in {texts[0]}. Expected "
            f"{self._named(expected)} in {texts[1]}{_cause(own, theirs, ours)}"
        )

    def _named(self, token: int | None) -> str:
        if token is None:
            return "nothing"
        return f"{token} ({self.chat.tokenizer.decode([token])!r})"


def _expanded(own: Tokens, runs: Sequence[int]) -> list[int]:
    left = iter(runs)
    counted = [(next(left) if own.is_placeholder(token) else 1, token) for token in own.ids]
    return [token for count, token in counted for _ in range(count)]


def _cause(own: Tokens, seen: Sequence[int], ours: Sequence[int]) -> str:
    """What may be the reason, where images take another number of tokens."""
    counts = [sum(map(own.is_placeholder, ids)) for ids in (seen, ours)]
    if counts[0] == counts[1]:
        return ""
    return (
        f". Its images have {counts[0]:,} tokens, and {counts[1]:,} here: sampler and recipe "
        "resize them differently (images.*)"
    )
