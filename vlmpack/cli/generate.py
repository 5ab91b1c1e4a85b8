"""`vlmpack generate`: ask a model folder one question, or all questions of a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import argument, option, quiet_transformers, takes
from vlmpack.errors import DataError, RecipeError, VlmpackError, schema_error, writing
from vlmpack.terminal import say
from vlmpack.whole_file import regular_bytes
from vlmpack.words import counted

if TYPE_CHECKING:
    from vlmpack.data.files.images import ImageRoot
    from vlmpack.data.files.records import Record
    from vlmpack.encode import Encoder
    from vlmpack.evaluation.predictions import Question

BATCHES_READ = 8
"""Batches of a file that are read together, so that questions of similar lengths share one."""
ANSWER_OF = {
    "question": "answer",
    "query": "response",
    "prompt": "completion",
    "instruction": "output",
}
"""The key of a question, and that of its answer, which a file of questions may leave out."""
NO_ANSWER = "-"
"""Stands where a record has no answer. The model does not see it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionsFile:
    """A file of questions, and where its answers go."""

    questions: Annotated[Path | None, option("generate.questions")] = None
    images: Annotated[Path | None, option("generate.images")] = None
    out: Annotated[Path | None, option("generate.out")] = None
    batch_size: Annotated[int, option("generate.batch_size")] = 16


NO_FILE = QuestionsFile()


@takes(QuestionsFile)
def generate(
    question: Annotated[str | None, argument("generate.question")] = None,
    model: Annotated[Path | None, option("generate.model")] = None,
    adapter: Annotated[list[Path] | None, option("generate.adapter")] = None,
    image: Annotated[list[Path] | None, option("generate.image")] = None,
    max_new_tokens: Annotated[int, option("generate.max_new_tokens")] = 64,
    draw: Annotated[Path | None, option("generate.draw")] = None,
    file: QuestionsFile = NO_FILE,
) -> None:
    """Answer one question about images greedily, and print the answer alone. With --questions,
    answer all records of a file in its order, and print one JSON object for each. Exit code 1 if
    any of them cannot be asked."""
    if question is not None and file.questions is None:
        if file.images is not None or file.out is not None:
            raise VlmpackError("--images, --output: these go with --questions FILE")
        _answer_one(question, model, adapter or (), image or (), max_new_tokens, draw)
    elif question is None and file.questions is not None:
        if image or draw is not None:
            raise VlmpackError("--image, --draw: these go with QUESTION; records name their images")
        _answer_file(file.questions, file, model, adapter or (), max_new_tokens)
    else:
        raise VlmpackError("expected one of QUESTION and --questions FILE")


def base_of(model: Path | None, adapters: Sequence[Path]) -> Path:
    """The model folder to load: the one that is given, else the one that the adapters name.

    Raises:
        VlmpackError: neither is given, or what the adapters name is no folder here.
        ModelError: no adapters in peft's format.
    """
    from vlmpack.capabilities.adapter_config import AdapterConfig

    found = [AdapterConfig.read(adapter).values for adapter in adapters]
    if model is not None:
        return model
    if not found:
        raise VlmpackError("expected --model DIR, or --adapter DIR with adapters that name it")
    named = found[0].get("base_model_name_or_path")
    if not (isinstance(named, str) and Path(named).is_dir()):
        raise VlmpackError(
            f"{adapters[0]} names its base model as {named!r}, which is no folder here; expected "
            "--model DIR too"
        )
    return Path(named)


def _answer_one(
    question: str,
    model: Path | None,
    adapters: Sequence[Path],
    paths: Sequence[Path],
    max_new_tokens: int,
    draw: Path | None,
) -> None:
    images = tuple(read_image("--image", path) for path in paths)
    if draw is not None and len(images) != 1:
        raise VlmpackError(f"--draw: {len(images)} images; an answer's boxes are drawn on one")
    if draw is not None and not _takes_images(draw.suffix):
        raise VlmpackError(f"--draw {draw}: no image file has such a name; expected FILE.png")
    base = base_of(model, adapters)

    # Heavy: only once the files are known to be there.
    from vlmpack.encode import ImagePart, Message, TextPart, VLMSample
    from vlmpack.encode.coordinates import no_rule
    from vlmpack.evaluation.generation import answer_questions, load_for_generation
    from vlmpack.evaluation.predictions import Question, Shapes, grounding_of

    parts: tuple[TextPart | ImagePart, ...] = (
        *(ImagePart(index) for index in range(len(images))),
        TextPart(question),
    )
    sample = VLMSample(
        key="question",
        url="the command line",
        messages=(Message("user", parts),),
        images=images,
    )
    quiet_transformers()
    ACTIVITY.enter_alone("loading the model")

    loaded, encoder = load_for_generation(base, adapters)
    if draw is not None and encoder.coordinates is None:
        way_out = "whose form the run's export then notes"
        raise VlmpackError(no_rule(encoder.family.name, f"--draw {draw}", way_out))
    try:
        grounding = None if draw is None else grounding_of(encoder, sample)
        posed = Question(
            key=sample.key,
            shard=sample.url,
            messages=sample.messages,
            images=images,
            truth="",
            grounding=grounding,
        )
        (answer,) = answer_questions(
            loaded, encoder, [posed], batch_size=1, max_new_tokens=max_new_tokens
        )
    except DataError as error:
        named = ", ".join(map(str, paths)) or "no image"
        raise VlmpackError(f"{error.reason} ({named})") from error
    say(answer or "", whole=True)
    if draw is not None and grounding is not None:
        shapes = Shapes.of(grounding, "", answer or "")
        with writing(draw.parent):
            draw.parent.mkdir(parents=True, exist_ok=True)
            shapes.on(0, images[0]).save(draw)
        own = encoder.settings.coordinates is None
        form = encoder.family.name if own else "data.coordinates"
        found = f"{counted(len(shapes.answer), 'shape')} in the form of {form}"
        say(f"drawn    {draw}: {found}", err=True)
    if not answer:
        say("the answer is empty: the model ended its turn at once", err=True)


