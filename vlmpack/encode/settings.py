"""What an `Encoder` gets besides its model folder, and what an exported folder notes of it.

The date of a template that writes the day is defined before it as a macro. From transformers a
template gets only plain data and no functions. Its own `strftime_now` reads the clock:

    {% macro strftime_now(format) %}...   written before the template: gives it the run's date
    {{ strftime_now("%d %b %Y") }}        in the template; the time of day is midnight

Variables of the template (`data.chat_template_kwargs`) apply to all conversations. A record's own
override them, name by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date as Date
from datetime import datetime, time
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from vlmpack.encode.omissions import unused_variable
from vlmpack.encode.sample import strings
from vlmpack.errors import ModelError
from vlmpack.file_format import EXPORT_NOTE
from vlmpack.limits import MAX_IMAGE_PIXELS
from vlmpack.model_folder.content import PROCESSOR_FILES
from vlmpack.recipe.data import BoxesInText, CoordinatesSection, ImagesSection
from vlmpack.whole_file import read_json, regular_bytes

T = TypeVar("T")

LossOn = Literal["assistant", "all"]
Learn = Literal["all_turns", "last_turn", "each_answer"]


@dataclass(frozen=True, slots=True)
class Note:
    """A file of an exported folder that notes settings of its training conversations.

    `vlmpack generate` reads it to write prompts in the same way.
    """

    file: str
    key: str
    meaning: str
    is_ascii: bool = True

    def write(self, folder: Path, value: Any) -> None:
        """Write it into an exported folder; nothing where there is no value."""
        if value:
            note = {self.key: value, "meaning": self.meaning}
            text = json.dumps(EXPORT_NOTE.mark(note), indent=2, ensure_ascii=self.is_ascii)
            (folder / self.file).write_text(text + "\n", encoding="utf-8")

    def read(self, folder: Path, make: Callable[[Any], T]) -> T | None:
        """What it says; None where there is none, or none that can be read.

        Raises:
            ModelError: a note of another format.
        """
        try:
            note: Any = read_json(folder / self.file)
            EXPORT_NOTE.take(note, folder / self.file, ModelError)
            return make(note[self.key])
        except (OSError, ValueError, KeyError, TypeError):
            return None


DATE_NOTE = Note(
    "vlmpack-date.json",
    "date",
    "The chat template writes the current date (strftime_now). In all conversations that this "
    "model was finetuned on it was this one.",
)
VARIABLES_NOTE = Note(
    "vlmpack-chat-template-kwargs.json",
    "chat_template_kwargs",
    "Variables that the chat template got in all conversations that this model was finetuned on, "
    "but where a record had its own. Whoever asks it gives them too.",
)
TOKENS_NOTE = Note(
    "vlmpack-special-tokens.json",
    "special_tokens",
    "Special tokens that questions and answers could spell where this model was finetuned. Whoever "
    "reads its answers keeps them: skip_special_tokens drops them.",
    is_ascii=False,
)
COORDINATES_NOTE = Note(
    "vlmpack-coordinates.json",
    "coordinates",
    "How boxes, points and polygons were written where this model was finetuned (data.coordinates "
    "of the recipe). Whoever reads them in its answers goes by it.",
)
NOTES = (DATE_NOTE, VARIABLES_NOTE, TOKENS_NOTE, COORDINATES_NOTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    """Settings of an encoder. Where date, variables, special tokens and coordinates are None,
    the exported folder's notes apply.

    Args:
        loss_on: which tokens are targets: the assistant's turns, or every text token.
        learn: which answers are targets. They are those of all turns, the last alone, or each as a
            sample.
        pairs: whether samples are pairs of answers to one prompt. Other samples are then refused,
            and without it pairs are.
        rollouts: whether samples are answers that a policy has drawn. Other samples are then
            refused.
        share_prefix: whether samples say which prefixes they may share (`EncodedSample.prefixes`).
        max_image_pixels: images with more pixels are refused before they are decoded.
        budget: bounds on what an image costs, in place of the processor's own.
        date: today's date for a chat template that reads the clock; without a note, the clock's.
            Other templates have none.
        coordinates: how objects of records are written, in place of the family's rule.
        boxes_in_text: what becomes of boxes in texts of records without objects.
    """

    loss_on: LossOn = "assistant"
    learn: Learn = "all_turns"
    pairs: bool = False
    rollouts: bool = False
    share_prefix: bool = False
    max_image_pixels: int = MAX_IMAGE_PIXELS
    budget: ImagesSection = field(default_factory=ImagesSection)
    date: Date | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    special_tokens: Sequence[str] | None = None
    coordinates: CoordinatesSection | None = None
    boxes_in_text: BoxesInText = "keep"

    def date_for(self, folder: Path) -> Date | None:
        """The date of conversations: the one given, noted, or today's. None for a template that
        does not read the clock."""
        if not reads_clock(folder):
            return None
        return self.date or DATE_NOTE.read(folder, Date.fromisoformat) or today()

    def variables_for(self, folder: Path) -> dict[str, Any]:
        """The variables given or noted."""
        if self.chat_template_kwargs is not None:
            return dict(self.chat_template_kwargs)
        return VARIABLES_NOTE.read(folder, dict) or {}

    def tokens_for(self, folder: Path) -> tuple[str, ...]:
        """The special tokens given or noted, in order."""
        given = self.special_tokens
        if given is None:
            given = TOKENS_NOTE.read(folder, lambda tokens: [str(token) for token in tokens]) or ()
        return tuple(sorted(set(given)))

    def coordinates_for(self, folder: Path) -> CoordinatesSection | None:
        """The form of coordinates given or noted."""
        return self.coordinates or COORDINATES_NOTE.read(folder, CoordinatesSection.model_validate)


_COMMENT = re.compile(rb"\{#.*?#\}", re.DOTALL)

_DIRECTIVES = (
    *(f"%{letter}" for letter in "aAbBcCdDeFgGhHIjmMnprRStTuUVwWxXyYzZ"),
    *(f"%-{letter}" for letter in "dmHIMSjy"),
    "%f",
)
_PERCENT = "\U000f1e04"
"""Stands for `%%` while the directives are replaced."""


def today() -> Date:
    """The day that the clock says."""
    return Date.today()


def reads_clock(folder: Path) -> bool:
    """Whether the chat template of a model folder writes the day or the time."""
    for name in PROCESSOR_FILES:
        path = folder / name
        may_hold = name.startswith("chat_template") or name.endswith("r_config.json")
        if may_hold and path.is_file():
            content = regular_bytes(path)
            if b"strftime_now" in content and b"strftime_now" in _COMMENT.sub(b"", content):
                return True
    return False


@cache
def with_date(template: str, day: Date) -> str:
    """A template whose `strftime_now` is that of a date; what it writes is else the same."""
    moment = datetime.combine(day, time())
    expression = f"format.replace('%%', '{_PERCENT}')"
    for directive in _DIRECTIVES:
        expression += f".replace({directive!r}, {moment.strftime(directive)!r})"
    expression += f".replace('{_PERCENT}', '%')"
    # The plus keeps a line break that the template begins with.
    return f"{{% macro strftime_now(format) %}}{{{{ {expression} }}}}{{% endmacro +%}}{template}"


TAKEN = frozenset(
    {
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("sanitize_control_tokens", "documents"),
    }
)
"""Arguments of `apply_chat_template` that are no variables of the template's."""


def is_variable(name: str) -> bool:
    """Whether a template could have a variable of that name."""
    return name not in TAKEN and name.isidentifier()


def refuse_variables(
    variables: Mapping[str, Any], *, read: Collection[str], special: Collection[str], where: str
) -> None:
    """Raise ModelError where the template of a model folder cannot take variables."""
    for name, value in variables.items():
        if not is_variable(name):
            raise ModelError(
                f"data.chat_template_kwargs: {name[:60]!r} is no variable of a template; expected "
                "such as enable_thinking or reasoning_effort"
            )
        if unused := unused_variable(name, read):
            raise ModelError(f"data.chat_template_kwargs: {unused}; model.path: {where}")
        for token in special:
            if token and any(token in text for text in strings(value)):
                raise ModelError(
                    f"data.chat_template_kwargs: {name} spells the special token {token!r}, which "
                    "the tokenizer would read as structure"
                )
