"""The chat template of a model folder: what it is given, and the text that it makes of it.

    turns                 in transformers' spelling, with calls and thoughts
    tools, variables      of one record, and variables of all, as `apply_chat_template` has them
    generation prompt     where an answer is asked for

A turn's content is a string, or a list of parts:

    {"role": "assistant", "content": "7"}
    {"role": "assistant", "content": [{"type": "text", "text": "7"}]}

Templates of vision-language models get parts, those of language models strings. But some take only
one of the two, for one role or for all. For example `message['content'] + '<|im_end|>'` fails on a
list, and `{{ message['content'] }}` writes the list itself. So the template is rendered once with
words in each form. A template that changes the words takes both forms, as in `apply_chat_template`.

Calls and thoughts go to the template unchanged. The arguments of calls become a JSON text where the
template takes no other form. DeepSeek's adds them to a text and fails on an object, and `{{
call.arguments }}` would write the object as Python does, with single quotes and None. A turn that
calls tools and says nothing has no content at all, as in transformers.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from vlmpack.encode.markers import HIDDEN, Span
from vlmpack.encode.omissions import variables_of
from vlmpack.encode.sample import (
    NO_INPUTS,
    ImagePart,
    Message,
    Role,
    Shown,
    TemplateInputs,
    TextPart,
    VideoPart,
    said,
    shown_by,
)
from vlmpack.encode.settings import with_date
from vlmpack.encode.template_bounds import bound_templates
from vlmpack.encode.turns import CALLS, AssistantTurns, TurnShape, shape_of
from vlmpack.errors import DataError, ModelError, VlmpackError, schema_error
from vlmpack.whole_file import regular_text

Form = Literal["parts", "string"]

Apply = Callable[[list[dict[str, Any]]], str]
"""Turns in transformers' spelling -> the template's text."""

_WORD = "vlmpackword"
_WORDS = f"The quick brown Fox jumps over {'the Dog, ' * 200}1 time."
_ARGUMENTS = {_WORD: _WORD}
_CALL = {"type": "function", "id": "vlmpack00", "function": {"name": "f", "arguments": _ARGUMENTS}}
_CALLED = Message("assistant", (), fields={CALLS: [_CALL]})
_ASKED_WITH: Mapping[Role, tuple[Role, ...]] = {
    "user": ("user",),
    "assistant": ("user", "assistant"),
    "system": ("system", "user"),
    "tool": ("user", "assistant", "tool"),
}
"""Role -> a conversation that has one turn of it; those of a user are asked first."""


def takes_text_arguments(apply: Apply) -> bool:
    """Whether a template takes the arguments of a call as JSON in a text, and no object."""
    whole = json.dumps(_ARGUMENTS)
    for form in ("parts", "string"):
        turns = turn_dicts([said("user", "x"), _CALLED], dict.fromkeys(_ASKED_WITH, form))
        written = _text_of(apply, turns)
        if _WORD in written and str(_ARGUMENTS) not in written:
            return False
        if whole in _text_of(apply, with_text_arguments(turns)):
            return True
    return False


def with_text_arguments(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turns in transformers' spelling, the arguments of their calls as JSON in a text."""
    return [
        {**turn, CALLS: [_with_text(call) for call in turn[CALLS]]} if CALLS in turn else {**turn}
        for turn in turns
    ]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _with_text(call["function"])}
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def _text_of(apply: Apply, turns: list[dict[str, Any]]) -> str:
    """The template's text; empty where it refuses the turns."""
    try:
        return apply(turns)
    except DataError:
        return ""


def find_forms(apply: Apply, preferred: Form) -> dict[Role, Form]:
    """The form of each role's turns: the preferred one, or the only one that it takes."""
    other = _other(preferred)
    forms: dict[Role, Form] = {}
    for role in _ASKED_WITH:
        forms[role] = preferred
        if not _takes(apply, role, forms) and _takes(apply, role, forms | {role: other}):
            forms[role] = other
    return forms


def differing_forms(apply: Apply, preferred: Form) -> list[Role]:
    """The roles whose turns a template takes in both forms and writes in two ways."""
    roles = []
    for role in _ASKED_WITH:
        forms = dict.fromkeys(_ASKED_WITH, preferred)
        both = (forms, forms | {role: _other(preferred)})
        if all(_takes(apply, role, each) for each in both):
            one, two = (_text_of(apply, turn_dicts(_asked(role, _WORDS), each)) for each in both)
            roles += [role] if one != two else []
    return roles


