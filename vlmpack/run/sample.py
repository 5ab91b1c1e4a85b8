"""Answers drawn to the prompts of a recipe's data, and kept with their rewards.

    prompts -> parts of some prompts -> drawn -> a line of drawn.jsonl each -> rollouts.jsonl

A part is drawn whole, and its line is on the disk before the next part ends. So a sampling that
broke off goes on behind its last whole line. The file of rollouts, of best answers or of pairs is
made once all parts are there. Images lie beside it, named by their digests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from vlmpack.activity import ACTIVITY
from vlmpack.build.data import build_encoder, data_spec, open_split
from vlmpack.build.extensions import NO_EXTENSIONS, Extensions
from vlmpack.data.config import SplitKey
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.data.shards.images import image_facts
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.distributed import Ranks
from vlmpack.encode import Encoder
from vlmpack.encode.rollouts import LogProbs
from vlmpack.errors import (
    DataError,
    EmptyDataError,
    RecipeError,
    RunDirError,
    VlmpackError,
    writing,
)
from vlmpack.evaluation.generation import Asked, draw_answers, load_for_generation
from vlmpack.evaluation.predictions import Question
from vlmpack.evaluation.rollouts import (
    FILES,
    Facts,
    Form,
    Reward,
    conversation_record,
    earned,
    in_form,
)
from vlmpack.evaluation.sampling import Drawn, Sampling, uniform_numbers
from vlmpack.file_format import ROLLOUTS
from vlmpack.recipe import Recipe
from vlmpack.recipe.objective import ObjectiveSection
from vlmpack.training.model_watch import watched_model
from vlmpack.training.run_dir import RunDir
from vlmpack.training.run_lock import RunLock
from vlmpack.version import __version__
from vlmpack.whole_file import sync_folder, write_atomically, written_whole

logger = logging.getLogger("vlmpack")

DRAWN = "drawn.jsonl"
SPLITS: Mapping[str, SplitKey] = {
    "train": "data.train",
    "validation": "data.validation",
    "test": "data.test",
}
BATCHES_TOGETHER = 8
"""Batches of a part, so that prompts of similar lengths share one."""
ANY_SIZE = SampleCaps(max_image_pixels=1 << 62)
_PART = re.compile(rb'\{"part": (\d+), ')


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of the data, and which answers are drawn to it.

    Args:
        group: names it; prompts that occur again have another name.
        numbers: of its answers. They go on where the same prompt occurs again.
    """

    asked: Asked
    group: str
    numbers: range


