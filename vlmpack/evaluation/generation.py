"""Answers to questions by transformers' own `generate`: greedy ones, or drawn ones.

    VLMSample -> Question (the turns before the last answer) -> prompt ids, placeholders expanded
    -> batches of similar length, padded on the left -> generate -> answers in the given order

`Draws` chooses the tokens of drawn answers (`sampling.py`).

The model gets ids, the padding mask, pixels and grids, and derives positions itself. No packing
code takes part, so the result is what a user of the exported folder gets. Positions are given only
for videos whose class counts them differently in training.

Shape letters: B questions of a batch, S columns of the padded prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vlmpack.activity import ACTIVITY
from vlmpack.backends.engine import Engine
from vlmpack.data.shards.images import image_facts
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.encode.chat import ChatEncoder
from vlmpack.encode.sample import shown_by
from vlmpack.errors import DataError
from vlmpack.evaluation.predictions import Question
from vlmpack.evaluation.sampling import Drawn, Draws, Sampling, prompt_digest
from vlmpack.families.base import kinds_of
from vlmpack.packing import Media
from vlmpack.packing.media import concatenate_media

OnBadSample = Callable[[DataError], None]
"""Called with a question that cannot be asked; may raise."""


def raised(error: DataError) -> None:
    raise error


NARROW_MODEL = 512
"""Hidden size up to which a CPU generates with one thread. The operations of one token are then so
short that threads mostly wait for each other. On two busy cores two threads took 4 times as long as
one (hidden size 128, batch 64), and used 3 times the CPU time."""

FIXED_CACHE: Mapping[str, Any] = {"cache_implementation": "static", "disable_compile": True}
"""Settings of GenerationConfig; see `Family.needs_fixed_cache`."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A tokenised question, not yet decoded.

    `ids` has one placeholder for each run of an image, and `runs` their lengths. `num_tokens`
    counts expanded placeholders.
    """

    index: int
    ids: list[int]
    runs: tuple[int, ...]
    num_tokens: int
    chat: ChatEncoder

    def expanded(self, placeholder_ids: Container[int]) -> list[int]:
        """The ids with as many placeholders as the runs are long."""
        runs, row = iter(self.runs), list[int]()
        for token in self.ids:
            row.extend([token] * (next(runs) if token in placeholder_ids else 1))
        return row


@dataclass(frozen=True, slots=True)
class Asked:
    """A question to draw answers to.

    Args:
        token_ids: of the prompt, with expanded placeholders.
        digest: says which prompt it is.
    """

    question: Question
    token_ids: tuple[int, ...]
    digest: str

    @classmethod
    def of(cls, question: Question, encoder: Encoder) -> Asked:
        """Tokenise a question.

        Raises:
            DataError: it cannot be asked.
        """
        ids = _tokenise(0, question, encoder).expanded(encoder.placeholder_ids)
        digest = prompt_digest(ids, shown_by(question.messages), question.images)
        return cls(question, tuple(ids), digest)


def answer_questions(
    model: Any,
    encoder: Encoder,
    questions: Sequence[Question],
    *,
    batch_size: int,
    max_new_tokens: int,
    on_bad_sample: OnBadSample = raised,
) -> list[str | None]:
    """Greedy answers, in the order of the questions.

    Args:
        model: a whole transformers model with its head, in eval mode, with unsharded weights.
        encoder: the processor of its folder.
        batch_size: questions per forward pass; similar lengths share a batch, the longest first.
        max_new_tokens: longest answer, in tokens; an answer also stops at the end of its turn.
        on_bad_sample: called with each question that cannot be asked (an unreadable image, say).

    Returns:
        One answer per question, stripped, without special tokens; None for a bad question.

    Raises:
        DataError: a bad question, as `on_bad_sample` decides.
    """
    prompts: list[_Prompt] = []
    for index, question in enumerate(questions):
        with _located(question, on_bad_sample):
            prompts.append(_tokenise(index, question, encoder))
    prompts.sort(key=lambda prompt: -prompt.num_tokens)
    answers: list[str | None] = [None] * len(questions)
    with _greedy(model, encoder, max_new_tokens), _few_threads(model):
        for start in range(0, len(prompts), batch_size):
            ACTIVITY.enter_alone("answering questions")
            ready: list[tuple[_Prompt, Media | None]] = []
            for prompt in prompts[start : start + batch_size]:
                with _located(questions[prompt.index], on_bad_sample):
                    ready.append((prompt, _media(questions[prompt.index], encoder)))
            texts = _generate(model, encoder, ready) if ready else []
            for (prompt, _), text in zip(ready, texts, strict=True):
                answers[prompt.index] = text
    return answers


def stream_answer(
    model: Any,
    encoder: Encoder,
    question: Question,
    *,
    max_new_tokens: int,
    show: Callable[[str], None],
) -> str:
    """One greedy answer, which `show` gets piece by piece while it is generated.

    Args:
        model, encoder, max_new_tokens: as of `answer_questions`.

    Raises:
        DataError: the question cannot be asked.
    """
    from transformers import TextStreamer

    prompt = _tokenise(0, question, encoder)
    media = _media(question, encoder)

    def decode(ids: int | list[int]) -> str:
        return prompt.chat.decode([ids] if isinstance(ids, int) else ids)

    def finalized(text: str, stream_end: bool = False) -> None:
        ACTIVITY.moved()
        show(text)

    reader: Any = SimpleNamespace(decode=decode)  # what it takes of a tokenizer
    streamer: Any = TextStreamer(reader, skip_prompt=True)
    streamer.on_finalized_text = finalized
    with _greedy(model, encoder, max_new_tokens), _few_threads(model):
        ACTIVITY.enter_alone("answering a question", shown=True)
        (text,) = _generate(model, encoder, [(prompt, media)], streamer)
    return text


def draw_answers(
    model: Any,
    encoder: Encoder,
    questions: Sequence[Question],
    numbers: Sequence[Sequence[np.random.Generator]],
    sampling: Sampling,
    *,
    batch_size: int,
    on_bad_sample: OnBadSample = raised,
) -> list[list[Drawn]]:
    """Answers that are drawn, several to each question.

    Args:
        model, encoder: as of `answer_questions`.
        numbers: of each question, the random numbers of each of its answers.
        batch_size: answers per forward pass; an image counts in it once an answer.

    Returns:
        Of each question its answers, in the order of `numbers`; none for a bad question.

    Raises:
        DataError: as `answer_questions`.
        NonFiniteError: the model's logits are no numbers.
    """
    rows: list[tuple[_Prompt, Media | None, np.random.Generator]] = []
    for index, question in enumerate(questions):
        with _located(question, on_bad_sample):
            asked = _tokenise(index, question, encoder), _media(question, encoder)
            rows += [(*asked, number) for number in numbers[index]]
    rows.sort(key=lambda row: -row[0].num_tokens)
    found: list[list[Drawn]] = [[] for _ in questions]
    with _greedy(model, encoder, sampling.max_new_tokens), _few_threads(model):
        ends = set(model.generation_config.eos_token_id)
        for start in range(0, len(rows), batch_size):
            ACTIVITY.enter_alone("drawing answers")
            batch = rows[start : start + batch_size]
            draws = Draws(sampling, [number for *_, number in batch])
            hook = model.register_forward_hook(draws.hear)
            try:
                _generate(model, encoder, [row[:2] for row in batch], draws=draws)
            finally:
                hook.remove()
            for (prompt, *_), (ids, log_probs, finish) in zip(
                batch, draws.answers(ends), strict=True
            ):
                drawn = Drawn(
                    token_ids=ids,
                    log_probs=log_probs,
                    finish=finish,
                    text=prompt.chat.decode(ids),
                )
                found[prompt.index].append(drawn)
    return found


def answer_over_ranks(
    engine: Engine,
    encoder: Encoder,
    questions: Sequence[Question],
    *,
    ranks: Ranks,
    batch_size: int,
    max_new_tokens: int,
    on_bad_sample: OnBadSample = raised,
) -> list[str | None]:
    """Distribute the questions over the ranks and gather all answers on every rank. Collective.

    Ranks generate independently, with whole weights. For a sharded model each rank gathers a whole
    copy first, since generating through shards would gather every layer again for every token.

    Args:
        questions: the same on every rank.
        on_bad_sample: called on every rank with the bad questions of all ranks, at the end.

    Returns:
        As `answer_questions`.

    Raises:
        DataError: on every rank, as `on_bad_sample` decides.
    """
    bad: list[DataError] = []
    with engine.generation() as model:
        answers = answer_questions(
            model,
            encoder,
            questions[ranks.rank :: ranks.world_size],
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            on_bad_sample=bad.append,
        )
    gathered = ranks.gather_objects((answers, bad))
    for _, errors in gathered:
        for error in errors:
            on_bad_sample(error)
    merged: list[str | None] = [None] * len(questions)
    for rank, (part, _) in enumerate(gathered):
        merged[rank :: ranks.world_size] = part
    return merged


def load_for_generation(
    folder: Path, adapters: Sequence[Path] = (), encoder: Encoder | None = None
) -> tuple[Any, Encoder]:
    """A model folder, ready to answer: on the GPU in bfloat16, or on the CPU in float32.

    Args:
        encoder: of the folder, where there is one.
        adapters: folders in peft's format, which are merged into the weights in float32, one after
            the other.

    Raises:
        ModelError: a folder without config, weights or processor files, or adapters that cannot be
            merged into this model.
        CapabilityError: a model family that is not known.
    """
    from vlmpack.backends.hf.adapters import merge_adapter
    from vlmpack.backends.hf.load import load_model

    encoder = Encoder(folder) if encoder is None else encoder
    model = load_model(folder)
    for adapter in adapters:
        model = merge_adapter(model, adapter)
    encoder.load()
    if torch.cuda.is_available():
        _halve(model.to("cuda"))
    return model.eval(), encoder


@contextmanager
def _located(question: Question, on_bad_sample: OnBadSample) -> Iterator[None]:
    """Add the question's place to its error, and pass it on."""
    try:
        yield
    except DataError as error:
        on_bad_sample(error.located(key=question.key, shard=question.shard))