def _other(form: Form) -> Form:
    return "string" if form == "parts" else "parts"


def _takes(apply: Apply, role: Role, forms: Mapping[Role, Form]) -> bool:
    """Whether what the template writes follows from the words of a turn, and not from the list that
    they stand in."""
    one, two = (
        _text_of(apply, turn_dicts(_asked(role, word), forms)) for word in (_WORD, _WORD[::-1])
    )
    return one != two and not writes_list(one)


def writes_list(text: str) -> bool:
    """Whether a template wrote the list of a turn's parts out, as Python or JSON."""
    return "'type'" in text.lower() or '"type"' in text.lower()


def _asked(role: Role, word: str) -> list[Message]:
    """A conversation with a word in a turn of a role."""
    turns = [said(each, word if each == role else "x") for each in _ASKED_WITH[role]]
    if role == "tool":
        turns[1] = _CALLED
        turns[2] = replace(turns[2], fields={"name": "f", "tool_call_id": _CALL["id"]})
    return turns


def turn_dicts(messages: Sequence[Message], forms: Mapping[Role, Form]) -> list[dict[str, Any]]:
    """Turns in transformers' spelling.

    Raises:
        DataError: (schema) an image in a turn that must be a string.
    """
    return [_turn_dict(message, forms[message.role]) for message in messages]


def _turn_dict(message: Message, form: Form) -> dict[str, Any]:
    if not message.parts and CALLS in message.fields:
        return {"role": message.role, **message.fields}
    return {"role": message.role, "content": _content(message, form), **message.fields}


def _content(message: Message, form: Form) -> str | list[dict[str, str]]:
    has_images = bool(message.shown)
    # A question with images is a list in every template that writes images at all.
    if form == "string" and not (has_images and message.role == "user"):
        if has_images:
            raise schema_error(
                f"the {message.role}'s turn has an image, but the chat template takes it as a "
                f"string alone. Put the image into a user's turn, or use a template that takes a "
                f"list of parts",
            )
        return message.text
    return [_part(part) for part in message.parts or (TextPart(""),)]


def _part(part: TextPart | Shown) -> dict[str, str]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "video" if isinstance(part, VideoPart) else "image"}


