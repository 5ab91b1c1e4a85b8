"""What commands share: options, options as the fields of a dataclass (`takes`), groups of commands.

A group names near commands for one that it does not have. The help of each command ends with an
example.
"""

from __future__ import annotations

import inspect
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from vlmpack.addresses import is_remote
from vlmpack.errors import RecipeError
from vlmpack.terminal import say

if TYPE_CHECKING:
    from vlmpack.recipe import Recipe


_SAID = tomllib.loads(files("vlmpack.cli").joinpath("options.toml").read_text(encoding="utf-8"))
"""Command -> parameter -> keywords of typer."""


def argument(name: str) -> Any:
    """What typer knows of an argument: `COMMAND.PARAMETER` in options.toml."""
    command, _, parameter = name.partition(".")
    return typer.Argument(**_SAID[command][parameter])


def option(name: str, **more: Any) -> Any:
    """The same of an option.

    Args:
        more: keywords of typer.Option that are code.
    """
    command, _, parameter = name.partition(".")
    said = {**_SAID[command][parameter], **more}
    return typer.Option(*said.pop("flags", ()), **said)


START_SECONDS = 6
"""Before a process that imports torch does anything else."""
SHARD_SECONDS = 0.008
"""What a shard takes, however small it is."""

RecipePath = Annotated[str, argument("shared.recipe_path")]
RecipeOrRun = Annotated[Path, argument("shared.recipe_or_run")]
Overrides = Annotated[list[str] | None, argument("shared.overrides")]
Shards = Annotated[list[str] | None, argument("shared.shards")]
WorldSize = Annotated[int | None, option("shared.world_size")]
ColumnsOption = Annotated[str | None, option("shared.columns")]
IgnoreColumns = Annotated[str | None, option("shared.ignore_columns")]
ImagesOption = Annotated[str | None, option("shared.images")]
RecipeOption = Annotated[Path | None, option("shared.recipe")]
Storage = Annotated[list[str] | None, option("shared.storage")]
IndexDir = Annotated[Path | None, option("shared.index_dir")]
Processes = Annotated[int | None, option("shared.processes")]
MaxImagePixels = Annotated[int | None, option("shared.max_image_pixels")]
AsJson = Annotated[bool, option("shared.as_json")]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How shards and files of records are read, and where their index is kept."""

    storage: Storage = None
    max_image_pixels: MaxImagePixels = None
    columns: ColumnsOption = None
    ignore_columns: IgnoreColumns = None
    images: ImagesOption = None
    index_dir: IndexDir = None


def columns_of(text: str | None) -> dict[str, str] | str | None:
    """What `--columns` says: a layout's name, or the columns by their roles.

    Raises:
        RecipeError: a role without a column, or twice.
    """
    if text is None or "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    if bad := ["".join(pair) for pair in pairs if not all(part.strip() for part in pair)]:
        raise RecipeError(
            f"--columns: {bad[0]!r}; expected role=column, such as question=q,answer=a, with "
            "layout=vqa among them or not"
        )
    columns = {role.strip(): column.strip() for role, _, column in pairs}
    if len(columns) < len(pairs):
        raise RecipeError(f"--columns: a role stands twice in {text!r}; expected once")
    return columns


def quiet_transformers() -> None:
    """Import it, without its progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def ignored_of(text: str | None) -> tuple[str, ...]:
    """The names that `--ignore-columns` lists."""
    return tuple(name for part in (text or "").split(",") if (name := part.strip()))


def launcher_number(name: str, default: int) -> int | None:
    """What the launcher says of RANK or WORLD_SIZE; None where that is no number, which is named
    when the process group starts."""
    text = os.environ.get(name, str(default))
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def num_processes(processes: int | None, shards: Sequence[str], bytes_a_second: int) -> int:
    """As many as asked for. Else one for each core this process may use, at most 16; but only one
    where it is done with local shards before the others have started.

    Args:
        processes: by the user.
        shards: to be read.
        bytes_a_second: that one process gets through.
    """
    if processes is not None:
        return processes
    if not any(is_remote(shard) for shard in shards):
        size = sum(path.stat().st_size for path in map(Path, shards) if path.is_file())
        if size / bytes_a_second + len(shards) * SHARD_SECONDS < START_SECONDS:
            return 1
    return min(16, len(os.sched_getaffinity(0)))


