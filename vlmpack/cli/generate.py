"""`vlmpack generate`: ask a model folder one question."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from vlmpack.activity import ACTIVITY
from vlmpack.cli.options import argument, option, quiet_transformers
from vlmpack.errors import DataError, VlmpackError, writing
from vlmpack.terminal import say
from vlmpack.whole_file import regular_bytes
from vlmpack.words import counted


def generate(
    question: Annotated[str, argument("generate.question")],
    model: Annotated[Path, option("generate.model")],
    image: Annotated[list[Path] | None, option("generate.image")] = None,
    max_new_tokens: Annotated[int, option("generate.max_new_tokens")] = 64,
    draw: Annotated[Path | None, option("generate.draw")] = None,
) -> None:
    """Answer one question about images greedily, and print the answer alone."""
    images = tuple(_read(path) for path in image or ())
    if draw is not None and len(images) != 1:
        raise VlmpackError(f"--draw: {len(images)} images; an answer's boxes are drawn on one")
    if draw is not None and not _takes_images(draw.suffix):
        raise VlmpackError(f"--draw {draw}: no image file has such a name; expected FILE.png")

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

    loaded, encoder = load_for_generation(model)
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
        named = ", ".join(str(path) for path in image or ()) or "no image"
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


def _takes_images(suffix: str) -> bool:
    """Whether Pillow writes images to files with that suffix."""
    from PIL import Image

    return Image.registered_extensions().get(suffix.lower()) in Image.SAVE


def _read(path: Path) -> bytes:
    try:
        return regular_bytes(path)
    except OSError as error:
        raise VlmpackError(
            f"--image {path} cannot be read: {error.strerror}; expected an image file"
        ) from error