_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""A template that marks what the assistant writes."""

MAX_SHAPES = 64
"""Settings of a template's variables whose turn shape is kept."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        takes_images: whether the model has a vision tower.
        date: today's date for a template that reads the clock; None for others.
        given: its variables in all conversations; a record's own override them.
    """

    tokenizer: Any
    takes_images: bool = True
    date: datetime.date | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    def refuse_bad_syntax(self) -> None:
        """Raise ModelError where the template cannot be compiled."""
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        bound_templates()
        try:
            text = self.tokenizer.get_chat_template()
            render_jinja_template([], chat_template=text)
        except TemplateSyntaxError as error:
            folder = Path(self.tokenizer.name_or_path)
            file = folder / "chat_template.jinja"
            own = file.is_file() and regular_text(file) == text
            name = f"{file}" if own else f"the chat template of {folder}"
            raise ModelError(f"model.path: {name}, line {error.lineno}: {error.message}") from error
        except Exception as error:  # compiling a hostile one may raise anything
            raise ModelError(
                f"model.path: the chat template of {self.tokenizer.name_or_path} cannot be "
                f"compiled ({type(error).__name__}: {error})"
            ) from error

    def text(self, inputs: TemplateInputs = NO_INPUTS) -> str:
        """The chat template, with the date: a folder may have one of its own for tools."""
        text = str(self.tokenizer.get_chat_template(tools=_tools(inputs)))
        return text if self.date is None else with_date(text, self.date)

    def render(
        self,
        messages: tuple[Message, ...],
        inputs: TemplateInputs = NO_INPUTS,
        *,
        generation_prompt: bool = False,
    ) -> str:
        """The template's text for some turns.

        Raises:
            DataError: (schema) the template refuses them, or an image for a model without tower.
        """
        return self._apply(self._as_dicts(messages), inputs, generation_prompt=generation_prompt)

    def _as_dicts(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        if not self.takes_images and shown_by(messages):
            raise no_vision_tower()
        turns = turn_dicts(messages, self._forms)
        has_calls = any(CALLS in message.fields for message in messages)
        return with_text_arguments(turns) if has_calls and self._text_arguments else turns

    @cached_property
    def _forms(self) -> dict[Role, Form]:
        def apply(turns: list[dict[str, Any]]) -> str:
            return self._apply(with_text_arguments(turns) if self._text_arguments else turns)

        return find_forms(apply, self.documented)

    @property
    def documented(self) -> Form:
        """The form in which transformers documents turns: lists of parts where there is a tower."""
        return "parts" if self.takes_images else "string"

    @cached_property
    def differing_roles(self) -> list[Role]:
        """Whose turns the template writes otherwise as a string than as a list of parts."""
        return differing_forms(self._apply, self.documented)

    @cached_property
    def _text_arguments(self) -> bool:
        return takes_text_arguments(self._apply)

    def _apply(
        self,
        turns: list[dict[str, Any]],
        inputs: TemplateInputs = NO_INPUTS,
        *,
        generation_prompt: bool = False,
    ) -> str:
        with template_faults():
            return str(
                self.tokenizer.apply_chat_template(
                    turns,
                    tools=_tools(inputs),
                    chat_template=self.text(inputs),
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    **self._variables(inputs),
                )
            )

    def _variables(self, inputs: TemplateInputs) -> dict[str, Any]:
        return {**self.given, **inputs.variables}

    def turns(self, inputs: TemplateInputs) -> AssistantTurns:
        """The assistant's turns in the texts of one record."""

        def render(turns: tuple[Message, ...], prompt: bool) -> str:
            return self.render(turns, inputs=inputs, generation_prompt=prompt)

        return AssistantTurns(render, self.shape(inputs))

    def shape(self, inputs: TemplateInputs) -> TurnShape:
        """The text that the template writes around an answer, under a record's variables."""
        variables = json.dumps(self._variables(inputs), sort_keys=True)
        if variables not in self._shapes:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            given = TemplateInputs(variables=inputs.variables)
            self._shapes[variables] = shape_of(
                lambda turns, prompt: self.render(turns, inputs=given, generation_prompt=prompt)
            )
        return self._shapes[variables]

    @cached_property
    def _shapes(self) -> dict[str, TurnShape]:
        return {}

    @cached_property
    def variables(self) -> frozenset[str]:
        """Those that the template reads, or the one for tools where a folder has two."""
        tool = {"type": "function", "function": {"name": "f"}}
        templates = {self.text(), self.text(TemplateInputs(tools=(tool,)))}
        return frozenset().union(*map(variables_of, templates))

    @cached_property
    def written(self) -> list[str]:
        """The templates, and what they make of conversations of every kind that they take."""
        call, tool = {"name": "f", "arguments": {}}, {"type": "function", "function": {"name": "f"}}
        shown = (ImagePart(0),) if self.takes_images else ()
        asked = (said("system", "x"), Message("user", (*shown, TextPart("x"))))
        called = Message("assistant", (), fields={CALLS: [{"id": "f", "function": call}]})
        texts = [self.text(), self.text(TemplateInputs(tools=(tool,)))]
        for turns in (asked[1:], asked, (*asked[1:], called, said("tool", "x"))):
            for prompt in (False, True):
                try:
                    answered = turns if prompt else (*turns, said("assistant", "x"))
                    texts.append(self.render(answered, generation_prompt=prompt))
                except DataError:  # a template that takes no such turns
                    continue
        return texts

    def spans(
        self,
        messages: tuple[Message, ...],
        inputs: TemplateInputs,
        text: str,
        *,
        last_alone: bool = False,
    ) -> list[Span]:
        """Character spans that the assistant wrote, of the last turn alone if requested.

        They are the template's own `{% generation %}` marks, with an end-of-turn token that follows
        directly. Without marks they are the turns.
        """
        turns = self.turns(inputs)
        last = [turns.last(messages, text)] if last_alone else []
        if not _MARKS.search(self.text(inputs)):
            return last or turns.spans(messages, text)
        from transformers.utils.chat_template_utils import render_jinja_template

        with template_faults():
            rendered: Any = render_jinja_template(  # annotated as a string, returns a pair
                [self._as_dicts(messages)],
                tools=_tools(inputs),
                chat_template=self.text(inputs),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self._variables(inputs)},
            )
        texts, spans = rendered
        assert texts == [text]
        close = self.shape(inputs).close
        marked = [(a, b + len(close) if text.startswith(close, b) else b) for a, b in spans[0]]
        if not last_alone:
            return marked
        return [(a, b) for a, b in marked if any(a < end and start < b for start, end in last)]

    def ids_of_transformers(
        self,
        messages: tuple[Message, ...],
        inputs: TemplateInputs = NO_INPUTS,
        *,
        generation_prompt: bool = False,
    ) -> list[int] | None:
        """The ids that `apply_chat_template` gives for turns in the documented form.

        None if the template does not take them. It may refuse, write a list out, or leave a turn's
        words out.
        """
        ids, text = self._documented(messages, inputs, generation_prompt=generation_prompt)
        own = self.render(messages, inputs, generation_prompt=generation_prompt)
        if text is None or writes_list(text) != writes_list(own):
            return None
        for at, turn in enumerate(messages):
            other = replace(turn, parts=tuple(map(_hidden, turn.parts)))
            changed = (*messages[:at], other, *messages[at + 1 :])
            theirs = self._documented(changed, inputs, generation_prompt=generation_prompt)[1]
            ours = self.render(changed, inputs, generation_prompt=generation_prompt)
            if theirs == text and ours != own:
                return None
        return ids

    def _documented(
        self, messages: tuple[Message, ...], inputs: TemplateInputs, *, generation_prompt: bool
    ) -> tuple[list[int], str | None]:
        """Ids and text of turns in the documented form; no text where the template refuses them."""
        turns = turn_dicts(messages, dict.fromkeys(get_args(Role), self.documented))
        given = {"tools": _tools(inputs), "chat_template": self.text(inputs)}
        given |= self._variables(inputs) | {"add_generation_prompt": generation_prompt}
        try:
            with template_faults():
                tokens = self.tokenizer.apply_chat_template(turns, return_dict=True, **given)
                text = self.tokenizer.apply_chat_template(turns, tokenize=False, **given)
        except DataError:
            return [], None
        return list(tokens["input_ids"]), str(text)

    def mask_of_transformers(
        self, messages: tuple[Message, ...], inputs: TemplateInputs = NO_INPUTS
    ) -> list[bool] | None:
        """Which tokens of a rendered conversation transformers itself takes for the assistant's.

        None for a template without marks. Labels do not come from here. Only `verify` asks.
        """
        if not _MARKS.search(self.text(inputs)):
            return None
        with template_faults():
            tokens = self.tokenizer.apply_chat_template(
                self._as_dicts(messages),
                tools=_tools(inputs),
                chat_template=self.text(inputs),
                return_dict=True,
                return_assistant_tokens_mask=True,
                **self._variables(inputs),
            )
        return [bool(flag) for flag in tokens["assistant_masks"]]


def _hidden(part: TextPart | Shown) -> TextPart | Shown:
    """A part with as many other characters, which no text has."""
    return TextPart(HIDDEN * len(part.text)) if isinstance(part, TextPart) else part


def _tools(inputs: TemplateInputs) -> list[Any] | None:
    return list(inputs.tools) or None


@contextmanager
def template_faults() -> Iterator[None]:
    """A template that refuses a conversation, cannot take its parts or takes too long is a fault of
    the data. It is a program of the model folder, so it may raise anything."""
    from jinja2 import TemplateError

    bound_templates()
    try:
        yield
    except VlmpackError:
        raise
    except Exception as error:
        is_plain = isinstance(error, TemplateError | TypeError | ValueError)
        said = f"{error}" if is_plain else f"{type(error).__name__}: {error}"
        raise schema_error(f"the chat template refuses the conversation: {said}") from error


def no_vision_tower() -> DataError:
    """Images for a language model alone."""
    return schema_error(
        "the sample has images, but the model has no vision tower. Use a vision-language model, "
        "or leave samples with images out",
    )