class Sampler(Protocol):
    """What answers are drawn from."""

    @property
    def log_probs(self) -> LogProbs:
        """What its log-probabilities are of."""

    @property
    def server(self) -> Mapping[str, str]:
        """Its name and version."""

    @property
    def prompts_together(self) -> int:
        """Prompts of a part."""

    def draw(
        self, parts: Iterable[tuple[int, Sequence[Prompt]]]
    ) -> Iterator[tuple[int, list[tuple[Prompt, list[Drawn]]]]]:
        """(part, its prompts with their answers), as they are done."""


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """transformers' own generation, in this process.

    Args:
        on_bad_prompt: gets the error of a prompt whose images cannot be decoded; may raise.
    """

    model: Any
    encoder: Encoder
    drawing: Drawing
    on_bad_prompt: Callable[[DataError], None]

    @property
    def log_probs(self) -> LogProbs:
        """What its log-probabilities are of: always of what was drawn from."""
        return "processed" if self.drawing.truncates else "after_temperature"

    @property
    def server(self) -> Mapping[str, str]:
        return {"name": "vlmpack", "version": __version__}

    @property
    def prompts_together(self) -> int:
        return max(1, self.drawing.batch_size * BATCHES_TOGETHER // self.drawing.answers)

    def draw(
        self, parts: Iterable[tuple[int, Sequence[Prompt]]]
    ) -> Iterator[tuple[int, list[tuple[Prompt, list[Drawn]]]]]:
        """One part after the other; see `Sampler`."""
        seed, round_ = self.drawing.seed, self.drawing.round
        for part, prompts in parts:
            numbers = [
                [uniform_numbers(seed, round_, p.asked.digest, n) for n in p.numbers]
                for p in prompts
            ]
            answers = draw_answers(
                self.model,
                self.encoder,
                [prompt.asked.question for prompt in prompts],
                numbers,
                self.drawing,
                batch_size=self.drawing.batch_size,
                on_bad_sample=self.on_bad_prompt,
            )
            yield part, list(zip(prompts, answers, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing(Sampling):
    """What is drawn, besides how.

    Args:
        answers: to each prompt.
        form: of the records that are written: `rollouts` for `objective.name: policy`, `best` for
            conversations with the best answer, `pairs` of the best and the worst answer.
        split: train, validation or test, whose prompts are asked.
        max_prompts: of the split, in its order; None for all.
        seed: of the random numbers.
        round: recorded as the version of the policy; other rounds have other random numbers.
        batch_size: answers that the embedded generation draws together.
    """

    answers: int = 4
    form: Form = "rollouts"
    split: str = "train"
    max_prompts: int | None = None
    seed: int = 0
    round: int = 0
    batch_size: int = 16

    def __post_init__(self) -> None:
        Sampling.__post_init__(self)
        for name in ("answers", "max_prompts", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise VlmpackError(f"{name} is {value}; expected at least 1")
        for name, known in (("form", FILES), ("split", SPLITS)):
            if getattr(self, name) not in known:
                raise VlmpackError(
                    f"{name} is {getattr(self, name)!r}; expected {', '.join(known)}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """A drawing, and where its answers go.

    Args:
        out: folder of the answers.
        on_prompts: told how many more prompts are done.
    """

    drawing: Drawing
    out: Path
    rewards: Mapping[str, Reward]
    on_prompts: Callable[[int], None] = field(default=lambda count: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """What a sampling came to.

    Args:
        file: its records.
        records: in that file.
        prompts: that were asked.
        answers: that were drawn.
        reward: mean of all answers.
        equal: prompts whose answers all earned the same.
        cut: answers that were ended at their longest.
    """

    file: Path
    records: int
    prompts: int
    answers: int
    reward: float
    equal: int
    cut: int


def sample_recipe(
    recipe: Recipe,
    order: SampleOrder,
    sampler_of: Callable[[Encoder], Sampler] | None = None,
    extensions: Extensions = NO_EXTENSIONS,
) -> SampleResult:
    """Draw answers to the prompts of a recipe's split; go on where a former call stopped.

    Args:
        sampler_of: makes what is drawn from; None for the recipe's model in this process.

    Raises:
        RecipeError: no such split.
        RunDirError: the folder is in use, or of another sampling.
        DataError: a bad record whose class is not skipped.
        VlmpackError: what is wrong with the model folder, the data or the server.
    """
    if recipe.objective.learns_rollouts:  # prompts are no rollouts yet
        recipe = recipe.model_copy(update={"objective": ObjectiveSection()})
    encoder = build_encoder(recipe)
    train = _open(recipe, encoder, order.drawing.split, extensions)
    with closing(train.split):
        bad = _BadPrompts(train)
        facts: dict[str, Any] = {
            "encoder": encoder.fingerprint,
            **{name: str(value) for name, value in train.identity.items()},
        }
        if sampler_of is None:
            ACTIVITY.enter_alone("loading the model")
            folder, adapter = Path(recipe.model.path), recipe.model.adapter
            with watched_model(folder, Ranks(), RunDir(order.out), adapter) as watch:
                adapters = [Path(adapter)] if adapter else []
                model, _ = load_for_generation(folder, adapters, encoder)
                facts |= watch.compare_all()
            sampler: Sampler = Embedded(
                model=model, encoder=encoder, drawing=order.drawing, on_bad_prompt=bad
            )
        else:
            sampler = sampler_of(encoder)
        return sample_into(order, sampler, _prompts(train, encoder, order.drawing, bad), facts)


def _open(recipe: Recipe, encoder: Encoder, split: str, extensions: Extensions) -> TrainData:
    """A split, read as questions with one true answer are."""
    key = SPLITS[split]
    spec = data_spec(recipe, encoder, Ranks(), extensions=extensions)
    train = open_split(replace(spec, test=replace(spec.test, key=key)), "data.test", Ledger(None))
    if train is None:
        raise RecipeError(f"{key}: the recipe has no such split; expected prompts there")
    return train


@dataclass(frozen=True, slots=True)
class _BadPrompts:
    """Leaves out a prompt that cannot be asked, or raises, as `data.on_error` says."""

    train: TrainData

    def __call__(self, error: DataError) -> None:
        if not self.train.config.data.on_error.skips(error.error_class):
            raise error
        logger.warning("prompt left out: %s", error)


def _prompts(
    train: TrainData, encoder: Encoder, drawing: Drawing, bad: Callable[[DataError], None]
) -> Iterator[Prompt]:
    seen, each = Counter[str](), drawing.answers
    for sample in islice(train.samples(), drawing.max_prompts):
        try:
            asked = Asked.of(Question.from_sample(sample, encoder), encoder)
        except DataError as error:
            bad(error.located(key=sample.key, shard=sample.url))
            continue
        times = seen[asked.digest]
        seen[asked.digest] += 1
        group = asked.digest + (f"-{times}" if times else "")
        yield Prompt(asked, group, range(times * each, (times + 1) * each))


def sample_into(
    order: SampleOrder, sampler: Sampler, prompts: Iterable[Prompt], facts: Mapping[str, Any]
) -> SampleResult:
    """Draw answers to some prompts into a folder; go on where a former call stopped.

    Args:
        prompts: the same ones in the same order in every call.
        facts: what else decides the answers, by name; JSON values.

    Raises:
        RunDirError: the folder is in use, of another sampling, or cannot be written.
        DataError, ExtensionError: an answer cannot be rewarded.
        EmptyDataError: no prompts.
    """
    drawing = order.drawing
    common = Facts(
        policy_version=drawing.round,
        sampling=drawing.fields(),
        log_probs=sampler.log_probs,
        server=sampler.server,
    )
    asked = {
        **facts,
        **{name: x for name, x in asdict(drawing).items() if name != "form"},
        "log_probs": sampler.log_probs,
        "server": f"{sampler.server['name']} {sampler.server['version']}",
        "rewards": [*order.rewards],
    }
    with writing(order.out, RunDirError):
        (order.out / "images").mkdir(parents=True, exist_ok=True)
        lock = RunLock(order.out / "sample.lock")
        lock.take()
        try:
            with _Parts.at(order.out / DRAWN, asked) as parts:
                count = 0

                def missing() -> Iterator[tuple[int, Sequence[Prompt]]]:
                    nonlocal count
                    left = iter(prompts)
                    while some := list(islice(left, sampler.prompts_together)):
                        count += 1
                        if count - 1 in parts.places:
                            order.on_prompts(len(some))
                        else:
                            yield count - 1, some

                for part, answered in sampler.draw(missing()):
                    parts.add(part, _records(answered, order, common))
                    order.on_prompts(len(answered))
                return _finish(order, parts, count)
        finally:
            lock.release()


def _records(
    answered: Sequence[tuple[Prompt, list[Drawn]]], order: SampleOrder, common: Facts
) -> list[list[dict[str, Any]]]:
    """The records of each prompt's answers."""
    groups = []
    for prompt, answers in answered:
        question = prompt.asked.question
        record = conversation_record(question, _keep_images(question.images, order.out))
        said = [({"role": "assistant", "content": each.text}, each) for each in answers]
        groups.append(
            [
                {
                    **record,
                    "messages": [*record["messages"], turn],
                    "rollout": common.rollout(
                        answer,
                        prompt=prompt.asked.token_ids,
                        group=prompt.group,
                        number=number,
                        rewards=earned(question, answer, order.rewards),
                    ),
                }
                for number, (turn, answer) in zip(prompt.numbers, said, strict=False)
            ]
        )
    return groups


def _keep_images(images: Sequence[bytes], folder: Path) -> list[str]:
    """Names of image files, which are in the folder then."""
    names = []
    for data in images:
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        kind = image_facts(data, "image", ANY_SIZE).format.lower()
        names.append(f"images/{digest}.{kind}")
        if not (folder / names[-1]).exists():
            write_atomically(folder / names[-1], data)
    return names


class _Parts:
    """The file of drawn parts: a line that says what they are of, and one a part, in any order.

    Args:
        places: of each part that is there, its line's place in the file.
    """

    def __init__(self, file: BinaryIO, places: dict[int, int]) -> None:
        self._file = file
        self.places = places

    @classmethod
    def at(cls, path: Path, asked: Mapping[str, Any]) -> closing[_Parts]:
        """Open it to go on behind its last whole line.

        Raises:
            RunDirError: it is of another sampling; the message lists what differs.
        """
        if not path.exists():
            write_atomically(path, json.dumps(ROLLOUTS.mark(asked)) + "\n")
            sync_folder(path.parent)
        file = path.open("r+b")
        try:
            found = json.loads(file.readline())
            ROLLOUTS.take(found, path, RunDirError)
            names = dict.fromkeys((*found, *asked))
            differ = [
                f"{name}: {found.get(name)} there, {asked.get(name)} now"
                for name in names
                if found.get(name) != asked.get(name)
            ]
            if differ:
                raise RunDirError(
                    f"{path} is of another sampling ({'; '.join(differ)}); choose another folder, "
                    "or delete it"
                )
            places, place = dict[int, int](), file.tell()
            for line in iter(file.readline, b""):
                named = _PART.match(line)
                if named is None or not line.endswith(b"\n"):
                    break
                places[int(named[1])] = place
                place += len(line)
            file.truncate(place)
            file.seek(place)
        except ValueError as error:
            file.close()
            raise RunDirError(f"{path} is no file of drawn answers: {error}") from None
        except BaseException:
            file.close()
            raise
        return closing(cls(file, places))

    def add(self, part: int, groups: Sequence[Any]) -> None:
        """Write a part down."""
        place = self._file.seek(0, os.SEEK_END)
        line = f'{{"part": {part}, "groups": {json.dumps(groups, ensure_ascii=False)}}}\n'
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.places[part] = place

    def groups(self, count: int) -> Iterator[list[dict[str, Any]]]:
        """The records of each prompt's answers, in the order of prompts."""
        for part in range(count):
            self._file.seek(self.places[part])
            yield from json.loads(self._file.readline())["groups"]

    def close(self) -> None:
        self._file.close()


def _finish(order: SampleOrder, parts: _Parts, count: int) -> SampleResult:
    """Write the records in the form that was ordered, and count."""
    path, numbers, total = order.out / FILES[order.drawing.form], Counter[str](), 0.0
    with written_whole(path) as file:
        for group in parts.groups(count):
            rewards = [record["rollout"]["reward"] for record in group]
            finishes = [record["rollout"]["finish"] for record in group]
            total += sum(rewards)
            numbers["prompts"] += bool(group)
            numbers["answers"] += len(group)
            numbers["equal"] += len(set(rewards)) == 1
            numbers["cut"] += finishes.count("length")
            for record in in_form(group, order.drawing.form):
                numbers["records"] += 1
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    if not numbers["answers"]:
        raise EmptyDataError(f"data.{order.drawing.split} has no prompt that can be asked")
    return SampleResult(
        file=path,
        records=numbers["records"],
        prompts=numbers["prompts"],
        answers=numbers["answers"],
        reward=total / numbers["answers"],
        equal=numbers["equal"],
        cut=numbers["cut"],
    )