def _answer_file(
    path: Path,
    given: QuestionsFile,
    model: Path | None,
    adapters: Sequence[Path],
    max_new_tokens: int,
) -> None:
    from vlmpack.data.files.images import ImageRoot
    from vlmpack.data.files.records import open_records

    found = iter(open_records(path, every_column=True))
    base, out, batch_size = base_of(model, adapters), given.out, given.batch_size
    if out is not None and out.exists():
        raise VlmpackError(f"{out} is there already; choose another place with -o, or delete it")
    from vlmpack.evaluation.generation import answer_questions, load_for_generation

    root = ImageRoot(str(given.images or (path if path.is_dir() else path.parent)))
    quiet_transformers()
    ACTIVITY.enter_alone("loading the model")
    loaded, encoder = load_for_generation(base, adapters)
    total = bad = 0
    while some := list(islice(found, batch_size * BATCHES_READ)):
        rows, asked = _asked(some, root, encoder)

        def refuse(error: DataError, rows: dict[str, dict[str, Any]] = rows) -> None:
            rows[error.key or ""]["error"] = error.reason

        answers = answer_questions(
            loaded,
            encoder,
            asked,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            on_bad_sample=refuse,
        )
        for question, answer in zip(asked, answers, strict=True):
            rows[question.key] |= {} if answer is None else {"answer": answer}
        _write(rows.values(), out)
        total, bad = total + len(rows), bad + sum("error" in row for row in rows.values())
    if not total:
        raise VlmpackError(f"{path} holds no record; expected a question a line")
    if bad:
        raise VlmpackError(f"{bad:,} of {counted(total, 'question')} could not be asked")
    if out is not None:
        say(f"{out}: {counted(total, 'answer')}")


def _write(rows: Iterable[Mapping[str, Any]], out: Path | None) -> None:
    """Write rows at the end of a file, or on standard output. Errors are said too."""
    for row in rows:
        if "error" in row:
            say(f"bad: {row['place']}: {row['error']}", err=True)
        if out is None:
            say(json.dumps(row), whole=True)  # in ASCII, which cannot steer a terminal
    if out is not None:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        with writing(out), out.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(lines)


def _asked(
    records: Sequence[Record], root: ImageRoot, encoder: Encoder
) -> tuple[dict[str, dict[str, Any]], list[Question]]:
    """A row of the output for each question by its place, and the questions that can be asked."""
    rows: dict[str, dict[str, Any]] = {}
    asked: list[Question] = []
    for record in records:
        try:
            found = questions_of(record, root, encoder)
        except DataError as error:
            rows[record.place] = {"place": record.place, "error": error.reason}
            continue
        asked += found
        rows |= {each.key: {"place": each.key, "question": each.text} for each in found}
    return rows, asked


def questions_of(record: Record, root: ImageRoot, encoder: Encoder) -> list[Question]:
    """What a record asks: the turns before its last answer, or before the answer that it lacks.

    A record with branches has several questions.

    Raises:
        DataError: it is of no layout, or it names an image that cannot be read.
    """
    from vlmpack.data.columns.form import find_form
    from vlmpack.data.files.samples import sample_of
    from vlmpack.data.files.source_form import find_dropped
    from vlmpack.data.shards.naming import JSON_FIELD
    from vlmpack.data.shards.samples import cook_texts
    from vlmpack.evaluation.predictions import Question

    if record.value is None:
        raise record.fault or schema_error("cannot be read")
    value = _with_answer(record.value)
    try:
        form = find_form([value], None, "the record", "the layout")
    except RecipeError as error:
        raise schema_error("; ".join(error.problems)) from None
    if dropped := find_dropped([value], form).columns:
        raise schema_error(
            f"nothing reads {' and '.join(map(repr, dropped))}, which seem to have images; "
            "expected them under 'images'"
        )
    sample = sample_of(value, form, root)
    members = sample.members
    texts = cook_texts(record.place, "", sample.document, (JSON_FIELD, *sample.names))
    return [
        Question.from_sample(
            replace(text.sample, images=tuple(members[name] for name in text.image_fields)), encoder
        )
        for text in texts
    ]


def _with_answer(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record, with a place for an answer behind a question that has none."""
    from vlmpack.data.columns.layouts import fitting, has_value

    for turns, role, content, name in (
        ("messages", "role", "content", "assistant"),
        ("conversations", "from", "value", "gpt"),
    ):
        said = record.get(turns)
        if isinstance(said, list) and said and isinstance(said[-1], dict):
            if said[-1].get(role) in ("user", "human", "tool", "observation", "tool_response"):
                return {**record, turns: [*said, {role: name, content: NO_ANSWER}]}
            return record
    if fitting({key for key, value in record.items() if has_value(value)}):
        return record
    answers = (ANSWER_OF[name] for name in record if name in ANSWER_OF)
    return {**record, **dict.fromkeys(answers, NO_ANSWER)}


def _takes_images(suffix: str) -> bool:
    """Whether Pillow writes images to files with that suffix."""
    from PIL import Image

    return Image.registered_extensions().get(suffix.lower()) in Image.SAVE


def read_image(said: str, path: Path) -> bytes:
    """The bytes of an image file.

    Args:
        said: what named it, for the message.

    Raises:
        VlmpackError: it cannot be read.
    """
    try:
        return regular_bytes(path)
    except OSError as error:
        raise VlmpackError(
            f"{said} {path} cannot be read: {error.strerror}; expected an image file"
        ) from error
