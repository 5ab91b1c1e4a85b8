"""Conversations drawn at random as users write them: images, tools, calls, results, thoughts, and
variables of the chat template.

A `Conversation` is what `apply_chat_template` takes; its `messages` and `inputs` are the same for
vlmpack.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from vlmpack.encode.sample import ImagePart, Message, TemplateInputs, TextPart

WORDS = (
    "Oslo",
    " 7\n",
    "it is <b>",
    "\u00e9t\u00e9",
    "a: b",
    "y",
    "{}",
    "\n",
    "  x",
    "</a>",
    "'q'",
    '"',
)
PARAMETERS: dict[str, dict[str, Any]] = {
    "q": {"type": "string", "description": " what \n"},
    "unit": {"type": "string", "enum": ["C", "F"], "description": "of it"},
    "days": {"type": "integer", "minimum": 1},
    "Tags": {"type": "array", "items": {"type": "string"}},
    "where": {
        "type": "object",
        "properties": {"lat": {"type": "number"}, "on": {"type": "boolean", "nullable": True}},
        "required": ["lat"],
    },
    "list": {
        "type": "array",
        "items": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    },
    "plain": {"type": "string"},
}
ARGUMENTS = (3, 2.5, True, False, ["a", 1], {"b": "c", "A": [True]}, None)


@dataclass
class Conversation:
    """One record.

    Args:
        turns: in transformers' spelling.
        tools: JSON schemas; None for none.
        variables: of the chat template.
    """

    turns: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> tuple[Message, ...]:
        """By hand, not by our reader."""
        images = 0
        found = []
        for turn in self.turns:
            parts: list[TextPart | ImagePart] = []
            content = turn["content"]
            for part in [content] if isinstance(content, str) else content or []:
                if isinstance(part, str):
                    parts.append(TextPart(part))
                elif part["type"] == "image":
                    parts.append(ImagePart(images))
                    images += 1
                else:
                    parts.append(TextPart(part["text"]))
            fields = {key: turn[key] for key in turn if key not in ("role", "content")}
            found.append(Message(turn["role"], tuple(parts), fields=fields))
        return tuple(found)

    @property
    def inputs(self) -> TemplateInputs:
        return TemplateInputs(tuple(self.tools or ()), self.variables)


@dataclass(frozen=True)
class Manner:
    """What a model's conversations have.

    Args:
        images: in questions.
        image_results: in results of tools.
        variables: of its template, with values to draw.
        words_beside_calls: whether it writes them where they were said.
        thoughts: whether turns have any.
        nulls: whether arguments are.
    """

    images: bool = True
    image_results: bool = False
    variables: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    words_beside_calls: bool = True
    thoughts: bool = True
    nulls: bool = True


class Drawn:
    """Conversations of a manner, one after the other.

    Args:
        seed: of the draw.
        plain: words without white space at their ends, no empty ones: what a reader of records
            need not refuse for what templates trim.
    """

    def __init__(self, manner: Manner, seed: str, *, plain: bool = False) -> None:
        self.manner, self.draw, self.plain = manner, random.Random(seed), plain

    def words(self) -> str:
        said = "".join(self.draw.choices(WORDS, k=self.draw.randint(1, 4)))
        return (said.strip() or "x") if self.plain else said

    def one(self) -> Conversation:
        draw, turns = self.draw, []
        if draw.random() < 0.4:
            turns.append({"role": "system", "content": self.words()})
        for _ in range(draw.randint(1, 3)):
            turns.append({"role": "user", "content": self._question()})
            while draw.random() < 0.45:
                turns += self._calls()
            if self.plain or draw.random() < 0.93:
                turns.append(self._thinking({"role": "assistant", "content": self.words()}))
        called = any("tool_calls" in turn for turn in turns)
        tools = self._tools() if called or draw.random() < 0.3 else None
        variables = {
            name: draw.choice(values)
            for name, values in self.manner.variables
            if draw.random() < 0.5
        }
        return Conversation(turns, tools, variables)

    def _question(self) -> Any:
        draw = self.draw
        if not self.manner.images or draw.random() < 0.6:
            return self.words()
        image, text = {"type": "image"}, {"type": "text", "text": self.words()}
        return draw.choice([[image, text], [text, image], [image, image, text], [image]])

    def _calls(self) -> list[dict[str, Any]]:
        draw, calls = self.draw, []
        for _ in range(draw.choice((1, 1, 2))):
            keys = draw.sample(("q", "City", "days"), draw.randint(0, 3))
            values = ARGUMENTS if self.manner.nulls else ARGUMENTS[:-1]
            given = {key: draw.choice((self.words(), *values)) for key in keys}
            function = {"name": draw.choice(("search", "y")), "arguments": given}
            identity = f"{len(calls)}{draw.randrange(10**6)}"
            calls.append({"id": identity, "type": "function", "function": function})
        has_words = draw.random() < 0.3 and (self.manner.words_beside_calls or not self.plain)
        turn = {"role": "assistant", "content": self.words() if has_words else ""}
        results = [self._result(call) for call in calls]
        return [self._thinking(turn | {"tool_calls": calls}), *results]

    def _result(self, call: dict[str, Any]) -> dict[str, Any]:
        content: Any = self.words()
        if self.manner.image_results and self.draw.random() < 0.2:
            content = [{"type": "text", "text": content}, {"type": "image"}]
        name = call["function"]["name"]
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}

    def _thinking(self, turn: dict[str, Any]) -> dict[str, Any]:
        thinks = self.manner.thoughts and self.draw.random() < 0.5
        return turn | {"reasoning_content": self.words()} if thinks else turn

    def _tools(self) -> list[dict[str, Any]]:
        draw, tools = self.draw, []
        for name in ("search", "y", *draw.sample(["get_weather"], draw.randint(0, 1))):
            keys = draw.sample(list(PARAMETERS), draw.randint(0, 5))
            schema: dict[str, Any] = {
                "type": "object",
                "properties": {key: PARAMETERS[key] for key in keys},
            }
            if keys and draw.random() < 0.6:
                schema["required"] = keys[: draw.randint(1, len(keys))]
            function = {"name": name, "description": f" Does {name}. ", "parameters": schema}
            function |= {"strict": True} if draw.random() < 0.2 else {}
            tools.append({"type": "function", "function": function})
        return tools