def _tokenise(index: int, question: Question, encoder: Encoder) -> _Prompt:
    """Ids and exact length; image sizes come from the headers, no pixel is decoded."""
    caps = SampleCaps(max_image_pixels=encoder.settings.max_image_pixels)
    sizes = [image_facts(data, str(n), caps).size for n, data in enumerate(question.images)]
    layouts = encoder.layouts(sizes, shown=shown_by(question.messages))
    texts = [layout.text for layout in layouts]
    chat = encoder.chat_for(objects=question.grounding is not None)
    ids = chat.encode_prompt(question.messages, texts, question.inputs)
    runs = tuple(run for layout in layouts for run in layout.runs)
    return _Prompt(index, ids, runs, len(ids) - len(runs) + sum(runs), chat)


def _media(question: Question, encoder: Encoder) -> Media | None:
    if not question.images:
        return None
    return encoder.pixels(question.images, shown=shown_by(question.messages))


def _generate(
    model: Any,
    encoder: Encoder,
    ready: Sequence[tuple[_Prompt, Media | None]],
    streamer: Any = None,
    draws: Draws | None = None,
) -> list[str]:
    device = next(model.parameters()).device
    inputs = {name: x.to(device) for name, x in _model_inputs(encoder, ready).items()}
    inputs = encoder.family.class_arguments(model, inputs, generates=True)
    with torch.no_grad():
        output: Tensor = model.generate(
            **inputs, streamer=streamer, logits_processor=None if draws is None else [draws]
        )
    new_ids = output[:, inputs["input_ids"].shape[1] :].tolist()
    return [
        prompt.chat.decode(ids).strip() for (prompt, _), ids in zip(ready, new_ids, strict=True)
    ]


