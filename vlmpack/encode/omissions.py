"""Whether a chat template writes what a conversation gives it; transformers says nothing.

    system prompt         its words are in the text, or as many others in their place would be
    tools                 the text differs without them, and names each of them
    results of tools,     each is replaced by a word of its own; the words must be in the text, or
    calls, thoughts,      in that of the conversation that ends with their turn: what a template
    words beside a call   drops once other turns follow, as thoughts, it was written to drop
    variables             the template reads a variable of that name

Only conversations that have any of these are checked. Others cost nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from vlmpack.encode.sample import Message, TemplateInputs, TextPart
from vlmpack.encode.template_bounds import bounded_environment
from vlmpack.encode.turns import CALLS, THOUGHTS, with_arguments, with_field
from vlmpack.errors import DataError, schema_error

_OTHERS = "Vlmpack-"
_WITH_TOOLS = "use a template that knows tools, such as the model's own of a later release"


class RenderInputs(Protocol):
    """The template's text."""

    def __call__(self, messages: tuple[Message, ...], inputs: TemplateInputs) -> str:
        """The template's text for some turns and for what it gets besides them."""


def variables_of(template: str) -> frozenset[str]:
    """The variables that a template reads and does not set, except jinja's own functions."""
    from jinja2 import meta

    environment = bounded_environment()
    parsed = environment.parse(template)
    own = {name for name, is_set in _first_uses(parsed).items() if is_set}
    return frozenset(meta.find_undeclared_variables(parsed)) - own - frozenset(environment.globals)


def _first_uses(template: Any) -> dict[str, bool]:
    """Name -> whether the template sets it before it reads it: jinja takes what is set in a branch
    alone for one that may come from outside."""
    from jinja2 import nodes

    uses: dict[str, bool] = {}
    pending = [template]
    while pending:
        node = pending.pop()
        if isinstance(node, nodes.Name) and node.ctx != "param":
            uses.setdefault(node.name, node.ctx == "store")
        inner = list(node.iter_child_nodes())
        if isinstance(node, nodes.Assign):
            inner.reverse()  # what is assigned is read first
        pending += reversed(inner)
    return uses


def refuse_unused_variables(variables: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise DataError (schema) where the template does not read a variable that it is given."""
    for name in variables:
        if unused := unused_variable(name, known):
            raise schema_error(
                f"chat_template_kwargs has {unused}: remove it from the record, or use another "
                f"template"
            )


def unused_variable(name: str, known: Collection[str]) -> str:
    """The name, with what the template reads instead; empty where it reads that."""
    if name in known:
        return ""
    own = sorted(set(known) - _ALWAYS)
    reads = ", ".join(map(repr, own)) or "none but the turns and tools"
    return f"{name[:60]!r}, which the chat template does not read (it reads {reads})"


_ALWAYS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
)


def refuse_lost(
    messages: tuple[Message, ...],
    inputs: TemplateInputs,
    text: str,
    render: RenderInputs,
    *,
    first: int = 0,
) -> None:
    """Raise DataError (schema) where the template leaves out a tool, a result, a call or a thought.

    Args:
        first: calls and thoughts of earlier turns are samples of their own, which ask for them.
    """
    if inputs.tools:
        _refuse_without_tools(messages, inputs, text, render)
    places = [at for at, turn in enumerate(messages) if at >= first or turn.role == "tool"]
    given = [each for at in places for each in _given(at, messages[at])]
    if not given:
        return
    changed = list(messages)
    for each in given:
        changed[each.turn] = each.put(changed[each.turn])
    try:
        written = render(tuple(changed), inputs)
    except DataError:  # a template that wants something of the words
        written = ""
    for each in given:
        if each.word not in written and not _is_written(each, messages, inputs, render):
            raise schema_error(
                f"the chat template leaves out {each.what} of turn {each.turn} "
                f"({messages[each.turn].role}), so it would not be trained: {each.instead}"
            )


def refuse_without_system(
    messages: tuple[Message, ...], inputs: TemplateInputs, text: str, render: RenderInputs
) -> None:
    """Raise DataError (schema) where the template leaves out words of a system prompt.

    Mistral's templates write it into a prompt, but into no finished conversation, so the model
    would learn without it. Words that control the template (SmolLM3's `/no_think`) are not left
    out, because it writes as many others. Arguments as of `refuse_lost`.
    """
    for at, message in enumerate(messages):
        for number, part in enumerate(message.parts if message.role == "system" else ()):
            if not isinstance(part, TextPart) or part.text.strip() in text:
                continue
            others = (_OTHERS * len(part.text))[: len(part.text.strip())]
            parts = (*message.parts[:number], TextPart(others), *message.parts[number + 1 :])
            changed = (*messages[:at], replace(message, parts=parts), *messages[at + 1 :])
            if others in text or others not in render(changed, inputs):
                raise schema_error(
                    "the chat template leaves the system prompt out of a conversation that ends "
                    "with the assistant. Put it into the first user's turn, or use another template"
                )


def _refuse_without_tools(
    messages: tuple[Message, ...], inputs: TemplateInputs, text: str, render: RenderInputs
) -> None:
    names = [name for tool in inputs.tools if (name := tool_name(tool)) and name not in text]
    try:
        same = render(messages, replace(inputs, tools=())) == text
    except DataError:
        same = False
    if same or names:
        which = "tools" if same else f"the tool {names[0][:60]!r}"
        raise schema_error(
            f"the record has tools, and the chat template writes no {which}, so the assistant "
            f"would be taught without knowing them: {_WITH_TOOLS}"
            if same
            else f"the chat template leaves out {which} of the record: {_WITH_TOOLS}"
        )


def tool_name(tool: Mapping[str, Any]) -> str:
    """The name of a tool by its schema; empty where it has none."""
    function = tool.get("function")
    named = function if isinstance(function, Mapping) else tool
    name = named.get("name")
    return name if isinstance(name, str) else ""


@dataclass(frozen=True, slots=True)
class _Given:
    """Something of a turn that the template must write."""

    turn: int
    kind: str
    what: str
    instead: str

    @property
    def word(self) -> str:
        """What stands in its place."""
        return f"vlmpackword{self.turn}{self.kind.replace('_', '')}q"

    def put(self, turn: Message) -> Message:
        """The turn with the word in its place."""
        if self.kind == "calls":
            return with_arguments(turn, {self.word: self.word})
        if self.kind != "text":
            return with_field(turn, self.kind, self.word)
        parts = [part for part in turn.parts if not isinstance(part, TextPart)]
        return replace(turn, parts=(*parts, TextPart(self.word)))


def _given(at: int, turn: Message) -> Iterator[_Given]:
    if turn.role == "tool" and turn.text.strip():
        yield _Given(at, "text", "the result", _WITH_TOOLS)
    if CALLS in turn.fields:
        yield _Given(at, "calls", "the calls", _WITH_TOOLS)
        if turn.text.strip():
            yield _Given(at, "text", "the words beside the calls", "leave them out of the record")
    for name in THOUGHTS:
        if name in turn.fields:
            instead = (
                "write them into the content as the model writes them (Qwen's "
                "<think>...</think>), or use a template that reads that key"
            )
            yield _Given(at, name, f"the thoughts ({name!r})", instead)


def _is_written(
    each: _Given, messages: tuple[Message, ...], inputs: TemplateInputs, render: RenderInputs
) -> bool:
    """Whether the template writes it where the conversation ends with its turn."""
    try:
        alone = (*messages[: each.turn], each.put(messages[each.turn]))
        return each.word in render(alone, inputs)
    except DataError:
        return False