def load(recipe: Path, overrides: Sequence[str] | None, world_size: int | None = None) -> Recipe:
    """The recipe at a path, or that of a run folder; a recipe's problems show without torch."""
    from vlmpack.recipe import check_world, load_recipe

    if not recipe.is_dir():
        return load_recipe(recipe, overrides or (), world_size=world_size)
    from vlmpack.build.look import read_recipe

    loaded = read_recipe(recipe, overrides or ())
    if world_size is not None:
        check_world(loaded, world_size)
    return loaded


def on_processes(
    recipe: Path, overrides: Sequence[str] | None, world_size: int | None
) -> tuple[Recipe, int]:
    """A recipe, checked for a number of processes: where none is given, for the fewest that its
    layout fits on, which is said on stderr.

    Args:
        world_size: as given; None where it is not.
    """
    from vlmpack.recipe.derived import smallest_world

    loaded = load(recipe, overrides, world_size)
    if world_size is not None:
        return loaded, world_size
    processes = smallest_world(loaded.parallelism)
    if processes > 1:
        say(
            f"without --world-size: for {processes} processes, the fewest that this layout fits on",
            err=True,
        )
        loaded = load(recipe, overrides, processes)
    return loaded, processes


def note_of_run(recipe: Recipe) -> str | None:
    """What keeps the run in the recipe's folder from going on; its checkpoints need torch to be
    read, so nothing is imported where there are none."""
    if not Path(recipe.run_dir, "checkpoints").is_dir():
        return None
    from vlmpack.build.look import resume_note

    return resume_note(recipe)


def takes(*groups: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that dataclasses have as fields: typer shows each by its own name,
    and the command gets one value of each class, behind its own arguments.

    Args:
        groups: dataclasses whose fields are annotated as parameters of typer's are; each has a
            default.
    """

    def wrapped(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = list(inspect.signature(command).parameters.values())[: -len(groups)]
        parameters = [one.replace(annotation=hints[one.name]) for one in own]
        for group in groups:
            kinds = get_type_hints(group, include_extras=True)
            for each in fields(group):
                assert each.default is not MISSING, each.name
                parameters.append(
                    inspect.Parameter(
                        each.name,
                        inspect.Parameter.POSITIONAL_OR_KEYWORD,
                        default=each.default,
                        annotation=kinds[each.name],
                    )
                )

        def run(**given: Any) -> None:
            values = [
                group(**{each.name: given.pop(each.name) for each in fields(group)})
                for group in groups
            ]
            command(*(given[one.name] for one in own), *values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return wrapped


FOREIGN = {
    "train": "finetune",
    "sft": "finetune",
    "dpo": "finetune",
    "fit": "finetune",
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
    words = ctx.command_path.split()[1:]
    paths = list(_paths(ctx.find_root().command))
    word = name.lower().replace("_", "-")
    if word in FOREIGN:
        suggestions = [FOREIGN[word]]
    else:
        here = [path for path in paths if path[:-1] == words]
        suggestions = [" ".join(path) for path in _near(word, here) or _near(word, paths)]
    if suggestions:
        return (
            f"No such command {name!r}. Did you mean "
            + " or ".join(f"'vlmpack {path}'" for path in suggestions)
            + "?"
        )
    there = ", ".join(path[-1] for path in paths if path[:-1] == words)
    return f"No such command {name!r}; expected one of {there}."


def _near(word: str, paths: list[list[str]]) -> list[list[str]]:
    """The paths whose last word is near, the nearest first."""
    known = dict.fromkeys(path[-1] for path in paths)
    words = [word] if word in known else get_close_matches(word, known, n=MOST_NAMED)
    return [path for near in words for path in paths if path[-1] == near][:MOST_NAMED]


def _paths(group: Any, above: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """The words of every command and group below one."""
    for name, command in group.commands.items():
        yield [*above, name]
        if isinstance(command, TyperGroup):
            yield from _paths(command, (*above, name))
