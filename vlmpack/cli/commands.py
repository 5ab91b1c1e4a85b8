"""Groups of commands: they name near ones for a command that they do not have, and the help of each
command ends with an example."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from typer.core import TyperGroup

FOREIGN = {
    "train": "finetune",
    "sft": "finetune",
    "dpo": "finetune",
    "fit": "finetune",
    "chat": "generate",
    "infer": "generate",
    "preprocess": "pack",
    "tokenize": "pack",
    "validate": "recipe check",
    "init": "recipe new",
    "env": "doctor",
    "version": "--version",
}
"""Words of other tools, and what does the same here."""

MOST_NAMED = 3


def example(line: str) -> str:
    """What the help of a command ends with: a command line."""
    return f"Example: `{line}`"


class Commands(TyperGroup):
    """Names near commands of the whole program, since a user may have the group wrong."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first argument names; ends with near ones where there is none."""
        name = args[0]
        known = name.startswith("-") or self.get_command(ctx, name) is not None
        if not known and not ctx.resilient_parsing:
            ctx.fail(unknown_command(ctx, name))
        return super().resolve_command(ctx, args)


def unknown_command(ctx: Any, name: str) -> str:
    """What to say of a name that is no command.

    Args:
        ctx: of the group that was asked for it.
        name: the word that stood in the command's place.
    """
    asked = ctx.command_path.split()[1:]
    paths = list(_paths(ctx.find_root().command))
    word = name.lower().replace("_", "-")
    if word in FOREIGN:
        found = [FOREIGN[word]]
    else:
        here = [path for path in paths if path[:-1] == asked]
        found = [" ".join(path) for path in _near(word, here) or _near(word, paths)]
    if found:
        return (
            f"No such command {name!r}. Did you mean "
            + " or ".join(f"'vlmpack {path}'" for path in found)
            + "?"
        )
    there = ", ".join(path[-1] for path in paths if path[:-1] == asked)
    return f"No such command {name!r}; expected one of {there}."


def _near(word: str, paths: list[list[str]]) -> list[list[str]]:
    """The paths whose last word is near, the nearest first."""
    words = get_close_matches(word, dict.fromkeys(path[-1] for path in paths), n=MOST_NAMED)
    return [path for near in words for path in paths if path[-1] == near][:MOST_NAMED]


def _paths(group: Any, above: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """The words of every command and group below one."""
    for name, command in group.commands.items():
        yield [*above, name]
        if isinstance(command, TyperGroup):
            yield from _paths(command, (*above, name))