def _model_inputs(
    encoder: Encoder, ready: Sequence[tuple[_Prompt, Media | None]]
) -> dict[str, Tensor]:
    """Left-padded inputs of one batch.

    ids  pad pad  q0  q0 img img      (two placeholders for a two-token image)
    mask  0   0   1   1   1   1
    kind  0   0   0   0   1   1       (mm_token_type_ids: the model's own position rule reads it)
    """
    rows = [prompt.expanded(encoder.placeholder_ids) for prompt, _ in ready]
    width = max(map(len, rows))
    input_ids = torch.full((len(rows), width), encoder.pad_token_id)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for place, row in enumerate(rows):
        input_ids[place, width - len(row) :] = torch.tensor(row)
        attention_mask[place, width - len(row) :] = 1
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    shown = [media for _, media in ready if media is not None]
    if shown:
        inputs |= encoder.family.token_arguments(kinds_of(input_ids, **encoder.placeholders))
        inputs |= encoder.family.image_arguments(concatenate_media(shown))
    return inputs


@contextmanager
def _greedy(model: Any, encoder: Encoder, max_new_tokens: int) -> Iterator[None]:
    """Greedy decoding with the folder's end tokens alone.

    `generate` would mix sampling or penalties of generation_config.json into what it is given.
    """
    from transformers import GenerationConfig

    own = model.generation_config
    stops = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    stops = sorted({int(x) for x in [*stops, encoder.tokenizer.eos_token_id] if x is not None})
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stops,
        pad_token_id=encoder.pad_token_id,
        use_cache=True,
        **(FIXED_CACHE if encoder.family.needs_fixed_cache else {}),
    )
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _few_threads(model: Any) -> Iterator[None]:
    """One thread for a narrow model on a CPU; the number is restored."""
    threads = torch.get_num_threads()
    width = model.get_input_embeddings().weight.shape[1]
    if next(model.parameters()).device.type == "cpu" and width <= NARROW_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _halve(model: nn.Module) -> None:
    """Weights to bfloat16, in place. Buffers stay float32: rotary frequencies lose positions."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
